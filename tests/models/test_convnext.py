"""ConvNeXt and ConvNeXt V2 against timm's outputs and their authors' layer-wise decay."""

import numpy as np
import paddle
import pytest
from golden.convnext import CASES
from golden.convolutions import array
from support.parity import assert_parity, load_formula
from support.small_models import small_convnext

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.convnext import Block, ConvNeXt
from models.layers.grn import GlobalResponseNorm
from weights import load_weights, save_weights


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_convnext(name), name, tmp_path, array)


def test_initialisation_is_timms():
    paddle.seed(0)
    model = ConvNeXt(32, stage_depths=(1, 1, 1, 1), embed_dims=(32, 64, 64, 128), num_classes=200)
    block = model.stages[3].blocks[0]
    for layer in (
        model.stages[3].downsample[1],
        block.conv_dw,
        block.mlp.fc1,
        block.mlp.fc2,
        model.head.fc,
    ):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.numpy().any()
    assert (block.gamma.numpy() == np.float32(1e-6)).all()
    assert (block.norm.weight.numpy() == 1).all()
    scaled = ConvNeXt(
        32,
        stage_depths=(1, 1, 1, 1),
        embed_dims=(32, 64, 64, 128),
        num_classes=200,
        head_init_scale=0.1,
    )
    assert float(scaled.head.fc.weight.std()) == pytest.approx(0.002, rel=0.05)
    assert float(scaled.stages[3].blocks[0].mlp.fc1.weight.std()) == pytest.approx(0.02, rel=0.05)


def test_the_small_stems_of_timm():
    """make_divisible of timm's layers: a multiple of 8, not below nine tenths of the half."""
    for dim, between in ((40, 24), (48, 24), (64, 32), (80, 40), (22, 16), (8, 8), (38, 24)):
        made = small_convnext(stem_type="overlap_tiered", embed_dims=(dim, 8, 8, 8)).stem
        assert [made[0].weight.shape, made[1].weight.shape] == [
            [between, 3, 3, 3],
            [dim, between, 3, 3],
        ]
    assert small_convnext(stem_type="overlap").stem[0].weight.shape == [4, 3, 3, 3]


def test_linears_and_convolutions_compute_the_same_and_read_each_others_weights(tmp_path):
    """Layer by layer in training mode: logits, and the gradients of all that both have."""
    images = paddle.to_tensor(array("images", (2, 3, 64, 64)))
    found = []
    linear = load_formula(small_convnext("convnext_v2"), tmp_path, array)
    save_weights(linear, tmp_path / "linear.safetensors")
    conv = small_convnext("convnext_v2", conv_mlp=True)
    load_weights(conv, tmp_path / "linear.safetensors")
    save_weights(conv, tmp_path / "conv.safetensors")
    again = small_convnext("convnext_v2")
    load_weights(again, tmp_path / "conv.safetensors")
    assert conv.stages[0].blocks[0].mlp.fc1.weight.shape == [16, 4, 1, 1]
    for model in (linear, conv, again):
        model.train()
        logits = model(images)
        (logits * paddle.to_tensor(array("loss", tuple(logits.shape)))).sum().backward()
        kept = {name: one.grad.numpy() for name, one in model.named_parameters() if one.ndim == 1}
        found.append(kept | {"logits": logits.numpy(), "stem": model.stem[0].weight.grad.numpy()})
    for other in found[1:]:
        for name, expected in found[0].items():
            np.testing.assert_allclose(
                other[name], expected, atol=2e-5 * np.ptp(expected) + 1e-7, err_msg=name
            )


def test_the_response_norm_has_gradients_where_a_channel_is_zero():
    norm = GlobalResponseNorm(3)
    norm.weight.set_value(paddle.to_tensor([1.0, 2.0, 3.0]))
    # norms 5, 0, 1; mean 2
    x = paddle.to_tensor([[[[3.0, 0.0, 1.0], [4.0, 0.0, 0.0]]]], stop_gradient=False)
    np.testing.assert_allclose(
        norm(x).numpy().reshape(2, 3), [[3 + 3 * 2.5, 0, 1 + 3 * 0.5], [4 + 4 * 2.5, 0, 0]], 1e-6
    )
    norm(x).sum().backward()
    assert np.isfinite(x.grad.numpy()).all()
    empty = paddle.zeros([1, 2, 2, 3])
    empty.stop_gradient = False
    norm(empty).sum().backward()
    assert (empty.grad.numpy() == 1).all()


