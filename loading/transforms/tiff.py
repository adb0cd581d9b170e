"""TIFF's directory: the tags that pixels depend on, and the same file with other tags."""

import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from errors import Unreadable

# Bytes per value by type; tags that lead elsewhere, or are text, EXIF, ICC, XMP and the like,
# aren't needed.
_BYTES = {1: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 16: 8, 17: 8}
_NUMBERS = {1: "B", 3: "H", 4: "I", 16: "Q"}  # types of whole numbers
_PRIVATE = 700
_SUBFILES = 330
XMP = 700
WIDTH = 256
HEIGHT = 257
BITS = 258
COMPRESSION = 259
PHOTOMETRIC = 262
SAMPLES = 277
PLANAR = 284
ORIENTATION = 274
PREDICTOR = 317
TILE_WIDTH = 322
TILE_HEIGHT = 323
EXTRA = 338
FORMAT = 339
STRIPS = 273
STRIP_ROWS = 278
STRIP_BYTES = 279
TILES = 324
TILE_BYTES = 325
# where strips and tiles begin, and how long they are
PLACES = (STRIPS, STRIP_BYTES, TILES, TILE_BYTES)
# Where a TIFF has no tag of its orientation, Pillow takes XMP's, and turns the image.
_TURNED = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_VALUES = 500_000  # of all tags: a palette's 196,608, and the places of 150,000 strips or tiles
# Of each rational number Pillow makes a Fraction: 150 bytes, 3 us.
_RATIONALS = (5, 10)
_RATIONAL_COST = 20


# A picture's strips or tiles together may hold four times its pixels, and a tile of 4,096 x 4,096
# besides.
_REPEATED = 4
_FREE_PIXELS = 1 << 24


class Tag(NamedTuple):
    """A tag's values: their type and number, and their bytes where these are few, or else where
    they stand.
    """

    kind: int
    count: int
    value: bytes


