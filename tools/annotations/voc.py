"""Masks in the layout of Pascal VOC: those of the challenge, and CVAT's with its labelmap.txt."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from errors import Allowance, InputError, RunError, Unreadable, open_file, printable, reading
from loading.annotations import checked_name, find_image
from loading.class_names import check_name
from loading.files import contents, utf8_text
from loading.layout import describe_folder
from loading.lists import numbered_lines
from loading.mask_tables import MaskTable, plain_table
from loading.segmentation_sets import class_names
from loading.transforms import largest_file, mask_image
from tools.annotations.pictures import Indices, Picture

_MASKS = "SegmentationClass"
_IMAGES = "JPEGImages"
_LISTS = Path("ImageSets", "Segmentation")
# CVAT's table of labels and their colours.
LABELMAP = "labelmap.txt"
_BYTES_PER_LINE = 300


class Voc:
    """The masks in SegmentationClass/.

    Where labelmap.txt is next to it, masks are pictures of its colours. Otherwise they hold the
    indices of the class names, and 255 is ignored.

    Args:
        folder: of SegmentationClass/ and ImageSets/.
        images: the images' folder; None: JPEGImages/ in ``folder``.
        most: pixels that a mask may have.

    Raises:
        InputError: a folder or an image is missing, or a list can't be read.
    """

    as_shown = False

    def __init__(self, folder: Path, images: Path | None, most: int) -> None:
        self.folder = folder
        self.images = images or folder / _IMAGES
        self.most = most
        for needed in (folder / _MASKS, self.images):
            if not needed.is_dir():
                raise InputError(
                    f"{needed}: there is no such folder; {needed.parent} holds"
                    f" {describe_folder(needed.parent)}"
                )
        self.colours = {}
        if os.path.lexists(folder / LABELMAP):
            self.colours = read_labelmap(folder / LABELMAP)
        self._pictures = [self._picture(name, part) for name, part in self._names()]

    def _names(self) -> list[tuple[str, str]]:
        """Returns the names of the masks, each with its part."""
        lists = {part: self.folder / _LISTS / f"{part}.txt" for part in ("train", "val")}
        if all(file.is_file() for file in lists.values()):
            return [(name, part) for part, file in lists.items() for name in _listed(file)]
        masks = sorted((self.folder / _MASKS).rglob("*.png"))
        if not masks:
            raise InputError(f"{self.folder / _MASKS}: no PNG in it or below it")
        folder = self.folder / _MASKS
        return [(os.path.splitext(mask.relative_to(folder))[0], "") for mask in masks]

    def _picture(self, name: str, part: str) -> Picture:
        mask = self.folder / _MASKS / f"{name}.png"
        image = find_image(self.images, name)
        if image is None or not mask.is_file():
            raise InputError(
                f"{printable(name)}: its {'image' if image is None else 'mask'} is missing;"
                " expected"
                f" {self.images / name}.jpg and {mask}"
            )
        return Picture(name, image, part, mask)

    def labels(self) -> Sequence[str]:
        return list(self.colours) or class_names("pascal_voc")

    def pictures(self) -> Sequence[Picture]:
        return self._pictures

    def mask(self, picture: Picture, size: tuple[int, int], indices: Indices) -> np.ndarray:
        file = picture.source
        with reading(file, "a mask"):
            data = contents(file, largest_file(self.most))
        table = self._table(indices)
        dtype = np.dtype(np.int32)
        try:
            return np.asarray(mask_image(data, str(file), self.most, dtype, table=table))
        except RunError as error:
            raise InputError(str(error)) from None

    def _table(self, indices: Indices) -> MaskTable:
        """Returns the class index of each value that a mask may hold."""
        if not self.colours:
            # The places of the names are the indices.
            classes = len(set(indices.of.values()) - {indices.ignored})
            return plain_table(classes, advice="name all classes in -classes")
        where = str(self.folder / LABELMAP)
        stored = list(self.colours.values())
        found = [indices.index(label, where) for label in self.colours]
        return MaskTable(np.array(stored, np.uint8), found, f"add it to {where}")


def read_labelmap(file: Path) -> dict[str, tuple[int, ...]]:
    """Returns the colours of labels in CVAT's labelmap.txt, whose lines are ``label:R,G,B:...``.

    Raises:
        InputError: it can't be read, or a line is wrong (which).
    """
    colours: dict[str, tuple[int, ...]] = {}
    with reading(file, "CVAT's labels", "; each line is label:R,G,B::"), open_file(file) as opened:
        allowance = Allowance(os.fstat(opened.fileno()).st_size)
        for number, line in numbered_lines(opened):
            text = utf8_text(line)
            if text.startswith("#") or not text.strip():
                continue
            allowance.take(_BYTES_PER_LINE + len(line))
            label, colour, *_ = [*text.split(":"), ""]
            words = [word.strip() for word in colour.split(",")]
            values = [int(word) for word in words if word.isdecimal() and len(word) <= 3]
            if len(values) != 3 or len(words) != 3 or max(values) > 255:
                raise Unreadable(f"line {number}: '{printable(text, 60)}' has no colour R,G,B")
            if check_name(label, f"line {number}") in colours or tuple(values) in colours.values():
                raise Unreadable(f"line {number}: its label or its colour occurs twice")
            colours[label] = tuple(values)
        if not colours:
            raise Unreadable("it has no label")
    return colours


def _listed(file: Path) -> list[str]:
    """Returns the names in a list of images."""
    names = []
    with reading(file, "a list of names"), open_file(file) as opened:
        allowance = Allowance(os.fstat(opened.fileno()).st_size)
        for _, line in numbered_lines(opened):
            allowance.take(_BYTES_PER_LINE + len(line))
            if name := utf8_text(line).strip():
                names.append(checked_name(name))
    return names