def test_drop_path_rises_linearly_over_all_blocks():
    blocks = [
        block
        for stage in small_convnext(stage_depths=(1, 2, 1, 1), droppath=0.4).stages
        for block in stage.blocks
    ]
    assert [block.drop_path.drop_prob for block in blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_layer_groups_are_the_authors():
    model = small_convnext(stage_depths=(3, 3, 27, 3), embed_dims=(2, 2, 2, 2))
    groups = model.layer_groups()
    assert len(groups) == 14
    names = [name for name, _ in model.named_parameters()]
    found = {}
    for name in names:
        owners = [
            i
            for i, group in enumerate(groups)
            if any(f"{name}.".startswith(f"{prefix}.") for prefix in group)
        ]
        assert len(owners) == 1, name
        found[name] = owners[0]
    # optim_factory.py of facebookresearch/ConvNeXt, get_num_layer_for_convnext
    for name, group in found.items():
        part, stage, kind, *rest = name.split(".")
        expected = {"stem": 0, "head": 13}.get(part)
        if expected is None:
            expected = [1, 2, 3, 12][int(stage)]
            expected += int(rest[0]) // 3 if (stage, kind) == ("2", "blocks") else 0
        assert group == expected, name
    assert model.no_weight_decay() == set()
    assert len(create_model("convnext_tiny").layer_groups()) == 8


def test_layer_groups_of_v2_are_its_authors():
    """get_num_layer_for_convnext_single of facebookresearch/ConvNeXt-V2's optim_factory.py: the
    stem has the first block's number; from 27 blocks on V1's.
    """
    model = small_convnext("convnext_v2")
    assert model.layer_groups() == [
        ("stem", "stages.0.downsample", "stages.0.blocks.0"),
        ("stages.1.downsample", "stages.1.blocks.0"),
        ("stages.1.blocks.1",),
        ("stages.2.downsample", "stages.2.blocks.0"),
        ("stages.3.downsample", "stages.3.blocks.0"),
        ("norm_pre", "head"),
    ]
    deep = {"stage_depths": (3, 3, 27, 3), "embed_dims": (2, 2, 2, 2)}
    assert (
        small_convnext("convnext_v2", **deep).layer_groups()
        == small_convnext(**deep).layer_groups()
    )


def test_the_classifier_is_exchangeable():
    model = small_convnext()
    images = paddle.to_tensor(array("images", (2, 3, 64, 64)))
    features = model.forward_features(images)
    assert features.shape == [2, 16, 2, 2]
    model.reset_classifier(7)
    assert (model.classifier_names(), model.head.fc.weight.shape) == (("head.fc",), [16, 7])
    assert model(images).shape == [2, 7]
    model.reset_classifier(0)
    expected = model.head.norm(features.mean(axis=[2, 3]))
    np.testing.assert_allclose(model(images).numpy(), expected.numpy(), atol=1e-6)
    assert model(paddle.zeros([1, 3, 32, 40])).shape == [1, 16]


def test_drop_path_drops_the_branch_of_whole_samples():
    paddle.seed(0)
    block = Block(8, init_values=0.1, drop_path=0.5)
    images = paddle.randn([64, 3, 3, 8])
    left = images
    dropped = (block(images) == left).numpy().all(axis=(1, 2, 3)).sum()
    assert 16 < dropped < 48
    block.eval()
    assert not (block(images) == left).numpy().all(axis=(1, 2, 3)).any()


def test_dropout_comes_between_norm_and_classifier():
    paddle.seed(0)
    model = small_convnext(dropout=0.5, num_classes=0)
    features = paddle.randn([8, 16, 2, 2])
    found = model.forward_head(features).numpy()
    model.eval()
    expected = 2 * model.forward_head(features).numpy()
    assert 32 < (found == 0).sum() < 96
    np.testing.assert_allclose(found[found != 0], expected[found != 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["MODEL.STAGE_DEPTHS", "[3, 3, 9]"],
            r"STAGE_DEPTHS is \[3, 3, 9\], expected four numbers",
        ),
        (["MODEL.EMBED_DIMS", "[96]"], r"EMBED_DIMS is \[96\], expected four numbers"),
        (["DATA.IMAGE_SIZE", "31"], "IMAGE_SIZE is 31, ConvNeXt takes images of at least 32 x 32"),
        (
            ["MODEL.STEM_TYPE", "overlap_act"],
            "STEM_TYPE is 'overlap_act', expected one of patch, overlap, overlap_tiered",
        ),
        (["MODEL.PATCH_SIZE", "4"], "MODEL.PATCH_SIZE is 4, but ConvNeXt takes no PATCH_SIZE"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("convnext_tiny", options))
