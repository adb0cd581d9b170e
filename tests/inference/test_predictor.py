"""A Predictor's answers are an evaluation's, whatever the weights' form; what can't be read is a
line.
"""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_sample_images
from support.parity import assert_same_bits
from support.training_runs import train

from config import get_config
from datasets import get_dataloader, get_datasets
from errors import InputError, RunError
from inference import Failure, Predictor
from inference.calibration.choice import Choice
from inference.exporting import write_export
from inference.pictures import Pictures
from loading.transforms import Normalize
from models import build_model
from training.checkpoint import describe, description_of
from training.checkpoint.description import METADATA
from weights import load_weights, save_weights

CLASSES = ("bridge", "flower, red")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of the data set "folder": crops of two photographs, of several sizes, JPEG and PNG."""
    root = tmp_path_factory.mktemp("photographs")
    for label, photograph in enumerate(load_sample_images().images):
        for place in range(9):
            split = root / ("train" if place < 4 else "val") / CLASSES[label]
            split.mkdir(parents=True, exist_ok=True)
            crop = Image.fromarray(photograph[20 * place :, 30 * place : 400 + 10 * place])
            crop.save(split / f"{place}.{('jpg', 'png')[place % 2]}")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory, photographs):
    """A run on them: its folder."""
    output = tmp_path_factory.mktemp("run")
    options = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(photographs),
        "DATA.IMAGE_SIZE",
        "32",
    ]
    options += [
        "MODEL.NUM_CLASSES",
        "auto",
        "MODEL.PATCH_SIZE",
        "8",
        "MODEL.EMBED_DIM",
        "16",
        "MODEL.DEPTH",
        "2",
    ]
    options += [
        "MODEL.NUM_HEADS",
        "2",
        "TRAIN.NUM_EPOCHS",
        "1",
        "TRAIN.WARMUP_EPOCHS",
        "0",
        "DATA.BATCH_SIZE",
        "4",
    ]
    train(
        [*options, "DATA.NUM_WORKERS", "0", "DATA.CROP_PCT", "0.9", "TRAIN.MODEL_EMA", "True"],
        output,
    )
    return output


def evaluated(run, photographs):
    """(files, logits) of the validation set, computed as ``engine.evaluate`` computes them, 4 at a
    time.
    """
    options = ["EVAL", "True", "DATA.BATCH_SIZE_EVAL", "4", "DATA.DATA_PATH", str(photographs)]
    config, _, val = get_datasets(get_config(str(run / "config.yaml"), options))
    model = build_model(config)
    load_weights(model, run / "checkpoints" / "best")
    model.eval()
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    with paddle.no_grad():
        logits = [
            model(normalize(batch["pixels"])).numpy()
            for batch in get_dataloader(config, val, "val")
        ]
    return [val.path(index) for index in range(len(val))], np.concatenate(logits)


@pytest.mark.smoke
@pytest.mark.parametrize("workers", [0, 2])
def test_answers_are_the_evaluations_to_the_bit(run, photographs, workers):
    files, logits = evaluated(run, photographs)
    predictor = Predictor(run, batch_size=4)
    found = [
        predictor.logits(batch.pixels)
        for batch in predictor.batches(Pictures(predictor.config, files), workers)
    ]
    assert_same_bits(np.concatenate(found), logits)
    answers = list(predictor.stream(files, top=2, workers=workers))
    assert [answer.name for answer in answers] == files
    expected = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float64)
    expected /= expected.sum(1, keepdims=True)
    assert [answer.outputs[0] for answer in answers] == logits.argmax(1).tolist()
    assert {answer.classes[answer.outputs.index(1)] for answer in answers} == {"flower, red"}
    np.testing.assert_allclose(
        [answer.probabilities for answer in answers], -np.sort(-expected), rtol=1e-6
    )


@pytest.mark.smoke
def test_one_file_carries_all(run, tmp_path):
    shutil.copy(run / "checkpoints" / "last" / "ema.safetensors", tmp_path / "alone.safetensors")
    told = description_of(tmp_path / "alone.safetensors")
    assert told == description_of(run / "checkpoints" / "best")
    assert (told.classes, told.values["DATA.CROP_PCT"], told.task) == (
        list(CLASSES),
        0.9,
        "classification",
    )
    assert Predictor(tmp_path / "alone").classes == list(CLASSES)
    # no path of this machine
    assert not [value for value in told.values.values() if str(run) in str(value)]


def test_an_earlier_releases_checkpoint_tells_the_same_by_its_state(run, tmp_path):
    told = description_of(run / "checkpoints" / "best")
    shutil.copytree(run / "checkpoints" / "best", tmp_path / "old")
    save_file(
        load_file(tmp_path / "old" / "model.safetensors"), tmp_path / "old" / "model.safetensors"
    )
    assert description_of(tmp_path / "old") == told


def test_timms_config_tells_of_timms_weights(tmp_path):
    config = get_config("vit_tiny_patch16_224", ["MODEL.NUM_CLASSES", "3", "DATA.IMAGE_SIZE", "32"])
    save_weights(build_model(config), tmp_path / "model.safetensors")
    own = {
        "input_size": [3, 32, 32],
        "crop_pct": 0.95,
        "mean": [0.1, 0.2, 0.3],
        "interpolation": "bilinear",
    }
    names = {"num_classes": 3, "label_names": ["a", "b", "c"]}
    stored = {"architecture": "vit_tiny_patch16_224", **names, "pretrained_cfg": own}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    predictor = Predictor(tmp_path)
    data = predictor.config.DATA
    assert (data.IMAGE_SIZE, data.CROP_PCT, data.INTERPOLATION) == (32, 0.95, "bilinear")
    assert data.IMAGENET_MEAN == [0.1, 0.2, 0.3]
    assert predictor.classes == ["a", "b", "c"]
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        InputError,
        match=r": cannot determine the model; pass its YAML file or name by -cfg",
    ):
        Predictor(tmp_path)
    with pytest.raises(InputError, match="found 2 class names, but the model has 3 outputs"):
        Predictor(
            tmp_path,
            "vit_tiny_patch16_224",
            ["MODEL.NUM_CLASSES=3", "DATA.IMAGE_SIZE=32"],
            ["x", "y"],
        )


def test_images_of_every_form_are_the_same_image(run):
    predictor = Predictor(run)
    pixels = load_sample_images().images[0][::2, ::2]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    forms = [pixels, Image.fromarray(pixels), file.getvalue()]
    assert [answer.name for answer in predictor(forms)] == ["image 0", "image 1", "image 2"]
    # One by one: the bits of an answer may depend on its place in a batch.
    [first], *others = (predictor([form]) for form in forms)
    assert all(other[1:] == first[1:] for [other] in others)
    assert predictor.pixels(pixels).shape == (32, 32, 3)
    assert predictor([]) == []
    for wrong in (pixels / 255.0, pixels[None]):
        with pytest.raises(
            RunError,
            match=r"image 0: found an array \[.*\] of .*, expected \[H, W\] or \[H, W, 3\]",
        ):
            predictor([wrong])


def cut_off():
    """Pillow's image of a PNG that ends early, which is found out when it is decoded."""
    file = io.BytesIO()
    Image.fromarray(load_sample_images().images[0]).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:5000]))