class Directory:
    """The first image's needed tags.

    Args:
        data: the file.

    Raises:
        Unreadable, struct.error: it is damaged, or its tags hold too much.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.order = "<" if data[:1] == b"I" else ">"
        big = b"+" in data[2:4]
        self._offset, self._count, self._entry = ("Q", "Q", "HHQ8s") if big else ("I", "H", "HHI4s")
        self._width = 8 if big else 4
        (self.start,) = struct.unpack_from(self.order + self._offset, data, 8 if big else 4)
        self.tags: dict[int, Tag] = {}
        values = 0
        xmp = slice(0)
        for tag, kind, count, value in self._entries():
            if tag == XMP and kind in (1, 7) and count > self._width:
                place = self._place(value)
                xmp = slice(place, place + count)  # of a directory full of them one is copied
            if tag >= _PRIVATE or tag == _SUBFILES or tag in self.tags or kind not in _BYTES:
                continue
            length = count * _BYTES[kind]
            if length > self._width and self._place(value) + length > len(data):
                raise Unreadable(f"its tag {tag} says that {count} values lie beyond its end")
            values += count * (_RATIONAL_COST if kind in _RATIONALS else 1)
            if values > _VALUES:
                raise Unreadable(f"its tags hold more than {_VALUES} values")
            self.tags[tag] = Tag(kind, count, value)
        if ORIENTATION not in self.tags and (turned := _TURNED.search(data[xmp])):
            self.tags[ORIENTATION] = self.short(int(turned[1]))

    def _place(self, value: bytes) -> int:
        return struct.unpack(self.order + self._offset, value)[0]

    def _entries(self) -> Iterator[tuple[int, int, int, bytes]]:
        (count,) = struct.unpack_from(self.order + self._count, self.data, self.start)
        form = self.order + self._entry
        first = self.start + struct.calcsize(self.order + self._count)
        length = struct.calcsize(form)
        if first + count * length > len(self.data) or count > 1 << 16:
            raise Unreadable(f"its directory of {count} tags reaches beyond its end")
        return struct.iter_unpack(form, self.data[first : first + count * length])

    def short(self, number: int) -> Tag:
        """Returns a tag of one number, below 65,536."""
        return Tag(3, 1, struct.pack(f"{self.order}H", number).ljust(self._width, b"\0"))

    def long(self, number: int) -> Tag:
        """Returns a tag of one number."""
        return Tag(4, 1, struct.pack(f"{self.order}I", number).ljust(self._width, b"\0"))

    def numbers(self, tag: int, default: int = 0) -> tuple[int, ...]:
        """Returns a tag's whole numbers; ``default`` where it isn't there, or holds none."""
        found = self.tags.get(tag)
        if found is None or not found.count or found.kind not in _NUMBERS:
            return (default,)
        length = found.count * _BYTES[found.kind]
        place = self._place(found.value)
        held = found.value[:length] if length <= self._width else self.data[place : place + length]
        return struct.unpack(f"{self.order}{found.count}{_NUMBERS[found.kind]}", held)

    def part(self, tag: int, start: int, count: int) -> Tag:
        """Returns ``count`` of a tag's values, from ``start`` on."""
        found = self.tags[tag]
        size = _BYTES[found.kind]
        if found.count * size <= self._width:
            return Tag(
                found.kind,
                count,
                found.value[start * size :][: count * size].ljust(self._width, b"\0"),
            )
        place = self._place(found.value) + start * size
        if count * size <= self._width:
            return Tag(
                found.kind, count, self.data[place : place + count * size].ljust(self._width, b"\0")
            )
        return Tag(found.kind, count, struct.pack(self.order + self._offset, place))

    def to_bytes(self, tags: Mapping[int, Tag]) -> bytes:
        """Returns the file with these tags alone, at most as many as it had.

        They stand where they stood: bytes behind the end would be read as pixels of a file that is
        cut short.
        """
        entries = b"".join(
            struct.pack(self.order + self._entry, tag, *tags[tag]) for tag in sorted(tags)
        )
        directory = struct.pack(self.order + self._count, len(tags)) + entries + bytes(self._width)
        return self.data[: self.start] + directory + self.data[self.start + len(directory) :]


def check_parts(directory: Directory) -> None:
    """Checks that an image's strips or tiles are in proportion to it, all together.

    Raises:
        Unreadable: they hold many times its pixels, or share bytes of the file.
    """
    width, height, samples = (directory.numbers(tag, 1)[0] for tag in (WIDTH, HEIGHT, SAMPLES))
    tiled = TILES in directory.tags
    if tiled:
        part_width, part_height = (
            directory.numbers(tag, 1)[0] for tag in (TILE_WIDTH, TILE_HEIGHT)
        )
    else:
        part_width = width
        part_height = min(height, directory.numbers(STRIP_ROWS, height)[0])
    if min(width, height, samples, part_width, part_height) < 1:
        raise Unreadable("its size is 0")
    planes = samples if directory.numbers(PLANAR, 1)[0] == 2 else 1
    needed = planes * math.ceil(width / part_width) * math.ceil(height / part_height)
    if wrong := [
        tag for tag in PLACES if tag in directory.tags and directory.tags[tag].kind not in _NUMBERS
    ]:
        raise Unreadable(f"its tag {wrong[0]} isn't of whole numbers")
    places = directory.tags.get(TILES if tiled else STRIPS)
    count = max(needed, places.count if places else 0)
    name = "tiles" if tiled else "strips"
    if count * part_width * part_height > planes * (_REPEATED * width * height + _FREE_PIXELS):
        raise Unreadable(
            f"its {count} {name} of {part_width} x {part_height} pixels are too many for {width} x {height} pixels"
        )
    size = len(directory.data)
    lengths = directory.numbers(TILE_BYTES if tiled else STRIP_BYTES)
    # A single wrong length is common, and does no harm: a decoder reads up to the file's end.
    if sum(min(length, size) for length in lengths) > _REPEATED * size:
        raise Unreadable(f"its {len(lengths)} {name} share bytes of the file")
