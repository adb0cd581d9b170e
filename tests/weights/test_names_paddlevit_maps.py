"""The weights of PaddleViT's models for segmentation give PaddleViT's logits in the models that its
files name (golden/make_paddlevit_segmentation.py).
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.paddlevit_segmentation import FILES, array, images, places

from config import get_config
from errors import InputError
from models import build_model
from weights import load_weights

GOLDEN = ROOT / "tests" / "golden" / "paddlevit_segmentation.npz"
# Trans2Seg takes images of 512 pixels alone.
MODELS = [
    pytest.param(name, marks=[pytest.mark.long] if name == "trans2seg" else []) for name in FILES
]


def stored(name):
    """The tensors of PaddleViT's file of a model, by its names."""
    with np.load(GOLDEN) as golden:
        shapes = json.loads(str(golden[f"{name}.shapes"]))
    tensors = {}
    for key, shape in shapes.items():
        values = array(key, shape)
        tensors[key] = np.zeros(shape, np.float32) if values is None else values
    return tensors


@pytest.fixture
def model_of(tmp_path):
    """Returns a function that builds the model of a file of PaddleViT's."""

    def model_of(name):
        file = tmp_path / "theirs.yaml"
        file.write_text(FILES[name])
        return build_model(get_config(file))

    return model_of


def load(model, tensors, folder, **options):
    """Loads tensors from a .pdparams file."""
    file = folder / "iter_160000_model_state.pdparams"
    paddle.save({key: paddle.to_tensor(values) for key, values in tensors.items()}, str(file))
    return load_weights(model, file, **options)


@pytest.mark.parametrize("name", MODELS)
def test_its_weights_give_its_logits(name, model_of, tmp_path):
    model = model_of(name)
    load(model, stored(name), tmp_path)
    model.eval()
    with np.load(GOLDEN) as golden:
        expected = golden[name]
    # Of the largest images, one is enough.
    count = 1 if name == "trans2seg" else 2
    pixels = images(model.encoder.image_size[0])[:count]
    with paddle.no_grad():
        found = places(model(paddle.to_tensor(pixels)).numpy())
    largest = np.abs(expected).max()
    assert np.abs(found - expected[:count]).max() < 1e-5 * largest
    # A logit depends on the image and on the place.
    assert np.abs(expected[0] - expected[1]).max() > 1e-2 * largest
    assert expected.std(axis=(2, 3)).min() > 1e-3 * largest


def test_a_damaged_file_is_one_line(model_of, tmp_path):
    tensors = stored("setr_naive")
    model = model_of("setr_naive")
    tensors["decoder.conv_0.bias"] = tensors["decoder.conv_0.bias"][:5]
    with pytest.raises(InputError, match=r"running_mean and .*conv_0.bias are \[256\] and \[5\]"):
        load(model, tensors, tmp_path)
    del tensors["decoder.conv_0.bias"]
    tensors["decoder.conv_0.weight"] = tensors["decoder.conv_0.weight"][:, :3]
    with pytest.raises(InputError, match="doesn't fit the model") as error:
        load(model, tensors, tmp_path)
    assert "\n" not in str(error.value)


def test_a_fine_tuning_keeps_all_but_the_classifiers(model_of, tmp_path):
    tensors = stored("segmenter")
    model = model_of("segmenter")
    for key, axis in {
        "decoder.mask_tokens": 1,
        "decoder.mask_norm.weight": 0,
        "decoder.mask_norm.bias": 0,
    }.items():
        tensors[key] = np.take(tensors[key], [0, 1, 2], axis)
    with pytest.raises(InputError, match="decode_head.cls_emb"):
        load(model, tensors, tmp_path)
    report = load(model, tensors, tmp_path, strict=False)
    assert set(report.fresh) == {
        "decode_head.cls_emb",
        "decode_head.mask_norm.weight",
        "decode_head.mask_norm.bias",
    }
    np.testing.assert_array_equal(model.encoder.norm.weight.numpy(), tensors["norm.weight"])
    np.testing.assert_array_equal(
        model.decode_head.proj_patch.numpy(), tensors["decoder.proj_patch.weight"]
    )
