"""Published datasets for semantic segmentation, in their layouts, with two images each."""

import os

import numpy as np
import pytest
from PIL import Image

from config import get_config
from datasets import get_dataset, get_datasets
from errors import InputError
from loading.segmentation_sets import class_names
from settings.registry import datasets

SIZE = (20, 12)
CITYSCAPES_IDS = tuple(range(34))


def save(file, values):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(file)


def stored(number, values):
    """A mask that holds each of some values."""
    rng = np.random.default_rng(number)
    drawn = rng.choice(np.array(values, np.uint8), SIZE[::-1])
    drawn.ravel()[: len(values)] = values
    return drawn


def pair(root, image, mask, values, number):
    pixels = np.random.default_rng(number).integers(0, 256, (*SIZE[::-1], 3))
    save(root / image, pixels.astype(np.uint8))
    drawn = stored(number, values)
    save(root / mask, drawn)
    return drawn


def ade20k(root, part, number):
    folder = {"train": "training", "val": "validation"}[part]
    name = f"ADE_{folder}_{number}"
    return pair(
        root, f"images/{folder}/{name}.jpg", f"annotations/{folder}/{name}.png", range(151), number
    )


def cityscapes(root, part, number, ids="labelIds", values=CITYSCAPES_IDS):
    city = ("aachen", "bochum")[number]
    name = f"{city}/{city}_00000{number}_000019"
    values = pair(
        root,
        f"leftImg8bit/{part}/{name}_leftImg8bit.png",
        f"gtFine/{part}/{name}_gtFine_{ids}.png",
        values,
        number,
    )
    # What else there is in the published folder is no mask of classes.
    save(root / f"gtFine/{part}/{name}_gtFine_instanceIds.png", values.astype(np.uint16) * 1000)
    save(root / f"gtFine/{part}/{name}_gtFine_color.png", np.zeros((12, 20, 3), np.uint8))
    (root / f"gtFine/{part}/{name}_gtFine_polygons.json").write_text("{}")
    return values


def cityscapes_train_ids(root, part, number):
    cityscapes(root, part, number)
    return cityscapes(root, part, number, "labelTrainIds", [*range(19), 255])


def pascal_context(root, part, number):
    name = f"2008_00000{number}"
    with open_list(root, f"ImageSets/SegmentationContext/{part}.txt") as lines:
        lines.write(f"{name}\n")
    image, mask = f"JPEGImages/{name}.jpg", f"SegmentationClassContext/{name}.png"
    return pair(root, image, mask, range(60), number)


def open_list(root, name):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    return open(root / name, "a")


def coco_stuff(root, part, number, ending="", values=None):
    name = f"{part}2017/00000000{number}"
    unused = (11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90)
    if values is None:
        values = [index for index in (*range(182), 255) if index not in unused]
    return pair(root, f"images/{name}.jpg", f"annotations/{name}{ending}.png", values, number)


def coco_stuff_train_ids(root, part, number):
    coco_stuff(root, part, number)
    return coco_stuff(root, part, number, "_labelTrainIds", [*range(171), 255])


def trans10k(root, part, number):
    folder = {"train": "train", "val": "validation"}[part]
    image, mask = f"{folder}/images/{number}.jpg", f"{folder}/masks_12/{number}_mask.png"
    return pair(root, image, mask, range(12), number)


def vaihingen(root, part, number):
    folder = {"train": "training", "val": "validation"}[part]
    name = f"top_mosaic_09cm_area{number}"
    image, mask = f"images/{folder}/{name}.tif", f"annotations/{folder}/{name}_noBoundary.png"
    return pair(root, image, mask, range(7), number)


def less_one(values):
    return np.where(values == 0, 255, values - 1)


def as_stored(values):
    return values


# The evaluated classes of Cityscapes' own table, by label id.
EVALUATED = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car",
    27: "truck", 28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip


def train_ids(values):
    names = class_names("cityscapes")
    index_of = {label: names.index(name) for label, name in EVALUATED.items()}
    return np.vectorize(lambda value: index_of.get(value, 255))(values)


def without_gaps(values):
    """Classes that have no image leave gaps in the published maps."""
    order = np.unique(values[values < 255])
    return np.where(values == 255, 255, np.searchsorted(order, values))


