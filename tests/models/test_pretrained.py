"""The crop, interpolation and normalisation that belong to weights."""

import json
import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

from config import get_config, with_values
from errors import InputError
from models.pretrained import disagreements, with_preprocessing
from settings.configuration import is_given

STORED = {
    "architecture": "vit_tiny_patch16_224",
    "num_classes": 1000,
    "pretrained_cfg": {
        "crop_pct": 0.95,
        "interpolation": "bilinear",
        "mean": [0.485, 0.456, 0.406],
        "std": [0.1, 0.2, 0.3],
        "input_size": [3, 224, 224],
    },
}


def write_weights(folder):
    save_file({"head.bias": np.zeros(2, np.float32)}, folder / "model.safetensors")


@pytest.fixture
def configured(tmp_path):
    """Returns a function: the configuration of ``options`` with weights whose config.json is STORED
    and ``changes``.
    """
    write_weights(tmp_path)

    def made(options=(), cfg=None, **changes):
        stored = STORED | {"pretrained_cfg": STORED["pretrained_cfg"] | changes}
        (tmp_path / "config.json").write_text(json.dumps(stored))
        return get_config(cfg, ["MODEL.PRETRAINED", str(tmp_path), *options])

    return made


def test_a_configuration_knows_which_keys_were_given():
    config = get_config("vit_tiny_patch16_224", ["DATA.INTERPOLATION", "bicubic"])
    for copy in (config, pickle.loads(pickle.dumps(config)), with_values(config, SEED=1)):
        assert is_given(copy, "DATA.INTERPOLATION")  # though it is the default
        assert is_given(copy, "DATA.CROP_PCT")  # by the file
        assert not is_given(copy, "DATA.IMAGENET_STD")
    assert is_given(with_values(config, SEED=1), "SEED")
    assert not is_given(config, "SEED")
    # nothing of the others is left in the defaults
    assert not is_given(get_config(), "DATA.CROP_PCT")


def test_what_is_not_given_comes_from_the_weights(configured):
    data = with_preprocessing(configured()).DATA
    assert (data.CROP_PCT, data.INTERPOLATION) == (0.95, "bilinear")
    assert (data.IMAGENET_MEAN, data.IMAGENET_STD) == ([0.485, 0.456, 0.406], [0.1, 0.2, 0.3])
    data = with_preprocessing(configured(["DATA.CROP_PCT", "0.875"])).DATA
    assert (data.CROP_PCT, data.INTERPOLATION) == (0.875, "bilinear")


def test_grey_images_are_compared_with_the_mean_of_the_colours(configured):
    grey = ["DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.2"]
    (line,) = disagreements(with_preprocessing(configured(grey)), STORED["pretrained_cfg"])
    assert line.startswith("warning: DATA.IMAGENET_MEAN is [0.5], the weights were made for [0.449")


def test_disagreements_name_both(configured):
    stored = STORED["pretrained_cfg"]
    config = with_preprocessing(configured(["DATA.CROP_PCT", "0.9", "DATA.IMAGENET_STD", "0.5"]))
    assert list(disagreements(config, stored)) == [
        "warning: DATA.CROP_PCT is 0.9, the weights were made for 0.95",
        "warning: DATA.IMAGENET_STD is [0.5], the weights were made for [0.1, 0.2, 0.3]",
    ]
    assert list(disagreements(with_preprocessing(configured()), stored)) == []
    assert list(disagreements(config, {})) == []
    squashed = disagreements(with_preprocessing(configured()), stored | {"crop_mode": "squash"})
    assert list(squashed) == ["warning: DATA.CROP_MODE is center, the weights were made for squash"]


def test_the_crop_mode_is_the_weights(configured):
    config = with_preprocessing(configured(crop_mode="squash"))
    assert config.DATA.CROP_MODE == "squash"
    assert list(disagreements(config, {"crop_mode": "squash"})) == []
    assert (
        with_preprocessing(
            configured(["DATA.CROP_MODE", "center"], crop_mode="squash")
        ).DATA.CROP_MODE
        == "center"
    )
    assert with_preprocessing(configured(crop_mode=None)).DATA.CROP_MODE == "center"


def test_a_task_of_masks_takes_no_crop_of_its_weights(configured):
    options = ["TASK", "segmentation", "HEAD.NAME", "linear", "DATA.CROP_MODE", "short"]
    config = with_preprocessing(configured(options))
    assert (config.DATA.CROP_PCT, config.DATA.CROP_MODE) == (0.875, "short")
    assert config.DATA.INTERPOLATION == "bilinear"
    assert list(disagreements(config, STORED["pretrained_cfg"])) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_pct": 2.5}, "DATA.CROP_PCT is 2.5, expected 0.1 <= value <= 2"),
        ({"interpolation": "lanczos"}, "DATA.INTERPOLATION is 'lanczos', expected one of bicubic"),
        (
            {"crop_mode": "border"},
            "DATA.CROP_MODE is 'border', expected one of center, squash, short, own; set the key by -o KEY VALUE",
        ),
        ({"mean": [1, 2]}, "DATA.IMAGENET_MEAN is"),
    ],
)
def test_what_a_configuration_cannot_hold_is_named(configured, changes, message):
    with pytest.raises(InputError, match=r"^the config\.json of .*" + message):
        with_preprocessing(configured(**changes))


def test_means_of_other_lengths_disagree(configured):
    config = with_preprocessing(configured())
    for mean, count in (
        ([0.485, 0.456], 1),
        ([0.485] * 4, 1),
        ([0.485], 1),
        ([0.485, 0.456, 0.406], 0),
    ):
        assert len(list(disagreements(config, {"mean": mean}))) == count


def test_without_weights_or_their_config_nothing_changes(tmp_path):
    write_weights(tmp_path)
    for options in ([], ["MODEL.PRETRAINED", str(tmp_path)]):
        config = get_config(None, options)
        assert with_preprocessing(config) == config
