"""Encoded images, decoded no further than a crop needs.

libjpeg-turbo (simplejpeg) decodes a plain JPEG into an array, without the rows below the crop. If
the crop is much larger than its result, it decodes at 1/2, 1/4 or 1/8 of the size. Pillow's filters
in SIMD (cykooz_resizer) resize it. Both work in the calling thread. Pillow decodes, or refuses,
anything else. Where exactly Pillow's pixels are asked for, libjpeg-turbo decodes the whole image,
as it does for Pillow. Then ``ops.images`` resizes it by Pillow's arithmetic.
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
# What the decoder leaves for the filter, at least: pixels per pixel of the result. The worst
# photograph is then 1.0 grey level from its full decode, in the mean; at 2 it is 1.4, at 1.5 2.0.
_GAP = 2.5
_MARGIN = 16  # more rows than the upsampling of colour reaches below a crop
# formats of which Pillow's mode I is 0..65535 (PNG: before Pillow 11)
_SIXTEEN_BITS = ("PPM", "PNG")
# TIFF's
_WHITE_IS_ZERO = 0
_TIFF_ALPHA = (1, 2)
# TIFF's channels by photometric interpretation; of others one
_TIFF_COLOURS = {2: 3, 5: 4, 6: 3, 8: 3}
# markers: frames that are coded row by row, the start of the pixels
_BASELINE = (0xC0, 0xC1)
_SCAN = 0xDA
# The one warning that a shortened image deserves: its other rows, up to the end of the file,
# without a flaw before.
_REST = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")


class Broken(RunError):
    """What an image file holds can't be decoded, however often it is read."""


class EncodedImage:
    """An image file in memory, of which the header alone is read at first.

    Args:
        data: the file.
        mode: of its pixels, once they are decoded: "RGB" or "L".
        name: what a person calls it.
        most: pixels that it may have (DATA.MAX_PIXELS).
        oriented: it is turned as its EXIF says (DATA.EXIF_ORIENTATION).
        exact: its pixels are Pillow's to the bit.

    Attributes:
        size: (width, height) in pixels, of what is shown.

    Raises:
        RunError: it can't be read; from every method.
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

    def decode(self) -> Image.Image:
        """Returns Pillow's full decode; of 16-bit grey as ``convert`` says."""
        with readable(self._name):
            return self._turn.image(convert(self._image, self.mode))

    def resized_crop(
        self, box: Box, size: tuple[int, int], resample: Image.Resampling, window: Box | None = None
    ) -> np.ndarray:
        """Does as the function, of a plain JPEG within 1.5 grey levels in the mean unless
        ``exact``, of all else exactly.
        """
        if self._exact:
            return self._exactly(box, size, resample, window)
        room = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
        scale = max(scale for scale in (1, 2, 4, 8) if scale == 1 or room >= scale * _GAP)
        with readable(self._name):
            stored = self._turn.box(box, self.size)
            pixels = self._jpeg(stored[3], scale)
            if pixels is None:
                return resized_crop(self.decode(), box, size, resample, window)
            left, top, right, bottom = (edge / scale for edge in stored)
            x, y = int(left), int(top)
            pixels = pixels[y : math.ceil(bottom), x : math.ceil(right)]
            place = CropBox(left - x, top - y, right - left, bottom - top)
            pixels = self._turn.pixels(_resize_box(pixels, place, self._turn.size(size), resample))
            left, top, right, bottom = window or (0, 0, *size)
            return pixels[top:bottom, left:right]

    def _exactly(
        self, box: Box, size: tuple[int, int], resample: Image.Resampling, window: Box | None
    ) -> np.ndarray:
        left, top, right, bottom = box
        height, width = bottom - top, right - left
        own = resample in images.FILTERS and not height > max(
            100 * width, size[1]
        )  # Pillow resizes a strip in two steps
        # of colours libjpeg makes another grey
        if own and self._image.mode in ("L", self.mode) and images.load():
            with readable(self._name):
                pixels = self._jpeg(self._image.size[1], 1)
            if pixels is not None:
                pixels = self._turn.pixels(pixels if self.mode == "RGB" else pixels[:, :, 0])
                return images.resize(pixels[top:bottom, left:right], size, resample, window)
        return resized_crop(self.decode(), box, size, resample, window)

    def _jpeg(self, rows: int, scale: int) -> np.ndarray | None:
        """Returns at least the first ``rows`` at 1 / ``scale``, [H, W, C] uint8, or None if this is
        no sound JPEG.
        """
        if self._image.format != "JPEG" or self._image.mode not in ("RGB", "L"):
            return None
        width, height = self._image.size
        enough = min(rows + _MARGIN, height)
        pixels = _decode(_cut_jpeg(self._data, enough), (enough, width), self.mode, scale)
        if pixels is None and enough < height:
            pixels = _decode(self._data, (height, width), self.mode, scale)
        return pixels