SETS = {
    "ade20k": ("ade20k", ade20k, less_one, 150, ("wall", "flag")),
    "cityscapes": ("cityscapes", cityscapes, train_ids, 19, ("road", "bicycle")),
    "train ids": ("cityscapes", cityscapes_train_ids, as_stored, 19, ("road", "bicycle")),
    "pascal_context": ("pascal_context", pascal_context, as_stored, 60, ("background", "wood")),
    "coco_stuff": ("coco_stuff", coco_stuff, without_gaps, 171, ("person", "wood")),
    "coco train ids": ("coco_stuff", coco_stuff_train_ids, as_stored, 171, ("person", "wood")),
    "trans10k": ("trans10k", trans10k, as_stored, 12, ("background", "storage box")),
    "vaihingen": ("vaihingen", vaihingen, less_one, 6, ("impervious surface", "clutter")),
}


def configured(root, dataset, *options):
    words = ["TASK", "segmentation", "DATA.DATASET", dataset, "DATA.DATA_PATH", str(root)]
    words += ["DATA.IMAGE_SIZE", "[12,20]", "DATA.NUM_WORKERS", "0", "HEAD.NAME", "linear"]
    words += ["DATA.CROP_MODE", "own"]
    return get_config(None, [*words, "MODEL.NUM_CLASSES", "auto", *map(str, options)])


@pytest.mark.parametrize("name", SETS)
def test_a_published_layout_is_read(tmp_path, name):
    dataset, write, expected, count, ends = SETS[name]
    drawn = {
        part: [write(tmp_path, part, number) for number in (0, 1)] for part in ("train", "val")
    }
    config, train, val = get_datasets(configured(tmp_path, dataset))
    assert config.MODEL.NUM_CLASSES == count == len(train.classes)
    assert (val.classes[0], val.classes[-1]) == ends
    for part, found in (("train", train), ("val", val)):
        assert len(found) == 2
        for number in (0, 1):
            mask = np.asarray(found.mask("mask", number))
            np.testing.assert_array_equal(mask, expected(drawn[part][number]))
            held = np.unique(mask[mask != 255])
            np.testing.assert_array_equal(held, np.arange(count))
    # Training images alone are split.
    for file in tmp_path.glob(datasets.components[dataset].given["val"]):
        os.rename(file, tmp_path / "elsewhere")
    parts = [
        get_dataset(configured(tmp_path, dataset, "DATA.VAL_SPLIT", 0.5), part)
        for part in ("train", "val")
    ]
    assert {*parts[0].paths, *parts[1].paths} == set(train.paths)


def test_pascal_context_has_59_classes_where_the_model_has(tmp_path):
    drawn = [
        pascal_context(tmp_path, part, number) for number in (0, 1) for part in ("train", "val")
    ]
    config = configured(tmp_path, "pascal_context", "MODEL.NUM_CLASSES", 59)
    config, train, _ = get_datasets(config)
    assert (config.MODEL.NUM_CLASSES, train.classes[0]) == (59, "aeroplane")
    np.testing.assert_array_equal(train.mask("mask", 1), less_one(drawn[2]))
    (tmp_path / "JPEGImages/2008_000001.jpg").unlink()
    message = r"train.txt: 1 of 2 files are missing, the first is .*/JPEGImages/2008_000001.jpg"
    with pytest.raises(InputError, match=message):
        get_datasets(config)


def test_an_index_that_is_no_class_is_refused(tmp_path):
    coco_stuff(tmp_path, "train", 0, values=[0, 11])
    with pytest.raises(
        InputError, match=r"it contains the index 11 at x 1, y 0, .*; expected 0..10 or"
    ):
        get_dataset(configured(tmp_path, "coco_stuff"), "train")


def test_a_layout_that_isnt_there_is_named(tmp_path):
    (tmp_path / "x").mkdir()
    for name in ("ade20k", "cityscapes", "coco_stuff", "trans10k", "vaihingen", "pascal_context"):
        with pytest.raises(InputError, match="there is no such (folder|file)"):
            get_dataset(configured(tmp_path, name), "train")
