"""Reads images of any number of channels in full depth.

The files are TIFF, .npy, and what Pillow reads in full depth. Pillow can't open a TIFF of many
channels. But it opens the same data under other tags, as images of one channel: either the channels
of a row side by side, or one plane after the other. So libtiff decodes the data, within Pillow's
limits.
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

Encoded = EncodedImage | Bands
# The type of a TIFF's values, by (bits, format) of a sample.
_DTYPES = {(8, 1): np.dtype(np.uint8), (16, 1): np.dtype(np.uint16), (32, 3): np.dtype(np.float32)}
# Pillow's modes that are read, and those that are converted to one of them.
_MODES = ("L", "LA", "RGB", "RGBA", "I", "I;16", "I;16B")
_CONVERTED = {"1": "L", "P": "RGB", "PA": "RGB"}
# TIFF's compressions of bytes, which don't depend on the channels and have no predictor.
_WITHOUT_PREDICTOR = (1, 32773)
# The compressions for which Pillow also reads a predictor.
_WITH_PREDICTOR = (5, 8, 32946, 34925, 50000)
# The predictor of integers: each value is stored as its difference from the one to its left.
_DIFFERENCES = 2
# TIFF's photometric interpretations that are read: grey from white or from black on, RGB, inks.
_WHITE_IS_ZERO = 0
_INTERPRETATIONS = (_WHITE_IS_ZERO, 1, 2, 5)
_LONGEST_HEADER = 10_000  # bytes of a .npy file
# The header that NumPy writes: a dictionary as Python prints it. Python 2 wrote 3L for 3.
_NPY_HEADER = re.compile(
    rb"\{ *'descr': *'(?P<dtype>[<>|=]?[?biufcOSUVMm][0-9]{0,4})',"
    rb" *'fortran_order': *(?P<fortran>True|False),"
    rb" *'shape': *\((?P<shape>(?:[0-9]{1,18}L?(?:, *|(?=\)))){0,32})\),? *\}\s*"
)


def encoded_image(
    data: bytes, mode: str | int, name: str, most: int, oriented: bool = False, exact: bool = False
) -> Encoded:
    """Returns the image in a file, as ``EncodedImage`` or as ``Bands``.

    Args:
        data: the file.
        mode: see ``pixel_mode``: Pillow's mode for ``EncodedImage``, the number of channels for
            ``Bands``.
        name, most, oriented: see ``EncodedImage`` and ``bands_of``.
        exact: see ``EncodedImage``. ``Bands`` are always exact.

    Raises:
        RunError: it can't be read.
    """
    if isinstance(mode, str):
        return EncodedImage(data, mode, name, most, oriented, exact)
    return bands_of(data, mode, name, most, oriented)


def bands_of(data: bytes, channels: int, name: str, most: int, oriented: bool = False) -> Bands:
    """Returns the image in a file, with its values as they are stored.

    Args:
        data: the file.
        channels: the number that it must have (DATA.IMAGE_CHANNELS).
        name: of the file, for messages.
        most: pixels that it may have (DATA.MAX_PIXELS). It may have eight times as many bytes.
        oriented: turn it as its EXIF says (DATA.EXIF_ORIENTATION). A TIFF is always turned.

    Raises:
        RunError: it can't be read, or has another number of channels.
    """
    with readable(name):
        kind = kind_of(data)
        turn = orientation_of(data) if oriented else 1
        if kind == NPY:
            values = _read_npy(data, channels, most)
        elif kind == "TIFF":
            values, turn = _read_tiff(Directory(data), channels, most)
        else:
            values = _read_with_pillow(data, channels, most)
        return bands_of_array(TURNS[turn].pixels(values), channels)


def _check_bytes(width: int, height: int, depth: int, most: int) -> None:
    """Raises Unreadable if an image of ``depth`` bytes a pixel has more pixels or bytes than it may."""
    check_size((width, height), most)
    if width * height * depth > BYTES_PER_PIXEL * most:
        raise Unreadable(
            f"it has {width} x {height} pixels of {depth} bytes: more than {BYTES_PER_PIXEL} of"
            f" DATA.MAX_PIXELS {most}"
        )


def _read_npy(data: bytes, channels: int, most: int) -> np.ndarray:
    """Returns the array of a .npy file, without a copy."""
    shape, fortran, dtype, start = _npy_header(data)
    if dtype.hasobject or dtype.newbyteorder("=") not in UNITS:
        raise Unreadable(f"its values are {str(dtype)[:40]}, expected uint8, uint16 or float32")
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise Unreadable(f"it is an array {list(shape)[:4]}, expected [H, W] or [H, W, C]")
    height, width = shape[:2]
    count = shape[2] if len(shape) == 3 else 1
    check_channels(count, channels)
    _check_bytes(width, height, count * dtype.itemsize, most)
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise Unreadable(f"it has the shape {list(shape)}, which doesn't match its size")
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if fortran else "C")


def _npy_header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Reads the header of a .npy file.

    NumPy would parse it as Python code, which takes half a minute for 10 kB of spaces, and may
    print warnings.

    Returns:
        (shape, whether it is in Fortran's order, type, place of the first value).
    """
    length_bytes = {b"\1\0": 2, b"\2\0": 4}.get(data[6:8])
    if length_bytes is None:
        raise Unreadable("its version isn't one that NumPy uses for numbers")
    first = 8 + length_bytes
    start = first + int.from_bytes(data[8:first], "little")
    header = None
    if start <= _LONGEST_HEADER:
        header = _NPY_HEADER.fullmatch(data, first, start)
    if not header:
        raise Unreadable("its header isn't one that NumPy writes for an array of numbers")
    shape = tuple(int(side) for side in re.findall(rb"[0-9]+", header["shape"]))
    return shape, header["fortran"] == b"True", np.dtype(header["dtype"].decode()), start


