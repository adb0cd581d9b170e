"""Images as panels of a sheet (``training.pages.sheets``). Matplotlib isn't imported here."""

import math
from typing import NamedTuple

import numpy as np
from PIL import Image

from loading.mask_tables import class_colors
from loading.transforms import visible

# Small images are enlarged until the shorter side has LEAST pixels, unless the longer one would
# have more than LONGEST.
LEAST = 224
LONGEST = 8 * LEAST
# How much of a class's colour an overlay has.
OPACITY = 0.5


class Panel(NamedTuple):
    """An image of a sheet.

    Attributes:
        title: the lines above it.
        image: [H, W, 3] uint8.
        frame: the colour of its frame; "": no frame.
    """

    title: str
    image: np.ndarray
    frame: str = ""


def enlarge(pixels: np.ndarray) -> np.ndarray:
    """Returns an image [H, W] or [H, W, C] as [H', W', 3] uint8.

    Pixels are repeated until the shorter side has LEAST, as far as the longer one stays within
    LONGEST. Floats are drawn as ``visible`` scales them.
    """
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.dtype != np.uint8:
        pixels = visible(pixels)
    height, width = pixels.shape[:2]
    times = min(math.ceil(LEAST / min(height, width)), LONGEST // max(height, width))
    times = max(1, times)
    return np.broadcast_to(pixels, (height, width, 3)).repeat(times, 0).repeat(times, 1)


def overlay(image: Image.Image, outputs: np.ndarray, opacity: float = OPACITY) -> Image.Image:
    """Returns an image whose pixels are blended with the colours of their classes."""
    colors = class_colors(int(outputs.max()) + 1)[outputs]
    return Image.blend(image.convert("RGB"), Image.fromarray(colors), opacity)
