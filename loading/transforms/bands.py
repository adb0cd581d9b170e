"""Images of any number of channels, whose values aren't converted to 8 bits."""

from typing import Any

import numpy as np
from PIL import Image

from errors import Unreadable
from loading.transforms.orientation import Box
from settings.configuration import Configuration
from settings.needs import float_pixels

# The stored value that stands for 1.0, by its type.
UNITS = {np.dtype(np.uint8): 255.0, np.dtype(np.uint16): 65535.0, np.dtype(np.float32): 1.0}


class Bands:
    """An image [H, W, C], uint8, uint16 or float32.

    Attributes:
        size: (width, height) in pixels.
    """

    def __init__(self, values: np.ndarray) -> None:
        self.values = values if values.ndim == 3 else values[:, :, None]
        self.size = self.values.shape[1], self.values.shape[0]

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self.values

    def picture(self) -> Image.Image:
        """Returns a picture of it for people, as ``visible`` makes it."""
        pixels = visible(self.values)
        return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])

    def decode(self) -> "Bands":
        """Returns itself, because it is decoded already."""
        return self

    def resized_crop(
        self, box: Box, size: tuple[int, int], resample: Image.Resampling, window: Box | None = None
    ) -> np.ndarray:
        """Returns what is in ``box``, resized: [H, W, C] float32.

        Values of 8 and 16 bits become shares of their largest value. Pillow resizes each channel in
        mode F, so nothing is rounded or clipped.

        Args:
            size: (width, height) in pixels.
            window: the box of the result that is returned; None: all of it.
        """
        left, top, right, bottom = box
        resized = np.empty((size[1], size[0], self.values.shape[2]), np.float32)
        for channel in range(resized.shape[2]):
            band = self.values[top:bottom, left:right, channel].astype(np.float32, order="C")
            resized[:, :, channel] = np.asarray(Image.fromarray(band).resize(size, resample))
        resized /= UNITS[self.values.dtype]
        left, top, right, bottom = window or (0, 0, *size)
        return resized[top:bottom, left:right]


def pixel_mode(config: Configuration) -> str | int:
    """Returns what images are read as: a mode of Pillow's, or the number of channels of ``Bands``.

    The mode is "RGB" or "L".
    """
    channels = config.DATA.IMAGE_CHANNELS
    if float_pixels(config.DATA):
        return channels
    return "L" if channels == 1 else "RGB"


def pixel_dtype(config: Configuration) -> type:
    """Returns the type of the pixels until they are normalised."""
    return np.float32 if float_pixels(config.DATA) else np.uint8


def most_resized(config: Configuration) -> int:
    """Returns how many pixels a resized image may have: DATA.MAX_PIXELS, or fewer of many floats."""
    data = config.DATA
    if not float_pixels(data):
        return data.MAX_PIXELS
    return min(data.MAX_PIXELS, 2 * data.MAX_PIXELS // data.IMAGE_CHANNELS)


def image_of(values: np.ndarray, mode: str | int) -> "Image.Image | Bands":
    """Returns the image of an array.

    Args:
        values: [H, W] or [H, W, 3] uint8; for ``Bands`` as of ``bands_of_array``.
        mode: as of ``pixel_mode``.

    Raises:
        Unreadable: it isn't such an array.
    """
    if isinstance(mode, int):
        return bands_of_array(values, mode)
    if values.dtype != np.uint8 or values.shape[2:] not in ((), (3,)):
        raise Unreadable(
            f"it is {values.dtype} of the shape {list(values.shape)}, which isn't an 8-bit image"
        )
    image = Image.fromarray(values)
    return image if image.mode == mode else image.convert(mode)


def bands_of_array(values: np.ndarray, channels: int) -> Bands:
    """Returns the image of an array [H, W] or [H, W, C], uint8, uint16 or float32.

    Raises:
        Unreadable: it isn't such an array, has other channels, or values that aren't finite.
    """
    dtype = values.dtype.newbyteorder("=")
    if dtype not in UNITS:
        raise Unreadable(f"its values are {dtype}, expected uint8, uint16 or float32")
    if values.ndim not in (2, 3) or 0 in values.shape:
        raise Unreadable(f"it is an array {list(values.shape)}, expected [H, W] or [H, W, C]")
    check_channels(values.shape[2] if values.ndim == 3 else 1, channels)
    if dtype.kind == "f" and not np.isfinite(values).all():
        raise Unreadable("some of its values are infinite or NaN; replace them")
    return Bands(values.astype(dtype, copy=False))


def visible(values: np.ndarray) -> np.ndarray:
    """Returns a picture of an image [H, W, C] for people, [H, W, 3] or [H, W, 1] uint8.

    The first three channels are shown as red, green and blue; of fewer than three, the first is
    shown as grey. Each is stretched from its least value to its largest.
    """
    height, width, channels = values.shape
    shown = 3 if channels >= 3 else 1
    picture = np.empty((height, width, shown), np.uint8)
    for channel in range(shown):
        band = values[:, :, channel].astype(np.float64)
        band -= band.min()
        picture[:, :, channel] = band * (255 / (band.max() or 1)) + 0.5
    return picture


def check_channels(count: int, channels: int) -> None:
    """Raises Unreadable where an image hasn't ``channels`` channels (DATA.IMAGE_CHANNELS)."""
    if count != channels:
        plural = "" if count == 1 else "s"
        raise Unreadable(f"it has {count} channel{plural}, but DATA.IMAGE_CHANNELS is {channels}")
