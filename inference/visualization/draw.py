"""Draws maps over images."""

import io

import training.pages.plain_matplotlib  # noqa: F401

# isort: split
import matplotlib
import numpy as np
from PIL import Image

from training.pages.sheets import COLOURS

# The left, top, right and bottom edges, in pixels.
Box = tuple[float, float, float, float]


def resize_map(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns a map [h, w] that is resized bilinearly to [height, width], float32."""
    image = Image.fromarray(values.astype(np.float32))
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def heat(
    base: np.ndarray, values: np.ndarray, box: Box | None = None, least: float = 0.0
) -> np.ndarray:
    """Returns an image in grey with a map over it, whose colours go from 0 to its largest value.

    Args:
        base: the image [H, W, 3] uint8.
        values: the map [h, w].
        box: the part of the image that the map covers; None: all of it. The rest is darkened.
        least: the value of the brightest colour, if no value is larger.

    Returns:
        [H, W, 3] uint8.
    """
    if box is None:
        box = (0, 0, base.shape[1], base.shape[0])
    left, top, right, bottom = (round(edge) for edge in box)
    grey = base.mean(2, keepdims=True).repeat(3, 2) / 255
    drawn = grey / 3
    brightest = max(float(values.max()), least, 1e-12)
    shares = resize_map(values, bottom - top, right - left) / brightest
    drawn[top:bottom, left:right] = 0.3 * grey[top:bottom, left:right] + 0.7 * to_colours(shares)
    return (255 * drawn + 0.5).astype(np.uint8)


def to_colours(shares: np.ndarray) -> np.ndarray:
    """Returns the colours of values from 0 to 1: [...] -> [..., 3]."""
    return matplotlib.colormaps[COLOURS](np.clip(shares, 0, 1))[..., :3]


def png(image: np.ndarray) -> bytes:
    """Returns an image [H, W, 3] uint8 as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
