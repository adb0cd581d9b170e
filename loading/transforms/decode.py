"""Encoded images, which are decoded no further than a crop needs.

A plain JPEG is decoded by libjpeg-turbo (simplejpeg), without the rows below the crop. If the crop
is much larger than its result, it is decoded at 1/2, 1/4 or 1/8 of the size. Then it is resized by
cykooz_resizer, which has Pillow's filters in SIMD. Both work in the calling thread. Other images
are decoded, or refused, by Pillow.

Where Pillow's exact pixels are needed, libjpeg-turbo decodes the whole JPEG, as it does for Pillow,
and ``ops.images`` resizes it by Pillow's arithmetic.
"""

import math
import re
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import simplejpeg
from cykooz_resizer import (
    CropBox,
    FilterType,
    ImageData,
    PixelType,
    ResizeAlg,
    ResizeOptions,
    Resizer,
)
from PIL import Image

from errors import RunError, reading
from loading.transforms import tiff
from loading.transforms.bands import Bands
from loading.transforms.formats import decoded, opened_image
from loading.transforms.orientation import TURNS, Box, orientation_of
from ops import images

_ALGORITHMS = {
    Image.Resampling.BICUBIC: ResizeAlg.convolution(FilterType.catmull_rom),
    Image.Resampling.BILINEAR: ResizeAlg.convolution(FilterType.bilinear),
    Image.Resampling.NEAREST: ResizeAlg.nearest(),
}
# A decode at a fraction of the size leaves at least so many pixels along a side for each pixel of
# the result. The worst photograph is then 1.0 grey level from its full decode, on average; at 2 it
# is 1.4, at 1.5 it is 2.0.
_GAP = 2.5
# Rows below a crop that are decoded, too: more than the upsampling of colours reaches.
_MARGIN = 16
# Formats whose images in Pillow's mode I have values of 0..65535 (PNG before Pillow 11).
_SIXTEEN_BITS = ("PPM", "PNG")
# Values of TIFF's tags PhotometricInterpretation and ExtraSamples.
_WHITE_IS_ZERO = 0
_TIFF_ALPHA = (1, 2)
# The colour channels of a TIFF by its photometric interpretation; other ones have one.
_TIFF_COLOURS = {2: 3, 5: 4, 6: 3, 8: 3}
# JPEG's markers of frames that are coded row by row, and of the start of the pixels.
_BASELINE = (0xC0, 0xC1)
_SCAN = 0xDA
# The one warning that is expected of a shortened JPEG: further rows follow, up to the end of the
# file.
_REST = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")


class Broken(RunError):
    """Raised if the content of an image file can't be decoded; reading it again doesn't help."""


