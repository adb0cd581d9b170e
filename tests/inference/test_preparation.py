"""The graph that prepares images gives Pillow's pixels; timm's config.json tells the same."""

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from config import get_config
from inference.conventions import write_conventions
from inference.fidelity import crops
from inference.preparation import Preparation
from loading.transforms import EvalTransform, Normalize
from models.paddle_inference import PROGRAM, Program, save_program
from models.pretrained import with_preprocessing
from training.checkpoint import describe
from weights.hub import read_config

# (width, height): smaller and larger than the model's images, odd, narrow, and as large.
SIZES = [
    (500, 375),
    (375, 500),
    (333, 217),
    (224, 224),
    (256, 256),
    (101, 77),
    (17, 23),
    (64, 300),
    (448, 448),
    (427, 40),
    (1, 40),
    (40, 1),
    (1, 1),
]


def prepared_by(*words):
    return get_config(None, ["DATA.IMAGE_SIZE", "64", *words])


WHOLE = ["TASK", "segmentation", "HEAD.NAME", "linear", "DATA.CROP_MODE"]


@pytest.mark.smoke
@pytest.mark.parametrize("kernel", ["bicubic", "bilinear"])
@pytest.mark.parametrize(
    "mode",
    [
        ["DATA.CROP_MODE", "squash"],
        ["DATA.CROP_PCT", "0.9"],
        ["DATA.CROP_PCT", "0.72"],
        ["DATA.CROP_PCT", "1.15"],
        ["DATA.CROP_PCT", "1.4", "DATA.CROP_MODE", "squash"],
        [*WHOLE, "short"],
        [*WHOLE, "short", "DATA.IMAGE_SIZE", "50x90"],
        [*WHOLE, "own"],
    ],
)
def test_the_graphs_pixels_are_pillows(kernel, mode):
    config = prepared_by("DATA.INTERPOLATION", kernel, *mode)
    graph = Preparation(config)
    transform = EvalTransform(config)
    for crop, size in zip(crops(len(SIZES)), SIZES, strict=True):
        image = crop.resize(size)
        found = (
            graph.crop_pixels(paddle.to_tensor(np.asarray(image)[None]))
            .numpy()[0]
            .transpose(1, 2, 0)
        )
        differs = np.abs(found - transform(image))
        assert differs.max() <= 2, size  # a half that is rounded the other way, in both passes
        assert differs.mean() < 0.05, size


@pytest.mark.parametrize("size", [(1, 40), (40, 1), (1, 1), (90, 70)])
def test_a_program_of_paddle_inference_has_the_graphs_pixels(size, tmp_path):
    graph = Preparation(prepared_by("DATA.CROP_MODE", "squash"))
    pixels = paddle.to_tensor(np.asarray(crops(1)[0].resize(size))[None])
    inputs = paddle.static.InputSpec([None, None, None, 3], "uint8", "images")
    save_program(graph, tmp_path / PROGRAM, inputs)
    np.testing.assert_allclose(Program(tmp_path)(pixels).numpy(), graph(pixels).numpy(), atol=1e-6)


def test_nearest_takes_pillows_pixels_but_at_edges():
    config = prepared_by("DATA.INTERPOLATION", "nearest")
    graph = Preparation(config)
    transform = EvalTransform(config)
    # Pillow sums up its steps, which misses 64 of 512
    for size in [(500, 375), (101, 77), (333, 217)]:
        image = crops(1)[0].resize(size)
        found = (
            graph.crop_pixels(paddle.to_tensor(np.asarray(image)[None]))
            .numpy()[0]
            .transpose(1, 2, 0)
        )
        assert (found == transform(image)).mean() > 0.98


def test_several_images_of_one_size_are_normalised_as_the_model_takes_them():
    config = prepared_by(
        "DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.4", "DATA.IMAGENET_STD", "0.3"
    )
    images = [crop.convert("L").resize((90, 70)) for crop in crops(3)]
    found = Preparation(config)(
        paddle.to_tensor(np.stack([np.asarray(image)[:, :, None] for image in images]))
    )
    pixels = np.stack([EvalTransform(config)(image) for image in images])
    expected = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)(
        paddle.to_tensor(pixels)
    ).numpy()
    assert np.abs(found.numpy() - expected).max() <= 2.01 / 255 / 0.3
    assert np.abs(found.numpy() - expected).mean() < 0.05 / 255 / 0.3


# --------------------------------------------------------- other toolkits


@pytest.fixture(
    params=[["DATA.CROP_PCT", "0.8"], ["DATA.CROP_MODE", "squash", "DATA.CROP_PCT", "1.0"]]
)
def config(request):
    words = [
        "DATA.INTERPOLATION",
        "bilinear",
        "DATA.IMAGENET_MEAN",
        "[0.1,0.2,0.3]",
        "MODEL.NUM_CLASSES",
        "3",
    ]
    return prepared_by(*request.param, *words)


def test_timms_config_tells_the_same_preparation(config, tmp_path):
    write_conventions(tmp_path, config, describe(config, ["cat", "dög", "#3"]), 768)
    told = read_config(tmp_path)
    assert (told["architecture"], told["num_classes"], told["num_features"]) == (
        config.MODEL.NAME,
        3,
        768,
    )
    assert told["label_names"] == ["cat", "dög", "#3"]
    assert told["input_size"] == [3, 64, 64]
    save_file({"head.bias": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    other = with_preprocessing(
        get_config(None, ["DATA.IMAGE_SIZE", "64", "MODEL.PRETRAINED", str(tmp_path)])
    )
    image = crops(1)[0]
    assert (EvalTransform(other)(image) == EvalTransform(config)(image)).all()
    assert (other.DATA.IMAGENET_MEAN, other.DATA.IMAGENET_STD) == (
        config.DATA.IMAGENET_MEAN,
        config.DATA.IMAGENET_STD,
    )
    assert (tmp_path / "labels.txt").read_text(encoding="utf-8") == "cat\ndög\n#3\n"
