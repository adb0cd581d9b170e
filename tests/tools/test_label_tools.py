"""tools/find_label_errors.py, tools/check_dataset.py --apply and tools/choose_images.py as people
run them.
"""

import csv
import subprocess

import numpy as np
import pytest
import warm
from conftest import TINY
from PIL import Image
from support.programs import ROOT
from support.training_runs import train

from config import get_config
from datasets import get_datasets
from loading.sources import _digits

KEYS = [*TINY, "DATA.DATASET", "folder", "DATA.BATCH_SIZE", "10", "MODEL.NUM_CLASSES", "3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Digits 0, 1 and 2 in folders of classes, the runs fold_0 and fold_1 on them, and a pool."""
    root = tmp_path_factory.mktemp("labels")
    images, labels, _ = _digits("train")
    for index in np.flatnonzero(labels < 3)[:90].tolist():
        folder = root / "pool" if index % 3 == 0 else root / "data" / "train" / str(labels[index])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[index]).save(folder / f"{index:03}.png")
    for fold in range(2):
        keys = ["DATA.DATA_PATH", str(root / "data"), "DATA.FOLDS", "2", "DATA.FOLD", str(fold)]
        train([*KEYS, *keys], root / f"fold_{fold}")
    return root


def tool(place, name, *words):
    """(exit status, standard output, standard error)."""
    command = [warm.python(), str(ROOT / "tools" / f"{name}.py"), *map(str, words)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def rows_of(file):
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.smoke
def test_from_runs_to_a_table_to_edited_lists(place):
    words = ["fold_0", "fold_1", "-workers=0", "-filter=prune_by_class", "-drawn=2"]
    status, out, err = tool(place, "find_label_errors", *words, "-output=found")
    assert (status, err) == (0, ""), err
    rows = rows_of(place / "found" / "label_errors.csv")
    count = len(list((place / "data").rglob("*.png")))
    assert out.startswith(f"{count} images: {len(rows)} label")
    assert out.endswith("found: label_errors.csv, sheet_1.png\n")
    # Models of one epoch know little: there are enough to edit.
    assert len(rows) > 3
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores)
    before = {path: path.read_bytes() for path in (place / "data").rglob("*.png")}
    rows[1]["action"] = "keep"
    rows[2]["action"] = "remove"
    with open(place / "edited.csv", "w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    words = [
        "-dataset=folder",
        "-data_path=data",
        "--apply=edited.csv",
        "-output=lists",
        "--workers=1",
    ]
    status, out, err = tool(place, "check_dataset", *words)
    assert (status, err) == (0, ""), err
    assert f"edited.csv: relabel {len(rows) - 2}, remove 1, keep 1\n" in out
    assert f"lists: {count - 1:,} in train_list.txt; train with -dataset=imagenet2012" in out
    assert {path: path.read_bytes() for path in (place / "data").rglob("*.png")} == before
    labels = {}
    for line in (place / "lists" / "train_list.txt").read_text().splitlines():
        path, label = line.rsplit(" ", 1)
        labels[path.removeprefix("../data/")] = label
    for number, row in enumerate(rows):
        if number == 2:
            assert row["image"] not in labels
        else:
            expected = row["label"] if number == 1 else row["suggested_label"]
            assert labels[row["image"]] == expected
    others = labels.keys() - {row["image"] for row in rows}
    assert all(labels[image] == image.split("/")[1] for image in others)
    # The lists are trained on.
    keys = ["DATA.DATASET", "imagenet2012", "DATA.DATA_PATH", str(place / "lists")]
    _, dataset, val = get_datasets(get_config(None, [*KEYS, *keys, "DATA.VAL_SPLIT", "0.2"]))
    assert len(dataset) + len(val) == count - 1


def test_one_run_and_its_features(place):
    words = ["fold_0", "-features", "-k=3", "-workers=0", "-drawn=0", "-output=near"]
    status, out, err = tool(place, "find_label_errors", *words)
    assert (status, err) == (0, ""), err
    assert out.endswith("near: label_errors.csv\n")


