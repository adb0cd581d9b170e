"""TinyViT against timm's outputs and its authors' layer-wise decay."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.tinyvit import CASES, array
from support.parity import assert_parity, load_formula
from support.small_models import small_tinyvit

from config import get_config
from errors import InputError
from models import build_model
from models.layers.relative import offset_index
from models.tinyvit import TinyViT
from weights.layout import linear_weights


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_and_features_are_timms(tmp_path, name):
    # Ten convolutions and batch norms make much of a rounding: Paddle's own attention is 0.8e-5
    # from timm's features.
    assert_parity(small_tinyvit(name), name, tmp_path, array, within=2e-5)


def test_gradients_are_timms_but_for_rounding(tmp_path):
    golden = np.load(ROOT / "tests" / "golden" / "tinyvit_padded.npz")
    model = load_formula(small_tinyvit("tinyvit_padded"), tmp_path, array)
    logits = model(paddle.to_tensor(array("images", (2, 3, *model.image_size))))
    (logits * paddle.to_tensor(array("loss", tuple(logits.shape)))).sum().backward()
    expected = {
        key.removeprefix("rounded/"): golden[key] for key in golden if key.startswith("rounded/")
    }
    transposed = linear_weights(model)
    least = 1e-2 * max(np.ptp(value) for value in expected.values())
    found = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        one = found[key].T if key in transposed else found[key]
        np.testing.assert_allclose(
            one, value, atol=5e-4 * max(np.ptp(value), least), rtol=0, err_msg=key
        )


def test_a_pair_of_tokens_has_the_bias_of_its_distance():
    """timm numbers distances as they first come."""
    places = [(y, x) for y in range(3) for x in range(2)]
    numbers = {}
    expected = []
    for one in places:
        for two in places:
            distance = (abs(one[0] - two[0]), abs(one[1] - two[1]))
            expected.append(numbers.setdefault(distance, len(numbers)))
    np.testing.assert_array_equal(offset_index((3, 2)).ravel(), expected)


def test_initialisation_is_timms():
    paddle.seed(0)
    model = TinyViT(
        32,
        embed_dims=(32, 64, 96, 128),
        stage_depths=(1, 1, 1, 1),
        num_heads=(1, 2, 3, 4),
        num_classes=200,
    )
    first = model.stages[0].blocks[0]
    block = model.stages[3].blocks[0]
    for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2, model.head.fc):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.numpy().any()
    for layer, fan_in in (
        (model.patch_embed.conv2.conv, 16 * 9),
        (first.conv2.conv, 9),
        (first.conv3.conv, 128),
    ):
        bound = fan_in**-0.5
        assert 0.98 * bound < float(layer.weight.abs().max()) <= bound
    assert not block.attn.attention_biases.numpy().any()
    assert [
        float(norm.weight.max()) for norm in (first.conv2.bn, first.conv3.bn, block.local_conv.bn)
    ] == [1, 0, 1]


def test_drop_path_rises_over_all_blocks():
    stages = small_tinyvit(droppath=0.4, dropout=0.1).stages
    rates = [block.drop_path.drop_prob for block in stages[0].blocks]
    rates += [block.drop_path2.drop_prob for stage in stages[1:] for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert {block.mlp.drop.p for stage in stages[1:] for block in stage.blocks} == {0.1}


def test_layer_groups_are_the_authors():
    model = small_tinyvit()
    assert model.layer_groups() == [
        ("stages.0.blocks.0", "stages.1.downsample", "patch_embed"),
        ("stages.1.blocks.0",),
        ("stages.1.blocks.1", "stages.2.downsample"),
        ("stages.2.blocks.0", "stages.3.downsample"),
        ("stages.3.blocks.0", "head"),
    ]
    blocks = ("stages.1.blocks.0", "stages.1.blocks.1", "stages.2.blocks.0", "stages.3.blocks.0")
    assert model.no_weight_decay() == {f"{block}.attn.attention_biases" for block in blocks}


def test_the_classifier_is_exchangeable():
    model = small_tinyvit()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 64, 64)))
    features = model.forward_features(images)
    assert features.shape == [2, 16, 2, 2]
    model.reset_classifier(7)
    assert (model.classifier_names(), model.head.fc.weight.shape) == (("head.fc",), [16, 7])
    model.reset_classifier(0)
    expected = model.head.norm(features.mean(axis=[2, 3]))
    np.testing.assert_allclose(model(images).numpy(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["MODEL.STAGE_DEPTHS", "[2, 2, 6]"],
            r"STAGE_DEPTHS is \[2, 2, 6\], expected four numbers",
        ),
        (["MODEL.NUM_HEADS", "[2, 4]"], r"NUM_HEADS is \[2, 4\], expected four numbers"),
        (["MODEL.WINDOW_SIZES", "[7]"], r"WINDOW_SIZES is \[7\], expected four numbers"),
        (
            ["MODEL.NUM_HEADS", "[2, 4, 7, 10]"],
            "NUM_HEADS has 7, expected a divisor of the 160 channels",
        ),
        (["DATA.IMAGE_SIZE", "31"], "IMAGE_SIZE is 31, TinyViT takes images of at least 32 x 32"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("tiny_vit_5m_224", options))
