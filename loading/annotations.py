"""The readers of COCO's and Pascal VOC's annotations as several labels for each image."""

import collections
import math
import mmap
import os
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.parsers import expat

import numpy as np

from errors import Allowance, InputError, Unreadable, open_file, printable, reading
from loading.class_names import UNPRINTABLE, check_name, each_once, names_beside, read_class_names
from loading.files import Paths, contents
from loading.label_sets import LabelSets
from loading.layout import IMAGE_SUFFIXES, describe_folder
from loading.lists import TextList, open_list
from loading.sources import Files, Split
from settings.plain import LONGEST_ENTRY, json_entries, json_value
from settings.registry import datasets

_COCO_FORM = "; expected a file such as COCO's instances_train2017.json"
# What COCO says of the pixels of an object: most of a file, and nothing to read here.
_PIXELS = re.compile(rb'"(?:segmentation|counts|bbox)"\s*:\s*\[[\d\s.,\[\]eE+-]*\]')
_CATEGORIES = re.compile(rb'"categories"\s*:\s*\[')
# What an image takes in memory besides its path, and an annotation.
_BYTES_PER_IMAGE = 400
_BYTES_PER_ANNOTATION = 64
_VOC_NAMES = Path(__file__).with_name("mask_classes") / "pascal_voc.txt"
_LARGEST_XML = 1 << 22


def checked_name(name: Any) -> str:
    """Returns the name of a file that an annotation gives; raises Unreadable if it leads elsewhere."""
    if not isinstance(name, str) or not name or UNPRINTABLE.search(name):
        raise Unreadable(f"'{printable(str(name), 60)}' isn't a file name")
    plain = name.replace("\\", "/")
    if plain.startswith("/") or ".." in plain.split("/"):
        raise Unreadable(f"the path '{printable(name, 60)}' is outside the folder")
    return os.path.normpath(plain)


def find_image(folder: Path, name: str) -> Path | None:
    """Returns the image of a name without its suffix in a folder; None if there is none."""
    for suffix in IMAGE_SUFFIXES:
        for each in (suffix, suffix.upper()):
            if (file := folder / f"{name}{each}").is_file():
                return file
    return None


# ------------------------------------------------------------------ COCO


@datasets.register(
    "coco_multilabel",
    holds="`annotations/instances_train2017.json`, `train2017/`, and both of `val2017`",
    task="multilabel",
    val="annotations/instances_val*.json",
)
def coco_multilabel(split: Split, *, data_path: str) -> Files:
    """Reads the categories of the objects in each image.

    Classes are in the order of their ids. Crowds of objects count as objects do. An image without
    objects has no labels, and stays.

    Raises:
        InputError: a file or a folder is missing, or the annotations can't be read.
    """
    root = Path(data_path)
    file = _coco_file(root, split.mode)
    names = _coco_categories(file)
    train = sorted((root / "annotations").glob("instances_train*.json"))
    if split.mode == "val" and len(train) == 1 and _coco_categories(train[0]) != names:
        raise InputError(f"{file}: its categories aren't those of {train[0].name}")
    with reading(file, "COCO's annotations", _COCO_FORM):
        paths, labels = _coco_images(file, sorted(names))
    folder = _coco_folder(root, file, paths[0])
    missing = sorted(set(paths) - _files_below(folder))
    if missing:
        raise InputError(
            f"{file}: {len(missing)} of {len(paths)} images are missing, the first is"
            f" {folder / missing[0]}"
        )
    relative = os.path.relpath(folder, root)
    return Files(
        root,
        Paths(os.path.normpath(f"{relative}/{path}") for path in paths),
        labels,
        [names[each] for each in sorted(names)],
    )


def _coco_file(root: Path, mode: str) -> Path:
    """Returns the annotations of a mode; raises InputError where there aren't exactly one file."""
    files = sorted((root / "annotations").glob(f"instances_{mode}*.json"))
    if len(files) != 1:
        found = f"found {len(files)} files" if files else "no such file"
        raise InputError(
            f"{root / 'annotations'}: {found} instances_{mode}*.json, expected one; {root} holds"
            f" {describe_folder(root)}"
        )
    return files[0]