def closed():
    image = Image.new("RGB", (4, 4))
    image.close()
    return image


@pytest.mark.parametrize(
    ("image", "line"),
    [
        (cut_off, "image 0: can't be read as an image \\(OSError: image file is truncated"),
        (closed, "image 0: can't be read as an image \\(ValueError: Operation on closed image"),
        (
            lambda: Image.new("La", (4, 4)),
            "image 0: can't be read as an image \\(ValueError: conversion from La",
        ),
        (lambda: Image.new("RGB", (0, 4)), "image 0: it has no pixels"),
        (lambda: np.zeros((4, 0, 3), np.uint8), "image 0: it has no pixels"),
        (lambda: np.zeros((0, 4), np.uint8), "image 0: it has no pixels"),
        (
            lambda: None,
            "image 0: found an object of type NoneType, expected a path, the bytes of a file",
        ),
        (lambda: 3, "image 0: found an object of type int, expected a path"),
        (io.BytesIO, "image 0: found an object of type BytesIO, expected a path"),
        (
            lambda: bytearray(b"GIF89a"),
            "image 0: found an object of type bytearray, expected a path",
        ),
    ],
)
def test_an_object_that_is_no_image_is_an_error_of_one_line(run, image, line):
    """And the images beside it are answered."""
    predictor = Predictor(run)
    with pytest.raises(RunError, match=line):
        predictor([image()])
    good = np.zeros((8, 8, 3), np.uint8)
    failure, answer = predictor.stream([image(), good], workers=0)
    assert isinstance(failure, Failure)
    assert answer.classes