def _read_with_pillow(data: bytes, channels: int, most: int) -> np.ndarray:
    """Returns the values of a file that Pillow reads in full depth."""
    image: Any
    image, data = opened_image(data, most)
    mode = _CONVERTED.get(image.mode, image.mode)
    if mode not in _MODES:
        raise Unreadable(f"its pixels are Pillow's {mode}, expected grey, RGB, or these with alpha")
    is_16_bit = mode.startswith("I")
    check_channels(1 if is_16_bit else len(mode), channels)
    # Of 16-bit colours Pillow keeps the high byte alone.
    is_deep_png = image.format == "PNG" and data[24] == 16
    is_deep_ppm = image.format == "PPM" and image.tile[0][0] != "raw"
    if (is_deep_png or is_deep_ppm) and not is_16_bit:
        raise Unreadable("Pillow only keeps 8 bits per channel; save it as TIFF")
    # Pillow warns where it can't keep the transparency.
    image.info.pop("transparency", None)
    image = decoded(image)
    if mode != image.mode:
        image = image.convert(mode)
    return np.asarray(image).astype(np.uint16 if is_16_bit else np.uint8, copy=False)


def _read_tiff(directory: Directory, channels: int, most: int) -> tuple[np.ndarray, int]:
    """Reads the first image of a TIFF file.

    Returns:
        (values [H, W, C], EXIF's number of its orientation).
    """

    def number(tag: int, default: int = 0) -> int:
        return directory.numbers(tag, default)[0]

    tiff.check_parts(directory)
    count = number(tiff.SAMPLES, 1)
    check_channels(count, channels)
    interpretation = number(tiff.PHOTOMETRIC, -1)
    dtype = _tiff_dtype(directory, interpretation)
    compression = number(tiff.COMPRESSION, 1)
    predictor = 1 if compression in _WITHOUT_PREDICTOR else number(tiff.PREDICTOR, 1)
    has_planes = count > 1 and number(tiff.PLANAR, 1) == 2
    # The channels of a pixel that stand side by side in a row.
    joined = 1 if has_planes else count
    # A predictor works channel by channel, so libtiff can't undo it in an image of joined channels.
    # That of integers is undone here.
    highest_predictor = 1 if dtype.kind == "f" else _DIFFERENCES
    is_known = compression in (*_WITHOUT_PREDICTOR, *_WITH_PREDICTOR)
    if not is_known or (joined > 1 and predictor > highest_predictor):
        raise Unreadable(
            f"it has TIFF compression {compression}, predictor {predictor}; save it with"
            " LZW or deflate, without a predictor"
        )
    width = number(tiff.WIDTH)
    height = number(tiff.HEIGHT)
    tile_width = number(tiff.TILE_WIDTH)
    for sides in ((width, height), (tile_width, number(tiff.TILE_HEIGHT))):
        _check_bytes(*sides, count * dtype.itemsize, most)
    tags = _one_channel_tags(directory, dtype, joined)
    if has_planes:
        planes = [_decode(directory, tags | own) for own in _planes(directory, count)]
        values = np.stack(planes, 2)
    else:
        values = _decode(directory, tags).reshape(height, width, count)
        if joined > 1 and predictor == _DIFFERENCES:
            values = _undo_differencing(values, tile_width or width)
    if interpretation == _WHITE_IS_ZERO:
        values = np.iinfo(dtype).max - values
    turn = number(tiff.ORIENTATION, 1)
    return values, turn if turn in TURNS else 1


