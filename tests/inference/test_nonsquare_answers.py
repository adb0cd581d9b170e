"""A model of images of two sides is evaluated, asked, exported and shown with one answer."""

import io
import json

import numpy as np
import paddle
import pytest
from conftest import without
from PIL import Image
from safetensors.numpy import save_file
from support.parity import assert_same_bits
from support.photographs import CLASSES, MODEL, write_photographs

from config import get_config
from datasets import get_dataloader, get_dataset
from inference import Predictor, visualization
from inference.backends import open_runner
from inference.conventions import write_conventions
from inference.export_manifest import read_export
from inference.exporting import write_export
from inference.serve.overlay import occlusion
from inference.visualization.predicted_image import predict_image
from loading.transforms import EvalTransform, Normalize
from models import build_model
from training.checkpoint import describe
from training.checkpoint.description import METADATA
from weights import file_arrays
from weights.hub import read_config

SIZE = [48, 32]
WORDS = [*without(MODEL, "DATA.IMAGE_SIZE"), "DATA.IMAGE_SIZE", "48x32", "DATA.CROP_MODE"]


def model_of(mode, file):
    """A small ViT's configuration and weights, which tell what they are of; the classifier parts
    the images.
    """
    paddle.seed(2)
    config = get_config(None, [*WORDS, mode])
    model = build_model(config)
    model.head.weight.set_value(paddle.randn([16, 2]))
    save_file(file_arrays(model), file, {METADATA: describe(config, list(CLASSES)).to_json()})
    return model, config


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["center", "squash"])
def test_evaluated_asked_and_exported_it_answers_alike(tmp_path, mode):
    data = write_photographs(tmp_path / "data", 2)
    model, config = model_of(mode, tmp_path / "model.safetensors")
    model.eval()
    options = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(data),
        "DATA.NUM_WORKERS",
        "0",
        "EVAL",
        "True",
    ]
    dataset = get_dataset(get_config(None, [*WORDS, mode, *options]), "val")
    [batch] = get_dataloader(get_config(None, [*WORDS, mode, *options]), dataset, "val")
    assert batch["pixels"].shape == [4, *SIZE, 3]
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    expected = model(normalize(batch["pixels"])).numpy()
    assert np.ptp(expected, axis=0).min() > 1e-3  # the images matter
    predictor = Predictor(tmp_path / "model.safetensors")
    assert predictor.config.DATA.IMAGE_SIZE == SIZE
    files = [dataset.path(index) for index in range(4)]
    pixels = np.stack([predictor.pixels(file) for file in files])
    assert_same_bits(predictor.logits(pixels), expected)
    if mode == "squash":
        return
    write_export(config, model, tmp_path / "export", list(CLASSES))
    told = json.loads((tmp_path / "export" / "preprocess.json").read_text())
    assert (told["image_size"], told["values"]["DATA.IMAGE_SIZE"]) == (SIZE, SIZE)
    exported = Predictor(tmp_path / "export")
    found = exported.logits(np.stack([exported.pixels(file) for file in files]))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)
    for tta in ("flip", "ten"):
        answers = list(predictor.stream(files, workers=0, tta=tta))
        assert [one.classes for one in answers] == [
            one.classes for one in exported.stream(files, workers=0, tta=tta)
        ]
    image = Image.open(files[0])
    found = open_runner(read_export(tmp_path / "export"), "preparation")(np.asarray(image)[None])
    prepared = normalize(paddle.to_tensor(EvalTransform(config)(image)[None])).numpy()
    assert np.abs(found - prepared).max() <= 2.01 / 127.5


def test_other_toolkits_are_told_the_size(tmp_path):
    _, config = model_of("squash", tmp_path / "model.safetensors")
    write_conventions(tmp_path, config, describe(config, list(CLASSES)), 16)
    assert read_config(tmp_path)["input_size"] == [3, *SIZE]


def test_what_a_server_draws_has_the_images_shape(tmp_path):
    model_of("center", tmp_path / "model.safetensors")
    predictor = Predictor(tmp_path / "model.safetensors", batch_size=16)
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    picture = Image.open(io.BytesIO(occlusion(predictor, image)))
    assert picture.size == (299, 448)
    seen = predict_image(predictor, image, original=True)
    width, height = 90, 60  # covered: 60 x 90 of (60, 40), of which 48 x 32 are cut
    assert seen.base.shape[:2] == (4 * height, 4 * width)
    np.testing.assert_allclose(np.array(seen.box) / 4, [29, 6, 61, 54])
    assert visualization.overlay(predictor, image)[:4] == b"\x89PNG"
