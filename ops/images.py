"""Pillow's operations on arrays of bytes, compiled for CPUs with AVX2 or AVX-512: its bits in less
time (images.h).

They are optional: ``make ops`` compiles them, ``load`` finds the result, and where it finds none,
Pillow computes (``loading.transforms``). They start no threads, so that forked loader workers can
call them. Images are [H, W] or [H, W, 3] uint8; results are new arrays.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ops.paths import is_built, library_folder, mark_as_used

_HERE = Path(__file__).resolve().parent
SOURCE = _HERE / "images.cc"
# As in Pillow's own builds for x86-64, no product is added before it was rounded.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
]
FILTERS = BILINEAR, BICUBIC = 2, 3  # of ``affine`` and ``resize``, by Pillow's numbers
_TYPES = {int: ctypes.c_int64, float: ctypes.c_float, bool: ctypes.c_bool}


def library() -> Path:
    """Returns where the compiled operations of these sources are, or would be."""
    made_of = (SOURCE.read_bytes(), SOURCE.with_suffix(".h").read_bytes(), " ".join(FLAGS).encode())
    return library_folder("images", made_of) / "images.so"


@functools.cache
def load() -> Any:
    """Returns the compiled operations; None: they weren't compiled, or this CPU hasn't what they
    need.
    """
    compiled = library()
    if not is_built(compiled):
        return None
    try:
        found = ctypes.CDLL(str(compiled))
    except OSError:
        return None
    mark_as_used(compiled)
    found.images_level.restype = ctypes.c_char_p
    level = found.images_level().decode()
    return (lambda name: getattr(found, f"{name}_{level}")) if level else None


def affine(
    pixels: np.ndarray, matrix: Sequence[float], resample: int, fill: int | tuple[int, ...]
) -> np.ndarray:
    """Returns ``image.transform(image.size, AFFINE, matrix, resample, fillcolor=fill)``, by one of
    FILTERS.
    """
    found = np.empty(pixels.shape, np.uint8)
    how = np.array(matrix, np.float64), resample == BICUBIC, np.array(fill, np.uint8, ndmin=1)
    _call("affine", *_shape(pixels), pixels, *how, found)
    return found


def resize(
    pixels: np.ndarray,
    size: tuple[int, int],
    resample: int,
    window: tuple[int, int, int, int] | None = None,
) -> np.ndarray:
    """Returns ``image.resize(size, resample)``, by one of FILTERS, or of that the box ``window``
    alone.

    Args:
        size: (width, height) in pixels.
    """
    left, top, right, bottom = window or (0, 0, *size)
    found = np.empty((bottom - top, right - left, *pixels.shape[2:]), np.uint8)
    box = np.array([left, top, right, bottom], np.int64)
    _call("resize", *_shape(pixels), pixels, size[1], size[0], box, resample == BICUBIC, found)
    return found


def blur(pixels: np.ndarray, deviation: float) -> np.ndarray:
    """Returns ``image.filter(ImageFilter.GaussianBlur(deviation))``."""
    return _change("blur", pixels, *_shape(pixels), pixels, float(deviation))


def sharpen(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Returns ``ImageEnhance.Sharpness(image).enhance(factor)``."""
    return _change("sharpen", pixels, *_shape(pixels), pixels, float(factor))


def adjust_color(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Returns ``ImageEnhance.Color(image).enhance(factor)``."""
    return (
        pixels
        if pixels.ndim == 2
        else _change("color", pixels, pixels.size // 3, pixels, float(factor))
    )


def shift_hue(pixels: np.ndarray, steps: int) -> np.ndarray:
    """Returns the image whose hues are moved by ``steps`` of the 256 that Pillow's mode HSV has.

    Of grey images nothing changes.
    """
    if pixels.ndim == 2:
        return pixels
    return _change("hue", pixels, pixels.size // 3, pixels, int(steps))


def blend(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    """Returns ``Image.blend(first, second, share)``."""
    return _change("blend", first, first.size, first, second, float(share))


def apply_tables(pixels: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Returns ``image.point(tables)``, of tables [256] uint8 for all channels, or [C, 256]."""
    *_, channels = _shape(pixels)
    tables = np.broadcast_to(tables, (channels, 256))
    return _change("map", pixels, pixels.size // channels, channels, pixels, tables)


def mirror(pixels: np.ndarray) -> np.ndarray:
    """Returns the mirror image, left for right, of [H, W, 3]."""
    return _change("mirror", pixels, *pixels.shape[:2], pixels)


def histogram(pixels: np.ndarray) -> np.ndarray:
    """Returns ``image.histogram()``, [C, 256] int64."""
    *_, channels = _shape(pixels)
    found = np.zeros((channels, 256), np.int64)
    _call("histogram", pixels.size // channels, channels, pixels, found)
    return found


def mean_grey(pixels: np.ndarray) -> float:
    """Returns ``ImageStat.Stat(image.convert("L")).mean[0]``."""
    *_, channels = _shape(pixels)
    found = np.empty(1, np.int64)
    _call("sum_of_greys", pixels.size // channels, channels, pixels, found)
    return int(found[0]) * channels / pixels.size


def _shape(pixels: np.ndarray) -> tuple[int, int, int]:
    height, width, *channels = pixels.shape
    return height, width, channels[0] if channels else 1


def _change(name: str, pixels: np.ndarray, *given: Any) -> np.ndarray:
    found = np.empty(pixels.shape, np.uint8)
    _call(name, *given, found)
    return found


def _call(name: str, *given: Any) -> None:
    """Calls a compiled operation: with arrays as pointers to their values in order."""
    kept = [
        np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value for value in given
    ]
    words = (
        ctypes.c_void_p(value.ctypes.data)
        if isinstance(value, np.ndarray)
        else _TYPES[type(value)](value)
        for value in kept
    )
    load()(name)(*words)
