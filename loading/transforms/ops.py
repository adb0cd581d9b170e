"""The operations that augmentation policies choose from, with timm's names and scales.

An operation takes an image and a value, and returns another image. It works on modes RGB and L; on
L, Color and Desaturate change nothing. ``scale`` computes the value for a level of a policy. An
operation without ``scale`` takes no value.

An image is Pillow's. An operation that is registered with ``arrays=True`` also takes an array of
pixels, [H, W] or [H, W, 3] uint8, for which ``ops.images`` computes the same bits. One that is
registered with ``moves=True`` moves pixels. It moves masks, too; the others leave masks as they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from loading.transforms.masks import Mask
from ops import images
from settings.registry import operations

Picture = Image.Image | np.ndarray
PictureOrMask = Picture | Mask
_NEAREST = Image.Resampling.NEAREST
# The colour of pixels from outside of an image.
Fill = int | tuple[int, ...]
# (level / 10, generator, the largest share of a translation) -> the operation's value.
Scale = Callable[[float, np.random.Generator, float], float]

# ------------------------------------------------------------ what levels mean


def _either_sign(most: float) -> Scale:
    """Returns a scale of values up to ``most``, of either sign."""
    return lambda share, rng, _: _sign(rng) * share * most


def _translation(share: float, rng: np.random.Generator, translate: float) -> float:
    return _sign(rng) * share * translate


def _sign(rng: np.random.Generator) -> int:
    return -1 if rng.random() > 0.5 else 1


def _bits(share: float) -> int:
    return int(share * 4)


def _threshold(share: float) -> int:
    return min(256, int(share * 256))


def _between(low: float, high: float) -> Scale:
    return lambda share, *_: max(low, min(high, low + (high - low) * share))


def _up_to(share: float, rng: np.random.Generator, _: float) -> float:
    most = 2.0 * min(1.0, share)
    return rng.uniform(min(0.1, most), max(0.1, most))


def _enhancement(share: float, *_: object) -> float:
    return share * 1.8 + 0.1


def _increasing(share: float, rng: np.random.Generator, _: float) -> float:
    return max(0.1, 1.0 + _sign(rng) * share * 0.9)


# --------------------------------------------------------------- operations

_RAMP = np.arange(256, dtype=np.uint8)


@operations.register("AutoContrast", arrays=True)
def autocontrast(image: Picture, *_: object) -> Picture:
    if not isinstance(image, np.ndarray):
        return ImageOps.autocontrast(image)
    tables = np.tile(_RAMP, (3, 1))
    for table, counts in zip(tables, images.histogram(image), strict=False):
        low, high = np.flatnonzero(counts)[[0, -1]].tolist()
        if low < high:
            scale = 255.0 / (high - low)
            table[:] = np.clip((np.arange(256) * scale + -low * scale).astype(int), 0, 255)
    return images.apply_tables(image, tables[: image[0, 0].size])


@operations.register("Equalize", arrays=True)
def equalize(image: Picture, *_: object) -> Picture:
    if not isinstance(image, np.ndarray):
        return ImageOps.equalize(image)
    tables = np.tile(_RAMP, (3, 1))
    for table, counts in zip(tables, images.histogram(image), strict=False):
        step = int(counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
        if step:
            table[:] = np.minimum((step // 2 + np.cumsum(counts) - counts) // step, 255)
    return images.apply_tables(image, tables[: image[0, 0].size])


@operations.register("Invert", arrays=True)
def invert(image: Picture, *_: object) -> Picture:
    return ~image if isinstance(image, np.ndarray) else ImageOps.invert(image)


@operations.register("Rotate", scale=_either_sign(30.0), arrays=True, moves=True)
def rotate(image: Picture, degrees: float, resample: Image.Resampling, fill: Fill) -> Picture:
    if not isinstance(image, np.ndarray):
        return image.rotate(degrees, resample, fillcolor=fill)
    angle = math.radians(degrees % 360.0)
    height, width = image.shape[:2]
    # Pillow's matrix maps places in the result to places in the image, about the centre.
    cos = round(math.cos(-angle), 15)
    sin = round(math.sin(-angle), 15)
    x = cos * (-width / 2) + sin * (-height / 2)
    y = -sin * (-width / 2) + cos * (-height / 2)
    return _affine(image, (cos, sin, x + width / 2, -sin, cos, y + height / 2), resample, fill)


# As in TensorFlow's TPU models, "Posterize" keeps no bit at level 0.
@operations.register("Posterize", scale=lambda share, *_: _bits(share), arrays=True)
@operations.register("PosterizeIncreasing", scale=lambda share, *_: 4 - _bits(share), arrays=True)
@operations.register("PosterizeOriginal", scale=lambda share, *_: 4 + _bits(share), arrays=True)
def posterize(image: Picture, bits: float, *_: object) -> Picture:
    if isinstance(image, np.ndarray):
        return image & np.uint8(256 - (256 >> max(0, int(bits))) if bits < 8 else 255)
    # The image is black then. Pillow 13 refuses this value.
    if bits < 1:
        return Image.new(image.mode, image.size)
    return image if bits >= 8 else ImageOps.posterize(image, int(bits))


@operations.register("Solarize", scale=lambda share, *_: _threshold(share), arrays=True)
@operations.register(
    "SolarizeIncreasing", scale=lambda share, *_: 256 - _threshold(share), arrays=True
)
def solarize(image: Picture, threshold: float, *_: object) -> Picture:
    if isinstance(image, np.ndarray):
        return images.apply_tables(image, np.where(threshold > _RAMP, _RAMP, ~_RAMP))
    # Pixels are whole numbers, so this is the same threshold.
    return ImageOps.solarize(image, math.ceil(threshold))


@operations.register("SolarizeAdd", scale=lambda share, *_: min(128, int(share * 110)), arrays=True)
def solarize_add(image: Picture, value: float, *_: object) -> Picture:
    table = [min(255, i + int(value)) if i < 128 else i for i in range(256)]
    if isinstance(image, np.ndarray):
        return images.apply_tables(image, np.array(table, np.uint8))
    return image.point(table * len(image.getbands()))


@operations.register("ShearX", scale=_either_sign(0.3), arrays=True, moves=True)
def shear_x(image: Picture, factor: float, resample: Image.Resampling, fill: Fill) -> Picture:
    return _affine(image, (1, factor, 0, 0, 1, 0), resample, fill)


@operations.register("ShearY", scale=_either_sign(0.3), arrays=True, moves=True)
def shear_y(image: Picture, factor: float, resample: Image.Resampling, fill: Fill) -> Picture:
    return _affine(image, (1, 0, 0, factor, 1, 0), resample, fill)


@operations.register("TranslateXRel", scale=_translation, arrays=True, moves=True)
def translate_x_rel(
    image: Picture, share: float, resample: Image.Resampling, fill: Fill
) -> Picture:
    width = image.shape[1] if isinstance(image, np.ndarray) else image.width
    return translate_x(image, share * width, resample, fill)


@operations.register("TranslateYRel", scale=_translation, arrays=True, moves=True)
def translate_y_rel(
    image: Picture, share: float, resample: Image.Resampling, fill: Fill
) -> Picture:
    height = image.shape[0] if isinstance(image, np.ndarray) else image.height
    return translate_y(image, share * height, resample, fill)


@operations.register("Desaturate", scale=_between(0.5, 1.0), arrays=True)
def desaturate(image: Picture, value: float, *_: object) -> Picture:
    return color(image, 1 - value)


@operations.register("GaussianBlur", scale=_between(0.1, 2.0), arrays=True)
@operations.register("GaussianBlurRand", scale=_up_to, arrays=True)
def gaussian_blur(image: Picture, radius: float, *_: object) -> Picture:
    if isinstance(image, np.ndarray):
        return images.blur(image, radius)
    return image.filter(ImageFilter.GaussianBlur(radius))


# Of this and the next three operations, a factor of 0 removes the property, and 1 changes nothing.
@operations.register("Color", scale=_enhancement, arrays=True)
@operations.register("ColorIncreasing", scale=_increasing, arrays=True)
def color(image: Picture, factor: float, *_: object) -> Picture:
    if isinstance(image, np.ndarray):
        return images.adjust_color(image, factor)
    return ImageEnhance.Color(image).enhance(factor)


@operations.register("Contrast", scale=_enhancement, arrays=True)
@operations.register("ContrastIncreasing", scale=_increasing, arrays=True)
def contrast(image: Picture, factor: float, *_: object) -> Picture:
    if isinstance(image, np.ndarray):
        grey = np.full(256, int(images.mean_grey(image) + 0.5), np.uint8)
        return images.apply_tables(image, images.blend(grey, _RAMP, factor))
    return ImageEnhance.Contrast(image).enhance(factor)


@operations.register("Brightness", scale=_enhancement, arrays=True)
@operations.register("BrightnessIncreasing", scale=_increasing, arrays=True)
def brightness(image: Picture, factor: float, *_: object) -> Picture:
    if isinstance(image, np.ndarray):
        return images.apply_tables(image, images.blend(np.zeros_like(_RAMP), _RAMP, factor))
    return ImageEnhance.Brightness(image).enhance(factor)


@operations.register("Sharpness", scale=_enhancement, arrays=True)
@operations.register("SharpnessIncreasing", scale=_increasing, arrays=True)
def sharpness(image: Picture, factor: float, *_: object) -> Picture:
    if isinstance(image, np.ndarray):
        return images.sharpen(image, factor)
    return ImageEnhance.Sharpness(image).enhance(factor)


def hue(image: Picture, shift: float) -> Picture:
    """Returns an image whose hues are moved, as by torchvision's ``adjust_hue``; grey ones stay.

    Args:
        shift: a share of the circle of hues, -0.5 to 0.5. It is cut off to a whole number of
            Pillow's 256 hues.
    """
    steps = int(shift * 255)
    if isinstance(image, np.ndarray):
        return images.shift_hue(image, steps)
    if image.mode == "L":
        return image
    hues, saturation, value = image.convert("HSV").split()
    hues = hues.point([(level + steps) % 256 for level in range(256)])
    return Image.merge("HSV", (hues, saturation, value)).convert(image.mode)


def translate_x(image: Picture, pixels: float, resample: Image.Resampling, fill: Fill) -> Picture:
    return _affine(image, (1, 0, pixels, 0, 1, 0), resample, fill)


def translate_y(image: Picture, pixels: float, resample: Image.Resampling, fill: Fill) -> Picture:
    return _affine(image, (1, 0, 0, 0, 1, pixels), resample, fill)


def _affine(image: Picture, matrix: tuple, resample: Image.Resampling, fill: Fill) -> Picture:
    if not isinstance(image, np.ndarray):
        return image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=fill)
    if resample in images.FILTERS:
        return images.affine(image, matrix, resample, fill)
    return np.asarray(_affine(Image.fromarray(image), matrix, resample, fill))


def blend(first: Picture, second: Picture, share: float) -> Picture:
    """Returns the mix of two images, with ``share`` of the second one."""
    if isinstance(first, Image.Image) and isinstance(second, Image.Image):
        return Image.blend(first, second, share)
    return images.blend(np.asarray(first), np.asarray(second), share)


def apply(
    name: str, image: PictureOrMask, value: float, resample: Image.Resampling, fill: Fill
) -> Any:
    """Returns an image, or a mask, after the operation that is registered as ``name``.

    A mask is moved by its nearest pixels, and filled with the index that it ignores.
    """
    operation, given = operations.load(name)
    if isinstance(image, Mask):
        if not given.get("moves"):
            return image
        return image._replace(image=operation(image.image, value, _NEAREST, image.ignored))
    if isinstance(image, np.ndarray) and not given.get("arrays"):
        return np.asarray(operation(Image.fromarray(image), value, resample, fill))
    return operation(image, value, resample, fill)


@dataclass(frozen=True)
class Augment:
    """An operation of a policy, with its probability and level.

    Args:
        name: of the operation.
        probability: that it is applied.
        level: 0 to 10.
        level_std: the standard deviation of a normal distribution around ``level``; infinite: the
            level is uniform in 0..level.
        level_max: the upper bound of the drawn level.
        resampling: of the geometric operations; if there are several, one is drawn.
        fill: the colour of pixels from outside of the image.
        translate: the largest shift of TranslateXRel and TranslateYRel, as a share of the image.
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
        # An unknown name is reported now, and not at a worker's first image.
        operations.load(self.name)

    def __call__(self, image: PictureOrMask, rng: np.random.Generator) -> Any:
        # What is drawn doesn't depend on the image.
        if self.probability < 1 and rng.random() > self.probability:
            return image
        level = self.level
        if self.level_std == float("inf"):
            level = rng.uniform(0, level)
        elif self.level_std > 0:
            level = rng.normal(level, self.level_std)
        share = max(0.0, min(level, self.level_max)) / 10
        _, given = operations.load(self.name)
        value = given["scale"](share, rng, self.translate) if "scale" in given else 0.0
        resample = self.resampling[0]
        if len(self.resampling) > 1:
            resample = self.resampling[rng.integers(len(self.resampling))]
        return apply(self.name, image, value, resample, self.fill)
