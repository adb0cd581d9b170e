"""Augmentation policies, with timm's names of them.

They are RandAugment, AutoAugment, TrivialAugment, 3-Augment and AugMix.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from errors import InputError
from loading.transforms.masks import Mask
from loading.transforms.ops import (
    Augment,
    Fill,
    Picture,
    PictureOrMask,
    apply,
    blend,
    posterize,
    rotate,
    shear_x,
    shear_y,
    solarize,
    translate_x,
    translate_y,
)
from settings.configuration import Configuration
from settings.registry import operations
from settings.suggestions import nearest

# What a policy draws follows from the generator alone. So an image and its mask, each with a generator
# in the same state, get the same operations.
Policy = Callable[[Any, np.random.Generator], Any]

FORMS = (
    "rand-m9-n2-p0.5-mstd0.5-mmax10-inc1-tweights (or tRotate+Invert), "
    "original-mstd0.5 (or originalr, v0, v0r, 3a), trivial, or augmix-m3-w3-d2-a1-b1-mstd0.5"
)
# A setting of a policy: its name and its value. That of "t" is a text, the others are numbers.
_SETTING = re.compile(r"(?P<text_name>t)(?P<text>[\w+]+)|(?P<name>[a-z]+)(?P<number>\d+(?:\.\d+)?)")
# The settings that are integers.
_INTEGERS = ("n", "inc", "w", "d", "b")
# The ranges of the numbers; otherwise 0 to _LARGEST.
_LEAST = {"n": 1, "mmax": 1, "w": 1, "a": 0.01}
_MOST = {"p": 1, "n": 100, "w": 100, "d": 100}
_LARGEST = 1000
_RAND = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd",
    "Color", "Contrast", "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateXRel",
    "TranslateYRel",
)  # fmt: skip
_GROWING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
_INCREASING = tuple(f"{name}Increasing" if name in _GROWING else name for name in _RAND)
_THREE_AUGMENT = ("SolarizeIncreasing", "Desaturate", "GaussianBlur")
_WEIGHTED = {
    "weights": {
        "Rotate": 3, "ShearX": 2, "ShearY": 2, "TranslateXRel": 1, "TranslateYRel": 1,
        "ColorIncreasing": 0.25, "SharpnessIncreasing": 0.25, "AutoContrast": 0.25,
        "SolarizeIncreasing": 0.05, "SolarizeAdd": 0.05, "ContrastIncreasing": 0.05,
        "BrightnessIncreasing": 0.05, "Equalize": 0.05, "PosterizeIncreasing": 0.05,
        "Invert": 0.05,
    },
    "3aw": {
        "SolarizeIncreasing": 6, "Desaturate": 6, "GaussianBlur": 6, "Rotate": 3, "ShearX": 2,
        "ShearY": 2, "PosterizeIncreasing": 1, "AutoContrast": 1, "ColorIncreasing": 1,
        "SharpnessIncreasing": 1, "ContrastIncreasing": 1, "BrightnessIncreasing": 1,
        "Equalize": 1, "Invert": 1,
    },
}  # fmt: skip
_AUGMIX = tuple(name for name in _INCREASING if name not in ("Invert", "SolarizeAdd"))
# The lines of the papers' tables, with commas between. A line has two operations, each with its
# name, its probability in tenths and its level.
_V0 = """
Equalize 8 1 ShearY 8 4, Color 4 9 Equalize 6 3, Color 4 1 Rotate 6 8, Solarize 8 3 Equalize 4 7,
Solarize 4 2 Solarize 6 2, Color 2 0 Equalize 8 8, Equalize 4 8 SolarizeAdd 8 3,
ShearX 2 9 Rotate 6 8, Color 6 1 Equalize 10 2, Invert 4 9 Rotate 6 0, Equalize 10 9 ShearY 6 3,
Color 4 7 Equalize 6 0, Posterize 4 6 AutoContrast 4 7, Solarize 6 8 Color 6 9,
Solarize 2 4 Rotate 8 9, Rotate 10 7 TranslateYRel 8 9, ShearX 0 0 Solarize 8 4,
ShearY 8 0 Color 6 4, Color 10 0 Rotate 6 2, Equalize 8 4 Equalize 0 8,
Equalize 10 4 AutoContrast 6 2, ShearY 4 7 SolarizeAdd 6 7, Posterize 8 2 Solarize 6 10,
Solarize 6 8 Equalize 6 1, Color 8 6 Rotate 4 5
"""
_ORIGINAL = """
PosterizeOriginal 4 8 Rotate 6 9, Solarize 6 5 AutoContrast 6 5, Equalize 8 8 Equalize 6 3,
PosterizeOriginal 6 7 PosterizeOriginal 6 6, Equalize 4 7 Solarize 2 4, Equalize 4 4 Rotate 8 8,
Solarize 6 3 Equalize 6 7, PosterizeOriginal 8 5 Equalize 10 2, Rotate 2 3 Solarize 6 8,
Equalize 6 8 PosterizeOriginal 4 6, Rotate 8 8 Color 4 0, Rotate 4 9 Equalize 6 2,
Equalize 0 7 Equalize 8 8, Invert 6 4 Equalize 10 8, Color 6 4 Contrast 10 8,
Rotate 8 8 Color 10 2, Color 8 8 Solarize 8 7, Sharpness 4 7 Invert 6 8, ShearX 6 5 Equalize 10 9,
Color 4 0 Equalize 6 3, Equalize 4 7 Solarize 2 4, Solarize 6 5 AutoContrast 6 5,
Invert 6 4 Equalize 10 8, Color 6 4 Contrast 10 8, Equalize 8 8 Equalize 6 3
"""
_POLICIES = {
    # The policy of TensorFlow's TPU EfficientNet.
    "v0": _V0,
    "v0r": _V0.replace("Posterize ", "PosterizeIncreasing "),
    # Cubuk et al. 2018, arXiv:1805.09501
    "original": _ORIGINAL,
    "originalr": _ORIGINAL.replace("PosterizeOriginal", "PosterizeIncreasing"),
    # The policy of DeiT-III.
    "3a": "Solarize 10 5, Desaturate 10 10, GaussianBlurRand 10 10",
}


def build_auto_augment(config: Configuration) -> Policy:
    """Returns the policy (image or mask, generator) -> the same of TRAIN.AUTO_AUGMENT.

    It behaves as in timm's ``transforms_imagenet_train``: pixels from outside have the mean colour,
    and geometric operations resample as the crop does. ``trivial`` is torchvision's
    TrivialAugmentWide (Mueller and Hutter 2021, arXiv:2103.10158), which takes the nearest pixel
    and fills with black.

    Raises:
        InputError: there is no such policy, or it hasn't such a setting.
    """
    text = config.TRAIN.AUTO_AUGMENT
    data = config.DATA
    mean = [min(255, round(255 * value)) for value in data.IMAGENET_MEAN]
    fill = mean[0] if data.IMAGE_CHANNELS == 1 else tuple(mean * (3 // len(mean)))
    chosen = config.TRAIN.INTERPOLATION or data.INTERPOLATION
    resampling = tuple(Image.Resampling[name.upper()] for name in interpolations(chosen))
    name, *settings = text.split("-")
    if name == "trivial":
        _settings(text, settings, ())
        return TrivialAugmentWide()
    if name == "rand":
        given = _settings(text, settings, ("m", "n", "p", "mstd", "mmax", "inc", "t"))
        return _rand(given, text, resampling, fill)
    if name == "augmix":
        given = _settings(text, settings, ("m", "w", "d", "a", "b", "mstd"))
        return _augmix(given, resampling, fill)
    if name in _POLICIES:
        std = float(_settings(text, settings, ("mstd",)).get("mstd", 0))
        augment = partial(
            Augment, level_std=std, level_max=10.0, resampling=resampling, fill=fill, translate=0.45
        )
        return AutoAugment([_augments(line, augment) for line in _POLICIES[name].split(",")])
    raise _unknown(text)


class RandAugment:
    """Applies ``n`` random operations (Cubuk et al. 2019, arXiv:1909.13719).

    Without ``weights``, all operations are equally likely, and one may come several times. With
    them, each comes once at most.
    """

    def __init__(
        self, augments: Sequence[Augment], n: int, weights: Sequence[float] | None = None
    ) -> None:
        self.augments = augments
        self.n = n
        self.probabilities = None if weights is None else np.asarray(weights) / np.sum(weights)

    def __call__(self, image: PictureOrMask, rng: np.random.Generator) -> Any:
        repeat = self.probabilities is None
        for index in rng.choice(len(self.augments), self.n, replace=repeat, p=self.probabilities):
            image = self.augments[index](image, rng)
        return image


class AutoAugment:
    """Applies the operations of one of its lines, each of which is equally likely."""

    def __init__(self, lines: Sequence[Sequence[Augment]]) -> None:
        self.lines = lines

    def __call__(self, image: PictureOrMask, rng: np.random.Generator) -> Any:
        for augment in self.lines[int(rng.integers(len(self.lines)))]:
            image = augment(image, rng)
        return image


class TrivialAugmentWide:
    """Applies one operation, at one of 31 magnitudes."""

    _SPACE = (
        "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness",
        "Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
    )  # fmt: skip
    _MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")

    def __call__(self, image: PictureOrMask, rng: np.random.Generator) -> Any:
        name = self._SPACE[rng.integers(len(self._SPACE))]
        step = int(rng.integers(31))
        return self.apply(image, name, step, -1 if rng.integers(2) else 1)

    def apply(self, image: PictureOrMask, name: str, step: int, sign: int, fill: int = 0) -> Any:
        """Applies an operation at one of the 31 steps of its widest range.

        The magnitudes are exact, while torchvision's are float32. At step 15 an image is shifted by
        16 pixels here, and there by 15.99, which is cut to 15.

        Args:
            step: 0 to 30.
            sign: 1 or -1, the direction.
            fill: what lies outside of an image. A mask gets the index that it ignores there.
        """
        if isinstance(image, Mask):
            if name not in self._MOVES:
                return image
            return image._replace(image=self.apply(image.image, name, step, sign, image.ignored))
        how = (Image.Resampling.NEAREST, fill)
        share = step / 30
        if name in ("ShearX", "ShearY"):
            shear = shear_x if name == "ShearX" else shear_y
            return shear(image, sign * 0.99 * share, *how)
        if name in ("TranslateX", "TranslateY"):
            translate = translate_x if name == "TranslateX" else translate_y
            return translate(image, -sign * (32 * step // 30), *how)
        if name == "Rotate":
            return rotate(image, sign * 135 * share, *how)
        if name == "Posterize":
            return posterize(image, 8 - round(share * 6))
        if name == "Solarize":
            return solarize(image, 255 - 8.5 * step)
        if name == "Identity":
            return image
        return apply(name, image, 1 + sign * 0.99 * share, *how)


class AugMix:
    """Mixes chains of operations with the image, as timm does.

    The method is that of Hendrycks et al. 2020 (arXiv:1912.02781). The chains move the image, each
    in its own way, so no mask fits the result.

    Args:
        width: number of chains.
        depth: operations of a chain; 0: a number from 1 to 3 is drawn.
        alpha: of the Dirichlet and Beta distributions of the shares.
        blended: blend each chain into the result in turn, in integers. This is faster, and a few
            grey levels different.
    """

    def __init__(
        self, augments: Sequence[Augment], width: int, depth: int, alpha: float, blended: bool
    ) -> None:
        self.augments = augments
        self.width = width
        self.depth = depth
        self.alpha = alpha
        self.blended = blended

    def __call__(self, image: Picture, rng: np.random.Generator) -> Picture:
        shares = rng.dirichlet([self.alpha] * self.width)
        share = rng.beta(self.alpha, self.alpha)
        chains = [self._chain(image, rng) for _ in shares]
        if self.blended:
            mixed = image
            # Each later chain takes away from the earlier ones. So a chain is blended in with a
            # larger share, of which its wanted one remains in the end.
            rest = 1 - share * np.append(np.cumsum(shares[::-1])[::-1][1:], 0)
            for chain, wanted, left in zip(chains, share * shares, rest, strict=True):
                mixed = blend(mixed, chain, float(wanted / left))
            return mixed
        total = sum(
            chain_share * np.asarray(chain, np.float32)
            for chain_share, chain in zip(shares, chains, strict=True)
        )
        pixels = np.clip(total, 0, 255).astype(np.uint8)
        mixed = pixels if isinstance(image, np.ndarray) else Image.fromarray(pixels)
        return blend(image, mixed, float(share))

    def _chain(self, image: Picture, rng: np.random.Generator) -> Picture:
        depth = self.depth or rng.integers(1, 4)
        for index in rng.integers(len(self.augments), size=depth):
            image = self.augments[index](image, rng)
        return image


def _rand(given: dict[str, str], text: str, resampling: tuple, fill: Fill) -> RandAugment:
    chosen = given.get("t")
    weights = None
    if chosen is None:
        names = _INCREASING if int(given.get("inc", 0)) else _RAND
    elif chosen == "3a":
        names = _THREE_AUGMENT
    elif chosen in _WEIGHTED:
        names = tuple(_WEIGHTED[chosen])
        weights = tuple(_WEIGHTED[chosen].values())
    else:
        names = chosen.split("+")
    if unknown := [name for name in names if name not in operations.names()]:
        hint = nearest(unknown[0], [*operations.names(), *_WEIGHTED])
        raise _unknown(text, f"t{chosen}", hint)
    n = int(given.get("n", 2))
    # An operation with a weight is applied once at most.
    if weights and n > len(names):
        raise _unknown(text, f"n{n}")
    std = float(given.get("mstd", 0))
    augments = [
        Augment(
            name,
            probability=float(given.get("p", 0.5)),
            level=float(given.get("m", 10)),
            level_std=std if std <= 100 else float("inf"),
            level_max=float(given.get("mmax", 10)),
            resampling=resampling,
            fill=fill,
            translate=0.45,
        )
        for name in names
    ]
    return RandAugment(augments, n, weights)


def _augmix(given: dict[str, str], resampling: tuple, fill: Fill) -> AugMix:
    augments = [
        Augment(
            name,
            probability=1.0,
            level=float(given.get("m", 3)),
            level_std=float(given.get("mstd", "inf")),
            level_max=10.0,
            resampling=resampling,
            fill=fill,
            translate=0.3,
        )
        for name in _AUGMIX
    ]
    return AugMix(
        augments,
        width=int(given.get("w", 3)),
        depth=int(given.get("d", 0)),
        alpha=float(given.get("a", 1)),
        blended=bool(int(given.get("b", 0))),
    )


def _augments(line: str, augment: Callable[..., Augment]) -> list[Augment]:
    """Returns the operations of a line of AutoAugment's tables.

    Args:
        augment: (name, probability, level) -> an operation.
    """
    words = line.split()
    return [
        augment(name, probability=int(tenths) / 10, level=float(level))
        for name, tenths, level in zip(words[::3], words[1::3], words[2::3], strict=True)
    ]


def _settings(text: str, words: list[str], known: tuple[str, ...]) -> dict[str, str]:
    """Returns the settings of a policy by name.

    ["m9", "mstd0.5"] becomes {"m": "9", "mstd": "0.5"}.

    Args:
        text: the whole policy, for the error.
        words: its settings.
        known: the names of the settings that it may have.
    """
    settings = {}
    for word in words:
        match = _SETTING.fullmatch(word)
        if not match:
            raise _unknown(text, word)
        name = match["text_name"] or match["name"]
        value = match["text"] or match["number"]
        if name not in known or name in settings or (name in _INTEGERS and not value.isdigit()):
            raise _unknown(text, word)
        if name != "t" and not _LEAST.get(name, 0) <= float(value) <= _MOST.get(name, _LARGEST):
            raise _unknown(text, word)
        settings[name] = value
    return settings


def interpolations(name: str) -> tuple[str, ...]:
    """Returns the ways of resampling to draw from, for a value of INTERPOLATION."""
    return ("bilinear", "bicubic") if name == "random" else (name,)


def _unknown(text: str, word: str = "", hint: str = "") -> InputError:
    """Returns the error about a policy, or about the setting ``word`` of it."""
    problem = f", in which {word!r} is unknown or out of range" if word else ""
    return InputError(f"TRAIN.AUTO_AUGMENT is {text!r}{problem}; expected {FORMS}{hint}")
