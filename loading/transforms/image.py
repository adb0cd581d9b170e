"""Transforms of one image, for training and for evaluation.

They take a Pillow image, an encoded image or ``Bands``, and return pixels [H, W, C], uint8 or
float32. Pixels of 8 bits stay uint8 until they are on the device, because they take a quarter of
the memory then.
"""

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from errors import Unreadable
from loading.transforms.auto import build_auto_augment, interpolations
from loading.transforms.bands import Bands, most_resized
from loading.transforms.corruption import Corruption
from loading.transforms.decode import Box, EncodedImage, resized_crop
from loading.transforms.masks import NEAREST, Mask
from loading.transforms.ops import brightness, color, contrast
from loading.transforms.photometric import distort
from loading.transforms.scale_jitter import ScaleJitter, padded
from ops import images
from settings.configuration import Configuration, pair

Picture = Image.Image | EncodedImage | Bands
# (height, width) in pixels
Size = tuple[int, int]
# Values of DATA.CROP_MODE by which images aren't cropped, and differ in size.
WHOLE = "short", "own"
# Pixels that the crop "simple" adds on each side.
_BORDER = 4
_JITTERED = (brightness, contrast, color)
RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
}


class Geometry(NamedTuple):
    """How a training transform moves the pixels of a sample, and of its masks.

    Attributes:
        resample: the filter of the image's crop.
        box: of a "random_resized" or "scale_jitter" crop, in pixels of the image; None for other
            crops.
        corner: (top, left) of another crop, in pixels of the resized image.
        size: (height, width) of the crop. That of "scale_jitter" may be smaller than the result.
        matrix: of the affine map from places in the result to places in the crop (Pillow's six
            numbers); None: there is none.
        hflip, vflip: whether to flip it horizontally, and vertically.
    """

    resample: Image.Resampling
    box: Box | None
    corner: tuple[int, int]
    size: Size
    matrix: tuple[float, ...] | None
    hflip: bool
    vflip: bool