def resized_crop(
    image: Image.Image | EncodedImage | Bands,
    box: Box,
    size: tuple[int, int],
    resample: Image.Resampling,
    window: Box | None = None,
) -> np.ndarray:
    """Returns Pillow's ``image.crop(box).resize(size, resample)``, [H, W] or [H, W, 3] uint8; of
    ``Bands`` as they say.

    Args:
        size: (width, height) in pixels.
        window: the box of the result that is wanted; None: all of it.

    Raises:
        RunError: an encoded image can't be read.
    """
    if not isinstance(image, Image.Image):
        return image.resized_crop(box, size, resample, window)
    resized = (image if box == (0, 0, *image.size) else image.crop(box)).resize(size, resample)
    return np.asarray(resized.crop(window) if window else resized)


def scaling_problem(image: Image.Image) -> str | None:
    """Returns why the values of an image that was opened can't become 8 bits, and what to do; None
    where they can.
    """
    if lost := _lost_channels(image):
        return lost
    kind = {"I": "32-bit integers", "F": "floats"}.get(image.mode)
    if kind is None or (image.mode == "I" and image.format in _SIXTEEN_BITS):
        return None
    return f"its pixels are {kind}, and nothing tells which value is white; convert it to 8 or 16 bits, or remove it"


def _lost_channels(image: Any) -> str | None:
    """What is said of a TIFF whose channels are more than colours and alpha: Pillow leaves the
    others out.
    """
    if image.format != "TIFF":
        return None
    tags = image.tag_v2
    count = tags.get(tiff.SAMPLES, 1)
    extra = count - _TIFF_COLOURS.get(tags.get(tiff.PHOTOMETRIC, 1), 1)
    if extra < 1 or (extra == 1 and np.ravel(tags.get(tiff.EXTRA, 0)).tolist()[0] in _TIFF_ALPHA):
        return None
    return f"of its {count} channels {extra} would be lost; DATA.IMAGE_CHANNELS {count} reads them, or convert it"


def convert(image: Image.Image, mode: str) -> Image.Image:
    """Returns an image as Pillow converts it, which drops alpha; but of 16-bit grey the high byte.

    Pillow, and timm with it, clips 16-bit grey at 255: almost all of it is white. Of 16-bit colours
    Pillow takes the high byte: so a picture is the same stored as grey or as colours. 8 bits that
    were widened, times 256 or times 257, come back as they were.

    Args:
        image: opened, and nothing that ``scaling_problem`` finds a reason in.
        mode: "RGB" or "L".
    """
    tags = getattr(image, "tag_v2", {})  # of TIFF
    image = decoded(image)
    image.info.pop("transparency", None)  # Pillow warns where it can't keep it
    if image.mode.startswith("I"):
        # of 12 bits Pillow leaves 0..4095
        pixels = np.asarray(image) >> (tags.get(tiff.BITS, (16,))[0] - 8)
        if tags.get(tiff.PHOTOMETRIC) == _WHITE_IS_ZERO:  # which Pillow turns of 8 bits alone
            pixels = 255 - pixels
        image = Image.fromarray(pixels.astype(np.uint8))
    return image if image.mode == mode else image.convert(mode)


def readable(name: str, kind: type[RunError] = Broken) -> AbstractContextManager[None]:
    """Turns what goes wrong while reading an image file into an error of ``kind`` that names it."""
    return reading(name, "an image", "; repair or remove it", kind)


def _decode(data: bytes, size: tuple[int, int], mode: str, scale: int) -> np.ndarray | None:
    """Returns a JPEG of the given (height, width) at 1 / ``scale``, or None if it isn't that or has
    a flaw.
    """
    height, width = (math.ceil(side / scale) for side in size)
    least: dict[str, Any] = (
        {"min_height": height, "min_width": width, "min_factor": scale} if scale > 1 else {}
    )
    pixels = np.empty((height, width, len(mode)), np.uint8)
    try:
        if simplejpeg.decode_jpeg_header(data, **least)[:2] != (height, width):
            return None
        simplejpeg.decode_jpeg(data, "RGB" if mode == "RGB" else "GRAY", buffer=pixels, **least)
    except ValueError as error:  # the first warning, or what stopped the decoder
        return pixels if _REST.fullmatch(str(error)) else None
    return pixels


def _cut_jpeg(data: bytes, rows: int) -> bytes:
    """Returns a baseline JPEG with ``rows`` in its header, where the decoder then stops; any other
    unchanged.
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
    height, width, channels = pixels.shape
    kind = PixelType.U8x3 if channels == 3 else PixelType.U8
    source = ImageData(width, height, kind, np.ascontiguousarray(pixels).tobytes())
    result = ImageData(*size, kind)
    Resizer().resize(
        source, result, ResizeOptions(_ALGORITHMS[resample], use_alpha=False, crop_box=box)
    )
    pixels = np.frombuffer(result.get_buffer(), np.uint8)
    return (
        pixels.reshape(size[1], size[0], 3) if channels == 3 else pixels.reshape(size[1], size[0])
    )
