"""MLP-Mixer, gMLP and ResMLP against timm's outputs."""

import math

import numpy as np
import paddle
import pytest
from golden.formula import array
from golden.mixer import CASES
from paddle import nn
from parity import assert_parity

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.gmlp import GMlp
from models.layers import DropPath
from models.mixer import MlpMixer
from models.resmlp import ResMlp

ARCHITECTURES = {"mixer": MlpMixer, "gmlp": GMlp, "resmlp": ResMlp}
NAMES = {"img_size": "image_size", "num_blocks": "depth"}  # timm's: ours


def small(name="mixer", **changes):
    """The model of golden/mixer.py's case NAME, with changes."""
    sizes = {NAMES.get(key, key): value for key, value in CASES[name].items()}
    return ARCHITECTURES[name.partition("_")[0]](**sizes | changes)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small(name), name, tmp_path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_initialisation_is_timms(name):
    paddle.seed(0)
    model = small(name, image_size=56, embed_dim=128, num_classes=50)  # 196 places
    block, places = model.blocks[1], 196
    assert not model.head.weight.numpy().any()
    assert not model.head.bias.numpy().any()
    deviation = (3 * 16) ** -0.5  # LeCun's, of 3 x 4 x 4 inputs
    assert float(model.stem.proj.weight.std()) == pytest.approx(deviation, rel=0.03)
    assert not model.stem.proj.bias.numpy().any()
    hidden = block.mlp_channels.fc1.weight.shape[1]
    bound = math.sqrt(6 / (128 + hidden))  # Xavier's
    assert 0.99 * bound < float(block.mlp_channels.fc1.weight.abs().max()) <= bound
    assert 0 < float(block.mlp_channels.fc1.bias.abs().max()) < 1e-5
    if name == "gmlp":
        assert float(block.mlp_channels.gate.proj.weight.std()) == pytest.approx(1e-6, rel=0.05)
        assert (block.mlp_channels.gate.proj.bias.numpy() == 1).all()
    if name == "resmlp":
        bound = math.sqrt(6 / (2 * places))
        assert 0.99 * bound < float(block.linear_tokens.weight.abs().max()) <= bound
        assert not block.linear_tokens.bias.numpy().any()
        assert (block.ls1.numpy() == np.float32(1e-4)).all()
        assert (small(name, init_values=0.3).blocks[0].ls2.numpy() == np.float32(0.3)).all()
        assert (block.norm1.alpha.numpy() == 1).all()
        assert not block.norm1.beta.numpy().any()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_is_in_one_layer_group(name):
    model = small(name)
    groups = model.layer_groups()
    assert groups == [("stem",), ("blocks.0",), ("blocks.1",), ("norm", "head")]
    for key, _ in model.named_parameters():
        assert sum(f"{key}.".startswith(f"{prefix}.") for group in groups for prefix in group) == 1, key
    affine = {f"{norm}.{key}" for norm in ("blocks.0.norm1", "blocks.0.norm2", "norm") for key in ("alpha", "beta")}
    assert affine <= model.no_weight_decay() if name == "resmlp" else model.no_weight_decay() == set()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_classifier_is_exchangeable(name):
    model = small(name)
    images = paddle.to_tensor(array("images", (2, 3, 16, 16)))
    features = model.forward_features(images)
    model.reset_classifier(3)
    assert model(images).shape == [2, 3]
    assert not model.head.weight.numpy().any()
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=1).numpy(), atol=1e-6)


@pytest.mark.parametrize(("name", "branches", "dropouts"), [("mixer", 2, 4), ("gmlp", 1, 2), ("resmlp", 2, 2)])
def test_stochastic_depth_has_one_rate_and_dropout_is_in_the_mlps(name, branches, dropouts):
    model, calls = small(name, drop=0.25, drop_path=0.3), []
    for layer in model.sublayers():
        if isinstance(layer, (nn.Dropout, DropPath)):
            rate = layer.p if isinstance(layer, nn.Dropout) else layer.drop_prob
            layer.register_forward_post_hook(lambda *_, rate=rate: calls.append(rate))
    model(paddle.to_tensor(array("images", (2, 3, 16, 16))))
    assert sorted(calls) == 2 * dropouts * [0.25] + 2 * branches * [0.3]  # of two blocks


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mixer_b16_224", ["DATA.IMAGE_SIZE", "225"], "IMAGE_SIZE 225 is not a multiple of PATCH_SIZE 16"),
        ("mixer_b16_224", ["MODEL.INIT_VALUES", "0.1"], "INIT_VALUES is 0.1, but Mixer takes no INIT_VALUES"),
        ("gmlp_s16_224", ["MODEL.EMBED_DIM", "5", "MODEL.MLP_RATIO", "1.0"], "MLP_RATIO 1.0 x EMBED_DIM 5 is 5, expec"),
        ("gmlp_s16_224", ["MODEL.MLP_RATIO", "[0.5, 4.0]"], r"MLP_RATIO is \[0.5, 4.0\], but gMLP takes one number"),
        ("mixer_b16_224", ["MODEL.MLP_RATIO", "[1, 2, 3]"], r"MLP_RATIO is \[1.0, 2.0, 3.0\], expected one number"),
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
