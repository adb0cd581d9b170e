"""Decodes the masks of a dataset for a check of their sizes and values."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from errors import RunError
from loading.class_names import class_name
from loading.sources import Masks
from loading.transforms import UnknownValues, check_mask_size, mask_image, readable

# About so many messages are kept for each split, and for each of its columns of masks.
MESSAGES = 1000
# Of each mask: whether it can be read, whether it holds values that the dataset's table lacks, whether
# it has its image's size, how many indices it holds, and whether any of these isn't ignored.
_RECORD = np.dtype([
    ("readable", "?"), ("unknown", "?"), ("fits", "?"), ("indices", "i4"), ("labelled", "?"),
])  # fmt: skip
# Indices have 16 bits at most.
_NUM_INDICES = 1 << 16
# The indices that a row of the table names.
_SHOWN = 4


class MaskSource(NamedTuple):
    """Where the masks of a column come from.

    Attributes:
        name: place -> the mask's name, for messages.
        data: place -> the bytes of the mask's file.
        kind: what the dataset says of the column.
    """

    name: Callable[[int], str]
    data: Callable[[int], bytes]
    kind: Masks


class CheckedMasks(NamedTuple):
    """The decoded masks of a column.

    Attributes:
        kind: as of ``MaskSource``.
        records: [n]. A mask that can't be compared, because it or its image can't be read, fits. One
            with unknown values is readable, and its pixels aren't counted.
        pixels: of each index, summed over all masks, [indices].
        messages: what is wrong with single masks, by their place; about the first MESSAGES.
    """

    kind: Masks
    records: np.ndarray
    pixels: np.ndarray
    messages: dict[int, str]

    def add(self, places: range, part: "CheckedMasks") -> None:
        """Adds the masks at ``places``."""
        self.records[places.start : places.stop] = part.records
        self.pixels[:] += part.pixels
        if len(self.messages) < MESSAGES:
            self.messages.update(part.messages)


def unchecked_masks(source: MaskSource, count: int) -> CheckedMasks:
    """Returns the result for ``count`` masks that are still to be decoded."""
    return CheckedMasks(
        source.kind, np.zeros(count, _RECORD), np.zeros(_NUM_INDICES, np.int64), messages={}
    )


def mask_sources(
    columns: Mapping[str, Masks | np.ndarray],
    name: Callable[..., str],
    data: Callable[..., bytes],
) -> dict[str, MaskSource]:
    """Returns the sources of a dataset's masks by column.

    Args:
        columns: the dataset's further columns.
        name, data: (place, column=name of a column) -> as of ``MaskSource``.
    """
    return {
        column: MaskSource(
            functools.partial(name, column=column), functools.partial(data, column=column), kind
        )
        for column, kind in columns.items()
        if isinstance(kind, Masks)
    }


def check_masks(
    source: MaskSource,
    places: range,
    images: Sequence[tuple[str, tuple[int, int] | None]],
    most: int,
    oriented: bool,
) -> CheckedMasks:
    """Decodes some masks of a column.

    Args:
        images: the name of each mask's image, and its (width, height) as it is shown; None where it
            can't be read.
        most: pixels that a mask may have.
        oriented: turn masks as their EXIF says (DATA.EXIF_ORIENTATION).
    """
    checked = unchecked_masks(source, len(places))
    checked.records["fits"] = True
    for place, record, (image, size) in zip(places, checked.records, images, strict=True):
        name = source.name(place)
        try:
            mask = read_mask(source, place, most, oriented)
            record["readable"] = True
            counts = np.bincount(np.asarray(mask).ravel())
            record["indices"] = np.count_nonzero(counts)
            record["labelled"] = counts.sum() > counts[source.kind.ignored :][:1].sum()
            checked.pixels[: len(counts)] += counts
            if size is not None:
                record["fits"] = mask.size == size
                check_mask_size(mask, name, size, image)
        except UnknownValues as error:
            record["readable"] = True
            record["unknown"] = True
            record["labelled"] = True
            checked.messages[place] = str(error)
        except RunError as error:
            checked.messages[place] = str(error)
    return checked


def read_mask(source: MaskSource, place: int, most: int, oriented: bool) -> Image.Image:
    """Returns a mask; raises RunError with its name where it can't be read.

    Args:
        place: of the mask in its source.
        most, oriented: as of ``check_masks``.
    """
    name = source.name(place)
    with readable(name, RunError):
        data = source.data(place)
    dtype = np.dtype(source.kind.dtype)
    return mask_image(data, name, most, dtype, oriented, source.kind.table)


def held_indices(masks: CheckedMasks, classes: Sequence[str] = ()) -> str:
    """Returns the indices that masks hold with their shares of all pixels, the largest first.

    Args:
        classes: names of the indices; empty where they are of no known classes.
    """
    total = masks.pixels.sum()
    order = np.argsort(-masks.pixels, kind="stable")
    held = order[masks.pixels[order] > 0].tolist()
    words = []
    for index in held[:_SHOWN]:
        ignored = " (ignored)" if index == masks.kind.ignored else ""
        name = class_name(classes, index) if classes and not ignored else str(index)
        words.append(f"{name}{ignored} {masks.pixels[index] / total:.1%}")
    if len(held) > _SHOWN:
        words.append(f"{len(held) - _SHOWN} more")
    return ", ".join(words)
