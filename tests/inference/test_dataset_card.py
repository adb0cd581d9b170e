"""The card of a checked dataset: parsed by huggingface_hub, and with the counts of what is there."""

import shutil
import subprocess

import numpy as np
import pytest
import warm
from conftest import ROOT
from huggingface_hub import DatasetCard
from PIL import Image
from support.cards import table

from config import get_config
from inference.visualization.dataset_card import data_name, license_entries

CLASSES = ["---", "<script>x<|script>", "a|b", "w w"]


@pytest.fixture
def folder(tmp_path):
    """A dataset of four classes with hostile names, a duplicate, a leak and a broken image."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        for mode, count in (("train", 3 + number), ("val", 2)):
            where = tmp_path / "own flowers" / mode / name
            where.mkdir(parents=True)
            for place in range(count):
                Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(
                    where / f"{place}.png"
                )
    root = tmp_path / "own flowers"
    shutil.copy(root / "train" / "---" / "0.png", root / "train" / "---" / "copy.png")
    shutil.copy(root / "train" / "a|b" / "0.png", root / "val" / "a|b" / "leak.png")
    return root


def check(folder, *words):
    done = subprocess.run(
        [
            warm.python(),
            str(ROOT / "tools" / "check_dataset.py"),
            "-dataset=folder",
            *map(str, words),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_card_tells_what_is_there(tmp_path, folder):
    status, told, errors = check(
        tmp_path, f"-data_path={folder}", "--card=README.md", "-license=CC-BY-4.0", "--workers=1"
    )
    assert status == 0, errors
    assert told.endswith("README.md is written\n")
    card = DatasetCard.load(tmp_path / "README.md")
    data = card.data.to_dict()
    assert data["license"] == "cc-by-4.0"
    assert data["pretty_name"] == "own flowers"
    assert data["task_categories"] == ["image-classification"]
    assert data["size_categories"] == ["n<1K"]
    rows = {row[0]: row[1:] for row in table(card.text, "")}
    assert rows["images"] == ["19", "9"]
    assert rows["images per class"] == ["4 to 6", "2 to 3"]
    assert rows["formats"] == ["PNG 19", "PNG 9"]
    assert table(card.text, "number") == [
        ["0", CLASSES[0], "4", "2"],
        ["1", CLASSES[1], "4", "2"],
        ["2", CLASSES[2], "5", "3"],
        ["3", CLASSES[3], "6", "2"],
    ]
    assert (
        "validation images that are the same file as a training image: 1, such as val/a\\|b/leak.png"
        in card.text
    )
    assert (
        "training images that are the same file as another training image: 2, such as train/---/0.png"
        in card.text
    )
    assert "<script>" not in card.text
    # Nobody else needs to know where the folder is.
    assert str(tmp_path) not in card.content


def test_the_licence_is_not_guessed(tmp_path, folder):
    status, _, errors = check(tmp_path, f"-data_path={folder}", "--card=card.md", "--workers=1")
    assert status == 0, errors
    card = DatasetCard.load(tmp_path / "card.md")
    assert card.data.to_dict()["license"] == "unknown"
    assert "The licence isn't known, because none was given." in card.text
    assert license_entries("My own: v1") == {"license": "other", "license_name": "My own: v1"}
    assert license_entries("MIT") == {"license": "mit"}


def test_what_cannot_be_written_is_told_before_images_are_read(tmp_path, folder):
    (tmp_path / "link.md").symlink_to("elsewhere.md")
    before = sorted(tmp_path.rglob("*"))
    for words, message in [
        (["--card=card.txt"], "error: --card card.txt: expected a file that ends in .md"),
        (["--card=absent/card.md"], "error: --card absent/card.md: its folder doesn't exist"),
        (["--card=link.md"], "error: --card link.md: it is a link"),
        (["-license=mit"], "error: -license is for --card FILE.md; add that, or leave it out"),
    ]:
        status, told, errors = check(tmp_path, f"-data_path={folder}", *words)
        assert (status, told) == (2, "")
        assert errors.startswith(message)
        assert errors.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dataset_is_called_by_its_folders_own_name():
    words = ["DATA.DATASET", "folder", "DATA.DATA_PATH", "/home/somebody/flowers/"]
    assert data_name(get_config(None, words)) == "flowers"
    assert data_name(get_config("vit_digits")) == "digits"
