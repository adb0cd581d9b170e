"""The operations that augmentation policies choose from, named and scaled as in timm: a Pillow image in, another out.

Each works on mode RGB and on mode L, where Color and Desaturate change nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

Fill = int | tuple[int, ...]  # the colour of what comes in from outside an image
# (image, value, resampling, fill) -> image
Apply = Callable[[Image.Image, float, Image.Resampling, Fill], Image.Image]
# (level as a share of 10, generator, TRANSLATE's share) -> the operation's value
Scale = Callable[[float, np.random.Generator, float], float]


class Operation(NamedTuple):
    """What to do, and the value that a level means (None: it takes none)."""

    apply: Apply
    scale: Scale | None = None


def shear_x(image: Image.Image, factor: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return _affine(image, (1, factor, 0, 0, 1, 0), resample, fill)


def shear_y(image: Image.Image, factor: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return _affine(image, (1, 0, 0, factor, 1, 0), resample, fill)


def translate_x(image: Image.Image, pixels: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return _affine(image, (1, 0, pixels, 0, 1, 0), resample, fill)


def translate_y(image: Image.Image, pixels: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, pixels), resample, fill)


def rotate(image: Image.Image, degrees: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return image.rotate(degrees, resample, fillcolor=fill)


def solarize(image: Image.Image, threshold: float, *_: object) -> Image.Image:
    return ImageOps.solarize(image, math.ceil(threshold))  # pixels are whole numbers


def solarize_add(image: Image.Image, value: float, *_: object) -> Image.Image:
    table = [min(255, i + int(value)) if i < 128 else i for i in range(256)]
    return image.point(table * len(image.getbands()))


def posterize(image: Image.Image, bits: float, *_: object) -> Image.Image:
    if bits < 1:  # black; Pillow 13 refuses it
        return Image.new(image.mode, image.size)
    return image if bits >= 8 else ImageOps.posterize(image, int(bits))


def desaturate(image: Image.Image, value: float, *_: object) -> Image.Image:
    return ImageEnhance.Color(image).enhance(1 - value)


def gaussian_blur(image: Image.Image, radius: float, *_: object) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(radius))


def enhance(kind: type) -> Apply:
    """Returns an operation of ``PIL.ImageEnhance``: a factor of 0 takes all away, 1 changes nothing."""
    return lambda image, factor, *_: kind(image).enhance(factor)


def _affine(image: Image.Image, row: tuple, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, row, resample, fillcolor=fill)


def _signed(most: float) -> Scale:
    """Up to ``most``, in one direction or the other."""
    return lambda share, rng, _: _sign(rng) * share * most


def _translated(share: float, rng: np.random.Generator, translate: float) -> float:
    return _sign(rng) * share * translate


def _sign(rng: np.random.Generator) -> int:
    return -1 if rng.random() > 0.5 else 1


def _bits(share: float) -> int:
    return int(share * 4)


def _threshold(share: float) -> int:
    return min(256, int(share * 256))


def _between(low: float, high: float) -> Scale:
    return lambda share, *_: max(low, min(high, low + (high - low) * share))


_ENHANCED = {
    "Color": enhance(ImageEnhance.Color),
    "Contrast": enhance(ImageEnhance.Contrast),
    "Brightness": enhance(ImageEnhance.Brightness),
    "Sharpness": enhance(ImageEnhance.Sharpness),
}
OPERATIONS: dict[str, Operation] = {
    "AutoContrast": Operation(lambda image, *_: ImageOps.autocontrast(image)),
    "Equalize": Operation(lambda image, *_: ImageOps.equalize(image)),
    "Invert": Operation(lambda image, *_: ImageOps.invert(image)),
    "Rotate": Operation(rotate, _signed(30.0)),
    "Posterize": Operation(posterize, lambda share, *_: _bits(share)),  # TPU's: all bits go at level 0
    "PosterizeIncreasing": Operation(posterize, lambda share, *_: 4 - _bits(share)),
    "PosterizeOriginal": Operation(posterize, lambda share, *_: 4 + _bits(share)),
    "Solarize": Operation(solarize, lambda share, *_: _threshold(share)),
    "SolarizeIncreasing": Operation(solarize, lambda share, *_: 256 - _threshold(share)),
    "SolarizeAdd": Operation(solarize_add, lambda share, *_: min(128, int(share * 110))),
    "ShearX": Operation(shear_x, _signed(0.3)),
    "ShearY": Operation(shear_y, _signed(0.3)),
    "TranslateXRel": Operation(lambda image, value, *how: translate_x(image, value * image.width, *how), _translated),
    "TranslateYRel": Operation(lambda image, value, *how: translate_y(image, value * image.height, *how), _translated),
    "Desaturate": Operation(desaturate, _between(0.5, 1.0)),
    "GaussianBlur": Operation(gaussian_blur, _between(0.1, 2.0)),
    "GaussianBlurRand": Operation(gaussian_blur, lambda share, rng, _: rng.uniform(0.1, 2.0 * min(1.0, share))),
    **{name: Operation(apply, lambda share, *_: share * 1.8 + 0.1) for name, apply in _ENHANCED.items()},
    **{
        f"{name}Increasing": Operation(apply, lambda share, rng, _: max(0.1, 1.0 + _sign(rng) * share * 0.9))
        for name, apply in _ENHANCED.items()
    },
}


@dataclass(frozen=True)
class Augment:
    """An operation of a policy, applied with its probability at its level.

    Args:
        name: one of OPERATIONS.
        probability: of being applied.
        level: 0 to 10.
        level_std: standard deviation of the level around ``level``; infinite: uniform in 0..level.
        level_max: the drawn level's upper bound.
        resampling: of the geometric operations; of several one is drawn.
        fill: the colour from outside.
        translate: TranslateXRel's and TranslateYRel's largest share of the image.
    """

    name: str
    probability: float
    level: float
    level_std: float
    level_max: float
    resampling: tuple[Image.Resampling, ...]
    fill: Fill
    translate: float

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        if self.probability < 1 and rng.random() > self.probability:
            return image
        level = self.level
        if self.level_std == float("inf"):
            level = rng.uniform(0, level)
        elif self.level_std > 0:
            level = rng.normal(level, self.level_std)
        operation, share = OPERATIONS[self.name], max(0.0, min(level, self.level_max)) / 10
        value = operation.scale(share, rng, self.translate) if operation.scale else 0.0
        resample = self.resampling[rng.integers(len(self.resampling)) if len(self.resampling) > 1 else 0]
        return operation.apply(image, value, resample, self.fill)