class EncodedImage:
    """An image file in memory, of which only the header is read at first.

    Args:
        data: the file.
        mode: of its decoded pixels, "RGB" or "L".
        name: for messages.
        most: pixels that it may have (DATA.MAX_PIXELS).
        oriented: turn it as its EXIF says (DATA.EXIF_ORIENTATION).
        exact: decode it to the same bits as Pillow.

    Attributes:
        size: (width, height) in pixels, after it is turned.

    Raises:
        RunError: from every method: the image can't be read.
    """

    def __init__(
        self,
        data: bytes,
        mode: str,
        name: str,
        most: int,
        oriented: bool = False,
        exact: bool = False,
    ) -> None:
        self.mode = mode
        self._name = name
        self._exact = exact
        with readable(name):
            self._image, self._data = opened_image(data, most)
        if reason := scaling_problem(self._image):
            raise Broken(f"{name}: {reason}")
        self._turn = TURNS[orientation_of(data) if oriented else 1]
        self.size = self._turn.size(self._image.size)
        self._keeps = False
        # What is kept: the pixels of a plain JPEG as they are stored, or else the image.
        self._pixels: np.ndarray | None = None
        self._decoded: Image.Image | None = None

    def keep_pixels(self) -> None:
        """Lets the next crop decode the image in full, once for all crops that follow."""
        self._keeps = True

    def decode(self) -> Image.Image:
        """Returns the image as Pillow decodes it; 16-bit grey as ``convert`` describes."""
        if self._decoded is not None:
            return self._decoded
        with readable(self._name):
            image = self._turn.image(convert(self._image, self.mode))
        if self._keeps:
            self._decoded = image
        return image

    def resized_crop(
        self, box: Box, size: tuple[int, int], resample: Image.Resampling, window: Box | None = None
    ) -> np.ndarray:
        """Returns what the function ``resized_crop`` returns.

        The pixels of a plain JPEG are within 1.5 grey levels of it, on average, unless the image is
        ``exact``.
        """
        if self._exact:
            return self._exact_crop(box, size, resample, window)
        room = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
        scale = max(scale for scale in (1, 2, 4, 8) if scale == 1 or room >= scale * _GAP)
        if self._keeps:
            scale = 1
        with readable(self._name):
            stored = self._turn.box(box, self.size)
            pixels = self._jpeg(stored[3], scale)
            if pixels is None:
                return resized_crop(self.decode(), box, size, resample, window)
            left, top, right, bottom = (edge / scale for edge in stored)
            # Whole pixels around the box are cut out, and the box within these is resized.
            x = int(left)
            y = int(top)
            pixels = pixels[y : math.ceil(bottom), x : math.ceil(right)]
            place = CropBox(left - x, top - y, right - left, bottom - top)
            pixels = self._turn.pixels(_resize_box(pixels, place, self._turn.size(size), resample))
            left, top, right, bottom = window or (0, 0, *size)
            return pixels[top:bottom, left:right]

    def _exact_crop(
        self, box: Box, size: tuple[int, int], resample: Image.Resampling, window: Box | None
    ) -> np.ndarray:
        left, top, right, bottom = box
        height = bottom - top
        width = right - left
        # Pillow resizes a narrow strip in two steps.
        is_strip = height > max(100 * width, size[1])
        # libjpeg computes grey from colours otherwise than Pillow.
        same_colours = self._image.mode in ("L", self.mode)
        if resample in images.FILTERS and not is_strip and same_colours and images.load():
            with readable(self._name):
                pixels = self._jpeg(self._image.size[1], 1)
            if pixels is not None:
                pixels = self._turn.pixels(pixels if self.mode == "RGB" else pixels[:, :, 0])
                return images.resize(pixels[top:bottom, left:right], size, resample, window)
        return resized_crop(self.decode(), box, size, resample, window)

    def _jpeg(self, rows: int, scale: int) -> np.ndarray | None:
        """Returns at least the first ``rows`` rows at 1 / ``scale``, [H, W, C] uint8.

        None is returned if this isn't a JPEG, or one that isn't decoded without a flaw.
        """
        # Pillow may have decoded the image already, because the JPEG has a flaw.
        if self._pixels is not None or self._decoded is not None:
            return self._pixels
        if self._image.format != "JPEG" or self._image.mode not in ("RGB", "L"):
            return None
        width, height = self._image.size
        enough = height if self._keeps else min(rows + _MARGIN, height)
        pixels = _decode(_cut_jpeg(self._data, enough), (enough, width), self.mode, scale)
        # A progressive JPEG can't be cut.
        if pixels is None and enough < height:
            pixels = _decode(self._data, (height, width), self.mode, scale)
        if self._keeps:
            self._pixels = pixels
        return pixels


def resized_crop(
    image: Image.Image | EncodedImage | Bands,
    box: Box,
    size: tuple[int, int],
    resample: Image.Resampling,
    window: Box | None = None,
) -> np.ndarray:
    """Returns Pillow's ``image.crop(box).resize(size, resample)``.

    Args:
        size: (width, height) in pixels.
        window: the box of the result that is returned; None: all of it.

    Returns:
        [H, W] or [H, W, 3] uint8; for ``Bands`` as their method.

    Raises:
        RunError: an encoded image can't be read.
    """
    if not isinstance(image, Image.Image):
        return image.resized_crop(box, size, resample, window)
    if box != (0, 0, *image.size):
        image = image.crop(box)
    resized = image.resize(size, resample)
    return np.asarray(resized.crop(window) if window else resized)


def scaling_problem(image: Image.Image) -> str | None:
    """Returns why an opened image's values can't become 8 bits, and what to do; None if they can."""
    if lost := _lost_channels(image):
        return lost
    kind = {"I": "32-bit integers", "F": "floats"}.get(image.mode)
    if kind is None or (image.mode == "I" and image.format in _SIXTEEN_BITS):
        return None
    return (
        f"its pixels are {kind}, and their white value is unknown;"
        " convert it to 8 or 16 bits, or remove it"
    )


