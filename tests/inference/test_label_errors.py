"""Wrong labels of runs of a cross-validation, and by the nearest images."""

import csv
import shutil

import numpy as np
import pytest
from conftest import TINY
from PIL import Image
from support.training_runs import train

from config import get_config, resolved_yaml
from errors import InputError
from inference import Predictor, label_sheets
from inference.confident_learning import self_confidence
from inference.label_errors import (
    all_images,
    features_of,
    find,
    held_out,
    probabilities_of,
    votes_of,
)
from loading.sources import _digits

FOLDS = 2
COUNT = 60


def write_digits(folder, count=COUNT):
    """Writes digits 0 to 4 into folders of classes. Every tenth label is wrong."""
    images, labels, _ = _digits("train")
    chosen = np.flatnonzero(labels < 5)[:count]
    for number, index in enumerate(chosen.tolist()):
        label = (labels[index] + (number % 10 == 0)) % 5
        file = folder / "train" / "abcde"[label] / f"{number:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[index]).save(file)


def options(data, fold, folds=FOLDS):
    return [
        *TINY, "DATA.DATASET", "folder", "DATA.DATA_PATH", str(data), "MODEL.NUM_CLASSES", "5",
        "DATA.FOLDS", str(folds), "DATA.FOLD", str(fold), "DATA.BATCH_SIZE", "10", "DATA.BATCH_SIZE_EVAL", "7",
        "TRAIN.BASE_LR", "0.01",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs of both folds of 60 digits."""
    place = tmp_path_factory.mktemp("runs")
    write_digits(place / "data")
    for fold in range(FOLDS):
        # The report's table has the answer to each image.
        train([*options(place / "data", fold), "REPORT", "True"], place / f"fold_{fold}")
    return [str(place / f"fold_{fold}") for fold in range(FOLDS)]


def values_of(parts, place):
    with probabilities_of(parts, place) as values:
        assert len(list(place.iterdir())) == 1
        kept = np.array(values)
    assert not list(place.iterdir())
    return kept


@pytest.mark.smoke
def test_each_image_is_answered_by_the_run_that_was_not_trained_on_it(runs, tmp_path):
    parts = held_out(runs, workers=0)
    names = [images.name(index) for images in parts for index in range(len(images.dataset))]
    assert len(names) == COUNT
    assert len(set(names)) == COUNT
    assert all(name.startswith("train/") for name in names)
    values = values_of(parts, tmp_path)
    assert values.shape == (COUNT, 5)
    np.testing.assert_allclose(values.sum(1), 1, atol=1e-12)
    # The table of each run's own evaluation has the same images and the same probabilities, which it
    # rounds from float32.
    row_of = dict(zip(names, values, strict=True))
    compared = 0
    for run in runs:
        with open(f"{run}/predictions.csv", newline="") as file:
            for row in csv.DictReader(file):
                own = row_of[row["image"]]
                assert int(row["predicted"]) == own.argmax()
                assert float(row["probability"]) == pytest.approx(own.max(), abs=1e-6)
                compared += 1
    assert compared == COUNT
    # Bit by bit they are what tools/predict.py answers in batches of the same size.
    predictor = Predictor(runs[1], batch_size=7)
    dataset = parts[1].dataset
    paths = [dataset.name(index) for index in range(len(dataset))]
    for place, answer in enumerate(predictor(paths), COUNT - len(paths)):
        assert values[place][answer.outputs].tolist() == answer.probabilities
    # The order of the runs doesn't count.
    again = held_out(runs[::-1], workers=0)
    np.testing.assert_array_equal(values_of(again, tmp_path), values)


def test_the_table_and_the_sheets(runs, tmp_path, monkeypatch):
    parts = held_out(runs, workers=0)
    values = np.full((COUNT, 5), 0.01)
    given = np.concatenate([images.dataset.labels for images in parts])
    truth = given.copy()
    truth[[3, 40, 41]] = (given[[3, 40, 41]] + 2) % 5
    values[np.arange(COUNT), truth] = 0.96
    values[41] += [0.001, 0, 0, 0, 0]
    found = find(parts, values)
    names = [images.name(index) for images in parts for index in range(len(images.dataset))]
    wrong = {names[place]: place for place in (3, 40, 41)}
    assert {suspect.name for suspect in found.suspects} == wrong.keys()
    assert [suspect.score for suspect in found.suspects] == sorted(
        self_confidence(given, values)[[3, 40, 41]]
    )
    for suspect in found.suspects:
        assert suspect.label == given[wrong[suspect.name]]
        assert suspect.suggestion == truth[wrong[suspect.name]]
        assert suspect.probability == pytest.approx(0.96, abs=0.01)
    assert label_sheets.summary(found).startswith("60 images: 3 labels look wrong (5.00 %)\n")
    monkeypatch.setattr(label_sheets, "_PER_SHEET", 2)
    written = label_sheets.write(tmp_path / "out", found, 3)
    assert written == ["label_errors.csv", "sheet_1.png", "sheet_2.png"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(written)
    with open(tmp_path / "out" / "label_errors.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["image", "label", "suggested_label", "score", "action"]
    assert [row["image"] for row in rows] == [suspect.name for suspect in found.suspects]
    assert {row["label"] for row in rows} <= set("abcde")
    assert {row["action"] for row in rows} == {"relabel"}
    # Three pictures for each image; two images in the first sheet.
    for number in (1, 2):
        with Image.open(tmp_path / "out" / f"sheet_{number}.png") as sheet:
            assert sheet.width == 9 * 232 + 8
    assert label_sheets.write(tmp_path / "none", found, 0) == ["label_errors.csv"]


def test_equal_scores_are_in_the_order_of_names(runs):
    parts = held_out(runs, workers=0)
    values = np.full((COUNT, 5), 0.01)
    given = np.concatenate([images.dataset.labels for images in parts])
    truth = given.copy()
    truth[::7] = (given[::7] + 1) % 5
    values[np.arange(COUNT), truth] = 0.96
    names = [suspect.name for suspect in find(parts, values).suspects]
    assert len(names) > 3
    assert names == sorted(names)
    assert find(parts, np.eye(5)[given]).suspects == []
    assert label_sheets.summary(find(parts, np.eye(5)[given])) == (
        "60 images: 0 labels look wrong (0.00 %)"
    )


@pytest.mark.smoke
def test_votes_of_the_nearest_images_leave_out_the_image_itself(runs, tmp_path):
    images = all_images(runs[1], workers=0)
    assert len(images.dataset) == COUNT
    features = features_of(images)
    with votes_of(images, features, 5, tmp_path) as values:
        votes = np.array(values)
    rows = features.astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -2)
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :5]
    expected = np.eye(5)[images.dataset.labels][nearest].mean(1)
    # A neighbour may differ where two are equally near in float32.
    assert (np.abs(votes - expected).max(1) < 1e-12).mean() > 0.9
    np.testing.assert_allclose(votes.sum(1), 1)
    # More neighbours than there are images: all others vote.
    with votes_of(images, features, 500, tmp_path) as values:
        counts = np.bincount(images.dataset.labels, minlength=5) - np.eye(5)[images.dataset.labels]
        np.testing.assert_allclose(values, counts / (COUNT - 1))


def refused(message, paths, **data):
    with pytest.raises(InputError) as caught:
        held_out(paths, list(data.items()), workers=0)
    assert message in str(caught.value)


def test_runs_that_are_no_cross_validation_are_refused(runs, tmp_path):
    refused("the runs are of the folds 0 of 2", runs[:1])
    refused("the runs are of the folds 0, 0 of 2", [runs[0], runs[0]])
    other = tmp_path / "other"
    shutil.copytree(runs[1], other, symlinks=True)
    text = (other / "config.yaml").read_text()

    def changed(old, new):
        assert old in text
        (other / "config.yaml").write_text(text.replace(old, new))

    changed("FOLDS: 2", "FOLDS: 3")
    refused("aren't folds of one cross-validation: DATA.FOLDS is 3 and 2", [runs[0], str(other)])
    changed("SPLIT_SEED: 0", "SPLIT_SEED: 4")
    refused("DATA.SPLIT_SEED is 4 and 0", [runs[0], str(other)])
    keys = options(f"{runs[0]}/../data", 0)
    place = keys.index("DATA.FOLDS")
    keys = [*keys[:place], *keys[place + 4 :]]
    (other / "config.yaml").write_text(resolved_yaml(get_config(None, keys)))
    refused("its run has no DATA.FOLDS", [str(other), str(other)])
    (other / "config.yaml").unlink()
    refused("it wasn't saved by a run: pass its -data_path", [runs[0], str(other)])


def test_data_that_was_moved_is_found_and_other_data_is_refused(runs, tmp_path):
    moved = tmp_path / "moved"
    write_digits(moved)
    parts = held_out(runs, [("DATA.DATA_PATH", str(moved))], workers=0)
    assert parts[0].dataset.name(0).startswith(str(moved))
    assert parts[0].name(0) == held_out(runs, workers=0)[0].name(0)
    # Other folders of classes.
    (moved / "train" / "a").rename(moved / "train" / "f")
    parts = held_out(runs, [("DATA.DATA_PATH", str(moved))], workers=0)
    with pytest.raises(
        InputError, match="its output 0 is the class 'a', but that of the data is 'b'"
    ):
        values_of(parts, tmp_path / "moved" / "train")
    # Other folds.
    next(moved.rglob("*.png")).unlink()
    refused(
        "was trained on 30 images, but now the other folds have 29",
        runs,
        **{"DATA.DATA_PATH": str(moved)},
    )


@pytest.mark.smoke
def test_several_labels_name_the_class_and_what_is_wrong(tmp_path):
    rng = np.random.default_rng(0)
    data = tmp_path / "data"
    data.mkdir()
    truth = rng.random((40, 3)) < 0.5
    truth[0] = True
    lines = ["image,top,left,right"]
    for index, row in enumerate(truth):
        Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(data / f"{index}.png")
        lines.append(f"{index}.png," + ",".join(map(str, row.astype(int))))
    (data / "train.csv").write_text("\n".join(lines) + "\n")
    shutil.copy(data / "train.csv", data / "val.csv")
    keys = options(data, 0)
    keys[keys.index("folder")] = "multilabel_csv"
    keys += ["MODEL.NUM_CLASSES", "3", "TASK", "multilabel"]
    for fold in range(FOLDS):
        train([*keys, "DATA.FOLD", str(fold)], tmp_path / f"fold_{fold}")
    parts = held_out([str(tmp_path / f"fold_{fold}") for fold in range(FOLDS)], workers=0)
    names = [images.name(index) for images in parts for index in range(len(images.dataset))]
    order = [int(name.removesuffix(".png")) for name in names]
    place = tmp_path / "place"
    place.mkdir()
    values = values_of(parts, place)
    assert values.shape == (40, 3)
    sure = np.where(truth[order], 0.9, 0.1)
    sure[5, 2] = 1 - sure[5, 2]
    sure[30, 0] = 1 - sure[30, 0]
    found = find(parts, sure)
    assert {(suspect.name, suspect.label, suspect.suggestion) for suspect in found.suspects} == {
        (names[5], 2, "superfluous" if truth[order[5], 2] else "missing"),
        (names[30], 0, "superfluous" if truth[order[30], 0] else "missing"),
    }
    assert "40 images: 2 labels of 120 for each image and class look wrong (1.67 %)" in (
        label_sheets.summary(found)
    )
    label_sheets.write(tmp_path / "out", found, 4)
    head = (tmp_path / "out" / "label_errors.csv").read_text().splitlines()[0]
    assert head == "image,class,problem,score,action"
    images = all_images(str(tmp_path / "fold_0"), workers=0)
    with votes_of(images, features_of(images), 39, place) as votes:
        rows = truth[[int(images.name(index).removesuffix(".png")) for index in range(40)]]
        np.testing.assert_allclose(votes, (rows.sum(0) - rows) / 39)
