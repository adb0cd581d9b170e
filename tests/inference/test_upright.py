"""What a model sees of a photograph that EXIF turns is what is shown of it: on pages, sheets, maps
and in reports.
"""

import io
import json
import subprocess

import numpy as np
import pytest
import warm
from conftest import ROOT
from PIL import Image
from support.browser import CHROMIUM, browsing
from support.servers import Served
from support.small_checkpoints import saved

from config import get_config
from datasets import get_datasets
from inference import Predictor, visualization
from inference.captions import small
from inference.pictures import Pictures
from inference.quantise import training_images
from inference.search import write_grid
from inference.serve.overlay import occlusion
from inference.visualization.dataset_report import _tile
from inference.visualization.predicted_image import predict_image
from models.pretrained import with_preprocessing
from tools import check_dataset
from training.report.mistakes import _picture

MODEL = "vit_small_patch16_224"
BOTH = pytest.mark.parametrize("oriented", [False, True])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weights of a model that sees photographs as they are stored, and of one that sees them
    turned.
    """
    found = {}
    for oriented in (False, True):
        folder = tmp_path_factory.mktemp("model")
        found[oriented] = saved(
            folder, MODEL, options=["DATA.EXIF_ORIENTATION", str(oriented), "DATA.CROP_PCT", "1.0"]
        )
    return found


@pytest.fixture(scope="module")
def photograph(tmp_path_factory):
    """A photograph that is bright above and dark below, stored on its side: its left half is the
    bright one.
    """
    file = tmp_path_factory.mktemp("photographs") / "turned.jpg"
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[:, :48] = 220
    exif = Image.Exif()
    exif[274] = 6  # shown, it is turned clockwise
    Image.fromarray(pixels).save(file, exif=exif, quality=95)
    return file


def is_upright(picture):
    """Whether a picture is bright above; one on its side is bright on its left."""
    grey = np.asarray(
        Image.open(io.BytesIO(picture)) if isinstance(picture, bytes) else picture, float
    )
    grey = grey.mean(2) if grey.ndim == 3 else grey
    rows, columns = (side // 2 for side in grey.shape)
    down = grey[:rows].mean() - grey[rows:].mean()
    across = grey[:, :columns].mean() - grey[:, columns:].mean()
    assert max(down, across) > 20 > min(down, across)
    return bool(down > across)


@BOTH
def test_maps_and_captions_are_of_what_the_model_sees(files, photograph, oriented):
    predictor = Predictor(files[oriented])
    path = str(photograph)
    assert is_upright(predictor.pixels(path)) is oriented
    for picture in (path, photograph.read_bytes(), Image.open(path)):
        assert is_upright(predict_image(predictor, picture).base) is oriented
        assert is_upright(predict_image(predictor, picture, original=True).base) is oriented
    assert is_upright(small(Pictures(predictor.config, [path]), 0, 64)) is oriented
    assert is_upright(visualization.overlay(predictor, path, "cam")) is oriented
    assert is_upright(occlusion(predictor, photograph.read_bytes())) is oriented


@BOTH
def test_a_grid_of_neighbours_is_of_what_the_model_saw(files, photograph, tmp_path, oriented):
    def query(file):
        tile = np.asarray(Image.open(file).convert("L"))[8:232, 8:232]
        rows, columns = np.nonzero(tile < 250)  # the paper is white
        return tile[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]

    assert write_grid(str(photograph), [], tmp_path / "grid.png", oriented) == []
    assert is_upright(query(tmp_path / "grid.png")) is oriented

    def run(tool, *words):
        command = [warm.python(), str(ROOT / "tools" / tool), *map(str, words)]
        how = {
            "cwd": tmp_path,
            "env": warm.environment(),
            "capture_output": True,
            "text": True,
            "timeout": 120,
        }
        done = subprocess.run(command, **how)
        assert done.returncode == 0, done.stderr

    run("features.py", files[oriented], photograph, "-output=f.npy")
    run("search.py", photograph, "f.npy", "-grid=stored.png")
    run(
        "search.py",
        photograph,
        photograph.parent,
        "-checkpoint",
        files[oriented],
        "-grid=folder.png",
    )
    for name in ("stored.png", "folder.png"):
        assert is_upright(query(tmp_path / name)) is oriented
    made = json.loads((tmp_path / "f.json").read_text())
    assert made.pop("oriented") is oriented
    (tmp_path / "f.json").write_text(json.dumps(made))  # as an earlier release wrote it
    run("search.py", photograph, "f.npy")


@BOTH
def test_reports_and_calibration_are_of_what_the_model_sees(files, photograph, tmp_path, oriented):
    for path in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "turned.jpg").write_bytes(photograph.read_bytes())
    options = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(tmp_path),
        "MODEL.NUM_CLASSES",
        "auto",
    ]
    config = get_config(None, [*options, "DATA.EXIF_ORIENTATION", str(oriented)])
    _, _, val = get_datasets(config)
    assert is_upright(_picture(val, 0)[0]) is oriented
    checked = check_dataset.check_images(config, workers=1)
    assert (
        is_upright(
            _tile(checked, 0)[12:100, 30:82] if oriented else _tile(checked, 0)[30:82, 12:100]
        )
        is oriented
    )
    model = Predictor(files[oriented]).config
    [image] = training_images(model, ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(tmp_path)], 1)
    assert is_upright(127 + 100 * image.transpose(1, 2, 0)) is oriented


def test_the_weights_setting_holds_where_a_model_is_named_for_them(files):
    def seen(oriented, *options):
        named = get_config(MODEL, ["MODEL.PRETRAINED", str(files[oriented]), *options])
        return with_preprocessing(named).DATA.EXIF_ORIENTATION

    assert [seen(False), seen(True)] == [False, True]
    assert seen(True, "DATA.EXIF_ORIENTATION", "False") is False  # what is said counts
    assert seen(False, "DATA.EXIF_ORIENTATION", "True") is True
    dali = ["DATA.LOADER", "dali", "TRAIN.AUTO_AUGMENT", "null", "TRAIN.COLOR_JITTER", "0"]
    assert seen(True, *dali) is False  # it can't turn what it decodes


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
@BOTH
def test_the_page_shows_the_picture_as_the_model_sees_it(files, photograph, tmp_path, oriented):
    server = Served(files[oriented], folder=tmp_path).ready()
    try:
        headers = {"Content-Type": "image/jpeg"}
        told = server.ask("POST", "/predict", photograph.read_bytes(), headers)
        assert told[2]["x-exif-orientation"] == str(oriented).lower()
        assert (
            is_upright(server.ask("POST", "/attention", photograph.read_bytes(), headers)[1])
            is oriented
        )
        with browsing() as browser:
            browser.open(f"http://127.0.0.1:{server.port}/", 600)
            browser.choose("#file", photograph)
            browser.wait("!document.getElementById('found').hidden")
            browser.wait("document.getElementById('shown').complete")
            box = browser.value(
                "(({left, top, width, height}) => [left, top, width, height])"
                "(document.getElementById('shown').getBoundingClientRect())"
            )
            browser.picture(tmp_path / "page.png")
            assert browser.said == []
        left, top, width, height = map(round, box)
        seen = (
            Image.open(tmp_path / "page.png")
            .convert("L")
            .crop((left, top, left + width, top + height))
        )
        side = min(seen.size) // 3
        middle = seen.width // 2, seen.height // 2
        shown = seen.crop((middle[0] - side, middle[1] - side, middle[0] + side, middle[1] + side))
        assert is_upright(shown) is oriented
    finally:
        server.end()
