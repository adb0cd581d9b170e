"""Transforms of one image: a Pillow image in, pixels [S, S, C] uint8 out.

Pixels stay uint8 until they are on the device: a quarter of the bytes through the loader's pipes.
"""

import math

import numpy as np
from PIL import Image
from yacs.config import CfgNode

RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
}


class TrainTransform:
    """Random resized crop, affine jitter and horizontal flip, all drawn from the generator that is passed in.

    The crop's distribution is torchvision's ``RandomResizedCrop`` (Szegedy et al. 2014): ten attempts at an area and a
    ratio (log-uniform), then the largest central crop of a permitted ratio.
    """

    def __init__(self, config: CfgNode) -> None:
        self.size = config.DATA.IMAGE_SIZE
        self.resample = RESAMPLING[config.DATA.INTERPOLATION]
        self.scale, self.ratio = config.TRAIN.CROP_SCALE, config.TRAIN.CROP_RATIO
        self.hflip, self.affine = config.TRAIN.HFLIP, config.TRAIN.AFFINE

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        box = self._crop_box(image.width, image.height, rng)
        image = image.crop(box).resize((self.size, self.size), self.resample)
        if any(self.affine):
            image = self._jitter(image, rng)
        if rng.random() < self.hflip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return _pixels(image)

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
