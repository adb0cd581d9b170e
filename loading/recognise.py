"""Recognises the format of a dataset by what its folder contains, where DATA.DATASET isn't given."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from config import default_values
from errors import InputError, open_file, reading
from loading import parquet, saved_datasets
from loading.csv_tables import count_rows, table_layout
from loading.layout import (
    IMAGE_SUFFIXES,
    check_data_path,
    describe_folder,
    is_folder,
    is_leftover,
    is_run,
    part_folder,
)
from loading.lists import numbered_lines
from loading.mask_folders import has_masks, training_images

# The folders of parts that Hugging Face's programs make.
_PARTS = ("train", "validation", "val", "valid", "test")
# Published datasets, and what programs save: the format's name, and entries of the folder that no
# other format has. A pattern stands for any entry that matches it.
_PUBLISHED = (
    ("cityscapes", "leftImg8bit gtFine"),
    ("pascal_context", "JPEGImages SegmentationClassContext"),
    ("coco_stuff", "images/train2017 annotations/train2017"),
    ("ade20k", "images/training/ADE_* annotations/training"),
    ("vaihingen", "images/training annotations/training/*_noBoundary.png"),
    ("trans10k", "train/masks_12"),
    ("voc_multilabel", "Annotations ImageSets/Main/train.txt"),
    ("coco_multilabel", "annotations/instances_*.json"),
    ("hf_dataset", "state.json"),
    *(("hf_dataset", f"{part}/state.json") for part in _PARTS),
    ("cifar10", "cifar-10-python.tar.gz"),
    ("cifar10", "cifar-10-batches-py"),
    ("cifar100", "cifar-100-python.tar.gz"),
    ("cifar100", "cifar-100-python"),
)
# Files that may be a dataset by themselves, and where tables of Parquet are in a folder.
_TABLES = (".csv", ".tsv", ".parquet")
_PARQUET = (
    *("*.parquet", "data/*.parquet", "default/*.parquet"),
    *(f"{part}/*.parquet" for part in _PARTS),
)
# The files of MNIST, and the formats that have them.
_MNIST = "train-images*-ubyte*"
_MNIST_FORMATS = ("mnist", "fashion_mnist")
# The training images of published datasets that are in no files of their own.
_PUBLISHED_IMAGES = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "mnist": 60_000,
    "fashion_mnist": 60_000,
}
# Files that describe a dataset, in lower case: they may be beside its only folder.
_DOCUMENTS = ("readme", "license", "licence", "citation")
# Names of folders of images, and of their masks, that the readers don't know.
_OTHER_IMAGES = {"JPEGImages", "image", "img", "imgs"}
_OTHER_MASKS = {"SegmentationClass", "SegmentationObject", "ann", "label", "mask"}
# The boxes of objects, as YOLO has them.
_BOXES = ("labels/*.txt", "labels/*/*.txt", "*/labels/*.txt")
# Lines of a list that are looked at.
_LINES = 100
# Entries of a folder that are looked at for an image: a tree without any may be a whole disk.
_MOST_ENTRIES = 10_000
# Folders within folders, each the only entry, as unpacked archives have them.
_DEEPEST = 4


class Layout(NamedTuple):
    """What a dataset's folder contains.

    Attributes:
        dataset: the name of the format, for DATA.DATASET.
        path: the folder or the table that has this format: the given one, or the only folder in it.
        reason: what it was recognised by, in words.
    """

    dataset: str
    path: str
    reason: str


def recognise(path: str) -> Layout:
    """Returns the format of the dataset in a folder, or of a table.

    Published datasets come first, then lists and tables, then folders. Images within these are not
    opened.

    Raises:
        InputError: there is no such folder, or its entries are of no format or of several.
    """
    default = default_values()["DATA.DATA_PATH"]
    check_data_path(path, default, unpacked=False, suffixes=_TABLES)
    root = Path(path)
    if root.is_file():
        dataset = "parquet" if path.lower().endswith(".parquet") else "csv"
        return Layout(dataset, path, "it is a table")
    for _ in range(_DEEPEST):
        if found := _published(root) or _listed(root) or _shards(root) or _in_folders(root):
            dataset, reason = found
            return Layout(dataset, path if root == Path(path) else str(root), reason)
        folders, others = _entries(root)
        if len(folders) != 1 or not all(name.lower().startswith(_DOCUMENTS) for name in others):
            break
        root = root / folders[0]
    # To unpack shards would be the wrong advice.
    if any(root.glob("*[0-9][0-9].tar")):
        raise InputError(
            f"{root} contains {describe_folder(root)}; if these are shards of WebDataset, name them"
            " train-000000.tar and so on, and val-000000.tar; otherwise unpack them"
        )
    check_data_path(path, default, unpacked=True)
    raise InputError(
        f"-data_path is {path}, which contains {describe_folder(Path(path))}: no dataset was"
        " recognised in it; expected a folder of images for each class, images alone, images/ and"
        " masks/, or train_list.txt; pass -dataset to say what it is"
    )


def _published(root: Path) -> tuple[str, str] | None:
    """Returns (format, reason) of a published dataset, or None."""
    for dataset, patterns in _PUBLISHED:
        if all(any(root.glob(pattern)) for pattern in patterns.split()):
            return dataset, f"it contains {patterns.replace(' ', ' and ')}"
    if any(root.glob(_MNIST)):
        raise InputError(
            f"{root} contains {_MNIST}, which MNIST and Fashion-MNIST have; pass -dataset="
            f"{' or -dataset='.join(_MNIST_FORMATS)}"
        )
    return None


def _listed(root: Path) -> tuple[str, str] | None:
    """Returns (format, reason) of a dataset in lists or tables, or None."""
    for mode in ("train", "val"):
        file = root / f"{mode}_list.txt"
        if file.is_file():
            dataset, lines = _list_format(file)
            return dataset, f"{file.name} has {lines}"
    for pattern in _PARQUET:
        if any(root.glob(pattern)):
            return "parquet", f"it contains {pattern}"
    if table := table_layout(root):
        if table.is_multilabel:
            return "multilabel_csv", f"{table.file.name} has 0 or 1 for each class"
        return "csv", f"it contains the table {table.file.name}"
    return None


def _list_format(file: Path) -> tuple[str, str]:
    """Returns the format of a list, and what its lines are."""
    with reading(file, "a list"), open_file(file) as opened:
        lines = []
        for _, line in numbered_lines(opened):
            if line.strip():
                lines.append(line.strip().lower())
            if len(lines) == _LINES:
                break
    if not lines:
        raise InputError(f"{file}: the list is empty")
    suffixes = tuple(suffix.encode() for suffix in IMAGE_SUFFIXES)
    last_words = [line.rpartition(b"\t")[2].split()[-1:] or [b""] for line in lines]
    ends_with_image = [word[0].endswith(suffixes) for word in last_words]
    if all(ends_with_image):
        pairs = sum(
            line.count(b"\t") == 1 or any(suffix + b" " in line for suffix in suffixes)
            for line in lines
        )
        if pairs == len(lines):
            return "masks_list", "an image and its mask on each line"
        if not pairs:
            return "images_list", "a path on each line, without a label"
        raise InputError(
            f"{file}: some lines have one path and others two; pass -dataset=masks_list or"
            " -dataset=images_list"
        )
    if any(ends_with_image) or any(b"," in word[0] for word in last_words):
        return "multilabel_list", "any number of labels on each line"
    return "imagenet2012", "a path and a label on each line"


def _shards(root: Path) -> tuple[str, str] | None:
    """Returns (format, reason) of tar shards, or None."""
    for mode in ("train", "val"):
        if any(root.glob(f"{mode}-*.tar")):
            return "shards", f"it contains {mode}-*.tar"
    return None


def _in_folders(root: Path) -> tuple[str, str] | None:
    """Returns (format, reason) of images in folders, or None."""
    if has_masks(root):
        _check_masks(root)
        return "masks", "it contains folders of images and of their masks"
    part = part_folder(root, "train") or part_folder(root, "val")
    folder = root / part if part else root
    folders, others = _entries(folder)
    has_images = any(map(_is_image, others))
    # Two are enough: to look into each folder of ImageNet would take a while.
    with_images = (name for name in folders if _has_image(folder / name))
    classes = list(itertools.islice(with_images, 2))
    images = _OTHER_IMAGES.intersection(folders)
    masks = _OTHER_MASKS.intersection(folders)
    if images and masks:
        raise InputError(
            f"{folder} contains {describe_folder(folder)}, which look like images and their masks;"
            " name the folders images and masks, or pass -dataset=folder if they are classes"
        )
    place = f" in {part}/" if part else ""
    if has_images and classes:
        raise InputError(
            f"{folder} contains {describe_folder(folder)}; pass -dataset=folder if its folders are"
            " classes, or -dataset=images for images without labels"
        )
    if has_images:
        return "images", f"there are images{place}, in no folders of classes"
    if len(classes) > 1 or (classes and part):
        return "folder", f"there is a folder of images for each class{place}"
    return None


def _check_masks(root: Path) -> None:
    """Raises InputError where what seems to be masks are the boxes of objects."""
    if any(root.glob("masks")) or any(root.glob("*/masks")):
        return
    for pattern in _BOXES:
        boxes = next(root.glob(pattern), None)
        # Masks may have a list of their classes beside them.
        if boxes and not _has_image(boxes.parent):
            raise InputError(
                f"{root} contains {pattern}, the boxes of objects as YOLO has them, which no"
                " format reads; give a folder of images for each class, or images/ and masks/"
            )


def _entries(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the names of a folder's folders and of its other entries, as far as they are data."""
    folders: list[str] = []
    others: list[str] = []
    with reading(folder, "a folder of images"), os.scandir(folder) as entries:
        for entry in entries:
            if is_leftover(entry.name):
                continue
            if not is_folder(entry):
                others.append(entry.name)
            elif not is_run(entry.path):
                folders.append(entry.name)
    return sorted(folders), sorted(others)


