"""ConvMixer against timm's outputs."""

import numpy as np
import paddle
import pytest
from golden.convmixer import CASES
from golden.convolutions import array
from paddle import nn
from support.parity import assert_parity
from support.small_models import small_convmixer

from config import get_config
from errors import InputError
from models import build_model
from models.convmixer import ConvMixer


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_convmixer(name), name, tmp_path, array)


def test_initialisation_is_pytorchs():
    paddle.seed(0)
    model = ConvMixer(8, embed_dim=64, depth=1, kernel_size=5, patch_size=4)
    block = model.blocks[0]
    stem = model.stem[0]
    for layer, fan_in in ((stem, 48), (block[0].fn[0], 25), (block[1], 64), (model.head, 64)):
        for parameter in (layer.weight, layer.bias):
            bound = float(parameter.abs().max())
            assert 0.9 * fan_in**-0.5 < bound <= fan_in**-0.5
            assert float(parameter.std()) == pytest.approx((3 * fan_in) ** -0.5, rel=0.2)
    norms = [layer for layer in model.sublayers() if isinstance(layer, nn.BatchNorm2D)]
    assert {(norm._momentum, norm._epsilon) for norm in norms} == {(0.9, 1e-5)}
    assert len(norms) == 3


def test_every_parameter_is_in_one_layer_group():
    model = small_convmixer()
    groups = model.layer_groups()
    assert groups == [("stem",), ("blocks.0",), ("blocks.1",), ("blocks.2",), ("head",)]
    for name, _ in model.named_parameters():
        assert (
            sum(f"{name}.".startswith(f"{prefix}.") for group in groups for prefix in group) == 1
        ), name
    assert model.no_weight_decay() == set()


def test_the_classifier_is_exchangeable_and_images_are_of_any_size():
    model = small_convmixer()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 16, 16)))
    features = model.forward_features(images)
    assert features.shape == [2, 16, 4, 4]
    model.reset_classifier(7)
    assert model(images).shape == [2, 7]
    assert 0.8 * 16**-0.5 < float(model.head.weight.abs().max()) <= 16**-0.5
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=[2, 3]).numpy(), atol=1e-6)
    assert model(paddle.zeros([1, 3, 4, 4])).shape == [1, 16]
    assert model.min_image_size == 4


def test_dropout_comes_before_the_classifier():
    paddle.seed(0)
    head = small_convmixer(dropout=0.5, num_classes=0).forward_head
    assert np.unique(head(paddle.ones([8, 16, 2, 2])).numpy()).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["DATA.IMAGE_SIZE", "6"], "IMAGE_SIZE is 6, ConvMixer takes images of at least 7 x 7"),
        (["MODEL.ACT", "silu"], "MODEL.ACT is 'silu', expected one of gelu, relu"),
        (["MODEL.DROPPATH", "0.1"], "MODEL.DROPPATH is 0.1, but ConvMixer takes no DROPPATH"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("convmixer_768_32", options))
