"""What trains on folders of classes alone is looked at, exported, checked and evaluated by the same
data.
"""

import shutil
import subprocess

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT, write_images
from support.training_runs import train

from config import get_config
from datasets import get_datasets
from errors import InputError
from inference import Predictor
from inference.quantise import training_images
from inference.run_data import data_keys
from loading.transforms import EvalTransform, Normalize
from tools import check_dataset, show_batch
from tools.visualize import list_images, true_class

SPLIT = ["DATA.VAL_SPLIT", "0.25", "DATA.SPLIT_SEED", "3", "DATA.SPLIT_GROUPS", r"(\w+)\.png"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(a run's folder, its data: the folders of two classes alone)."""
    root = tmp_path_factory.mktemp("own")
    data = root / "flowers"
    write_images(data, {"ant": 12, "bee": 12, ".ipynb_checkpoints": 1}, size=40)
    (data / "bee/broken.png").write_bytes(b"no image")
    options = [
        "DATA.DATASET", "folder", "DATA.DATA_PATH", str(data), *SPLIT, "DATA.SKIP_BROKEN", "True",
        "DATA.EXIF_ORIENTATION", "True", "DATA.BATCH_SIZE", "4", "DATA.IMAGE_SIZE", "32", "DATA.NUM_WORKERS", "0",
        "MODEL.NUM_CLASSES", "auto", "MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "1",
        "MODEL.NUM_HEADS", "2", "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.NUM_EPOCHS", "1", "REPORT", "False",
    ]  # fmt: skip
    train(options, root / "RUN")
    return root / "RUN", data


def calibrated(run, flags=(), count=100):
    predictor = Predictor(run)
    data = data_keys(predictor.weights, flags, "it needs data")
    return training_images(predictor.config, data, count)


def prepared(run, *options):
    """The training images of the run's configuration, prepared as an evaluation does."""
    config, train, _ = get_datasets(get_config(run / "config.yaml", list(options)))
    train.transform = EvalTransform(config)
    train.erasing = None
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    images = [
        normalize(paddle.to_tensor(train[index][0][None])).numpy()[0] for index in range(len(train))
    ]
    return np.stack(images)


def same(found, expected):
    """Whether two sets of images are the same, in any order."""
    return sorted(one.tobytes() for one in found) == sorted(one.tobytes() for one in expected)


def test_int8_of_a_run_takes_the_runs_own_training_images(trained, tmp_path):
    run, data = trained
    expected = prepared(run)
    assert len(expected) in (18, 19)
    assert same(calibrated(run), expected)
    assert same(calibrated(run, [("DATA.DATA_PATH", str(data))]), expected)
    shutil.copytree(data, tmp_path / "moved")
    assert same(calibrated(run, [("DATA.DATA_PATH", str(tmp_path / "moved"))]), expected)
    assert len(calibrated(run, [("DATA.VAL_SPLIT", "0.5")])) < 18
    # Another folder, which has a validation part: its training part.
    write_images(
        tmp_path / "other", {"train/ant": 3, "train/bee": 2, "val/ant": 4, "val/bee": 4}, size=40
    )
    assert len(calibrated(run, [("DATA.DATA_PATH", str(tmp_path / "other"))])) == 5
    assert len(calibrated(run, [("DATA.DATASET", "digits")], 7)) == 7


def test_weights_without_a_run_are_calibrated_on_folders_of_any_layout(trained, tmp_path):
    run, data = trained
    model = get_config(run / "config.yaml")
    with pytest.raises(InputError, match="it needs data: pass its -data_path"):
        data_keys(None, [], "it needs data")
    shutil.copytree(data, tmp_path / "bare")
    (tmp_path / "bare/bee/broken.png").unlink()
    write_images(tmp_path / "one", {"any": 3}, size=40)
    write_images(tmp_path / "both", {"train/ant": 3, "val/ant": 1}, size=40)
    for folder, count in (("bare", 24), ("one", 3), ("both", 3)):
        words = data_keys(None, [("DATA.DATA_PATH", str(tmp_path / folder))], "it needs data")
        assert len(training_images(model, words, 100)) == count
        # Labels aren't needed.
        flags = [("DATA.DATA_PATH", str(tmp_path / folder)), ("DATA.DATASET", "images")]
        words = data_keys(None, flags, "it needs data")
        assert len(training_images(model, words, 100)) == count


def test_a_run_is_exported_as_int8_by_one_command(trained, tmp_path):
    for package in ("nncf", "paddle2onnx"):
        pytest.importorskip(package, reason="the extra export isn't installed")
    run, _ = trained
    command = [
        warm.python(),
        str(ROOT / "tools/export_model.py"),
        "-pretrained",
        run,
        "-output",
        tmp_path / "int8",
    ]
    command += ["-format", "onnx", "-precision", "int8", "-least_agreement", "0"]
    done = subprocess.run(
        list(map(str, command)), env=warm.environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, f"{tmp_path}/int8: onnx, int8" in done.stdout) == (0, True), (
        done.stderr
    )


def test_the_tools_take_the_runs_configuration_and_its_data(trained, monkeypatch, capsys):
    run, _ = trained
    picture = show_batch.draw(get_config(run / "config.yaml"), 1, 4)
    assert picture.startswith(b"\x89PNG")
    monkeypatch.setattr("sys.argv", ["check_dataset", f"-cfg={run}/config.yaml", "-workers=1"])
    check_dataset.main()
    screen = capsys.readouterr().out
    assert (
        "remark: training images that can't be read: 1" in screen
        or "validation images that can't be" in screen
    )
    assert (
        "remark: skipped entries that aren't data (hidden or system files, files of runs, links): 1, such as .ipynb_checkpoints"
        in screen
    )


def test_an_evaluation_takes_the_runs_part_or_all_of_other_data(trained):
    run, data = trained
    (data / "bee/broken.png").rename(data / "bee/broken.txt")
    try:
        evaluated = get_config(run / "config.yaml", ["EVAL", "True"])
        assert len(get_datasets(evaluated)[2]) == 24 - len(prepared(run))
        everything = get_config(
            run / "config.yaml", ["EVAL", "True", "DATA.VAL_SPLIT", "null", "DATA.FOLDS", "null"]
        )
        assert len(get_datasets(everything)[2]) == 24
    finally:
        (data / "bee/broken.txt").rename(data / "bee/broken.png")


def test_the_true_class_is_the_folder_that_the_model_knows(tmp_path, monkeypatch):
    write_images(tmp_path, {"train/cat": 1, "val/dog/more": 1, "bird": 1})
    monkeypatch.chdir(tmp_path)
    files, between = list_images([".", "bird", "bird/0.png"])
    known = [true_class(folders, {"cat", "dog", "bird"}) for folders in between]
    assert list(zip(files, known, strict=True)) == [
        ("./bird/0.png", "bird"), ("./train/cat/0.png", "cat"), ("./val/dog/more/0.png", "dog"),
        ("bird/0.png", None), ("bird/0.png", None),
    ]  # fmt: skip
    assert true_class(["train", "cat"], set()) == "train"
