"""COCO's annotations: one JSON file of images, categories, and outlines or runs of pixels."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from errors import Allowance, InputError, Unreadable, install, printable, reading
from loading.annotations import checked_name
from loading.class_names import check_name
from settings.plain import is_real
from tools.annotations.pictures import (
    Indices,
    Picture,
    annotation_json,
    checked_points,
    checked_size,
)

_FORM = "; expected a file such as COCO's instances_train2017.json"
# pycocotools takes up to 120 bytes for each pixel along an outline.
_LONGEST_OUTLINE = 500_000
# Characters of a count of runs that are written as text: five bits each, of 32.
_LONGEST_COUNT = 7


class Coco:
    """The annotations of a file.

    Args:
        file: the JSON file.
        images: the folder that its names of images are relative to.

    Raises:
        InputError: the file can't be read, or pycocotools isn't installed.
    """

    as_shown = False

    def __init__(self, file: Path, images: Path) -> None:
        self.file = file
        self.tools = _pycocotools()
        with reading(file, "COCO's annotations", _FORM):
            content = annotation_json(file)
            rows = {name: _rows(content, name) for name in ("images", "categories", "annotations")}
            self.names = _categories(rows["categories"])
            self.of_image: dict[int, list[dict[str, Any]]] = {}
            self._pictures = []
            names: set[str] = set()
            for row in rows["images"]:
                path = checked_name(row.get("file_name"))
                name = path.rpartition(".")[0] or path
                if name in names or _id(row, "id") in self.of_image:
                    raise Unreadable(f"the image {printable(path)}, or its id, occurs twice")
                names.add(name)
                self.of_image[row["id"]] = []
                self._pictures.append(Picture(name, images / path, "", row))
            if not self._pictures:
                raise Unreadable("it has no images")
            for row in rows["annotations"]:
                if _id(row, "category_id") not in self.names:
                    raise Unreadable(f"an annotation has the unknown category {row['category_id']}")
                if _id(row, "image_id") not in self.of_image:
                    raise Unreadable(f"an annotation has the unknown image {row['image_id']}")
                self.of_image[row["image_id"]].append(row)

    def labels(self) -> Sequence[str]:
        return [self.names[each] for each in sorted(self.names)]

    def pictures(self) -> Sequence[Picture]:
        return self._pictures

    def mask(self, picture: Picture, size: tuple[int, int], indices: Indices) -> np.ndarray:
        """Returns the annotations of an image, of which smaller ones cover larger ones."""
        row = picture.source
        with reading(self.file, "COCO's annotations", _FORM):
            width, height = checked_size(row.get("width"), row.get("height"), size)
            allowance = Allowance(width * height)
            mask = np.full((height, width), indices.unlabelled, np.int32)
            for annotation in sorted(self.of_image[row["id"]], key=_area, reverse=True):
                name = self.names[annotation["category_id"]]
                index = indices.index(name, str(self.file))
                try:
                    self._paint(mask, annotation.get("segmentation"), index)
                    # It may be painted over many times.
                    allowance.take(0)
                except Unreadable as error:
                    where = f"an annotation of {printable(row['file_name'])}"
                    raise Unreadable(f"{where}: {error}") from None
            return mask

    def _paint(self, mask: np.ndarray, segmentation: Any, index: int) -> None:
        """Writes an index where an annotation is.

        Args:
            mask: [H, W], which is changed.
            segmentation: a list of outlines [x, y, x, y, ...], or runs of pixels.
        """
        height, width = mask.shape
        if type(segmentation) is dict:
            mask[runs_to_pixels(segmentation, (height, width))] = index
            return
        if type(segmentation) is not list or not segmentation:
            raise Unreadable("it has no segmentation, and boxes alone aren't enough for masks")
        for outline in segmentation:
            if type(outline) is not list or len(outline) % 2:
                raise Unreadable("it has an outline that isn't a list of pairs x, y")
            pairs = [[x, y] for x, y in zip(outline[::2], outline[1::2], strict=True)]
            points = np.array(checked_points(pairs, (width, height), least=3))
            steps = np.abs(points - np.roll(points, 1, 0)).max(1)
            if steps.sum() > _LONGEST_OUTLINE:
                raise Unreadable(f"it has an outline of more than {_LONGEST_OUTLINE} pixels")
            # What lies to the right of the outline and below it isn't decoded. The rest is: a shifted
            # outline would have other roundings.
            right, bottom = (np.ceil(points.max(0)).clip(0).astype(int) + 1).tolist()
            part = mask[:bottom, :right]
            runs = self.tools.frPyObjects([points.ravel().tolist()], part.shape[0], part.shape[1])
            part[self.tools.decode(runs)[:, :, 0] > 0] = index


def runs_to_pixels(runs: dict[str, Any], shape: tuple[int, int]) -> np.ndarray:
    """Returns the pixels of an annotation that is written as runs, [H, W] bool.

    The runs go down the columns; those at even places are outside. pycocotools would read them
    without checking them, and from memory that isn't theirs.

    Args:
        runs: "size" [height, width], and "counts": a list of lengths, or COCO's text of them.
        shape: (height, width) of the image.

    Raises:
        Unreadable: they aren't those of an image of this shape.
    """
    if runs.get("size") != list(shape):
        raise Unreadable(f"it has runs for an image of another size than {shape[1]} x {shape[0]}")
    counts = runs.get("counts")
    total = shape[0] * shape[1]
    if type(counts) is str:
        counts = _counts_of_text(counts)
    elif type(counts) is not list or not all(type(c) is int and 0 <= c <= total for c in counts):
        raise Unreadable("it has runs whose counts are neither numbers nor text")
    lengths = np.array(counts, np.int64)
    if lengths.sum() != total or lengths.min(initial=0) < 0:
        raise Unreadable(f"it has runs of {lengths.sum()} pixels, expected {total}")
    inside = np.arange(len(lengths)) % 2 == 1
    return np.repeat(inside, lengths).reshape(shape[::-1]).T


def _counts_of_text(text: str) -> np.ndarray:
    """Returns the lengths in COCO's text of runs.

    A number is written in groups of five bits, the lowest first; the sixth bit says that more
    follow, and the sign is that of the highest. From the fourth number on, each is the difference
    to the one before the last.
    """
    codes = np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64) - 48
    if len(codes) and (codes.min() < 0 or codes.max() > 63 or codes[-1] & 32):
        raise Unreadable("it has runs whose text isn't in COCO's format")
    is_last = codes & 32 == 0
    number = np.cumsum(is_last) - is_last
    begins = np.flatnonzero(np.diff(number, prepend=-1))
    place = np.arange(len(codes)) - begins[number] if len(codes) else codes
    if place.max(initial=0) >= _LONGEST_COUNT:
        raise Unreadable("it has runs whose text isn't in COCO's format")
    values = np.zeros(len(begins), np.int64)
    np.add.at(values, number, (codes & 31) << 5 * place)
    last = np.flatnonzero(is_last)
    values -= np.where(codes[last] & 16, 1 << 5 * (place[last] + 1), 0)
    # Each column of pairs is summed up on its own; the first number stands before them.
    for start in (1, 2):
        values[start::2] = np.cumsum(values[start::2])
    return values


def _pycocotools() -> ModuleType:
    """Returns pycocotools' module of masks; raises InputError if it isn't installed."""
    try:
        from pycocotools import mask
    except ImportError:
        raise InputError(f"COCO's annotations need pycocotools; {install('masks')}") from None
    return mask


def _rows(content: Any, name: str) -> list[dict[str, Any]]:
    """Returns a list of the file; raises Unreadable where it is of another form."""
    rows = content.get(name) if type(content) is dict else None
    if type(rows) is not list or not all(type(row) is dict for row in rows):
        raise Unreadable(f'it has no list of "{name}"')
    return rows


def _categories(rows: list[dict[str, Any]]) -> dict[int, str]:
    """Returns the names of categories by their ids."""
    names: dict[int, str] = {}
    for row in rows:
        name = row.get("name")
        if type(name) is not str:
            raise Unreadable("a category has no name")
        check_name(name, "category's name")
        if _id(row, "id") in names:
            raise Unreadable(f"the category {row['id']} occurs twice")
        names[row["id"]] = name
    return names


def _id(row: dict[str, Any], name: str) -> int:
    if type(row.get(name)) is not int:
        raise Unreadable(f'its "{name}" is {printable(str(row.get(name)), 40)}, expected a number')
    return row[name]


def _area(annotation: dict[str, Any]) -> float:
    area: Any = annotation.get("area")
    return float(area) if is_real(area) else 0.0
