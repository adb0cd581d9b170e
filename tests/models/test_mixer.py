"""MLP-Mixer, gMLP and ResMLP against timm's outputs."""

import math

import numpy as np
import paddle
import pytest
from golden.formula import array
from golden.mixer import CASES
from paddle import nn
from support.parity import assert_parity
from support.small_models import MIXERS, small_mixer

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.layers import DropPath


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_mixer(name), name, tmp_path)


def assert_lecun(layer, fan_in):
    """Flax's own: deviation 1 / sqrt(fan in) after a cut at two deviations, which makes it 0.88 of
    the uncut one.
    """
    bound = 2 * fan_in**-0.5 / 0.8796256610342398
    assert float(layer.weight.std()) == pytest.approx(fan_in**-0.5, rel=0.03)
    assert 0.97 * bound < float(layer.weight.abs().max()) <= bound * 1.000001
    assert not layer.bias.numpy().any()


def assert_uniform(parameter, bound):
    assert 0.95 * bound < float(parameter.abs().max()) <= bound * 1.000001
    assert float(parameter.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


@pytest.mark.smoke
@pytest.mark.parametrize("name", MIXERS)
def test_initialisation_is_its_sources(name):
    paddle.seed(0)
    model = small_mixer(name, image_size=56, embed_dim=128, num_classes=50)  # 196 places
    # the stem reads 3 x 4 x 4 = 48 values
    block = model.blocks[1]
    stem = model.stem.proj
    head = model.head
    hidden = block.mlp_channels.fc1.weight.shape[1]
    if name == "mixer":  # big_vision's, of Flax
        assert_lecun(stem, 48)
        assert_lecun(block.mlp_tokens.fc1, 196)
        assert_lecun(block.mlp_channels.fc2, hidden)
    elif name == "gmlp":  # timm's
        assert_lecun(stem, 48)
        assert_uniform(block.mlp_channels.fc1.weight, math.sqrt(6 / (128 + hidden)))  # Xavier's
        assert 0 < float(block.mlp_channels.fc1.bias.abs().max()) < 1e-5
        assert float(block.mlp_channels.gate.proj.weight.std()) == pytest.approx(1e-6, rel=0.05)
        assert (block.mlp_channels.gate.proj.bias.numpy() == 1).all()
    else:  # deit's
        assert_uniform(stem.weight, 48**-0.5)
        assert_uniform(stem.bias, 48**-0.5)
        for layer in (block.linear_tokens, block.mlp_channels.fc1, block.mlp_channels.fc2, head):
            assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.03)
            assert not layer.bias.numpy().any()
        halved = small_mixer(name, embed_dim=128, num_classes=50, head_init_scale=0.5)
        assert float(halved.head.weight.std()) == pytest.approx(0.01, rel=0.05)
        assert (block.ls1.numpy() == np.float32(1e-4)).all()
        assert (small_mixer(name, init_values=0.3).blocks[0].ls2.numpy() == np.float32(0.3)).all()
        assert (block.norm1.alpha.numpy() == 1).all()
        assert not block.norm1.beta.numpy().any()
    assert head.weight.numpy().any() == (name == "resmlp")
    assert not head.bias.numpy().any()


@pytest.mark.parametrize("name", MIXERS)
def test_every_parameter_is_in_one_layer_group(name):
    model = small_mixer(name)
    groups = model.layer_groups()
    assert groups == [("stem",), ("blocks.0",), ("blocks.1",), ("norm", "head")]
    for key, _ in model.named_parameters():
        assert (
            sum(f"{key}.".startswith(f"{prefix}.") for group in groups for prefix in group) == 1
        ), key
    affine = {
        f"{norm}.{key}"
        for norm in ("blocks.0.norm1", "blocks.0.norm2", "norm")
        for key in ("alpha", "beta")
    }
    assert (
        affine <= model.no_weight_decay() if name == "resmlp" else model.no_weight_decay() == set()
    )


@pytest.mark.parametrize("name", MIXERS)
def test_the_classifier_is_exchangeable(name):
    model = small_mixer(name)
    images = paddle.to_tensor(array("images", (2, 3, 16, 16)))
    features = model.forward_features(images)
    model.reset_classifier(3)
    assert model(images).shape == [2, 3]
    assert model.head.weight.numpy().any() == (name == "resmlp")
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=1).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "branches", "dropouts"), [("mixer", 2, 4), ("gmlp", 1, 2), ("resmlp", 2, 2)]
)
def test_stochastic_depth_has_one_rate_and_dropout_is_in_the_mlps(name, branches, dropouts):
    model = small_mixer(name, dropout=0.25, droppath=0.3)
    calls = []
    for layer in model.sublayers():
        if isinstance(layer, (nn.Dropout, DropPath)):
            rate = layer.p if isinstance(layer, nn.Dropout) else layer.drop_prob
            layer.register_forward_post_hook(lambda *_, rate=rate: calls.append(rate))
    model(paddle.to_tensor(array("images", (2, 3, 16, 16))))
    assert sorted(calls) == 2 * dropouts * [0.25] + 2 * branches * [0.3]  # of two blocks


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "mixer_b16_224",
            ["DATA.IMAGE_SIZE", "225"],
            "IMAGE_SIZE 225 is not a multiple of PATCH_SIZE 16",
        ),
        (
            "mixer_b16_224",
            ["MODEL.INIT_VALUES", "0.1"],
            "INIT_VALUES is 0.1, but Mixer takes no INIT_VALUES",
        ),
        (
            "gmlp_s16_224",
            ["MODEL.EMBED_DIM", "5", "MODEL.MLP_RATIO", "1.0"],
            "MLP_RATIO 1.0 x EMBED_DIM 5 is 5, expected",
        ),
        (
            "gmlp_s16_224",
            ["MODEL.MLP_RATIO", "[0.5, 4.0]"],
            r"MLP_RATIO is \[0.5, 4.0\], but gMLP takes one number",
        ),
        (
            "mixer_b16_224",
            ["MODEL.MLP_RATIO", "[1, 2, 3]"],
            r"MLP_RATIO is \[1.0, 2.0, 3.0\], expected one number",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(name, options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config(name, options))


def test_images_of_another_size_are_refused():
    model = create_model("gmlp_ti16_224", image_size=32, depth=1)
    assert model(paddle.zeros([1, 3, 32, 32])).shape == [1, 1000]
    with pytest.raises(InputError, match="takes images of 32 x 32, found 48 x 48"):
        model(paddle.zeros([1, 3, 48, 48]))
