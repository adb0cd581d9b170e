"""The orientation of photographs, which is read from EXIF in a file's bytes.

Pillow would parse all metadata for this one number, which can take gigabytes (``formats``). In a
TIFF file the orientation is a tag of the image itself, and Pillow always turns such an image as it
decodes it.
"""

import re
import struct
from typing import NamedTuple

import numpy as np
from PIL import Image

# (left, top, right, bottom) in pixels; right and bottom are outside.
Box = tuple[int, int, int, int]
# EXIF's number of the orientation, and the types in which it is stored.
TAG = 274
_FORMS = {1: "B", 3: "H", 4: "I"}
_HEAD = b"Exif\0\0"
# Segments or chunks of a file that are searched.
_MOST_SEGMENTS = 10_000
# A marker may be padded.
_MARKER = re.compile(rb"\xff+([^\xff])", re.DOTALL)
# JPEG's markers: the start of the pixels, the end, and the segment of EXIF.
_SCAN = 0xDA
_END = 0xD9
_EXIF = 0xE1


class Turn(NamedTuple):
    """How the stored pixels of a file become the picture that is shown.

    Attributes:
        swapped: rows become columns. This comes first.
        across: the picture is mirrored horizontally.
        down: the picture is mirrored vertically.
    """

    swapped: bool = False
    across: bool = False
    down: bool = False

    def size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns the picture's (width, height) for the stored one, or the other way round."""
        return (size[1], size[0]) if self.swapped else size

    def box(self, box: Box, size: tuple[int, int]) -> Box:
        """Returns the box of the stored pixels for a box of the picture.

        Args:
            size: (width, height) of the picture.
        """
        left, top, right, bottom = box
        if self.across:
            left, right = size[0] - right, size[0] - left
        if self.down:
            top, bottom = size[1] - bottom, size[1] - top
        return (top, left, bottom, right) if self.swapped else (left, top, right, bottom)

    def pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Returns the picture's pixels for the stored ones, [H, W] or [H, W, C], without a copy."""
        pixels = pixels.swapaxes(0, 1) if self.swapped else pixels
        return pixels[:: -1 if self.down else 1, :: -1 if self.across else 1]

    def image(self, image: Image.Image) -> Image.Image:
        """Returns the picture for the stored image."""
        return image if self == TURNS[1] else image.transpose(_METHODS[self])

    def back(self, image: Image.Image) -> Image.Image:
        """Returns the stored image for the picture."""
        if self.swapped:
            # A mirror image of columns is one of rows before the two are swapped.
            return Turn(True, across=self.down, down=self.across).image(image)
        return self.image(image)


# The turns by EXIF's number.
TURNS = {
    1: Turn(), 2: Turn(across=True), 3: Turn(across=True, down=True), 4: Turn(down=True),
    5: Turn(swapped=True), 6: Turn(swapped=True, across=True),
    7: Turn(swapped=True, across=True, down=True), 8: Turn(swapped=True, down=True),
}  # fmt: skip
_METHODS = {
    TURNS[2]: Image.Transpose.FLIP_LEFT_RIGHT, TURNS[3]: Image.Transpose.ROTATE_180,
    TURNS[4]: Image.Transpose.FLIP_TOP_BOTTOM, TURNS[5]: Image.Transpose.TRANSPOSE,
    TURNS[6]: Image.Transpose.ROTATE_270, TURNS[7]: Image.Transpose.TRANSVERSE,
    TURNS[8]: Image.Transpose.ROTATE_90,
}  # fmt: skip


def orientation_of(data: bytes) -> int:
    """Returns the EXIF orientation of a JPEG, PNG or WebP file, 1 to 8.

    It is 1 (not turned) where there is no orientation, or it can't be read.
    """
    try:
        if data.startswith(b"\xff\xd8\xff"):
            return orientation_in(_of_jpeg(data))
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return orientation_in(_of_chunks(data, 8, ">I4s", b"eXIf", 4))
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return orientation_in(_of_chunks(data, 12, "<4sI", b"EXIF", 0))
    except struct.error:
        # The file ends too early.
        pass
    return 1


def orientation_in(exif: bytes) -> int:
    """Returns the orientation in EXIF's bytes; 1 where they have none or are damaged."""
    exif = exif.removeprefix(_HEAD)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        entries = exif[start + 2 : start + 2 + 12 * count]
        for tag, kind, _, value in struct.iter_unpack(
            f"{order}HHI4s", entries[: len(entries) // 12 * 12]
        ):
            if tag == TAG and kind in _FORMS:
                (turn,) = struct.unpack_from(order + _FORMS[kind], value)
                return turn if turn in TURNS else 1
    except struct.error:
        pass
    return 1


def _of_jpeg(data: bytes) -> bytes:
    place = 2
    for _ in range(_MOST_SEGMENTS):
        match = _MARKER.match(data, place)
        if not match or match[1][0] in (_SCAN, _END):
            break
        marker = match[1][0]
        place = match.end() - 2
        (length,) = struct.unpack_from(">H", data, match.end())
        if marker == _EXIF and data.startswith(_HEAD, place + 4):
            return data[place + 4 : place + 2 + length]
        place += 2 + length
    return b""


def _of_chunks(data: bytes, place: int, form: str, wanted: bytes, check: int) -> bytes:
    """Returns the content of the chunk ``wanted``, or nothing.

    Args:
        place: where the first chunk begins.
        form: of a chunk's head, as of ``struct``: its name and length, in either order.
        check: bytes of a checksum behind each chunk; 0: WebP's chunks, which are padded to an even
            length.
    """
    for _ in range(_MOST_SEGMENTS):
        head = struct.unpack_from(form, data, place)
        name, length = head if isinstance(head[0], bytes) else head[::-1]
        if name == wanted:
            return data[place + 8 : place + 8 + length]
        place += 8 + length + check + (0 if check else length % 2)
    return b""
