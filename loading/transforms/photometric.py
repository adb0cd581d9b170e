"""TRAIN.PHOTOMETRIC, the photometric distortion of SSD (Liu et al. 2016, arXiv:1512.02325).

The values are those of its authors' code, which mmsegmentation has, too. Each step has probability
0.5, in this order: brightness (a level of -32..32 is added), contrast (levels times 0.5..1.5),
saturation (HSV's, times 0.5..1.5), hue (moved by up to a tenth of the circle either way). With
probability 0.5, contrast comes last instead.
"""

import numpy as np
from PIL import Image

from loading.transforms.ops import Picture, hue
from ops import images

# Of each step, the bounds of the value that is drawn: brightness, contrast, saturation, hue.
_LOW = -32.0, 0.5, 0.5, -0.1
_HIGH = 32.0, 1.5, 1.5, 0.1
_RAMP = np.arange(256.0)
# Pixels whose saturation is computed at a time.
_BLOCK = 1 << 15


def distort(image: Picture, rng: np.random.Generator) -> np.ndarray:
    """Returns the pixels of an image, [H, W] or [H, W, 3] uint8, with their colours distorted.

    Each step rounds to whole levels, and cuts off at 0 and 255. Of grey images, brightness and
    contrast alone change.
    """
    delta, factor, saturation, shift = rng.uniform(_LOW, _HIGH)
    is_brighter, has_contrast, is_saturated, has_hue, is_last = rng.random(5) < 0.5
    table = _RAMP
    if is_brighter:
        table = _levels(table + delta)
    if has_contrast and not is_last:
        table = _levels(table * factor)
    pixels = _mapped(np.asarray(image), table)
    if pixels.ndim == 3:
        if is_saturated:
            pixels = _saturated(pixels, saturation)
        if has_hue:
            pixels = _moved_hue(pixels, shift)
    if has_contrast and is_last:
        pixels = _mapped(pixels, _levels(_RAMP * factor))
    return pixels


def _levels(values: np.ndarray) -> np.ndarray:
    return np.rint(values).clip(0, 255)


def _mapped(pixels: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns pixels of which each level is replaced by that of a table [256]."""
    if table is _RAMP:
        return pixels
    levels = table.astype(np.uint8)
    if images.load():
        return images.apply_tables(pixels, levels)
    image = Image.fromarray(pixels)
    return np.asarray(image.point([int(level) for level in levels] * len(image.getbands())))


def _saturated(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Returns pixels [H, W, 3] whose saturation in HSV is multiplied, up to 1.

    The saturation is (value - least) / value, where a pixel's value is its largest channel. It
    grows by a factor where each channel's distance to the value does.
    """
    colors = np.ascontiguousarray(pixels).reshape(-1, 3)
    result = np.empty_like(colors)
    # The floats of so many pixels stay in a processor's cache, which halves the time.
    for start in range(0, len(colors), _BLOCK):
        block = slice(start, start + _BLOCK)
        channels = [np.ascontiguousarray(levels) for levels in colors[block].T]
        red, green, blue = channels
        value = np.maximum(np.maximum(red, green), blue).astype(np.float32)
        factors: np.ndarray | np.float32 = np.float32(factor)
        if factor > 1:
            least = np.minimum(np.minimum(red, green), blue)
            factors = np.minimum(factors, value / np.maximum(value - least, 1))
        for channel, levels in enumerate(channels):
            result[block, channel] = value - factors * (value - levels) + np.float32(0.5)
    return result.reshape(pixels.shape)


def _moved_hue(pixels: np.ndarray, shift: float) -> np.ndarray:
    """Returns pixels whose hues are moved by a share of the circle."""
    if images.load():
        return np.asarray(hue(pixels, shift))
    return np.asarray(hue(Image.fromarray(pixels), shift))
