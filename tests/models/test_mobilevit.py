"""MobileViT against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.mobilevit import CASES, array
from support.parity import assert_parity
from support.small_models import small_mobilevit

from config import get_config
from errors import InputError
from inference.visualization.attention import attention
from models import build_model, create_model
from models.layers import LayerNorm
from models.layers.attention import attention_weights
from models.layers.resize import interpolate
from models.mobilevit import InvertedResidual, expanded_channels


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_mobilevit(name), name, tmp_path, array)


def test_maps_are_stretched_as_by_pytorch():
    """torch.nn.functional.interpolate(x, (4, 3), mode="bilinear", align_corners=False), by hand."""
    x = paddle.to_tensor(np.float32([[[[0, 6], [3, 0], [9, 3]]]]))
    rows = np.float32([[0, 6], [1.875, 2.25], [5.25, 1.125], [9, 3]])
    expected = np.stack([rows[:, 0], rows.mean(1), rows[:, 1]], 1)
    np.testing.assert_allclose(interpolate(x, (4, 3)).numpy()[0, 0], expected, atol=1e-6)
    assert interpolate(x, (3, 2)) is x
    one = interpolate(paddle.full([1, 2, 1, 1], 3.0), (2, 2))
    assert (one.numpy() == 3).all()
    shrunk = interpolate(paddle.to_tensor(np.float32([[[[0, 3, 9, 3]]]])), (1, 3))
    np.testing.assert_allclose(shrunk.numpy()[0, 0, 0], [0.5, 6, 4], atol=1e-5)


def test_channels_within_a_block_are_timms():
    """timm's make_divisible: the nearest multiple of 8, never more than a tenth below."""
    cases = ((16, 2), (24, 4), (16, 0.9), (10, 1.1), (100, 0.999), (1, 1))
    assert [expanded_channels(dim, ratio) for dim, ratio in cases] == [
        32, 96, 16, 16, 96, 8
    ]  # fmt: skip


def test_epsilons_are_timms_or_paddlevits():
    for model, last in ((small_mobilevit(), 1e-5), (small_mobilevit(last_norm_eps=1e-6), 1e-6)):
        found = {
            name: layer._epsilon
            for name, layer in model.named_sublayers()
            if isinstance(layer, LayerNorm)
        }
        assert {name: found.pop(name) for name in [*found] if name.endswith("1.norm")} == {
            f"stages.{i}.1.norm": last for i in (2, 3, 4)
        }
        assert (len(found), set(found.values())) == (8, {1e-5})


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_mobilevit(
        embed_dims=(16, 16, 32, 32, 32, 64, 64, 64, 96), hidden_dims=(32, 64, 64), num_classes=200
    )
    block = model.stages[4][1]
    first = model.stages[1][1]
    for layer in (block.transformer[0].attn.qkv, block.transformer[0].mlp.fc2, model.head.fc):
        assert float(layer.weight.std()) == pytest.approx(0.01, rel=0.05)
        assert not layer.bias.numpy().any()
    for layer, fan_out in (
        (first.conv2_kxk.conv, 9),
        (block.conv_kxk.conv, 64 * 9),
        (block.conv_1x1, 64),
    ):
        assert float(layer.weight.std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)
    blocks = [layer for layer in model.sublayers() if isinstance(layer, InvertedResidual)]
    # 0: with a shortcut
    assert [float(block.conv3_1x1.bn.weight.max()) for block in blocks] == [0, 1, 0, 0, 1, 1, 1]


def test_rates_are_timms():
    """timm 1.0.31's mobilevit_s with drop_path_rate 0.9: ten blocks from 0 on, one rate for a
    block's attention.
    """
    model = small_mobilevit(droppath=0.9, dropout=0.1, attention_dropout=0.2, head_dropout=0.3)
    rates = [
        [getattr(b, "drop_path", None) or b.transformer[-1].drop_path1 for b in stage]
        for stage in model.stages
    ]
    found = [[layer.drop_prob for layer in stage] for stage in rates]
    assert sum(found, []) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    for stage in list(model.stages)[2:]:
        for block in stage[1].transformer:
            rate = stage[1].transformer[0].drop_path1.drop_prob
            assert {block.drop_path1.drop_prob, block.drop_path2.drop_prob} == {rate}
            assert (block.attn.attn_drop.p, block.attn.proj_drop.p, block.mlp.drop.p) == (
                0.2,
                0.1,
                0.1,
            )
    assert model.head.drop.p == 0.3


def test_layer_groups_are_in_order():
    assert small_mobilevit().layer_groups() == [
        ("stem",),
        ("stages.0.0",),
        *((f"stages.1.{i}",) for i in range(3)),
        *((f"stages.{i}.{j}",) for i in (2, 3) for j in (0, 1)),
        ("stages.4.0",),
        ("stages.4.1", "final_conv"),
        ("head",),
    ]


def test_the_classifier_is_exchangeable():
    model = small_mobilevit()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 50, 70)))
    features = model.forward_features(images)
    assert features.shape == [2, 24, 2, 3]
    model.reset_classifier(7)
    assert (model.classifier_names(), model.head.fc.weight.shape) == (("head.fc",), [24, 7])
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=[2, 3]).numpy(), atol=1e-6)
    assert model(images[:, :, :1, :1]).shape == [2, 24]


def test_a_norm_before_the_attention_is_paddlevits():
    model = small_mobilevit(hidden_norm=True)
    names = {name for name, _ in model.named_parameters()} ^ {
        name for name, _ in small_mobilevit().named_parameters()
    }
    assert {name.partition("conv_1x1.")[2] for name in names} == {
        "weight",
        "conv.weight",
        "bn.weight",
        "bn.bias",
    }
    assert len(names) == 3 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.EMBED_DIMS", "[16, 32]"], r"EMBED_DIMS is \[16, 32\], expected 9 numbers"),
        (["MODEL.HIDDEN_DIMS", "[64, 64]"], r"HIDDEN_DIMS is \[64, 64\], expected 3 numbers"),
        (["MODEL.STAGE_DEPTHS", "[2, 4]"], r"STAGE_DEPTHS is \[2, 4\], expected 3 numbers"),
        (["MODEL.NUM_HEADS", "7"], "HIDDEN_DIMS has 144, not a multiple of NUM_HEADS 7"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("mobilevit_s", options))


def test_each_variant_has_its_width_between():
    for name, between in (("mobilevit_xxs", 32), ("mobilevit_xs", 64), ("mobilevit_s", 64)):
        with paddle.LazyGuard():
            assert create_model(name).stages[0][0].conv1_1x1.conv.weight.shape[0] == between


def test_attention_of_each_place_within_patches_is_put_together():
    model = small_mobilevit("mobilevit_odd")
    model.eval()
    image = paddle.to_tensor(array("image", (1, 3, 80, 33)))
    with attention_weights(model, ["stages.2.1.transformer.0.attn"]) as kept:
        model(image)
    [weights] = kept.values()
    # places within a patch, heads, 5 x 3 patches of a map of 10 x 5
    assert weights.shape == [4, 4, 15, 15]
    found = attention(model, image, 0)
    assert found.shape == (4, 10, 6)
    for row in range(2):
        for column in range(2):
            own = weights[2 * row + column].mean(1).reshape([4, 5, 3]).numpy()
            np.testing.assert_allclose(found[:, row::2, column::2], own, atol=1e-6)
    assert attention(model, image).shape == (4, 4, 2)