def test_one_image_for_several_is_refused(run):
    """The letters of a path were taken for paths, and the rows of an array for grey images."""
    predictor = Predictor(run)
    pixels = np.zeros((8, 8, 3), np.uint8)
    for one in (
        "a.jpg",
        Path("a.jpg"),
        b"GIF89a",
        Image.fromarray(pixels),
        pixels,
        pixels[:, :, 0],
    ):
        for ask in (predictor, lambda images: list(predictor.stream(images))):
            with pytest.raises(
                InputError,
                match=r"found one image .*, expected a list of images: predictor\(\[image\]\)",
            ):
                ask(one)
    assert len(predictor(np.stack([pixels, pixels]))) == 2


@pytest.mark.parametrize(
    ("named", "line"),
    [
        ({"top": 0}, "top is 0, expected a whole number of 1 or more"),
        ({"top": -1}, "top is -1, expected"),
        ({"top": 1.5}, "top is 1.5, expected"),
        ({"threshold": float("nan")}, "threshold is nan, expected a probability from 0 to 1"),
        ({"threshold": 2}, "threshold is 2, expected"),
        ({"threshold": "x"}, "threshold is 'x', expected"),
    ],
)
def test_a_top_or_threshold_that_is_none_is_refused(run, named, line):
    with pytest.raises(InputError, match=line):
        Predictor(run)([np.zeros((8, 8, 3), np.uint8)], **named)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cant_be_read_is_a_line_in_its_place(run, photographs, tmp_path, workers):
    (tmp_path / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    good = str(next((photographs / "val" / CLASSES[0]).iterdir()))
    files = [good, str(tmp_path / "cut.jpg"), str(tmp_path / "none"), good, str(tmp_path)]
    predictor = Predictor(run, batch_size=2)
    answers = list(predictor.stream(files, workers=workers))
    assert [answer.name for answer in answers] == files
    assert [isinstance(answer, Failure) for answer in answers] == [False, True, True, False, True]
    assert answers[1].error == f"{files[1]}: it is truncated; repair or remove it"
    assert answers[0][1:] == answers[3][1:]
    with pytest.raises(RunError, match="cut.jpg: it is truncated"):
        predictor(files)


def test_outputs_of_many_labels_are_each_for_itself(run, tmp_path):
    stored = load_file(run / "checkpoints" / "best" / "model.safetensors")
    config = description_of(run / "checkpoints" / "best").to_config()
    told = describe(config, list(CLASSES), "multilabel")
    save_file(stored, tmp_path / "many.safetensors", {METADATA: told.to_json()})
    assert Predictor(tmp_path / "many", str(run / "config.yaml")).task == "multilabel"
    predictor = Predictor(tmp_path / "many")
    logits = np.array([[3.0, 1.0], [-800.0, 800.0]], np.float32)
    shares = predictor.probabilities(logits)
    np.testing.assert_allclose(shares, [[0.95257413, 0.73105858], [0, 1]], atol=1e-8)
    assert predictor.prediction_of("x", shares[0], Choice(threshold=0.5)).classes == list(CLASSES)
    assert predictor.prediction_of("x", shares[0], Choice(threshold=0.9)).classes == list(
        CLASSES[:1]
    )
    assert predictor.prediction_of("x", shares[0], Choice(threshold=0.99)).classes == []
    # no thresholds are known: 0.5
    assert predictor.prediction_of("x", shares[0]).classes == list(CLASSES)
    told = describe(config, list(CLASSES), "multilabel", [0.96, 0.7])
    save_file(stored, tmp_path / "kept.safetensors", {METADATA: told.to_json()})
    kept = Predictor(tmp_path / "kept")
    assert (
        kept.prediction_of("x", shares[0]).classes,
        kept.prediction_of("x", shares[0], Choice(threshold=0.9)).outputs,
    ) == (
        [CLASSES[1]],
        [0],
    )
    kept.thresholds = [0.7, 0.96]
    assert kept.prediction_of("x", shares[0][::-1]).outputs == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d | {"task": "detection"},
            "its task is 'detection', expected one of beit, classification, ",
        ),
        (lambda d: d | {"classes": "ab"}, "its classes is 'ab', expected a list of names"),
        (
            lambda d: d | {"classes": ["a\nb", "c"]},
            r"its classes is ['a\nb', 'c'], expected a list of names that",
        ),
        (
            lambda d: d | {"values": {"MODEL.EMBED_DIMS": 3}},
            "it has the key MODEL.EMBED_DIMS, which ViT doesn't have",
        ),
        (lambda d: d | {"values": {"MODEL.NUM_HEADS": -1}}, "MODEL.NUM_HEADS is -1"),
        (
            lambda d: d | {"thresholds": [0.5, 2.0]},
            "its thresholds is [0.5, 2.0], expected a list of probabilities",
        ),
        (
            lambda d: d | {"thresholds": [0.5] * 3},
            "has 3 thresholds, but the model has 2 outputs",
        ),
        (lambda d: {"model": "x"}, "its task is missing"),
    ],
)
def test_a_description_that_is_none_is_refused(run, tmp_path, change, message):
    file = tmp_path / "wrong.safetensors"
    told = json.loads(description_of(run / "checkpoints" / "best").to_json())
    save_file(
        load_file(run / "checkpoints" / "best" / "model.safetensors"),
        file,
        {METADATA: json.dumps(change(told))},
    )
    with pytest.raises(InputError) as caught:
        Predictor(file)
    assert message in str(caught.value)
    assert "wrong.safetensors" in str(caught.value)


