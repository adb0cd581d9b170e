"""Files of any number of channels in full depth: TIFF, NumPy's arrays, and what Pillow reads.

Pillow can't open a TIFF of many channels. But it can open the same data with other tags. They say
one channel that is as wide as all channels of a row together, or one plane after the other. So
libtiff decodes it, within Pillow's bounds.
"""

import math
import re
from typing import Any

import numpy as np

from errors import Unreadable
from loading.transforms import tiff
from loading.transforms.bands import UNITS, Bands, bands_of_array, check_channels
from loading.transforms.decode import EncodedImage, readable
from loading.transforms.formats import (
    BYTES_PER_PIXEL,
    NPY,
    check_size,
    decoded,
    kind_of,
    opened_image,
    opened_plain,
)
from loading.transforms.orientation import TURNS, orientation_of
from loading.transforms.tiff import Directory, Tag

# By TIFF's bits and format of a sample.
_KINDS = {(8, 1): np.dtype(np.uint8), (16, 1): np.dtype(np.uint16), (32, 3): np.dtype(np.float32)}
# Pillow's, as which others are taken; of the rest these:
_MODES = {"1": "L", "P": "RGB", "PA": "RGB"}
_TAKEN = ("L", "LA", "RGB", "RGBA", "I", "I;16", "I;16B")
# TIFF's compressions that work on bytes, whatever the channels; of those that Pillow reads the
# predictor too.
_PLAIN = (1, 32773)
_PREDICTED = (5, 8, 32946, 34925, 50000)
_INTEGERS = 2  # the predictor of whole numbers
_MEANINGS = (0, 1, 2, 5)  # photometric interpretations: grey from white or black on, colours, inks
_LONGEST_HEADER = 10_000  # bytes; Python 2 wrote 3L for 3
_NPY_HEADER = re.compile(
    rb"\{ *'descr': *'([<>|=]?[?biufcOSUVMm][0-9]{0,4})', *'fortran_order': *(True|False),"
    rb" *'shape': *\(((?:[0-9]{1,18}L?(?:, *|(?=\)))){0,32})\),? *\}\s*"
)
Encoded = EncodedImage | Bands


def encoded_image(
    data: bytes, mode: str | int, name: str, most: int, oriented: bool = False, exact: bool = False
) -> Encoded:
    """Returns the image in a file: of ``pixel_mode``; else as ``EncodedImage`` and ``bands_of``.

    Raises:
        RunError: it can't be read.
    """
    if isinstance(mode, str):
        return EncodedImage(data, mode, name, most, oriented, exact)
    return bands_of(data, mode, name, most, oriented)


def bands_of(data: bytes, channels: int, name: str, most: int, oriented: bool = False) -> Bands:
    """Returns the image in a file.

    Args:
        data: the file.
        channels: that it has to have (DATA.IMAGE_CHANNELS).
        name: what a person calls it.
        most: pixels that it may have (DATA.MAX_PIXELS), and eight times as many bytes.
        oriented: it is turned as its EXIF says (DATA.EXIF_ORIENTATION); a TIFF is turned always.

    Raises:
        RunError: it can't be read, or has other channels.
    """
    with readable(name):
        kind = kind_of(data)
        turn = orientation_of(data) if oriented else 1
        if kind == NPY:
            values = _array(data, channels, most)
        elif kind == "TIFF":
            values, turn = _tiff(Directory(data), channels, most)
        else:
            values = _picture(data, channels, most)
        return bands_of_array(TURNS[turn].pixels(values), channels)


def _check_bytes(width: int, height: int, depth: int, most: int) -> None:
    """Raises Unreadable where an image, of ``depth`` bytes a pixel, is too large."""
    check_size((width, height), most)
    if width * height * depth > BYTES_PER_PIXEL * most:
        raise Unreadable(
            f"it has {width} x {height} pixels of {depth} bytes: more than {BYTES_PER_PIXEL} of DATA.MAX_PIXELS {most}"
        )


def _array(data: bytes, channels: int, most: int) -> np.ndarray:
    """The array of a .npy file, without a copy."""
    shape, fortran, dtype, start = _npy_header(data)
    if dtype.hasobject or dtype.newbyteorder("=") not in UNITS:
        raise Unreadable(f"its values are {str(dtype)[:40]}, expected uint8, uint16 or float32")
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise Unreadable(f"it is an array {list(shape)[:4]}, expected [H, W] or [H, W, C]")
    found = shape[2] if len(shape) == 3 else 1
    check_channels(found, channels)
    _check_bytes(shape[1], shape[0], found * dtype.itemsize, most)
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise Unreadable(f"it claims the shape {list(shape)}, which isn't its size")
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if fortran else "C")


