"""Encoded images, decoded no further than a crop needs.

A flawless plain JPEG goes through libjpeg-turbo (simplejpeg) into an array, at 1/2, 1/4 or 1/8 of its size for a crop
that is much larger than what becomes of it, and through Pillow's filters in SIMD (cykooz_resizer). Both work in the
calling thread. Anything else is Pillow's to decode, or to refuse.
"""

import contextlib
import io
import math
from collections.abc import Iterator

import numpy as np
import simplejpeg
from cykooz_resizer import CropBox, FilterType, ImageData, PixelType, ResizeAlg, ResizeOptions, Resizer
from PIL import Image, UnidentifiedImageError

from errors import RunError

Box = tuple[int, int, int, int]  # left, top, right and bottom in pixels; right and bottom are outside
_ALGORITHMS = {
    Image.Resampling.BICUBIC: ResizeAlg.convolution(FilterType.catmull_rom),
    Image.Resampling.BILINEAR: ResizeAlg.convolution(FilterType.bilinear),
    Image.Resampling.NEAREST: ResizeAlg.nearest(),
}
_COLORSPACES = {"RGB": "RGB", "L": "GRAY"}
# What the decoder leaves for the filter, at least: pixels per pixel of the result. The worst photograph is then 1.0
# grey level from its full decode, in the mean; at 2 it is 1.4, at 1.5 2.0.
_GAP = 2.5


class EncodedImage:
    """An image file in memory, of which the header alone is read at first.

    Args:
        data: the file.
        mode: of its pixels, once they are decoded: "RGB" or "L".
        name: what a person calls it.

    Attributes:
        size: (width, height) in pixels.

    Raises:
        RunError: it can't be read; from every method.
    """

    def __init__(self, data: bytes, mode: str, name: str) -> None:
        self.mode, self._data, self._name = mode, data, name
        with readable(name):
            self._image = Image.open(io.BytesIO(data))
        self.size = self._image.size

    def decoded(self) -> Image.Image:
        """Returns Pillow's full decode."""
        with readable(self._name):
            self._image.load()
            return self._image if self._image.mode == self.mode else self._image.convert(self.mode)

    def resized_crop(self, box: Box, size: tuple[int, int], resample: Image.Resampling) -> np.ndarray:
        """As the function, of a plain JPEG within 1.5 grey levels in the mean, of all else exactly."""
        room = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
        scale = max(scale for scale in (1, 2, 4, 8) if scale == 1 or room >= scale * _GAP)
        pixels = self._jpeg(scale)
        if pixels is None:
            return resized_crop(self.decoded(), box, size, resample)
        left, top, right, bottom = (edge / scale for edge in box)
        x, y = int(left), int(top)
        pixels = pixels[y : math.ceil(bottom), x : math.ceil(right)]
        return _resized(pixels, CropBox(left - x, top - y, right - left, bottom - top), size, resample)

    def _jpeg(self, scale: int) -> np.ndarray | None:
        """Returns the image at 1 / ``scale`` of its size, [H, W, C] uint8, or None if it is no flawless plain JPEG."""
        if self._image.format != "JPEG" or self._image.mode not in _COLORSPACES:
            return None
        width, height = (math.ceil(side / scale) for side in self.size)
        least = {"min_width": width, "min_height": height, "min_factor": scale} if scale > 1 else {}
        try:
            pixels = simplejpeg.decode_jpeg(self._data, _COLORSPACES[self.mode], **least)
        except ValueError:  # warnings of libjpeg-turbo among them
            return None
        return pixels if pixels.shape[:2] == (height, width) else None


def resized_crop(
    image: Image.Image | EncodedImage, box: Box, size: tuple[int, int], resample: Image.Resampling
) -> np.ndarray:
    """Returns Pillow's ``image.crop(box).resize(size, resample)``, [H, W] or [H, W, 3] uint8.

    Args:
        size: (width, height) in pixels.

    Raises:
        RunError: an encoded image can't be read.
    """
    if isinstance(image, EncodedImage):
        return image.resized_crop(box, size, resample)
    return np.asarray((image if box == (0, 0, *image.size) else image.crop(box)).resize(size, resample))


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns what goes wrong while reading an image file into a RunError that names it."""
    try:
        yield
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        unknown = isinstance(error, UnidentifiedImageError)  # its text has the buffer's address
        reason = "of no known format" if unknown else " ".join(str(error).split())
        raise RunError(
            f"{name}: not readable as an image ({type(error).__name__}: {reason});"
            " repair or remove it, or train with DATA.SKIP_BROKEN True"
        ) from None


def _resized(pixels: np.ndarray, box: CropBox, size: tuple[int, int], resample: Image.Resampling) -> np.ndarray:
    height, width, channels = pixels.shape
    kind = PixelType.U8x3 if channels == 3 else PixelType.U8
    source, result = ImageData(width, height, kind, pixels.tobytes()), ImageData(*size, kind)
    Resizer().resize(source, result, ResizeOptions(_ALGORITHMS[resample], use_alpha=False, crop_box=box))
    pixels = np.frombuffer(result.get_buffer(), np.uint8)
    return pixels.reshape(size[1], size[0], 3) if channels == 3 else pixels.reshape(size[1], size[0])