def _lost_channels(image: Any) -> str | None:
    """Returns the problem of a TIFF with more channels than colours and alpha; otherwise None.

    Of such a TIFF, Pillow only reads the colours and alpha.
    """
    if image.format != "TIFF":
        return None
    tags = image.tag_v2
    count = tags.get(tiff.SAMPLES, 1)
    extra = count - _TIFF_COLOURS.get(tags.get(tiff.PHOTOMETRIC, 1), 1)
    is_alpha = np.ravel(tags.get(tiff.EXTRA, 0)).tolist()[0] in _TIFF_ALPHA
    if extra < 1 or (extra == 1 and is_alpha):
        return None
    return f"{extra} of its {count} channels would be lost; set DATA.IMAGE_CHANNELS {count} to read them, or convert it"


def convert(image: Image.Image, mode: str) -> Image.Image:
    """Returns an image as Pillow converts it, without alpha; but of 16-bit grey the high byte.

    Pillow, and timm with it, clips 16-bit grey at 255, so that almost all of it becomes white. Of
    16-bit colours it takes the high byte. Here a picture is the same, whether it is stored as grey
    or as colours. Values of 8 bits that were widened, times 256 or times 257, are restored.

    Args:
        image: an opened one, for which ``scaling_problem`` is None.
        mode: "RGB" or "L".
    """
    # Only a TIFF has tags.
    tags = getattr(image, "tag_v2", {})
    image = decoded(image)
    # Pillow warns where it can't keep the transparency.
    image.info.pop("transparency", None)
    if image.mode.startswith("I"):
        # Values of 12 bits stay 0..4095 in Pillow.
        pixels = np.asarray(image) >> (tags.get(tiff.BITS, (16,))[0] - 8)
        # Pillow inverts such images of 8 bits only.
        if tags.get(tiff.PHOTOMETRIC) == _WHITE_IS_ZERO:
            pixels = 255 - pixels
        image = Image.fromarray(pixels.astype(np.uint8))
    return image if image.mode == mode else image.convert(mode)


def readable(name: str, kind: type[RunError] = Broken) -> AbstractContextManager[None]:
    """Turns any error of a ``with`` statement that reads an image into one that names it.

    Args:
        kind: of the error.
    """
    return reading(name, "an image", "; repair or remove it", kind)


def _decode(data: bytes, size: tuple[int, int], mode: str, scale: int) -> np.ndarray | None:
    """Returns a JPEG's pixels at 1 / ``scale``; None if it has another size or a flaw.

    Args:
        size: its expected (height, width).
    """
    height, width = (math.ceil(side / scale) for side in size)
    least: dict[str, Any] = {}
    if scale > 1:
        least = {"min_height": height, "min_width": width, "min_factor": scale}
    pixels = np.empty((height, width, len(mode)), np.uint8)
    try:
        if simplejpeg.decode_jpeg_header(data, **least)[:2] != (height, width):
            return None
        simplejpeg.decode_jpeg(data, "RGB" if mode == "RGB" else "GRAY", buffer=pixels, **least)
    except ValueError as error:
        # This is the decoder's first warning, or its error.
        return pixels if _REST.fullmatch(str(error)) else None
    return pixels


def _cut_jpeg(data: bytes, rows: int) -> bytes:
    """Returns a baseline JPEG with the height ``rows`` in its header, after which a decoder stops.

    Any other data is returned as it is.
    """
    place = 2
    marker = 0
    while place + 7 <= len(data) and data[place] == 0xFF and marker != _SCAN:
        marker = data[place + 1]
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        if marker in _BASELINE:
            return data[: place + 5] + rows.to_bytes(2, "big") + data[place + 7 :]
        place += 2 + length
    return data


def _resize_box(
    pixels: np.ndarray, box: CropBox, size: tuple[int, int], resample: Image.Resampling
) -> np.ndarray:
    """Returns ``box`` of pixels [H, W, C], resized to ``size`` (width, height): [H, W] or [H, W, 3]."""
    height, width, channels = pixels.shape
    kind = PixelType.U8x3 if channels == 3 else PixelType.U8
    source = ImageData(width, height, kind, np.ascontiguousarray(pixels).tobytes())
    result = ImageData(*size, kind)
    Resizer().resize(
        source, result, ResizeOptions(_ALGORITHMS[resample], use_alpha=False, crop_box=box)
    )
    shape = (size[1], size[0], 3) if channels == 3 else (size[1], size[0])
    return np.frombuffer(result.get_buffer(), np.uint8).reshape(shape)