def test_wrong_edits_write_nothing(place):
    (place / "bad.csv").write_text("image,label,suggested_label,score,action\nx.png,0,1,0,keep\n")
    words = ["-dataset=folder", "-data_path=data", "--apply=bad.csv", "-output=none"]
    status, out, err = tool(place, "check_dataset", *words)
    assert (status, out) == (2, "")
    assert err == (
        "error: bad.csv: its line 2 names the image 'x.png', which the dataset lacks; paths are"
        " relative to -data_path\n"
    )
    assert not (place / "none").exists()
    for words, message in (
        (["-dataset=folder", "-data_path=data", "--apply=bad.csv"], "need -output DIR"),
        (["-dataset=digits", "--apply=bad.csv", "-output=none"], "DATASET digits has none"),
        (["-dataset=images", "-data_path=data/train", "--apply=bad.csv", "-output=none"], "have none"),
        (
            ["-dataset=folder", "-data_path=data", "--apply=bad.csv", "-output=none", "-o", "DATA.FOLDS", "3"],
            "set DATA.FOLDS in the runs on the lists",
        ),
    ):  # fmt: skip
        status, out, err = tool(place, "check_dataset", *words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_edited_lists_of_several_labels(place):
    data = place / "several"
    data.mkdir()
    for index in range(3):
        Image.effect_noise((8, 8), index + 1).save(data / f"{index}.png")
    (data / "train.csv").write_text("image,fur,tail\n0.png,1,0\n1.png,1,1\n2.png,0,0\n")
    (place / "sets.csv").write_text(
        "image,class,problem,score,action\n0.png,tail,missing,0.1,relabel\n"
        "1.png,fur,superfluous,0.2,relabel\n2.png,tail,missing,0.3,remove\n"
    )
    words = ["-dataset=multilabel_csv", "-data_path=several", "--apply=sets.csv", "-output=sets"]
    status, out, err = tool(place, "check_dataset", *words, "--workers=1")
    assert (status, err) == (0, ""), err
    assert "sets.csv: relabel 2, remove 1, keep 0\n" in out
    assert "train with -dataset=multilabel_list -data_path=sets" in out
    assert (place / "sets" / "train_list.txt").read_text() == (
        "../several/0.png\t0,1\n../several/1.png\t1\n"
    )


@pytest.mark.smoke
def test_images_to_label_next(place):
    words = ["fold_0", "pool", "-count=4", "-by=margin", "-workers=1", "-output=next"]
    status, out, err = tool(place, "choose_images", *words)
    assert (status, err) == (0, ""), err
    assert "next: 4 images by margin; chosen.csv, chosen.txt, sheet_1.png\n" in out
    rows = rows_of(place / "next" / "chosen.csv")
    listed = (place / "next" / "chosen.txt").read_text().splitlines()
    assert [row["image"] for row in rows] == listed
    assert all((place / name).exists() for name in listed)
    margins = [float(row["margin"]) for row in rows]
    assert margins == sorted(margins)
    # Other tools take the list.
    status, out, err = tool(
        place, "predict", "fold_0", "next/chosen.txt", "-format=csv", "-workers=0"
    )
    assert (status, err) == (0, ""), err
    first = next(csv.DictReader(out.splitlines()))
    assert (first["name"], first["class"]) == (listed[0], rows[0]["class"])
    assert float(first["probability"]) == pytest.approx(float(rows[0]["probability"]), abs=1e-4)


def test_an_image_that_cannot_be_read_is_left_out(place):
    (place / "more").mkdir()
    (place / "more" / "broken.png").write_bytes(b"no image")
    words = ["fold_0", "pool", "more", "-count=900", "-by=coverage", "-workers=1", "-output=all"]
    status, out, err = tool(place, "choose_images", *words)
    assert status == 1
    assert "1 can't be read" in out
    assert "more/broken.png" in err
    assert "-count 900: there are no more images" in err
    assert len(rows_of(place / "all" / "chosen.csv")) <= len(list((place / "pool").iterdir()))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("find_label_errors", ["fold_0", "-output=o"], "the runs are of the folds 0 of 2"),
        ("find_label_errors", ["fold_0", "fold_1", "-features", "-output=o"], "-features needs one run, found 2"),
        ("find_label_errors", ["fold_0", "fold_1", "-k=3", "-output=o"], "-k has no effect without -features"),
        ("find_label_errors", ["fold_0", "-features", "-k=0", "-output=o"], "-k is 0, expected at least 1"),
        ("find_label_errors", ["fold_0", "fold_1", "-output=data"], "data exists; choose another -output"),
        ("find_label_errors", ["fold_0", "fold_1", "-output=no/o"], "no isn't a writable folder"),
        ("find_label_errors", ["none", "-features", "-output=o"], "none"),
        ("choose_images", ["fold_0", "pool", "-count=0", "-output=o"], "-count is 0, expected at least 1"),
        ("choose_images", ["fold_0", "none", "-output=o"], "'none': there is no such file or folder"),
        ("choose_images", ["fold_0", "pool", "-output=data"], "data exists; choose another -output"),
    ],
    ids=map(str, range(10)),
)  # fmt: skip
def test_bad_input_is_one_line(place, name, words, message):
    status, out, err = tool(place, name, *words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (place / "o").exists()