def _coco_folder(root: Path, file: Path, first: str) -> Path:
    """Returns the folder of the images that a file annotates; raises InputError if there is none.

    Args:
        first: the path of its first image.
    """
    name = file.stem.removeprefix("instances_")
    folders = [root / name, root / "images" / name, root / "images", root]
    for folder in folders:
        if (folder / first).is_file():
            return folder
    raise InputError(
        f"{folders[0]}: the first image of {file.name}, {printable(first)}, isn't there or in"
        f" images/{name}; {root} holds {describe_folder(root)}"
    )


def _files_below(folder: Path) -> set[str]:
    """Returns the paths of the files in a folder and below it."""
    found = set()
    for below, _, files in os.walk(folder):
        relative = os.path.relpath(below, folder)
        found.update(os.path.normpath(f"{relative}/{file}") for file in files)
    return found


def _coco_categories(file: Path) -> dict[int, str]:
    """Returns the names of a file's categories by their ids."""
    names: dict[int, str] = {}
    with reading(file, "COCO's annotations", _COCO_FORM), open_file(file) as opened:
        allowance = Allowance(os.fstat(opened.fileno()).st_size)
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            match = _CATEGORIES.search(content)
            if not match:
                raise Unreadable('it has no list of "categories"')
            text = content[match.end() - 1 : match.end() + LONGEST_ENTRY].decode(errors="replace")
        for entry in json_value(text, 0)[0]:
            allowance.take(_BYTES_PER_IMAGE)
            if type(entry) is not dict or type(entry.get("name")) is not str:
                raise Unreadable("a category has no name")
            if _number(entry, "id") in names:
                raise Unreadable(f"the category {entry['id']} occurs twice")
            names[entry["id"]] = check_name(entry["name"], "category's name")
        each_once(list(names.values()))
    return names


def _coco_images(file: Path, categories: list[int]) -> tuple[list[str], LabelSets]:
    """Returns (the paths of a file's images, the labels of each).

    The entries are read one after the other, without what they say of pixels. So the 450 MB of
    COCO's training images take 0.5 GB of memory.

    Args:
        categories: the ids, in the order of the labels.
    """
    paths: list[str] = []
    place_of: dict[int, int] = {}
    label_of = {each: label for label, each in enumerate(categories)}
    images = array("q")
    labels = array("q")
    with open_file(file) as opened:
        allowance = Allowance(os.fstat(opened.fileno()).st_size)
        # Each byte is read once, so the time is in proportion without a clock.
        allowance.until = math.inf
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            text = _PIXELS.sub(b'"":0', content).decode()
    allowance.take(len(text))
    for section, entry in json_entries(text):
        if section == "images":
            path = checked_name(entry.get("file_name"))
            allowance.take(_BYTES_PER_IMAGE + 2 * len(path))
            if _number(entry, "id") in place_of:
                raise Unreadable(f"the id of the image {printable(path)} occurs twice")
            place_of[entry["id"]] = len(paths)
            paths.append(path)
        elif section == "annotations":
            if _number(entry, "category_id") not in label_of:
                raise Unreadable(f"an annotation has the unknown category {entry['category_id']}")
            allowance.left -= _BYTES_PER_ANNOTATION
            images.append(_number(entry, "image_id"))
            labels.append(label_of[entry["category_id"]])
    allowance.take(0)
    if not paths or not labels:
        raise Unreadable("it has no images" if not paths else "it has no annotations")
    if len(set(paths)) < len(paths):
        repeated, _ = collections.Counter(paths).most_common(1)[0]
        raise Unreadable(f"the image {printable(repeated)} occurs twice")
    if unknown := set(images) - place_of.keys():
        raise Unreadable(f"an annotation has the unknown image {min(unknown)}")
    places = np.array([place_of[image] for image in images])
    # Each label of an image once, in rising order.
    places, chosen = np.divmod(
        np.unique(places * len(categories) + np.array(labels)), len(categories)
    )
    counts = np.bincount(places, minlength=len(paths))
    return paths, LabelSets(chosen, np.concatenate([[0], np.cumsum(counts)]))


