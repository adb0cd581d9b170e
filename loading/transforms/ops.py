"""The operations that augmentation policies choose from, named and scaled as in timm: a Pillow image in, another out.

Each works on mode RGB and on mode L, where Color and Desaturate change nothing. Its ``scale`` gives the value that a
level means; without one it takes none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from configs.registry import operations

Fill = int | tuple[int, ...]  # the colour of what comes in from outside an image
# (level as a share of 10, generator, TRANSLATE's share) -> the operation's value
Scale = Callable[[float, np.random.Generator, float], float]

# ------------------------------------------------------------ what levels mean


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


def _enhanced(share: float, *_: object) -> float:
    return share * 1.8 + 0.1


def _increasing(share: float, rng: np.random.Generator, _: float) -> float:
    return max(0.1, 1.0 + _sign(rng) * share * 0.9)


# --------------------------------------------------------------- operations


@operations.register("AutoContrast")
def autocontrast(image: Image.Image, *_: object) -> Image.Image:
    return ImageOps.autocontrast(image)


@operations.register("Equalize")
def equalize(image: Image.Image, *_: object) -> Image.Image:
    return ImageOps.equalize(image)


@operations.register("Invert")
def invert(image: Image.Image, *_: object) -> Image.Image:
    return ImageOps.invert(image)


@operations.register("Rotate", scale=_signed(30.0))
def rotate(image: Image.Image, degrees: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return image.rotate(degrees, resample, fillcolor=fill)


@operations.register("Posterize", scale=lambda share, *_: _bits(share))  # TPU's: all bits go at level 0
@operations.register("PosterizeIncreasing", scale=lambda share, *_: 4 - _bits(share))
@operations.register("PosterizeOriginal", scale=lambda share, *_: 4 + _bits(share))
def posterize(image: Image.Image, bits: float, *_: object) -> Image.Image:
    if bits < 1:  # black; Pillow 13 refuses it
        return Image.new(image.mode, image.size)
    return image if bits >= 8 else ImageOps.posterize(image, int(bits))


@operations.register("Solarize", scale=lambda share, *_: _threshold(share))
@operations.register("SolarizeIncreasing", scale=lambda share, *_: 256 - _threshold(share))
def solarize(image: Image.Image, threshold: float, *_: object) -> Image.Image:
    return ImageOps.solarize(image, math.ceil(threshold))  # pixels are whole numbers


@operations.register("SolarizeAdd", scale=lambda share, *_: min(128, int(share * 110)))
def solarize_add(image: Image.Image, value: float, *_: object) -> Image.Image:
    table = [min(255, i + int(value)) if i < 128 else i for i in range(256)]
    return image.point(table * len(image.getbands()))


@operations.register("ShearX", scale=_signed(0.3))
def shear_x(image: Image.Image, factor: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return _affine(image, (1, factor, 0, 0, 1, 0), resample, fill)


@operations.register("ShearY", scale=_signed(0.3))
def shear_y(image: Image.Image, factor: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return _affine(image, (1, 0, 0, factor, 1, 0), resample, fill)


@operations.register("TranslateXRel", scale=_translated)
def translate_x_rel(image: Image.Image, share: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return translate_x(image, share * image.width, resample, fill)


@operations.register("TranslateYRel", scale=_translated)
def translate_y_rel(image: Image.Image, share: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return translate_y(image, share * image.height, resample, fill)


@operations.register("Desaturate", scale=_between(0.5, 1.0))
def desaturate(image: Image.Image, value: float, *_: object) -> Image.Image:
    return ImageEnhance.Color(image).enhance(1 - value)


@operations.register("GaussianBlur", scale=_between(0.1, 2.0))
@operations.register("GaussianBlurRand", scale=lambda share, rng, _: rng.uniform(0.1, 2.0 * min(1.0, share)))
def gaussian_blur(image: Image.Image, radius: float, *_: object) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(radius))


@operations.register("Color", scale=_enhanced)  # as of the next: a factor of 0 takes all away, 1 changes nothing
@operations.register("ColorIncreasing", scale=_increasing)
def color(image: Image.Image, factor: float, *_: object) -> Image.Image:
    return ImageEnhance.Color(image).enhance(factor)


@operations.register("Contrast", scale=_enhanced)
@operations.register("ContrastIncreasing", scale=_increasing)
def contrast(image: Image.Image, factor: float, *_: object) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(factor)


@operations.register("Brightness", scale=_enhanced)
@operations.register("BrightnessIncreasing", scale=_increasing)
def brightness(image: Image.Image, factor: float, *_: object) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(factor)


@operations.register("Sharpness", scale=_enhanced)
@operations.register("SharpnessIncreasing", scale=_increasing)
def sharpness(image: Image.Image, factor: float, *_: object) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(factor)


def translate_x(image: Image.Image, pixels: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return _affine(image, (1, 0, pixels, 0, 1, 0), resample, fill)


def translate_y(image: Image.Image, pixels: float, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, pixels), resample, fill)


def _affine(image: Image.Image, row: tuple, resample: Image.Resampling, fill: Fill) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, row, resample, fillcolor=fill)


@dataclass(frozen=True)
class Augment:
    """An operation of a policy, applied with its probability at its level.

    Args:
        name: of the operation.
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

    def __post_init__(self) -> None:
        operations.load(self.name)  # here, not at a worker's first image

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        if self.probability < 1 and rng.random() > self.probability:
            return image
        level = self.level
        if self.level_std == float("inf"):
            level = rng.uniform(0, level)
        elif self.level_std > 0:
            level = rng.normal(level, self.level_std)
        (apply, given), share = operations.load(self.name), max(0.0, min(level, self.level_max)) / 10
        value = given["scale"](share, rng, self.translate) if "scale" in given else 0.0
        resample = self.resampling[rng.integers(len(self.resampling)) if len(self.resampling) > 1 else 0]
        return apply(image, value, resample, self.fill)
