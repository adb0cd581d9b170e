"""The classes of pixels: predictions are an evaluation's, on any number of processes, as masks,
overlays and areas.
"""

import csv
import io
import json
import subprocess
from pathlib import Path

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT
from PIL import Image
from support.mask_models import CLASSES, evaluation, random_model, save_model, write_data

from datasets import get_dataloader
from errors import InputError, RunError
from inference import Predictor
from inference.map_pictures import Folder, mask_image, overlay, with_legend
from inference.maps import Areas, PixelMap, areas
from inference.predictor import Failure
from loading.mask_tables import class_colors
from settings.registry import tasks
from training import engine
from training.pixel_metrics import count_pairs

WAYS = [
    [],
    ["DATA.CROP_MODE", "own"],
    ["DATA.CROP_MODE", "squash", "DATA.CROP_PCT", "1.0"],
    ["HEAD.STRIDE", "[20, 16]"],
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("maps"))


@pytest.fixture(scope="module")
def weights(data):
    return save_model(data, data / "model.safetensors")


def images_of(data):
    return [str(data / "images" / "val" / f"{index}.png") for index in range(7)]


def masks_of(data):
    return [np.asarray(Image.open(data / "masks" / "val" / f"{index}.png")) for index in range(7)]


@pytest.mark.smoke
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_classes_are_an_evaluations(data, tmp_path, way, flip):
    options = [*way, "METHOD.FLIP", str(flip)]
    config, val = evaluation(data, *options)
    task = tasks.choose(config)(config, val.classes)
    task.prepare_data(val, "val")
    engine.evaluate(task, random_model(config), get_dataloader(config, val, "val"))
    predictor = Predictor(save_model(data, tmp_path / "model.safetensors", *way))
    confusion = np.zeros(16, np.int64)
    found = predictor.maps(images_of(data), flip=flip)
    for one, mask in zip(found, masks_of(data), strict=True):
        assert one.outputs.shape == mask.shape
        assert one.outputs.dtype == np.uint8
        pairs = paddle.to_tensor(one.outputs.astype(np.int64)), paddle.to_tensor(mask.astype(int))
        confusion += count_pairs(*pairs, 4, 255).numpy()
    assert (confusion.reshape(4, 4) == task.predictions.confusion).all()
    assert predictor.classes == CLASSES


def test_forms_of_an_image_and_workers_give_the_same_map(data, weights):
    predictor = Predictor(weights)
    paths = images_of(data)
    plain = predictor.maps(paths)
    pictures = [Image.open(path) for path in paths]
    contents = [Path(path).read_bytes() for path in paths]
    arrays = [np.asarray(picture) for picture in pictures]
    for images in (pictures, contents, arrays):
        for one, other in zip(plain, predictor.maps(images), strict=True):
            assert (one.outputs == other.outputs).all()
    for one, other in zip(plain, predictor.maps(paths, workers=2), strict=True):
        assert one.name == other.name
        assert (one.outputs == other.outputs).all()


def test_areas_are_shares_of_pixels():
    one = PixelMap("a", np.array([[2, 2, 0], [2, 0, 3]], np.uint8))
    found = areas(one, CLASSES)
    assert found.outputs == [2, 0, 3]
    assert found.classes == [CLASSES[2], CLASSES[0], CLASSES[3]]
    assert found.percents == pytest.approx([50, 100 / 3, 100 / 6])
    assert areas(one, []).classes == ["2", "0", "3"]