@pytest.mark.smoke
def test_an_export_answers_as_its_checkpoint(run, photographs, tmp_path):
    predictor = Predictor(run)
    files = sorted(map(str, photographs.glob("val/*/*")))
    write_export(predictor.config, predictor.model, tmp_path / "export", predictor.classes)
    exported = Predictor(tmp_path / "export")
    assert (exported.model, exported.classes, exported.task) == (
        None,
        list(CLASSES),
        "classification",
    )
    assert exported.report == f"{tmp_path}/export: vit_base_patch16_224, paddle, float32"
    for own, theirs in zip(predictor(files), exported(files), strict=True):
        assert own.classes == theirs.classes
        np.testing.assert_allclose(own.probabilities, theirs.probabilities, atol=1e-5)
    assert (exported.pixels(files[0]) == predictor.pixels(files[0])).all()
    with pytest.raises(InputError, match="an export, whose model is known; leave out -cfg"):
        Predictor(tmp_path / "export", "vit_tiny_patch16_224")
    with pytest.raises(
        InputError,
        match=r"an export, made for DATA.CROP_PCT 0.9; leave DATA.CROP_PCT out, or export",
    ):
        Predictor(tmp_path / "export", options=["DATA.CROP_PCT=0.5"])


def test_an_answer_without_finite_probabilities_is_none():
    said = "a.jpg: the weights yield non-finite logits for it"
    assert Predictor._outcome(None, "a.jpg", "", np.array([np.nan, 0.5]), 1, None) == Failure(
        "a.jpg", said
    )
