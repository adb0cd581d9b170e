"""Transforms of one image: a Pillow image, an encoded one or ``Bands`` in, pixels [H, W, C] uint8
or float32 out.

Pixels stay uint8 until they are on the device: a quarter of the bytes through the loader's pipes.
"""

import copy
import math

import numpy as np
from PIL import Image

from errors import Unreadable
from loading.transforms.auto import build_auto_augment, interpolations
from loading.transforms.bands import Bands, most_resized
from loading.transforms.corruption import Corruption
from loading.transforms.decode import Box, EncodedImage, resized_crop
from loading.transforms.ops import brightness, color, contrast
from ops import images
from settings.options import Configuration, pair

Picture = Image.Image | EncodedImage | Bands
Size = tuple[int, int]  # (height, width) in pixels
_BORDER = 4  # pixels that "simple" adds on each side
_JITTERED = (brightness, contrast, color)
RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
}


class TrainTransform:
    """Crop, affine jitter, flips, TRAIN.AUTO_AUGMENT and colour jitter, all drawn from the
    generator that is passed in. A call may ask for another size than IMAGE_SIZE. Of a size of two
    sides neither the boxes' ratio nor what is drawn depends (timm 1.0.31).

    CROP "random_resized" has the distribution of torchvision's ``RandomResizedCrop`` (Szegedy et
    al. 2014). It makes ten attempts at an area and a ratio (log-uniform), then takes the largest
    central crop of a permitted ratio. "random_resized_once" is that of BYOL (Grill et al. 2020) and
    of MAE's linear probe: the first box, clipped to the image. "simple" is DeiT-III's
    (arXiv:2204.07118): the short side at the crop's size, 4 mirrored pixels around, a crop at
    random. "short_side" and "squash" resize the short side, or both, to IMAGE_SIZE / CROP_PCT and
    crop at random.

    Raises:
        InputError: an AUTO_AUGMENT that there isn't.
        Unreadable: from a call: an image so narrow that it would have more than MAX_PIXELS,
            resized.
    """

    def __init__(self, config: Configuration) -> None:
        train = config.TRAIN
        self.size, self.crop, self.most = (
            pair(config.DATA.IMAGE_SIZE),
            train.CROP,
            most_resized(config),
        )
        self.resize_share = 1.0 if self.crop == "simple" else train.CROP_PCT
        self.resize_to = before_crop(self.size, self.resize_share)
        names = interpolations(train.INTERPOLATION or config.DATA.INTERPOLATION)
        self.resampling = [RESAMPLING[name] for name in names]
        self.scale = train.CROP_SCALE
        self.ratio = train.CROP_RATIO
        self.hflip = train.HFLIP
        self.vflip = train.VFLIP
        self.affine = train.AFFINE
        self.augment = build_auto_augment(config) if train.AUTO_AUGMENT else None
        self.color_jitter = train.COLOR_JITTER

    def at(self, size: int | Size) -> "TrainTransform":
        """Returns the same for another size of pixels."""
        other = copy.copy(self)
        other.size = pair(size)
        other.resize_to = before_crop(other.size, self.resize_share)
        return other

    def __call__(
        self, image: Picture, rng: np.random.Generator, size: int | Size | None = None
    ) -> np.ndarray:
        if size is not None and pair(size) != self.size:
            return self.at(size)(image, rng)
        pixels = self._crop(image, rng)
        if any(self.affine):
            pixels = self._jitter(pixels, rng)
        if rng.random() < self.hflip:
            pixels = _mirror(pixels)
        if self.vflip and rng.random() < self.vflip:
            pixels = pixels[::-1]
        if self.augment is not None or self.color_jitter:
            pixels = self._recolor(pixels if images.load() else Image.fromarray(pixels), rng)
        return _pixels(pixels)

    def _recolor(self, image: Image.Image | np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if self.augment is not None:
            image = self.augment(image, rng)
        if self.color_jitter:
            low, high = max(0.0, 1 - self.color_jitter), 1 + self.color_jitter
            factors = rng.uniform(low, high, len(_JITTERED))
            for index in rng.permutation(len(_JITTERED)):
                image = _JITTERED[index](image, factors[index])
        return np.asarray(image)

    def _crop(self, image: Picture, rng: np.random.Generator) -> np.ndarray:
        resample = self.resampling[
            rng.integers(len(self.resampling)) if len(self.resampling) > 1 else 0
        ]
        if self.crop.startswith("random_resized"):
            return resized_crop(
                image, self._crop_box(*image.size, rng), (self.size[1], self.size[0]), resample
            )
        pixels = (_squash if self.crop == "squash" else _cover)(
            image, self.resize_to, resample, self.most
        )
        if self.crop == "simple":
            border = ((_BORDER, _BORDER), (_BORDER, _BORDER), (0, 0))
            pixels = np.pad(pixels, border[: pixels.ndim], "reflect")
        top, left = (
            int(rng.integers(had - side + 1))
            for had, side in zip(pixels.shape[:2], self.size, strict=True)
        )
        return pixels[top : top + self.size[0], left : left + self.size[1]]

    def _crop_box(self, width: int, height: int, rng: np.random.Generator) -> Box:
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if self.crop == "random_resized_once":
                w, h = min(w, width), min(h, height)
            if 0 < w <= width and 0 < h <= height:
                left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
                return left, top, left + w, top + h
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h

    def draw(self, width: int, height: int, rng: np.random.Generator) -> tuple[Box, bool, bool]:
        """Draws (the crop's box, whether it is flipped horizontally, vertically), as a call does
        that does no more.
        """
        box = self._crop_box(width, height, rng)
        return box, rng.random() < self.hflip, self.vflip > 0 and rng.random() < self.vflip

    def _jitter(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        degrees, shift, scaling = self.affine
        angle = math.radians(rng.uniform(-degrees, degrees))
        (height, width), moved = self.size, rng.uniform(-shift, shift, 2)
        dx, dy = moved * (width, height)
        scale = 1 / (1 + rng.uniform(-scaling, scaling))
        # Pillow maps output to input: the inverse rotation and scaling about the centre, then the
        # shift.
        cos = math.cos(angle) * scale
        sin = math.sin(angle) * scale
        x = width / 2
        y = height / 2
        row_x = (cos, sin, x - cos * (x + dx) - sin * (y + dy))
        row_y = (-sin, cos, y + sin * (x + dx) - cos * (y + dy))
        how = (width, height), Image.Transform.AFFINE, row_x + row_y, Image.Resampling.BILINEAR
        if pixels.dtype == np.uint8:
            return np.asarray(Image.fromarray(pixels).transform(*how))
        bands = (Image.fromarray(np.ascontiguousarray(band)) for band in np.moveaxis(pixels, 2, 0))
        return np.stack([np.asarray(band.transform(*how)) for band in bands], 2)


class EvalTransform:
    """Resizes to IMAGE_SIZE / CROP_PCT and cuts the centre, as timm and torchvision do.

    CROP_MODE "center" keeps the ratio (``covering``). "squash" resizes both sides: at CROP_PCT 1.0
    nothing of the image is lost (the evaluation of Swin and ConvNeXt at 384). DATA.CORRUPTION draws
    from the generator.

    Raises:
        InputError: DATA.CORRUPTION needs what isn't installed.
        Unreadable: from a call: as ``TrainTransform``.
    """

    def __init__(self, config: Configuration) -> None:
        self.size, self.most = pair(config.DATA.IMAGE_SIZE), most_resized(config)
        self.resize_to = before_crop(self.size, config.DATA.CROP_PCT)
        self.resized = _squash if config.DATA.CROP_MODE == "squash" else _cover
        self.resample = RESAMPLING[config.DATA.INTERPOLATION]
        self.corruption = Corruption(config) if config.EVAL and config.DATA.CORRUPTION else None

    def __call__(self, image: Picture, rng: np.random.Generator | None = None) -> np.ndarray:
        pixels = _pixels(self.resized(image, self.resize_to, self.resample, self.most, self.size))
        return self.corruption(pixels, rng) if self.corruption and rng is not None else pixels


def before_crop(size: Size, share: float) -> Size:
    """Returns the (height, width) of which a crop of ``size`` is the ``share``, rounded down."""
    height, width = size
    return math.floor(height / share), math.floor(width / share)


def covering(width: int, height: int, to: Size) -> tuple[int, int]:
    """Returns the (width, height) of an image that is resized, its ratio kept, until it just covers
    ``to``.

    As timm 1.0.31: torchvision cuts off what is left of a pixel where ``to`` is a square; otherwise
    it is rounded, in double precision.
    """
    if to[0] == to[1]:
        short = min(width, height)
        return to[0] * width // short, to[0] * height // short
    ratio = min(height / to[0], width / to[1])
    return round(width / ratio), round(height / ratio)


def _cover(
    image: Picture, to: Size, resample: Image.Resampling, most: int, centre: Size | None = None
) -> np.ndarray:
    width, height = covering(*image.size, to)
    if width * height > max(most, math.prod(to)):
        sides = f"{image.size[0]} x {image.size[1]} pixels"
        limit = f"DATA.MAX_PIXELS {'leaves floats, ' if isinstance(image, Bands) else ''}{most}"
        raise Unreadable(f"it has {sides}, resized {width} x {height}: more than {limit}")
    return _resize(image, (width, height), resample, centre)


def _squash(
    image: Picture, to: Size, resample: Image.Resampling, _: int, centre: Size | None = None
) -> np.ndarray:
    return _resize(image, (to[1], to[0]), resample, centre)


def _resize(
    image: Picture, size: tuple[int, int], resample: Image.Resampling, centre: Size | None
) -> np.ndarray:
    """The image at ``size`` (width, height), or of that the ``centre`` (height, width) alone."""
    window = None
    if centre is not None:
        left, top = (round((had - side) / 2) for had, side in zip(size, centre[::-1], strict=True))
        window = left, top, left + centre[1], top + centre[0]
    return resized_crop(image, (0, 0, image.size[0], image.size[1]), size, resample, window)


def _mirror(pixels: np.ndarray) -> np.ndarray:
    if pixels.ndim == 2:
        return pixels[:, ::-1]
    if pixels.shape[2] == 3 and pixels.dtype == np.uint8 and images.load():
        return images.mirror(pixels)
    mirrored = np.empty_like(pixels)
    for channel in range(pixels.shape[2]):  # a third of the time of all at once, or less
        mirrored[:, :, channel] = pixels[:, ::-1, channel]
    return mirrored


def _pixels(pixels: np.ndarray) -> np.ndarray:
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
