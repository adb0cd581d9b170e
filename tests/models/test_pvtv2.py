"""PVTv2 against timm's outputs and numbers."""

import math

import numpy as np
import paddle
import pytest
from golden.make_names_vit import values
from golden.pvtv2 import CASES
from support.parity import assert_parity
from support.small_models import small_pvtv2

from config import get_config
from errors import InputError
from models import build_model


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_pvtv2(name), name, tmp_path, values)


def test_epsilons_are_timms():
    found = {
        name: layer._epsilon
        for name, layer in small_pvtv2().named_sublayers()
        if name.endswith(("norm", "norm1"))
    }
    for name in ("patch_embed.norm", "stages.1.downsample.norm", "stages.0.blocks.0.attn.norm"):
        assert found[name] == 1e-5
    for name in ("stages.0.norm", "stages.3.norm", "stages.2.blocks.0.norm1"):
        assert found[name] == 1e-6


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_pvtv2(embed_dims=(32, 64, 64, 128), num_heads=(1, 1, 1, 1), num_classes=200)
    block = model.stages[1].blocks[0]
    for layer in (block.attn.q, block.attn.kv, block.mlp.fc1, model.head):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.numpy().any()
    for layer, fan_out in (
        (model.patch_embed.proj, 7 * 7 * 32),
        (model.stages[1].downsample.proj, 3 * 3 * 64),
        (block.attn.sr, 4 * 4 * 64),
        (block.mlp.dwconv, 3 * 3),
    ):
        assert float(layer.weight.std()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)
        assert not layer.bias.numpy().any()
    assert float(
        small_pvtv2(num_classes=500, head_init_scale=0.1).head.weight.std()
    ) == pytest.approx(0.002, rel=0.05)


def test_drop_path_rises_over_all_blocks_and_dropout_is_theirs_alike():
    model = small_pvtv2(droppath=0.4, dropout=0.1, attention_dropout=0.2)
    blocks = [block for stage in model.stages for block in stage.blocks]
    calls = []
    for block in blocks:
        for layer in (
            block.attn.attn_drop,
            block.attn.proj_drop,
            block.mlp.drop,
            block.drop_path1,
            block.drop_path2,
        ):
            layer.register_forward_post_hook(
                lambda layer, *_: calls.append(getattr(layer, "p", "path"))
            )
    model(paddle.zeros([1, 3, 64, 64]))
    assert calls == 5 * [0.2, 0.1, "path", 0.1, 0.1, "path"]
    for rates in (
        [block.drop_path1.drop_prob for block in blocks],
        [block.drop_path2.drop_prob for block in blocks],
    ):
        assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_layer_groups_are_in_order_and_hold_every_parameter_once():
    model = small_pvtv2()
    groups = model.layer_groups()
    assert groups == [
        ("patch_embed",),
        ("stages.0.blocks.0",),
        ("stages.0.blocks.1",),
        ("stages.1.blocks.0", "stages.0.norm", "stages.1.downsample"),
        ("stages.2.blocks.0", "stages.1.norm", "stages.2.downsample"),
        ("stages.3.blocks.0", "stages.2.norm", "stages.3.downsample"),
        ("stages.3.norm", "head"),
    ]
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{prefix}.") for group in groups for prefix in group) == 1, name
    assert model.no_weight_decay() == set()


def test_the_classifier_is_exchangeable():
    model = small_pvtv2()
    images = paddle.to_tensor(values("images", (2, 3, 64, 64)))
    features = model.forward_features(images)
    assert features.shape == [2, 16, 2, 2]
    model.reset_classifier(7)
    assert (model.classifier_names(), model.head.weight.shape) == (("head",), [16, 7])
    assert model(images).shape == [2, 7]
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=[2, 3]).numpy(), atol=1e-6)


def test_the_least_images_are_those_that_fill_a_patch_of_keys():
    for name, side in (("pvtv2", 29), ("pvtv2_plain", 33), ("pvtv2_linear", 1)):
        model = small_pvtv2(name, image_size=side)
        assert model.min_image_size == side
        assert model(paddle.zeros([1, 3, side, side + 5])).shape == [1, 5]
    with pytest.raises(InputError, match="IMAGE_SIZE is 28, .* takes images of at least 29 x 29"):
        small_pvtv2(image_size=28)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[2, 2]"], r"STAGE_DEPTHS is \[2, 2\], expected four numbers"),
        (["MODEL.NUM_HEADS", "8"], r"NUM_HEADS is \[8\], expected four numbers: one per stage"),
        (["MODEL.SR_RATIO", "[8, 4]"], r"SR_RATIO is \[8, 4\], expected four numbers"),
        (["MODEL.MLP_RATIO", "[8, 4]"], r"MLP_RATIO is \[8.0, 4.0\], expected four numbers"),
        (
            ["MODEL.NUM_HEADS", "[1, 2, 5, 7]"],
            "NUM_HEADS has 7, expected a divisor of the 256 channels",
        ),
        (["MODEL.EMBED_DIM", "64"], "MODEL.EMBED_DIM is 64, but PVTv2 takes no EMBED_DIM"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("pvtv2_b0", options))