def _npy_header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Returns (the shape, whether it is in Fortran's order, the type, where the values begin) of a
    .npy file.

    NumPy parses it as Python does, which takes half a minute for 10 kB of spaces, and prints
    warnings.
    """
    width = {b"\1\0": 2, b"\2\0": 4}.get(data[6:8])
    if width is None:
        raise Unreadable("it is of another version than NumPy writes for numbers")
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    if start > _LONGEST_HEADER or not (found := _NPY_HEADER.fullmatch(data, 8 + width, start)):
        raise Unreadable("its header isn't one that NumPy writes for an array of numbers")
    shape = tuple(int(side) for side in re.findall(rb"[0-9]+", found[3]))
    return shape, found[2] == b"True", np.dtype(found[1].decode()), start


def _picture(data: bytes, channels: int, most: int) -> np.ndarray:
    """What Pillow reads in full depth."""
    image: Any
    image, data = opened_image(data, most)
    mode = _MODES.get(image.mode, image.mode)
    if mode not in _TAKEN:
        raise Unreadable(f"its pixels are Pillow's {mode}, expected grey, RGB, or these with alpha")
    check_channels(1 if mode.startswith("I") else len(mode), channels)
    deep = (image.format == "PNG" and data[24] == 16) or (
        image.format == "PPM" and image.tile[0][0] != "raw"
    )
    if deep and not mode.startswith("I"):
        raise Unreadable("Pillow keeps 8 bits of its colours; save it as TIFF")
    image.info.pop("transparency", None)
    image = decoded(image)
    return np.asarray(image if mode == image.mode else image.convert(mode)).astype(
        np.uint16 if mode.startswith("I") else np.uint8, copy=False
    )


def _tiff(directory: Directory, channels: int, most: int) -> tuple[np.ndarray, int]:
    """The first image of a TIFF file, and how it is to be turned."""

    tiff.check_parts(directory)

    def number(tag: int, default: int = 0) -> int:
        return directory.numbers(tag, default)[0]

    width = number(tiff.WIDTH)
    height = number(tiff.HEIGHT)
    found = number(tiff.SAMPLES, 1)
    check_channels(found, channels)
    forms = {
        (bits, form)
        for bits in directory.numbers(tiff.BITS, 1)
        for form in directory.numbers(tiff.FORMAT, 1)
    }
    kind = _KINDS.get(next(iter(forms))) if len(forms) == 1 else None
    meaning = number(tiff.PHOTOMETRIC, -1)
    if kind is None or meaning not in _MEANINGS or (meaning == 0 and kind.kind == "f"):
        bits = "channels of {} bits".format(
            " and ".join(sorted({str(bits) for bits, _ in forms})[:4])
        )
        raise Unreadable(
            f"it has {bits}, kind {meaning}; expected plain ones of uint8, uint16 or float32"
        )
    compression = number(tiff.COMPRESSION, 1)
    predictor = number(tiff.PREDICTOR, 1)
    planes = found > 1 and number(tiff.PLANAR, 1) == 2
    joined = found if found > 1 and not planes else 1  # channels in a row
    if compression in _PLAIN:
        predictor = 1
    elif compression not in _PREDICTED or (
        joined > 1 and predictor > (1 if kind.kind == "f" else _INTEGERS)
    ):
        how = f"compression {compression}, predictor {predictor}"
        raise Unreadable(
            f"it is packed by TIFF's {how}; save it with LZW or deflate, without a predictor"
        )
    tile = number(tiff.TILE_WIDTH), number(tiff.TILE_HEIGHT)
    for sides in ((width, height), tile):
        _check_bytes(*sides, found * kind.itemsize, most)
    tags = {
        tag: own
        for tag, own in directory.tags.items()
        if tag not in (tiff.EXTRA, tiff.ORIENTATION, tiff.PLANAR)
    }
    ours = {
        tiff.WIDTH: width * joined,
        tiff.TILE_WIDTH: tile[0] * joined,
        tiff.SAMPLES: 1,
        tiff.PHOTOMETRIC: 1,
    }
    ours |= {tiff.BITS: 8 * kind.itemsize, tiff.FORMAT: 3 if kind.kind == "f" else 1}
    if joined > 1:
        tags.pop(tiff.PREDICTOR, None)
    tags |= {tag: directory.long(value) for tag, value in ours.items() if tag in tags}
    if planes:
        values = np.stack(
            [_decode(directory, tags | part) for part in _planes(directory, found)], 2
        )
    else:
        values = _decode(directory, tags).reshape(height, width, found)
        if joined > 1 and predictor == _INTEGERS:
            values = _undo_differencing(values, tile[0] or width)
    turn = number(tiff.ORIENTATION, 1)
    return (np.iinfo(kind).max - values if meaning == 0 else values), turn if turn in TURNS else 1


def _planes(directory: Directory, count: int) -> list[dict[int, Tag]]:
    """The tags in which each plane differs: where its strips or tiles are."""
    found = [tag for tag in tiff.PLACES if tag in directory.tags]
    if any(directory.tags[tag].count % count for tag in found):
        raise Unreadable(f"its strips or tiles aren't {count} times as many")
    each = {tag: directory.tags[tag].count // count for tag in found}
    return [
        {tag: directory.part(tag, plane * each[tag], each[tag]) for tag in found}
        for plane in range(count)
    ]


def _decode(directory: Directory, tags: dict[int, Tag]) -> np.ndarray:
    """The pixels [H, W] of the file with these tags, in the machine's order of bytes."""
    pixels = np.asarray(decoded(opened_plain(directory.to_bytes(tags), "TIFF")))
    if (
        pixels.dtype.kind == "f"
        and directory.order == ">"
        and directory.numbers(tiff.COMPRESSION, 1) != (1,)
    ):
        # libtiff gives the machine's order, of which Pillow knows for whole numbers alone
        return pixels.byteswap()
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _undo_differencing(values: np.ndarray, tile: int) -> np.ndarray:
    """Undoes horizontal differencing, which begins anew in each tile: modulo the type's range."""
    starts = range(0, values.shape[1], tile)
    parts = [
        np.add.accumulate(values[:, start : start + tile], 1, values.dtype) for start in starts
    ]
    return np.concatenate(parts, 1)
