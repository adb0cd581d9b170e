"""The tags of a TIFF file that pixels depend on, and the same file with other tags."""

import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from errors import Unreadable

# Bytes of a value, by its type. Types of offsets to further directories are left out.
_BYTES = {1: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 16: 8, 17: 8}
# The types of unsigned integers, as ``struct`` names them.
_INTEGERS = {1: "B", 3: "H", 4: "I", 16: "Q"}
_BYTE = 1
_SHORT = 3
_LONG = 4
_UNDEFINED = 7
_RATIONALS = (5, 10)

WIDTH = 256
HEIGHT = 257
BITS = 258
COMPRESSION = 259
PHOTOMETRIC = 262
STRIPS = 273
ORIENTATION = 274
SAMPLES = 277
STRIP_ROWS = 278
STRIP_BYTES = 279
PLANAR = 284
PREDICTOR = 317
TILE_WIDTH = 322
TILE_HEIGHT = 323
TILES = 324
TILE_BYTES = 325
_SUBFILES = 330
EXTRA = 338
FORMAT = 339
XMP = 700
# Tags from this one on are metadata.
_METADATA = 700
# The tags that say where strips and tiles begin, and how long they are.
PLACES = (STRIPS, STRIP_BYTES, TILES, TILE_BYTES)

# If a TIFF has no tag of its orientation, Pillow turns the image as XMP says.
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
# Values of all tags. A palette has 196,608; the others suffice for 150,000 strips or tiles.
_MOST_VALUES = 500_000
# A rational number counts as so many values. Pillow makes a Fraction of each: 150 bytes, 3 us.
_RATIONAL_COST = 20
_MOST_TAGS = 1 << 16
# The strips or tiles of a picture may hold four times its pixels, and so many besides: one tile of
# 4,096 x 4,096.
_REPEATED = 4
_FREE_PIXELS = 1 << 24


class Tag(NamedTuple):
    """The values of a tag.

    Attributes:
        kind: TIFF's type of the values.
        count: number of the values.
        value: the values, if they fit into the directory; otherwise their place in the file.
    """

    kind: int
    count: int
    value: bytes


