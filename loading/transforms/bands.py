"""Images of any number of channels, whose values stay what they are."""

from typing import Any

import numpy as np
from PIL import Image

from errors import Unreadable
from loading.transforms.orientation import Box
from settings.needs import float_pixels
from settings.options import Configuration

# What a stored value is divided by, by its type.
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
        """Returns a picture of it: ``visible``."""
        pixels = visible(self.values)
        return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])

    def decode(self) -> "Bands":
        """Returns itself: it is decoded."""
        return self

    def resized_crop(
        self, box: Box, size: tuple[int, int], resample: Image.Resampling, window: Box | None = None
    ) -> np.ndarray:
        """Returns the part in ``box`` at ``size`` (width, height), or the box ``window`` of that:
        [H, W, C] float32. Values of 8 and 16 bits become shares of their largest value. Each
        channel is what Pillow makes of it in mode F: nothing is rounded or cut off.
        """
        left, top, right, bottom = box
        found = np.empty((size[1], size[0], self.values.shape[2]), np.float32)
        for channel in range(found.shape[2]):
            band = self.values[top:bottom, left:right, channel].astype(np.float32, order="C")
            found[:, :, channel] = np.asarray(Image.fromarray(band).resize(size, resample))
        found /= UNITS[self.values.dtype]
        left, top, right, bottom = window or (0, 0, *size)
        return found[top:bottom, left:right]


def pixel_mode(config: Configuration) -> str | int:
    """Returns what images are read as: Pillow's mode "RGB" or "L", or the number of channels of
    ``Bands``.
    """
    channels = config.DATA.IMAGE_CHANNELS
    return channels if float_pixels(config.DATA) else "L" if channels == 1 else "RGB"


def pixel_dtype(config: Configuration) -> type:
    """Returns the type of pixels up to the model."""
    return np.float32 if float_pixels(config.DATA) else np.uint8


def most_resized(config: Configuration) -> int:
    """Returns how many pixels an image may be resized to: DATA.MAX_PIXELS, or of many floats fewer."""
    data = config.DATA
    return (
        min(data.MAX_PIXELS, 2 * data.MAX_PIXELS // data.IMAGE_CHANNELS)
        if float_pixels(data)
        else data.MAX_PIXELS
    )


def image_of(values: np.ndarray, mode: str | int) -> "Image.Image | Bands":
    """Returns the image of an array [H, W] or [H, W, C]: ``Bands``, or in a ``mode`` of Pillow's of
    [H, W(, 3)] uint8.

    Raises:
        Unreadable: it is another one; as ``of_array``.
    """
    if isinstance(mode, int):
        return of_array(values, mode)
    if values.dtype != np.uint8 or values.shape[2:] not in ((), (3,)):
        raise Unreadable(
            f"it is {values.dtype} of the shape {list(values.shape)}, which is no picture of 8 bits"
        )
    image = Image.fromarray(values)
    return image if image.mode == mode else image.convert(mode)


def of_array(values: np.ndarray, channels: int) -> Bands:
    """Returns the image of an array [H, W] or [H, W, C].

    Raises:
        Unreadable: it is another one, has other channels, or values that are no numbers.
    """
    dtype = values.dtype.newbyteorder("=")
    if dtype not in UNITS:
        raise Unreadable(f"its values are {dtype}, expected uint8, uint16 or float32")
    if values.ndim not in (2, 3) or 0 in values.shape:
        raise Unreadable(f"it is an array {list(values.shape)}, expected [H, W] or [H, W, C]")
    check_channels(values.shape[2] if values.ndim == 3 else 1, channels)
    if dtype.kind == "f" and not np.isfinite(values).all():
        raise Unreadable("some of its values are infinite or no numbers; replace them")
    return Bands(values.astype(dtype, copy=False))


def visible(values: np.ndarray) -> np.ndarray:
    """Returns a picture of an image [H, W, C], [H, W, 3 or 1] uint8. Its first three channels are
    red, green and blue; of fewer than three the first is grey. Each is stretched from its least
    value to its largest.
    """
    height, width, channels = values.shape
    found = np.empty((height, width, shown := 3 if channels >= 3 else 1), np.uint8)
    for channel in range(shown):
        band = values[:, :, channel].astype(np.float64)
        band -= band.min()
        found[:, :, channel] = band * (255 / (band.max() or 1)) + 0.5
    return found


def check_channels(found: int, channels: int) -> None:
    """Raises Unreadable where an image has other channels than DATA.IMAGE_CHANNELS."""
    if found != channels:
        raise Unreadable(
            f"it has {found} channel{'s' * (found != 1)}, DATA.IMAGE_CHANNELS is {channels}"
        )
