"""Tables of masks: which class each index or colour of a mask's file stands for.

Class indices begin at 0. Pixels that count nowhere have the index 255, or 65535 where there are
more than 255 classes.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

# Classes that a mask can have: the indices of 16 bits, without the one that is ignored.
MOST_MASK_CLASSES = 65_535
# Ranges of indices that a message names.
_SHOWN = 4
_COLOURS = 1 << 24


class MaskKind(NamedTuple):
    """How masks are stored in memory, which depends on the number of classes.

    Attributes:
        dtype: of the class indices. Paddle has no integers of 16 bits without a sign.
        ignored: the index of pixels that count nowhere.
    """

    dtype: Literal["uint8", "int32"]
    ignored: int


def mask_kind(classes: int) -> MaskKind:
    """Returns how masks of this number of classes are stored in memory."""
    if classes <= 255:
        return MaskKind("uint8", 255)
    return MaskKind("int32", 65_535)


class MaskTable:
    """The meaning of the values in mask files. Other values are an error.

    Args:
        stored: indices as they are stored, [n] integers from 0 to 65535, or colours [n, 3] uint8.
        indices: the class index of each, [n], or the one that is ignored.
        advice: what a user may change about a value that the table lacks, for messages.
    """

    def __init__(self, stored: Any, indices: Any, advice: str = "correct the mask") -> None:
        self.stored = np.asarray(stored)
        self.indices = np.asarray(indices, np.int32)
        self.advice = advice

    def __reduce__(self) -> tuple:
        # Without the lookup, which each process makes when it needs it.
        return MaskTable, (self.stored, self.indices, self.advice)

    @property
    def of_colours(self) -> bool:
        """Returns whether the mask files contain colours."""
        return self.stored.ndim == 2

    @property
    def is_identity(self) -> bool:
        """Returns whether the files hold class indices already."""
        return not self.of_colours and bool((self.stored == self.indices).all())

    def to_bytes(self) -> bytes:
        """Returns bytes that differ for other tables."""
        return self.stored.tobytes() + self.indices.tobytes()

    @functools.cached_property
    def _lookup(self) -> np.ndarray:
        """The place of each value in the table plus 1, by the value; 0: the table lacks it."""
        values = _packed(self.stored) if self.of_colours else self.stored
        # Memory that nothing is written to isn't taken, so a table of all colours costs little.
        lookup = np.zeros(_COLOURS if self.of_colours else 1 << 16, np.uint16)
        lookup[values] = np.arange(1, len(values) + 1)
        return lookup

    def classes_of(self, values: np.ndarray, dtype: Any) -> tuple[np.ndarray, str]:
        """Returns the class indices of a mask, and the problem with its values, or "".

        Args:
            values: [H, W] integers, or [H, W, 3] uint8 where the table is of colours.
            dtype: of the class indices.
        """
        keys = _packed(values) if self.of_colours else values
        places = self._lookup[keys]
        problem = "" if places.all() else self._problem(keys, places)
        by_place = np.concatenate([[0], self.indices]).astype(dtype)
        return by_place[places], problem

    def _problem(self, keys: np.ndarray, places: np.ndarray) -> str:
        """Returns which value isn't in the table: the first one, where it is, how many there are."""
        outside = np.flatnonzero(places.ravel() == 0)
        first = int(keys.ravel()[outside[0]])
        y, x = divmod(int(outside[0]), keys.shape[1])
        if self.of_colours:
            found = f"the colour {first >> 16} {first >> 8 & 255} {first & 255}"
            expected = f"one of {len(self.stored)} colours"
        else:
            found = f"the index {first}"
            expected = _ranges(self.stored)
        count = len(outside)
        pixels = "pixel" if count == 1 else "pixels"
        return (
            f"it contains {found} at x {x}, y {y}, and {count:,} {pixels} of unknown values in"
            " total;"
            f" expected {expected}; {self.advice}"
        )


def index_table(indices: Mapping[int, int], advice: str = "correct the mask") -> MaskTable:
    """Returns the table of masks that hold indices: stored index -> class index, or ignored."""
    return MaskTable(list(indices), list(indices.values()), advice)


def plain_table(
    classes: int, ignore_index: int | None = None, advice: str = "correct the mask"
) -> MaskTable:
    """Returns the table of masks that hold the class indices themselves.

    Args:
        classes: their number.
        ignore_index: what is stored for pixels that count nowhere; None: as ``mask_kind`` has it.
    """
    ignored = mask_kind(classes).ignored
    indices = {index: index for index in range(classes)}
    indices[ignored if ignore_index is None else ignore_index] = ignored
    return index_table(indices, advice)


def shifted_table(classes: int) -> MaskTable:
    """Returns the table of masks whose 0 is ignored, and whose classes are numbered from 1."""
    kind = mask_kind(classes)
    indices = {0: kind.ignored, kind.ignored: kind.ignored}
    indices |= {index + 1: index for index in range(classes)}
    return index_table(indices)


def class_colors(count: int) -> np.ndarray:
    """Returns a colour for each class, [count, 3] uint8: Pascal VOC's colour map.

    The bits of a class's index, from the lowest on, are in turn the highest bits of red, green and
    blue. So nearby indices have distant colours, and index 0 is black.
    """
    indices = np.arange(count)
    colors = np.zeros((count, 3), np.uint8)
    for place in range(24):
        bit = indices >> place & 1
        colors[:, place % 3] |= (bit << (7 - place // 3)).astype(np.uint8)
    return colors


def _packed(colours: np.ndarray) -> np.ndarray:
    """Returns colours [..., 3] uint8 as one number each, [...] int32."""
    wide = colours.astype(np.int32)
    return wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2]


def _ranges(values: Iterable[int]) -> str:
    """Returns indices in words, such as "0..18 or 255"."""
    ordered = np.unique(np.asarray(values))
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    if len(words) > _SHOWN:
        words = [*words[: _SHOWN - 1], f"{len(words) - _SHOWN + 1} more"]
    return " or ".join(words)