def _tiff_dtype(directory: Directory, interpretation: int) -> np.dtype:
    """Returns the type of a TIFF's values; raises Unreadable if they aren't of a type that is read."""
    # The number of bits and the format of each channel. A hostile file may have many of both.
    bits = set(directory.numbers(tiff.BITS, 1))
    forms = set(directory.numbers(tiff.FORMAT, 1))
    dtype = None
    if len(bits) == 1 and len(forms) == 1:
        dtype = _DTYPES.get((min(bits), min(forms)))
    is_read = interpretation in _INTERPRETATIONS
    if dtype is None or not is_read or (interpretation == _WHITE_IS_ZERO and dtype.kind == "f"):
        shown = " and ".join(sorted(str(number) for number in bits)[:4])
        raise Unreadable(
            f"it has channels of {shown} bits and the photometric interpretation {interpretation};"
            " expected uint8, uint16 or float32 channels that are grey, RGB or inks"
        )
    return dtype


def _one_channel_tags(directory: Directory, dtype: np.dtype, joined: int) -> dict[int, Tag]:
    """Returns a file's tags, changed so that it is an image of one channel.

    Args:
        dtype: of its values.
        joined: channels that stand side by side in a row. The image is so many times as wide.
    """
    dropped = {tiff.EXTRA, tiff.ORIENTATION, tiff.PLANAR}
    if joined > 1:
        dropped.add(tiff.PREDICTOR)
    tags = {tag: value for tag, value in directory.tags.items() if tag not in dropped}
    changed = {
        tiff.WIDTH: directory.numbers(tiff.WIDTH)[0] * joined,
        tiff.TILE_WIDTH: directory.numbers(tiff.TILE_WIDTH)[0] * joined,
        tiff.SAMPLES: 1,
        tiff.PHOTOMETRIC: 1,
        tiff.BITS: 8 * dtype.itemsize,
        tiff.FORMAT: 3 if dtype.kind == "f" else 1,
    }
    return tags | {tag: directory.long(value) for tag, value in changed.items() if tag in tags}


def _planes(directory: Directory, count: int) -> list[dict[int, Tag]]:
    """Returns for each of ``count`` planes the tags of its own strips or tiles."""
    tags = [tag for tag in tiff.PLACES if tag in directory.tags]
    if any(directory.tags[tag].count % count for tag in tags):
        raise Unreadable(f"the number of its strips or tiles isn't a multiple of {count}")
    lengths = {tag: directory.tags[tag].count // count for tag in tags}
    return [
        {tag: directory.part(tag, plane * length, length) for tag, length in lengths.items()}
        for plane in range(count)
    ]


def _decode(directory: Directory, tags: dict[int, Tag]) -> np.ndarray:
    """Returns the pixels [H, W] of the file with these tags, in the machine's order of bytes."""
    pixels = np.asarray(decoded(opened_plain(directory.to_bytes(tags), "TIFF")))
    is_compressed = directory.numbers(tiff.COMPRESSION, 1) != (1,)
    if pixels.dtype.kind == "f" and directory.order == ">" and is_compressed:
        # libtiff returns values in the machine's order. Pillow knows that only of integers.
        return pixels.byteswap()
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _undo_differencing(values: np.ndarray, tile: int) -> np.ndarray:
    """Undoes horizontal differencing, modulo the type's range.

    Args:
        values: [H, W, C].
        tile: the width of a tile; the differences start over in each.
    """
    starts = range(0, values.shape[1], tile)
    tiles = [
        np.add.accumulate(values[:, start : start + tile], 1, values.dtype) for start in starts
    ]
    return np.concatenate(tiles, 1)
