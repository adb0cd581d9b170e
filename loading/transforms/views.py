"""Several augmented views of one image, for tasks that compare them (DINO's multi-crop).

``multi_crop`` makes the views' transforms from a task's keys. The dataset draws view v of an image
from a generator of its own (``ImageDataset.views``).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from errors import InputError
from loading.transforms.decode import EncodedImage
from loading.transforms.image import Picture as LoadedImage
from loading.transforms.image import Size, TrainTransform
from loading.transforms.ops import (
    Picture,
    brightness,
    color,
    contrast,
    gaussian_blur,
    hue,
    solarize,
)
from ops import images
from settings.configuration import Configuration, pair
from settings.needs import float_pixels
from settings.values import quoted

# The colour jitter of BYOL and DINO: its probability, and the strength of each operation.
_JITTER_PROBABILITY = 0.8
_STRENGTHS = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
_OPERATIONS: dict[str, Callable] = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": color,
    "hue": hue,
}
# The operations that have a meaning for grey images.
_OF_GREY = ("brightness", "contrast")
# The standard deviation of the blur, in pixels.
_RADIUS = 0.1, 2.0
# Pixels from this level on are inverted.
_SOLARIZED_FROM = 128


class Colors(NamedTuple):
    """How the colours of a view are changed.

    Attributes:
        jitter: the operations in their order, each with its factor; of "hue" the shift.
        grey: whether the colours are removed.
        radius: the standard deviation of the blur, in pixels; None: no blur.
        solarize: whether bright pixels are inverted.
    """

    jitter: tuple[tuple[str, float], ...] = ()
    grey: bool = False
    radius: float | None = None
    solarize: bool = False


class ViewTransform(TrainTransform):
    """One view: a random box that is resized to ``size``, then flips, TRAIN.AFFINE and colours.

    The box is drawn as TRAIN.CROP "random_resized" draws it, with TRAIN.CROP_RATIO. The colours are
    changed as in BYOL (Grill et al. 2020, arXiv:2006.07733, appendix B) and DINO (Caron et al.
    2021, arXiv:2104.14294): jitter of brightness, contrast, saturation and hue in random order with
    probability 0.8, then grey, Gaussian blur and solarization. Of grey images, hue and saturation
    stay as they are. What is switched off draws nothing.

    Args:
        size: (height, width) of the view in pixels.
        scale: the smallest and the largest share of the image's area that the box has.
        color: a factor on the strengths of the jitter (0.4, 0.4, 0.2 and 0.1); 0: no jitter.
        grey: probability that the colours are removed.
        blur: probability of a Gaussian blur, whose deviation is uniform in 0.1 to 2 pixels.
        solarize: probability that pixels of 128 and more are inverted.
    """

    def __init__(
        self,
        config: Configuration,
        size: Size,
        scale: Sequence[float],
        *,
        color: float = 0.0,
        grey: float = 0.0,
        blur: float = 0.0,
        solarize: float = 0.0,
    ) -> None:
        super().__init__(config)
        self.size = size
        self.crop = "random_resized"
        self.scale = tuple(scale)
        self.augment = None
        self.is_grey = config.DATA.IMAGE_CHANNELS == 1
        self.strengths = {
            name: color * strength
            for name, strength in _STRENGTHS.items()
            if color and (not self.is_grey or name in _OF_GREY)
        }
        self.grey = 0.0 if self.is_grey else grey
        self.blur = blur
        self.solarize = solarize

    def draw_colors(self, rng: np.random.Generator) -> Colors:
        """Draws the changes of a view's colours, after its geometry (``draw``)."""
        jitter: tuple[tuple[str, float], ...] = ()
        if self.strengths and rng.random() < _JITTER_PROBABILITY:
            factors = [self._factor(name, rng) for name in self.strengths]
            jitter = tuple(factors[place] for place in rng.permutation(len(factors)))
        is_grey = self.grey > 0 and rng.random() < self.grey
        radius = None
        if self.blur > 0 and rng.random() < self.blur:
            radius = rng.uniform(*_RADIUS)
        is_solarized = self.solarize > 0 and rng.random() < self.solarize
        return Colors(jitter, is_grey, radius, is_solarized)

    def _factor(self, name: str, rng: np.random.Generator) -> tuple[str, float]:
        strength = self.strengths[name]
        if name == "hue":
            return name, rng.uniform(-strength, strength)
        return name, rng.uniform(max(0.0, 1 - strength), 1 + strength)

    def _recolor(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        colors = self.draw_colors(rng)
        return pixels if colors == Colors() else recolor(pixels, colors)


def recolor(pixels: np.ndarray, colors: Colors) -> np.ndarray:
    """Returns pixels [H, W] or [H, W, 3] uint8 with their colours changed."""
    image: Picture = pixels if images.load() else Image.fromarray(pixels)
    for name, factor in colors.jitter:
        image = _OPERATIONS[name](image, factor)
    if colors.grey:
        image = color(image, 0.0)
    if colors.radius is not None:
        image = gaussian_blur(image, colors.radius)
    if colors.solarize:
        image = solarize(image, _SOLARIZED_FROM)
    return np.asarray(image)


def draw_views(
    image: LoadedImage,
    views: Mapping[str, Sequence[TrainTransform]],
    generator: Callable[[int], np.random.Generator],
) -> dict[str, np.ndarray]:
    """Returns the views of an image by their column, each [V, H, W, C]. It is decoded once.

    Args:
        views: by column; those of a column have one size.
        generator: returns the generator of a view by its number, which counts over all columns.
    """
    # For a single view, a JPEG may be decoded at a smaller size.
    if isinstance(image, EncodedImage) and sum(map(len, views.values())) > 1:
        image.keep_pixels()
    numbers = itertools.count()
    return {
        name: np.stack([view(image, generator(next(numbers))) for view in transforms])
        for name, transforms in views.items()
    }


def multi_crop(
    config: Configuration,
    *,
    global_scale: Sequence[float],
    local_views: int = 0,
    local_size: int = 96,
    local_scale: Sequence[float] = (0.05, 0.4),
    color: float = 1.0,
    grey: float = 0.2,
    blur: Sequence[float] = (1.0, 0.1, 0.5),
    solarize: float = 0.2,
) -> dict[str, list[ViewTransform]]:
    """Returns the views of each image, by the column that holds them (``ImageDataset.views``).

    "pixels" has two global views of IMAGE_SIZE, and "local" has the local ones, if there are any.

    Args:
        global_scale, local_scale: shares of the image's area, the smallest and the largest.
        local_views: the number of local views.
        local_size: their side in pixels.
        color, grey: as of ``ViewTransform``, for all views.
        blur: its probability in the first global view, in the second one, and in the local ones.
        solarize: its probability in the second global view. The others aren't solarized.

    Raises:
        InputError: a scale isn't one, or colours are to be changed in images that aren't of 8 bits.
            The message names the key of METHOD.
    """
    for key, scale in (("GLOBAL_SCALE", global_scale), ("LOCAL_SCALE", local_scale)):
        low, high = scale
        if not 1e-6 <= low <= high <= 1:
            raise InputError(
                f"METHOD.{key} is {quoted(list(scale))}, expected 0 < low <= high <= 1, from 1e-6 on"
            )
    if float_pixels(config.DATA):
        _refuse_colors({"COLOR": color, "GREY": grey, "BLUR": blur, "SOLARIZE": solarize}, config)
    first, second, local = blur
    size = pair(config.DATA.IMAGE_SIZE)
    shared = {"color": color, "grey": grey}
    views = {
        "pixels": [
            ViewTransform(config, size, global_scale, blur=first, **shared),
            ViewTransform(config, size, global_scale, blur=second, solarize=solarize, **shared),
        ]
    }
    if local_views:
        view = ViewTransform(config, pair(local_size), local_scale, blur=local, **shared)
        views["local"] = [view] * local_views
    return views


def _refuse_colors(values: dict[str, float | Sequence[float]], config: Configuration) -> None:
    """Raises InputError for the first key of METHOD that changes colours.

    Args:
        values: by key.
    """
    channels = config.DATA.IMAGE_CHANNELS
    for key, value in values.items():
        if np.any(value):
            found = np.asarray(value).tolist()
            expected = np.zeros_like(value).tolist()
            raise InputError(
                f"METHOD.{key} is {quoted(found)}, expected {expected} with IMAGE_CHANNELS"
                f" {channels} of float32: it supports 8-bit colour and grey images only"
            )