class Directory:
    """The directory of a TIFF file's first image, with the tags that pixels depend on.

    Args:
        data: the file.

    Attributes:
        order: of the bytes, as ``struct`` writes it: "<" or ">".
        start: place of the directory in the file.
        tags: by number.

    Raises:
        Unreadable, struct.error: it is damaged, or its tags hold too much.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.order = "<" if data[:1] == b"I" else ">"
        is_big = b"+" in data[2:4]
        # The formats of an offset, of the number of tags, and of a tag; bytes of values in a tag.
        if is_big:
            self._offset = self.order + "Q"
            self._count = self.order + "Q"
            self._entry = self.order + "HHQ8s"
            self._width = 8
        else:
            self._offset = self.order + "I"
            self._count = self.order + "H"
            self._entry = self.order + "HHI4s"
            self._width = 4
        (self.start,) = struct.unpack_from(self._offset, data, 8 if is_big else 4)
        self.tags: dict[int, Tag] = {}
        values = 0
        xmp = slice(0)
        for number, kind, count, value in self._entries():
            if number == XMP and kind in (_BYTE, _UNDEFINED) and count > self._width:
                place = self._place(value)
                # Only the last one is copied, however many there are.
                xmp = slice(place, place + count)
            is_metadata = number >= _METADATA or number == _SUBFILES
            if is_metadata or number in self.tags or kind not in _BYTES:
                continue
            length = count * _BYTES[kind]
            if length > self._width and self._place(value) + length > len(data):
                raise Unreadable(f"its tag {number} has {count} values beyond its end")
            values += count * (_RATIONAL_COST if kind in _RATIONALS else 1)
            if values > _MOST_VALUES:
                raise Unreadable(f"its tags have more than {_MOST_VALUES} values")
            self.tags[number] = Tag(kind, count, value)
        if ORIENTATION not in self.tags and (match := _XMP_ORIENTATION.search(data[xmp])):
            self.tags[ORIENTATION] = self.short(int(match[1]))

    def _place(self, value: bytes) -> int:
        """Returns the place in the file that a tag's ``value`` stands for."""
        return struct.unpack(self._offset, value)[0]

    def _entries(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yields the number, type, count and value of each tag."""
        (count,) = struct.unpack_from(self._count, self.data, self.start)
        first = self.start + struct.calcsize(self._count)
        length = struct.calcsize(self._entry)
        if first + count * length > len(self.data) or count > _MOST_TAGS:
            raise Unreadable(f"its directory of {count} tags reaches beyond its end")
        return struct.iter_unpack(self._entry, self.data[first : first + count * length])

    def short(self, number: int) -> Tag:
        """Returns a tag of one number, below 65,536."""
        return self._inline_tag(_SHORT, 1, struct.pack(f"{self.order}H", number))

    def long(self, number: int) -> Tag:
        """Returns a tag of one number, below 4,294,967,296."""
        return self._inline_tag(_LONG, 1, struct.pack(f"{self.order}I", number))

    def _inline_tag(self, kind: int, count: int, values: bytes) -> Tag:
        """Returns a tag whose values fit into the directory."""
        return Tag(kind, count, values.ljust(self._width, b"\0"))

    def numbers(self, number: int, default: int = 0) -> tuple[int, ...]:
        """Returns the integers of tag ``number``; ``default`` if it isn't there, or holds none."""
        tag = self.tags.get(number)
        if tag is None or not tag.count or tag.kind not in _INTEGERS:
            return (default,)
        length = tag.count * _BYTES[tag.kind]
        if length <= self._width:
            values = tag.value[:length]
        else:
            place = self._place(tag.value)
            values = self.data[place : place + length]
        return struct.unpack(f"{self.order}{tag.count}{_INTEGERS[tag.kind]}", values)

    def part(self, number: int, start: int, count: int) -> Tag:
        """Returns a tag with ``count`` of the values of tag ``number``, from ``start`` on."""
        tag = self.tags[number]
        size = _BYTES[tag.kind]
        if tag.count * size <= self._width:
            values = tag.value[start * size :][: count * size]
            return self._inline_tag(tag.kind, count, values)
        place = self._place(tag.value) + start * size
        if count * size <= self._width:
            return self._inline_tag(tag.kind, count, self.data[place : place + count * size])
        return Tag(tag.kind, count, struct.pack(self._offset, place))

    def to_bytes(self, tags: Mapping[int, Tag]) -> bytes:
        """Returns the file with ``tags`` alone, of which there are at most as many as it had.

        The directory stays at its place. If it stood at the end of a file that was cut short, its
        bytes would be read as the missing pixels.
        """
        entries = b"".join(struct.pack(self._entry, tag, *tags[tag]) for tag in sorted(tags))
        directory = struct.pack(self._count, len(tags)) + entries + bytes(self._width)
        return self.data[: self.start] + directory + self.data[self.start + len(directory) :]


def check_parts(directory: Directory) -> None:
    """Checks that the strips or tiles of an image, all together, are in proportion to it.

    Raises:
        Unreadable: they hold many times its pixels, or share bytes of the file.
    """

    def number(tag: int, default: int = 1) -> int:
        return directory.numbers(tag, default)[0]

    width = number(WIDTH)
    height = number(HEIGHT)
    samples = number(SAMPLES)
    is_tiled = TILES in directory.tags
    if is_tiled:
        name = "tiles"
        part_width = number(TILE_WIDTH)
        part_height = number(TILE_HEIGHT)
    else:
        name = "strips"
        part_width = width
        part_height = min(height, number(STRIP_ROWS, height))
    if min(width, height, samples, part_width, part_height) < 1:
        raise Unreadable("its size is 0")
    for tag in PLACES:
        if tag in directory.tags and directory.tags[tag].kind not in _INTEGERS:
            raise Unreadable(f"its tag {tag} isn't of whole numbers")
    planes = samples if number(PLANAR) == 2 else 1
    needed = planes * math.ceil(width / part_width) * math.ceil(height / part_height)
    places = directory.tags.get(TILES if is_tiled else STRIPS)
    count = max(needed, places.count if places else 0)
    if count * part_width * part_height > planes * (_REPEATED * width * height + _FREE_PIXELS):
        raise Unreadable(
            f"its {count} {name} of {part_width} x {part_height} pixels are too many for"
            f" {width} x {height} pixels"
        )
    size = len(directory.data)
    lengths = directory.numbers(TILE_BYTES if is_tiled else STRIP_BYTES)
    # A single wrong length is common, and does no harm: a decoder reads up to the file's end.
    if sum(min(length, size) for length in lengths) > _REPEATED * size:
        raise Unreadable(f"its {len(lengths)} {name} share bytes of the file")