class TrainTransform:
    """The training transform: crop, affine jitter, flips, TRAIN.AUTO_AUGMENT and colour jitter.

    All of it is drawn from the generator that is passed to a call. The geometry is drawn once, and
    applied to the image and to its masks, to these with the nearest pixel. So are AUTO_AUGMENT's
    operations that move pixels. Colours are changed in the image alone: by AUTO_AUGMENT, then by
    COLOR_JITTER, then by PHOTOMETRIC.

    A call may give another size than IMAGE_SIZE. What is drawn, including the ratio of the crop's
    box, doesn't depend on the ratio of that size (as in timm 1.0.31).

    TRAIN.CROP is one of:

    - "random_resized": the distribution of torchvision's ``RandomResizedCrop`` (Szegedy et al.
      2014). Ten attempts are made at an area and a ratio (log-uniform). If they fail, the largest
      central crop of a permitted ratio is taken.
    - "random_resized_once": the crop of BYOL (Grill et al. 2020) and of MAE's linear probe. The
      first box is taken, clipped to the image.
    - "simple": DeiT-III's (arXiv:2204.07118). The short side is resized to the crop's size, 4
      mirrored pixels are added on each side, and a random crop is taken.
    - "short_side", "squash": the short side, or both sides, are resized to IMAGE_SIZE / CROP_PCT,
      and a random crop is taken.
    - "scale_jitter": semantic segmentation's (``scale_jitter``). The rest of a crop that is smaller
      than IMAGE_SIZE is padded after all else, masks with the index that they ignore.

    Raises:
        InputError: there is no such AUTO_AUGMENT.
        Unreadable: from a call: the image is so narrow that it would have more than MAX_PIXELS
            after it is resized.
    """

    def __init__(self, config: Configuration) -> None:
        train = config.TRAIN
        self.size = pair(config.DATA.IMAGE_SIZE)
        self.crop = train.CROP
        self.most = most_resized(config)
        self.resize_share = 1.0 if self.crop == "simple" else train.CROP_PCT
        self.resize_to = before_crop(self.size, self.resize_share)
        names = interpolations(train.INTERPOLATION or config.DATA.INTERPOLATION)
        self.resampling = [RESAMPLING[name] for name in names]
        self.jitter = ScaleJitter(config)
        self.scale = train.CROP_SCALE
        self.ratio = train.CROP_RATIO
        self.hflip = train.HFLIP
        self.vflip = train.VFLIP
        self.affine = train.AFFINE
        self.augment = build_auto_augment(config) if train.AUTO_AUGMENT else None
        self.color_jitter = train.COLOR_JITTER
        self.photometric = train.PHOTOMETRIC

    def at(self, size: int | Size) -> "TrainTransform":
        """Returns this transform for another size of pixels."""
        other = copy.copy(self)
        other.size = pair(size)
        other.resize_to = before_crop(other.size, self.resize_share)
        return other

    def __call__(
        self, image: Picture, rng: np.random.Generator, size: int | Size | None = None
    ) -> np.ndarray:
        return self.with_masks(image, (), rng, size)[0]

    def with_masks(
        self,
        image: Picture,
        masks: Sequence[Mask],
        rng: np.random.Generator,
        size: int | Size | None = None,
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the pixels [H, W, C] of an image, and [H, W] of each of its masks."""
        if size is not None and pair(size) != self.size:
            return self.at(size).with_masks(image, masks, rng)
        # The order of the draws is part of the result: another order gives other samples.
        geometry = self.draw(*image.size, rng, masks)
        pixels = self._moved(image, geometry, geometry.resample)
        moved = [self._moved(mask.image, geometry, NEAREST, mask.ignored) for mask in masks]
        if self.augment is not None:
            # From a copy of the generator, the policy draws for a mask what it draws for the image.
            for place, mask in enumerate(masks):
                cropped = Mask(Image.fromarray(moved[place]), mask.ignored)
                moved[place] = np.asarray(self.augment(cropped, copy.deepcopy(rng)).image)
        pixels = padded(_pixels(self._recolor(pixels, rng)), self.size, self.jitter.padding)
        sized = zip(moved, masks, strict=True)
        return pixels, [padded(values, self.size, mask.ignored) for values, mask in sized]

    def _recolor(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Returns the pixels of a crop with their colours changed."""
        if self.augment is None and not self.color_jitter and not self.photometric:
            return pixels
        image = pixels if images.load() else Image.fromarray(pixels)
        if self.augment is not None:
            image = self.augment(image, rng)
        if self.color_jitter:
            low = max(0.0, 1 - self.color_jitter)
            high = 1 + self.color_jitter
            factors = rng.uniform(low, high, len(_JITTERED))
            for index in rng.permutation(len(_JITTERED)):
                image = _JITTERED[index](image, factors[index])
        if self.photometric:
            image = distort(image, rng)
        return np.asarray(image)

    def draw(
        self, width: int, height: int, rng: np.random.Generator, masks: Sequence[Mask] = ()
    ) -> Geometry:
        """Draws the geometry of a sample from an image of ``width`` x ``height``.

        Nothing else of a sample is drawn before it.

        Args:
            masks: of the image, which CROP_MAX_CLASS is for.
        """
        resample = self.resampling[0]
        if len(self.resampling) > 1:
            resample = self.resampling[rng.integers(len(self.resampling))]
        box = None
        corner = 0, 0
        size = self.size
        if self.crop == "scale_jitter":
            base = width, height
            if not self.jitter.own_size:
                base = covering(width, height, self.size)
            box, size = self.jitter.draw((width, height), base, self.size, masks, rng)
        elif self.crop.startswith("random_resized"):
            box = self._crop_box(width, height, rng)
            size = self._size_of_crop(box)
        else:
            rows, columns = self.resize_to
            if self.crop != "squash":
                columns, rows = covering(width, height, self.resize_to)
            border = _BORDER if self.crop == "simple" else 0
            top = int(rng.integers(rows + 2 * border - self.size[0] + 1))
            left = int(rng.integers(columns + 2 * border - self.size[1] + 1))
            corner = top, left
        matrix = self._affine_matrix(size, rng) if any(self.affine) else None
        hflip = rng.random() < self.hflip
        vflip = self.vflip > 0 and rng.random() < self.vflip
        return Geometry(resample, box, corner, size, matrix, hflip, vflip)

    def _moved(
        self,
        image: Picture,
        geometry: Geometry,
        resample: Image.Resampling,
        ignored: int | None = None,
    ) -> np.ndarray:
        """Returns an image's pixels [H, W] or [H, W, C] after a crop, an affine map and flips.

        Args:
            resample: the filter of the crop.
            ignored: fills what lies outside of a mask; None: it is an image, which gets black.
        """
        pixels = self._cropped(image, geometry, resample)
        if geometry.matrix is not None:
            pixels = _warped(pixels, geometry.matrix, ignored)
        if geometry.hflip:
            pixels = _mirror(pixels)
        if geometry.vflip:
            pixels = pixels[::-1]
        return pixels

    def _cropped(
        self, image: Picture, geometry: Geometry, resample: Image.Resampling
    ) -> np.ndarray:
        height, width = geometry.size
        if geometry.box is not None:
            return resized_crop(image, geometry.box, (width, height), resample)
        resize = _squash if self.crop == "squash" else _cover
        pixels = resize(image, self.resize_to, resample, self.most)
        if self.crop == "simple":
            border = ((_BORDER, _BORDER), (_BORDER, _BORDER), (0, 0))
            pixels = np.pad(pixels, border[: pixels.ndim], "reflect")
        top, left = geometry.corner
        return pixels[top : top + height, left : left + width]

    def _size_of_crop(self, _box: Box) -> Size:
        """Returns the (height, width) that the box of a "random_resized" crop is resized to."""
        return self.size

    def _crop_box(self, width: int, height: int, rng: np.random.Generator) -> Box:
        """Draws the box of a "random_resized" crop from an image of ``width`` x ``height``."""
        log_ratio = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(*log_ratio))
            w = round(math.sqrt(area * ratio))
            h = round(math.sqrt(area / ratio))
            if self.crop == "random_resized_once":
                w = min(w, width)
                h = min(h, height)
            if 0 < w <= width and 0 < h <= height:
                left = int(rng.integers(width - w + 1))
                top = int(rng.integers(height - h + 1))
                return left, top, left + w, top + h
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w = min(width, max(1, round(height * ratio)))
        h = min(height, max(1, round(width / ratio)))
        left = (width - w) // 2
        top = (height - h) // 2
        return left, top, left + w, top + h

    def _affine_matrix(self, size: Size, rng: np.random.Generator) -> tuple[float, ...]:
        """Draws a rotation, a shift and a scaling of a crop of ``size``."""
        degrees, shift, scaling = self.affine
        height, width = size
        angle = math.radians(rng.uniform(-degrees, degrees))
        dx, dy = rng.uniform(-shift, shift, 2) * (width, height)
        scale = 1 / (1 + rng.uniform(-scaling, scaling))
        # Pillow maps places in the output to places in the input. So the matrix is the inverse
        # rotation and scaling about the centre, and then the shift.
        cos = math.cos(angle) * scale
        sin = math.sin(angle) * scale
        x = width / 2
        y = height / 2
        row_x = (cos, sin, x - cos * (x + dx) - sin * (y + dy))
        row_y = (-sin, cos, y + sin * (x + dx) - cos * (y + dy))
        return row_x + row_y