def _number(entry: dict[str, Any], name: str) -> int:
    number = entry.get(name)
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise Unreadable(f'its "{name}" is {printable(str(number), 40)}, expected a number')
    return number


# ------------------------------------------------------------ Pascal VOC


@datasets.register(
    "voc_multilabel",
    holds="`ImageSets/Main/train.txt` and `val.txt`, `Annotations/`, `JPEGImages/`",
    task="multilabel",
    val="ImageSets/Main/val.txt",
)
def voc_multilabel(split: Split, *, data_path: str) -> Files:
    """Reads the classes of the objects in each image, without objects that are marked as difficult.

    Raises:
        InputError: a file is missing or can't be read, or an object is of another class.
    """
    root = Path(data_path)
    classes = names_beside(root) or read_class_names(_VOC_NAMES)[1:]
    label_of = {name: label for label, name in enumerate(classes)}
    labels = array("i")
    ends = array("q", [0])

    def paths(lines: TextList) -> Iterator[bytes]:
        for number, line in lines:
            name = checked_name(os.fsdecode(line).strip())
            objects = _voc_objects(root / "Annotations" / f"{name}.xml")
            if unknown := sorted(objects - label_of.keys()):
                raise InputError(
                    f"{root / 'Annotations' / name}.xml: '{printable(unknown[0], 60)}' isn't one of the"
                    f" {len(classes)} classes; list your classes in {root / 'classes.txt'}"
                )
            image = find_image(root / "JPEGImages", name)
            if image is None:
                raise InputError(f"{root / 'JPEGImages' / name}.jpg: there is no such file")
            lines.allowance.take(_BYTES_PER_ANNOTATION * len(objects))
            labels.extend(sorted(label_of[each] for each in objects))
            ends.append(len(labels))
            yield lines.add_path(number, os.fsencode(image.relative_to(root)))

    with open_list(root / "ImageSets" / "Main" / f"{split.mode}.txt", "voc_multilabel") as lines:
        # The files are opened one by one, which takes longer than reading the list.
        lines.allowance.until = math.inf
        images = Paths(paths(lines))
        if not labels:
            raise Unreadable(f"none of its {len(images)} images has an object")
        return Files(root, images, LabelSets(labels, ends), classes)


def _voc_objects(file: Path) -> set[str]:
    """Returns the classes of the objects in an annotation that aren't marked as difficult.

    Raises:
        InputError: it can't be read, or declares entities, which could grow without end.
    """
    objects: set[str] = set()
    # The names of the elements around the current one, and the texts of the current object.
    around: list[str] = []
    texts: dict[str, str] = {}

    def start(name: str, _: Any) -> None:
        around.append(name)
        if around == ["annotation", "object"]:
            texts.clear()

    def text(content: str) -> None:
        if len(around) == 3 and around[1] == "object" and around[2] in ("name", "difficult"):
            texts[around[2]] = texts.get(around[2], "") + content

    def end(_: str) -> None:
        if around == ["annotation", "object"]:
            name = check_name(texts.get("name", "").strip(), "object's name")
            if texts.get("difficult", "0").strip() != "1":
                objects.add(name)
        around.pop()

    def refuse(*_: Any) -> None:
        raise Unreadable("it has a document type, which annotations don't need")

    with reading(file, "an annotation of VOC's", "; repair it, or remove it from the list"):
        parser = expat.ParserCreate()
        parser.StartElementHandler = start
        parser.EndElementHandler = end
        parser.CharacterDataHandler = text
        parser.StartDoctypeDeclHandler = refuse
        parser.EntityDeclHandler = refuse
        parser.Parse(contents(file, _LARGEST_XML), True)
    return objects
