"""Sets of masks of which all pixels are ignored: one line at the start, whatever holds the masks."""

import sys

import numpy as np
import pytest
from PIL import Image
from support.mask_files import write_masks

from config import get_config
from datasets import get_dataset, get_datasets
from errors import InputError
from tools import make_shards


@pytest.fixture
def root(tmp_path):
    write_masks(tmp_path / "data", train=6, val=3)
    return tmp_path / "data"


def configured(root, *options):
    words = [
        "TASK",
        "segmentation",
        "HEAD.NAME",
        "linear",
        "DATA.DATA_PATH",
        str(root),
        "DATA.IMAGE_SIZE",
        "32",
    ]
    words += ["DATA.CROP_MODE", "short", "MODEL.NUM_CLASSES", "auto", "DATA.DATASET", "masks"]
    return get_config(None, [*words, *options])


def ignore(root, mode, but=0, value=255):
    """Writes masks that hold one value, and the class 1 in one pixel of the first ``but`` masks."""
    for number, file in enumerate(sorted((root / "masks" / mode).glob("*.png"))):
        with Image.open(file) as image:
            mask = np.full(image.size[::-1], value, np.uint8)
        if number < but:
            mask[-1, -1] = 1
        Image.fromarray(mask).save(file)


def decoded_masks(monkeypatch, dataset):
    """Returns a list that collects the numbers of the masks that are decoded."""
    decoded = []
    read = dataset.mask
    monkeypatch.setattr(
        dataset, "mask", lambda column, index: (decoded.append(index), read(column, index))[1]
    )
    return decoded


@pytest.mark.parametrize(("mode", "count"), [("train", 6), ("val", 3)])
def test_a_set_without_a_labelled_pixel_is_refused(root, mode, count):
    ignore(root, mode)
    message = (
        f"^the {mode} set of 'masks' at {root} has no pixel with a class: all pixels of its {count}"
        " masks are ignored; correct the masks, or the setting of the ignored values$"
    )
    with pytest.raises(InputError, match=message):
        get_datasets(configured(root))


def test_one_labelled_pixel_is_enough(root):
    ignore(root, "train", but=1)
    _, train, _ = get_datasets(configured(root))
    assert len(train) == 6


def test_an_evaluation_reads_no_training_masks(root):
    ignore(root, "train")
    options = ["EVAL", "True", "MODEL.NUM_CLASSES", "3"]
    _, train, val = get_datasets(configured(root, *options))
    assert train is None
    assert len(val) == 3


def test_the_ignored_value_may_be_a_class_of_others(root):
    ignore(root, "train", value=2)
    get_datasets(configured(root))
    (root / "classes.txt").write_text("background\ndisc\n")
    for mode in ("train", "val"):
        ignore(root, mode, value=2)
    with pytest.raises(InputError, match="the train set .* has no pixel with a class"):
        get_datasets(configured(root, "DATA.IGNORE_INDEX", "2"))


def test_masks_are_decoded_until_one_has_a_class(root, monkeypatch):
    dataset = get_dataset(configured(root), "train")
    decoded = decoded_masks(monkeypatch, dataset)
    assert dataset.has_labelled_pixel("mask")
    assert len(decoded) == 1
    ignore(root, "train")
    decoded.clear()
    assert not dataset.has_labelled_pixel("mask")
    assert sorted(decoded) == list(range(6))


def test_a_broken_mask_is_named_or_left_out(root):
    ignore(root, "train")
    (root / "masks/train/3.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"masks/train/3.png"):
        get_datasets(configured(root))
    with pytest.raises(InputError, match="has no pixel with a class"):
        get_datasets(configured(root, "DATA.SKIP_BROKEN", "True"))


def test_lists_shards_and_caches_are_checked_too(root, tmp_path, monkeypatch):
    # A cache holds pictures of one size.
    for file in root.rglob("*.png"):
        with Image.open(file) as image:
            image.resize((16, 16), Image.Resampling.NEAREST).save(file)
    ignore(root, "train")
    words = ["-dataset=masks", f"-data_path={root}", f"-output={tmp_path}/shards", "-workers=1"]
    monkeypatch.setattr(sys, "argv", ["make_shards.py", *words])
    make_shards.main()
    for mode in ("train", "val"):
        lines = [f"images/{mode}/{number}.png\tmasks/{mode}/{number}.png\n" for number in range(3)]
        (root / f"{mode}_list.txt").write_text("".join(lines))
    for options in (
        ["DATA.DATASET", "masks_list"],
        ["DATA.DATASET", "shards", "DATA.DATA_PATH", str(tmp_path / "shards")],
        ["DATA.CACHE", str(tmp_path / "cache")],
    ):
        with pytest.raises(InputError, match="the train set .* has no pixel with a class"):
            get_datasets(configured(root, *options))


def test_published_layouts_are_checked_too(tmp_path):
    """Index 0 is no class of ADE20K."""
    for part in ("training", "validation"):
        for kind, ending in (("images", "jpg"), ("annotations", "png")):
            (tmp_path / kind / part).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / kind / part / f"a.{ending}")
    with pytest.raises(InputError, match="the train set of 'ade20k' .* its 1 mask are ignored"):
        get_datasets(configured(tmp_path, "DATA.DATASET", "ade20k"))


def test_one_class_is_refused(root):
    for mode in ("train", "val"):
        ignore(root, mode, value=0)
    (root / "classes.txt").write_text("background\n")
    message = r"^the masks have only one class \(background\), so there is nothing to learn; assign"
    with pytest.raises(InputError, match=message):
        get_datasets(configured(root))
    (root / "classes.txt").unlink()
    with pytest.raises(
        InputError, match=r"have only one class \(MODEL.NUM_CLASSES is 1\), so there"
    ):
        get_datasets(configured(root, "MODEL.NUM_CLASSES", "1"))