def _has_image(folder: Path) -> bool:
    """Returns whether a folder has an image in it or below it, among the first _MOST_ENTRIES."""
    entries = 0
    for _, folders, files in _walk(folder):
        if any(map(_is_image, files)):
            return True
        entries += len(folders) + len(files)
        if entries > _MOST_ENTRIES:
            return False
    return False


def _images(folder: Path) -> Iterator[str]:
    """Yields the names of the images in a folder and below."""
    for _, _, files in _walk(folder):
        yield from filter(_is_image, files)


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not is_leftover(name)


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """``os.walk`` without folders that aren't data. Links to folders aren't followed."""
    for current, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not is_leftover(name) and not is_run(os.path.join(current, name))
        ]
        yield current, folders, files


def count_training_images(layout: Layout, most: int) -> int:
    """Returns the number of a dataset's training images, or ``most`` if there are at least so many.

    Images whose number isn't known without reading them, such as those of shards, count as ``most``.
    """
    root = Path(layout.path)
    if layout.dataset == "parquet":
        return min(parquet.count_training_rows(root), most)
    if layout.dataset == "hf_dataset":
        count = saved_datasets.count_training_rows(root)
        return most if count is None else min(count, most)
    if layout.dataset in ("csv", "multilabel_csv") and (table := table_layout(root)):
        return min(count_rows(table.file), most)
    file = root / "train_list.txt"
    if file.is_file():
        with reading(file, "a list"), open_file(file) as opened:
            return _count(numbered_lines(opened), most)
    if layout.dataset == "masks":
        return _count(_images(training_images(root)), most)
    if layout.dataset in ("folder", "images"):
        training = root / part_folder(root, "train")
        if layout.dataset == "images":
            return _count(_images(training), most)
        # The folder of a class may be a link.
        _, classes, _ = next(_walk(training), ("", [], []))
        images = itertools.chain.from_iterable(_images(training / name) for name in classes)
        return _count(images, most)
    return min(_PUBLISHED_IMAGES.get(layout.dataset, most), most)


def _count(items: Iterator, most: int) -> int:
    count = 0
    for count, _ in enumerate(items, 1):
        if count == most:
            break
    return count
