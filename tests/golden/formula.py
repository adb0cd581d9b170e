"""Weights and inputs that NumPy and torch make alike: by a formula from name and shape, nothing to
store.
"""

import zlib

import numpy as np
from PIL import Image


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns sin(0.7 (crc32(name) mod 1000 + i)) / 5 over the flat index i; 1 more for a norm's
    weight, a variance.
    """
    index = np.arange(np.prod(shape, dtype=np.int64)) + zlib.crc32(name.encode()) % 1000
    ones = ("norm" in name and name.endswith("weight")) or name.endswith("running_var")
    values = np.sin(0.7 * index) / 5 + (1.0 if ones else 0.0)
    return values.reshape(shape).astype(np.float32)


def places(values: np.ndarray, count: int = 64) -> np.ndarray:
    """Returns ``count`` values of an array, from the first to the last."""
    return values.reshape(-1)[np.linspace(0, values.size - 1, count).astype(int)]


LEVELS = (0, 3, 7.5, 10)  # of augmentation operations
TRIVIAL_STEPS = (0, 7, 21, 30)  # of TrivialAugmentWide's 31 magnitudes


def picture(mode: str = "RGB") -> Image.Image:
    """Returns a picture of 20 x 14 pixels with slopes, edges and a bright spot; its darkest value
    is 12.
    """
    rows, columns = np.mgrid[:14, :20]
    slopes = np.stack([12 * columns, 9 * rows + 5 * columns, 200 - 8 * rows], axis=2)
    slopes[3:7, 5:12] = (240, 60, 30)
    slopes[9:11, 14:17] = 255
    return Image.fromarray(np.clip(slopes, 12, 255).astype(np.uint8)).convert(mode)


# Changes of a view's colours: the jitter in its order, whether it is grey, the blur's radius,
# whether it is solarized.
CHANGES = [
    ((("brightness", 1.37), ("contrast", 0.61), ("saturation", 1.19), ("hue", 0.083)), False, None, False),
    ((("hue", -0.1), ("saturation", 0.8), ("contrast", 1.4), ("brightness", 0.6)), False, 1.3, False),
    ((("contrast", 1.21), ("hue", 0.004), ("brightness", 0.93), ("saturation", 1.0)), False, 0.1, True),
    ((("saturation", 0.95), ("brightness", 1.0), ("hue", -0.5), ("contrast", 1.0)), True, 2.0, True),
    ((("hue", 0.5),), False, None, False),
    ((("hue", -0.03),), False, None, False),
    ((), True, None, False),
    ((), False, 0.7, False),
    ((), False, None, True),
]  # fmt: skip


def photograph() -> Image.Image:
    """Returns a picture of 250 x 188 pixels with smooth colours, edges and texture."""
    rows, columns = np.mgrid[:188, :250]
    waves = [np.sin(rows / 31 + columns / 17), np.cos(rows / 11), np.sin(columns / 7 - rows / 43)]
    colours = 128 + 90 * np.stack(waves, axis=2)
    colours[60:120, 40:90] = (230, 40, 30)
    colours += 20 * np.sin(rows * columns / 97)[:, :, None]
    return Image.fromarray(colours.clip(0, 255).astype(np.uint8))
