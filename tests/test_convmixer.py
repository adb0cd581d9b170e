"""ConvMixer against timm's outputs, and its authors' recipe."""

import numpy as np
import paddle
import pytest
from golden.convmixer import CASES, SIZES
from golden.convolutions import array
from paddle import nn
from parity import assert_parity

from config import get_config
from errors import InputError
from models import build_model, list_models
from models.convmixer import ConvMixer
from optim import build_schedule
from options import leaves


def small(name="convmixer", **changes):
    """The ConvMixer of golden/convmixer.py's case NAME, with changes."""
    sizes = CASES[name] | {"embed_dim": CASES[name]["dim"]}
    del sizes["dim"]
    return ConvMixer(SIZES[name], **sizes | changes)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small(name), name, tmp_path, array)


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
    model = small()
    groups = model.layer_groups()
    assert groups == [("stem",), ("blocks.0",), ("blocks.1",), ("blocks.2",), ("head",)]
    for name, _ in model.named_parameters():
        assert sum(f"{name}.".startswith(f"{prefix}.") for group in groups for prefix in group) == 1, name
    assert model.no_weight_decay() == set()


def test_the_classifier_is_exchangeable_and_images_are_of_any_size():
    model = small()
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
    head = small(drop=0.5, num_classes=0).forward_head
    assert np.unique(head(paddle.ones([8, 16, 2, 2])).numpy()).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["DATA.IMAGE_SIZE", "6"], "IMAGE_SIZE is 6, ConvMixer takes images of at least 7 x 7"),
        (["MODEL.ACT", "silu"], "MODEL.ACT is 'silu', expected one of None, gelu, relu"),
        (["MODEL.DROPPATH", "0.1"], "MODEL.DROPPATH is 0.1, but ConvMixer takes no DROPPATH"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("convmixer_768_32", options))


TRAIN = {
    "WEIGHT_DECAY": 2e-5, "OPTIMIZER.NAME": "AdamW", "OPTIMIZER.EPS": 1e-3, "GRAD_CLIP": 1.0, "SMOOTHING": 0.1,
    "AUTO_AUGMENT": "rand-m9-mstd0.5-inc1", "MIXUP_ALPHA": 0.5, "CUTMIX_ALPHA": 0.5, "RANDOM_ERASE_PROB": 0.25,
    "RANDOM_ERASE_MODE": "pixel", "INTERPOLATION": "random", "REPEATED_AUGMENT": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", list_models("convmixer*"))
def test_the_recipe_has_its_sources_numbers(name):
    config = get_config(name)
    values = dict(leaves(config))
    assert {key: values[f"TRAIN.{key}"] for key in TRAIN} == TRAIN
    assert values["TRAIN.NUM_EPOCHS"] == (300 if name == "convmixer_768_32" else 150)
    assert (values["DATA.IMAGENET_MEAN"], values["DATA.CROP_PCT"]) == ([0.485, 0.456, 0.406], 0.96)
    schedule = build_schedule(config, 10, 640)
    peak = 4 * config.TRAIN.NUM_EPOCHS
    assert [schedule(step) for step in (0, peak, 10 * config.TRAIN.NUM_EPOCHS)] == pytest.approx([0, 0.01, 0])
