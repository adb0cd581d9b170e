"""Transforms of one image: a Pillow image in, pixels [S, S, C] uint8 out.

Pixels stay uint8 until they are on the device: a quarter of the bytes through the loader's pipes.
"""

import math

import numpy as np
from PIL import Image, ImageEnhance
from yacs.config import CfgNode

from transforms.auto import build_auto_augment, interpolations

_BORDER = 4  # pixels that "simple" adds on each side
_JITTERED = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
}


class TrainTransform:
    """Crop, affine jitter, flips, TRAIN.AUTO_AUGMENT and colour jitter, all drawn from the generator that is passed in.

    CROP "random_resized" has the distribution of torchvision's ``RandomResizedCrop`` (Szegedy et al. 2014): ten
    attempts at an area and a ratio (log-uniform), then the largest central crop of a permitted ratio. "simple" is
    DeiT-III's (arXiv:2204.07118): the short side to the crop's size, 4 mirrored pixels around, a crop at random.

    Raises:
        InputError: an AUTO_AUGMENT that there isn't.
    """

    def __init__(self, config: CfgNode) -> None:
        train = config.TRAIN
        self.size, self.simple = config.DATA.IMAGE_SIZE, train.CROP == "simple"
        names = interpolations(train.INTERPOLATION or config.DATA.INTERPOLATION)
        self.resampling = [RESAMPLING[name] for name in names]
        self.scale, self.ratio = train.CROP_SCALE, train.CROP_RATIO
        self.hflip, self.vflip, self.affine = train.HFLIP, train.VFLIP, train.AFFINE
        self.augment = build_auto_augment(config) if train.AUTO_AUGMENT else None
        self.color_jitter = train.COLOR_JITTER

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        image = self._crop(image, rng)
        if any(self.affine):
            image = self._jitter(image, rng)
        if rng.random() < self.hflip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.vflip and rng.random() < self.vflip:
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        if self.augment is not None:
            image = self.augment(image, rng)
        if self.color_jitter:
            low, high = max(0.0, 1 - self.color_jitter), 1 + self.color_jitter
            factors = rng.uniform(low, high, len(_JITTERED))
            for index in rng.permutation(len(_JITTERED)):
                image = _JITTERED[index](image).enhance(factors[index])
        return _pixels(image)

    def _crop(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        resample = self.resampling[rng.integers(len(self.resampling)) if len(self.resampling) > 1 else 0]
        if not self.simple:
            box = self._crop_box(image.width, image.height, rng)
            return image.crop(box).resize((self.size, self.size), resample)
        short = min(image.size)
        image = image.resize([self.size * side // short for side in image.size], resample)
        border = ((_BORDER, _BORDER), (_BORDER, _BORDER), (0, 0))
        pixels = np.asarray(image)
        pixels = np.pad(pixels, border[: pixels.ndim], "reflect")
        top, left = (int(rng.integers(side - self.size + 1)) for side in pixels.shape[:2])
        return Image.fromarray(pixels[top : top + self.size, left : left + self.size])

    def _crop_box(self, width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
                return left, top, left + w, top + h
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h

    def draw(self, width: int, height: int, rng: np.random.Generator) -> tuple[tuple[int, int, int, int], bool, bool]:
        """Draws (the crop's box, whether it is flipped horizontally, vertically), as a call does that does no more."""
        box = self._crop_box(width, height, rng)
        return box, rng.random() < self.hflip, self.vflip > 0 and rng.random() < self.vflip

    def _jitter(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        degrees, shift, scaling = self.affine
        angle = math.radians(rng.uniform(-degrees, degrees))
        dx, dy = rng.uniform(-shift, shift, 2) * self.size
        scale = 1 / (1 + rng.uniform(-scaling, scaling))
        # Pillow maps output to input: the inverse rotation and scaling about the centre, then the shift.
        cos, sin, centre = math.cos(angle) * scale, math.sin(angle) * scale, self.size / 2
        row_x = (cos, sin, centre - cos * (centre + dx) - sin * (centre + dy))
        row_y = (-sin, cos, centre + sin * (centre + dx) - cos * (centre + dy))
        return image.transform(image.size, Image.Transform.AFFINE, row_x + row_y, Image.Resampling.BILINEAR)


class EvalTransform:
    """Resizes the short side to IMAGE_SIZE / CROP_PCT and cuts the centre, as timm and torchvision do."""

    def __init__(self, config: CfgNode) -> None:
        self.size = config.DATA.IMAGE_SIZE
        self.resize_to = math.floor(config.DATA.IMAGE_SIZE / config.DATA.CROP_PCT)
        self.resample = RESAMPLING[config.DATA.INTERPOLATION]

    def __call__(self, image: Image.Image, rng: np.random.Generator | None = None) -> np.ndarray:
        short = min(image.size)
        if short != self.resize_to:
            width, height = (self.resize_to * side // short for side in image.size)
            image = image.resize((width, height), self.resample)
        left, top = round((image.width - self.size) / 2), round((image.height - self.size) / 2)
        return _pixels(image.crop((left, top, left + self.size, top + self.size)))


def _pixels(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