class EvalTransform:
    """The evaluation transform: resizes an image and crops its centre, as timm and torchvision do.

    The image is resized to IMAGE_SIZE / CROP_PCT. DATA.CROP_MODE "center" keeps the ratio
    (``covering``). "squash" resizes both sides, so at CROP_PCT 1.0 nothing of the image is cropped
    (the evaluation of Swin and ConvNeXt at 384). "short" resizes as "center" does at CROP_PCT 1.0
    and crops nothing, and "own" keeps the image's size: the pixels of two images may then differ
    in size. With a CROP_PCT above 1, the crop is larger than the resized image, and is padded with
    black. With DATA.EVAL_SIZE, nothing is cropped. Only DATA.CORRUPTION draws from the
    generator. It changes the image alone.

    Attributes:
        size: IMAGE_SIZE.
        keeps_masks: masks are neither resized nor cropped.

    Raises:
        InputError: a package that DATA.CORRUPTION needs isn't installed.
        Unreadable: from a call: as of ``TrainTransform``.
    """

    def __init__(self, config: Configuration) -> None:
        self.keeps_masks = False
        mode = config.DATA.CROP_MODE
        self.size = pair(config.DATA.IMAGE_SIZE)
        crops = mode not in WHOLE and config.DATA.EVAL_SIZE is None
        self.cropped_to = self.size if crops else None
        self.most = most_resized(config)
        self.resize_to = evaluation_size(config)
        self.resized = _RESIZES[mode]
        self.resample = RESAMPLING[config.DATA.INTERPOLATION]
        self.corruption = Corruption(config) if config.EVAL and config.DATA.CORRUPTION else None

    def __call__(self, image: Picture, rng: np.random.Generator | None = None) -> np.ndarray:
        pixels = _pixels(self._moved(image, self.resample))
        if self.corruption and rng is not None:
            return self.corruption(pixels, rng)
        return pixels

    def with_masks(
        self, image: Picture, masks: Sequence[Mask], rng: np.random.Generator
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the pixels [H, W, C] of an image, and [H, W] of each of its masks."""
        pixels = self(image, rng)
        if self.keeps_masks:
            return pixels, [np.asarray(mask.image) for mask in masks]
        return pixels, [self._moved(mask.image, NEAREST) for mask in masks]

    def _moved(self, image: Picture, resample: Image.Resampling) -> np.ndarray:
        return self.resized(image, self.resize_to, resample, self.most, self.cropped_to)


def evaluation_size(config: Configuration) -> Size:
    """Returns the (height, width) that an evaluation resizes images to, or until they cover it."""
    data = config.DATA
    if data.EVAL_SIZE is not None:
        return pair(data.EVAL_SIZE)
    if data.CROP_MODE in WHOLE:
        return pair(data.IMAGE_SIZE)
    return before_crop(pair(data.IMAGE_SIZE), data.CROP_PCT)


def before_crop(size: Size, share: float) -> Size:
    """Returns the (height, width) to resize to, so that a crop of ``size`` is ``share`` of each side.

    It is rounded down.
    """
    height, width = size
    return math.floor(height / share), math.floor(width / share)


def covering(width: int, height: int, to: Size) -> tuple[int, int]:
    """Returns the smallest (width, height) that covers ``to`` and keeps an image's ratio.

    It is rounded as in timm 1.0.31: down where ``to`` is a square, as torchvision does; otherwise
    to the nearest whole number, in double precision.

    Args:
        width, height: of the image.
        to: (height, width).
    """
    if to[0] == to[1]:
        short = min(width, height)
        return to[0] * width // short, to[0] * height // short
    ratio = min(height / to[0], width / to[1])
    return round(width / ratio), round(height / ratio)


def _cover(
    image: Picture, to: Size, resample: Image.Resampling, most: int, centre: Size | None = None
) -> np.ndarray:
    """Resizes an image until it covers ``to``; returns its ``centre`` alone if that is given."""
    width, height = covering(*image.size, to)
    if width * height > max(most, math.prod(to)):
        sides = f"{image.size[0]} x {image.size[1]} pixels"
        floats = "leaves floats, " if isinstance(image, Bands) else ""
        limit = f"DATA.MAX_PIXELS {floats}{most}"
        raise Unreadable(f"it has {sides}, resized {width} x {height}: more than {limit}")
    return resized_to(image, (width, height), resample, centre)


def _squash(
    image: Picture, to: Size, resample: Image.Resampling, _: int, centre: Size | None = None
) -> np.ndarray:
    """Resizes both sides of an image to ``to``; returns its ``centre`` alone if that is given."""
    return resized_to(image, (to[1], to[0]), resample, centre)


def _keep(
    image: Picture, _to: Size, resample: Image.Resampling, _most: int, _centre: Size | None = None
) -> np.ndarray:
    """Returns an image's pixels at its own size."""
    return resized_to(image, image.size, resample, None)


def resized_to(
    image: Picture, size: tuple[int, int], resample: Image.Resampling, centre: Size | None
) -> np.ndarray:
    """Returns an image at ``size`` (width, height), or the ``centre`` (height, width) of that.

    Where the centre is larger than the image, it is padded with zeros, which are black.
    """
    box = (0, 0, image.size[0], image.size[1])
    if centre is None:
        return resized_crop(image, box, size, resample)
    height, width = centre
    left = crop_begin(size[0], width)
    top = crop_begin(size[1], height)
    window = max(left, 0), max(top, 0), min(left + width, size[0]), min(top + height, size[1])
    pixels = resized_crop(image, box, size, resample, window)
    if pixels.shape[:2] == centre:
        return pixels
    padded = np.zeros((height, width, *pixels.shape[2:]), pixels.dtype)
    above = max(-top, 0)
    before = max(-left, 0)
    padded[above : above + pixels.shape[0], before : before + pixels.shape[1]] = pixels
    return padded


def crop_begin(side: int, crop: int) -> int:
    """Returns where a central crop of a side begins, as in torchvision: below 0 if it is longer."""
    return round((side - crop) / 2) if side >= crop else -((crop - side) // 2)


# How an evaluation resizes an image, by DATA.CROP_MODE.
_RESIZES = {"center": _cover, "squash": _squash, "short": _cover, "own": _keep}


def _mirror(pixels: np.ndarray) -> np.ndarray:
    if pixels.ndim == 2:
        return pixels[:, ::-1]
    if pixels.shape[2] == 3 and pixels.dtype == np.uint8 and images.load():
        return images.mirror(pixels)
    # Channel by channel, this takes a third of the time of all at once, or less.
    mirrored = np.empty_like(pixels)
    for channel in range(pixels.shape[2]):
        mirrored[:, :, channel] = pixels[:, ::-1, channel]
    return mirrored


def _warped(
    pixels: np.ndarray, matrix: tuple[float, ...], ignored: int | None = None
) -> np.ndarray:
    """Returns pixels [H, W] or [H, W, C] after an affine map.

    Args:
        matrix: maps places in the result to places in ``pixels``.
        ignored: fills what lies outside of a mask; None: it is an image, which gets black.
    """
    resample = Image.Resampling.BILINEAR if ignored is None else NEAREST

    def warp(values: np.ndarray) -> np.ndarray:
        image = Image.fromarray(values)
        affine = Image.Transform.AFFINE
        return np.asarray(image.transform(image.size, affine, matrix, resample, fillcolor=ignored))

    if pixels.ndim == 2 or pixels.dtype == np.uint8:
        return warp(pixels)
    # Pillow has no image of several float channels.
    channels = np.moveaxis(pixels, 2, 0)
    return np.stack([warp(np.ascontiguousarray(channel)) for channel in channels], 2)


def _pixels(pixels: np.ndarray) -> np.ndarray:
    """Returns pixels [H, W] or [H, W, C] as [H, W, C]."""
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