def stored(image):
    """Returns an image after it was a PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return Image.open(file)


def test_masks_are_indices_with_the_classes_palette():
    outputs = np.array([[0, 1, 2], [3, 255, 7]], np.uint8)
    image = stored(mask_image(outputs, 256))
    assert image.mode == "P"
    assert (np.asarray(image) == outputs).all()
    assert (np.asarray(image.convert("RGB")) == class_colors(256)[outputs]).all()
    image = stored(mask_image(outputs.astype(np.int32) * 200, 60_000))
    assert (np.asarray(image) == outputs.astype(int) * 200).all()


def test_an_overlay_is_half_the_colour_and_its_legend_names_the_classes():
    pixels = np.full((40, 50, 3), 100, np.uint8)
    outputs = np.zeros((40, 50), np.uint8)
    outputs[:10] = 2
    picture = overlay(Image.fromarray(pixels), outputs)
    expected = pixels / 2 + class_colors(3)[outputs] / 2
    assert np.abs(np.asarray(picture) - expected).max() <= 1
    whole = with_legend(picture, areas(PixelMap("a", outputs), CLASSES))
    assert (np.asarray(whole)[:40, :50] == np.asarray(picture)).all()
    # The squares of both colours, and ink beside them.
    legend = np.asarray(whole)[:, 50:]
    for output in (0, 2):
        assert (legend == class_colors(3)[output]).all(-1).sum() >= 100
    assert (legend[:, 30:] < 100).any()
    many = Areas("a", list(range(40)), list(map(str, range(40))), [2.5] * 40)
    assert with_legend(picture, many).height > 600


def test_files_have_the_images_names_or_numbers(data, weights, tmp_path):
    predictor = Predictor(weights)
    paths = images_of(data)[:2]
    [first] = predictor.maps(paths[:1])
    folder = Folder("masks", predictor.config, paths, tmp_path / "a", tmp_path / "a", CLASSES)
    folder.write(first)
    folder.write(Failure(paths[1], f"{paths[1]}: it is broken"))
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["0.png"]
    assert (np.asarray(Image.open(tmp_path / "a" / "0.png")) == first.outputs).all()
    twice = [paths[0], paths[0]]
    folder = Folder("overlays", predictor.config, twice, tmp_path / "b", tmp_path / "b", CLASSES)
    folder.write(first)
    folder.write(Failure(paths[0], f"{paths[0]}: it is broken"))
    assert sorted(file.name for file in (tmp_path / "b").iterdir()) == ["1-0.jpg", "2-0.jpg"]


def predict(*words, status=0):
    done = subprocess.run(
        [warm.python(), "tools/predict.py", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


@pytest.mark.long
def test_the_command_writes_masks_and_areas(data, weights, tmp_path):
    images = data / "images" / "val"
    expected = Predictor(weights).maps(images_of(data))
    for flags in ([], ["-ngpus", "2"]):
        output = tmp_path / f"masks{len(flags)}"
        predict(weights, images, "-format", "masks", "-output", output, *flags)
        for index, one in enumerate(expected):
            assert (np.asarray(Image.open(output / f"{index}.png")) == one.outputs).all()
    rows = list(csv.reader(io.StringIO(predict(weights, images, "-format", "csv", "-top", "2"))))
    assert rows[0] == ["name", "rank", "output", "class", "percent", "error"]
    found = areas(expected[0], CLASSES)
    assert [row[1:5] for row in rows[1:3]] == [
        [str(rank + 1), str(found.outputs[rank]), found.classes[rank], str(found.percents[rank])]
        for rank in range(2)
    ]
    assert {row[0] for row in rows[3:]} == set(images_of(data)[1:])
    lines = predict(weights, images, "-format", "jsonl").splitlines()
    first = json.loads(lines[0])["areas"]
    assert [one["percent"] for one in first] == found.percents
    assert f"{found.percents[0]:9.2f} %  {found.classes[0]}" in predict(weights, images)
    (tmp_path / "broken.png").write_bytes(b"no image")
    told = predict(
        weights, images, tmp_path / "broken.png", "-format", "masks", "-output", tmp_path / "m",
        status=1,
    )  # fmt: skip
    assert "1 of 8 images can't be read; they have no mask; see -format csv" in told
    assert len(list((tmp_path / "m").iterdir())) == 7


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["-format", "masks"], "-format masks needs -output: a new folder"),
        (
            ["-format", "pictures", "-output", "{out}/x"],
            "use -format overlays or masks for pixel classes",
        ),
        (["-tta", "ten"], "-tta ten crops images, but each pixel needs a class; use -tta flip"),
        (["-threshold", "0.5"], "-threshold is for models with several labels per image"),
    ],
)
@pytest.mark.long
def test_flags_that_maps_have_not_are_refused(data, weights, tmp_path, flags, told):
    flags = [flag.format(out=tmp_path) for flag in flags]
    error = predict(weights, data / "images" / "val", *flags, status=2)
    assert told in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_predictor_says_what_it_can_not_do(data, weights, checkpoint):
    predictor = Predictor(weights)
    with pytest.raises(InputError, match="classifies pixels, not images"):
        predictor(images_of(data))
    with pytest.raises(InputError, match="TASK classification, which doesn't classify pixels"):
        Predictor(checkpoint).maps(images_of(data))
    bias = predictor.model.decode_head.classifier.bias
    bias.set_value(np.full(bias.shape, np.nan, np.float32))
    with pytest.raises(RunError, match=r"0\.png: .*non-finite logits"):
        predictor.maps(images_of(data))
