"""Writes augment.npz and policies.json: what timm's and torchvision's augmentation does (timm
1.0.31, torchvision 0.28.0, Pillow 13.0.0).

PYTHONPATH=.:tests python tests/golden/make_augment.py
"""

import json
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from timm.data import auto_augment as aa
from torchvision.transforms import autoaugment as tv

from golden.formula import LEVELS, TRIVIAL_STEPS, picture

FILL = (124, 116, 104)


def operations() -> dict[str, np.ndarray]:
    """Each operation at each level, in both directions: where timm draws a sign, it gets ours."""
    found = {}
    names = [name for name in aa.NAME_TO_OP if name not in ("TranslateX", "TranslateY")]
    posterize = ImageOps.posterize  # Pillow 13 refuses 0 bits, which made an image black before
    ImageOps.posterize = (
        lambda image, bits: posterize(image, bits) if bits else Image.new(image.mode, image.size)
    )
    random.uniform = lambda low, high: low + (high - low) / 4
    hparams = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    for sign, value in (("+", 0.0), ("-", 0.9)):
        random.random = lambda value=value: value
        for name in names:
            for level in LEVELS:
                operation = aa.AugmentOp(name, prob=1.0, magnitude=level, hparams=hparams)
                found[f"{name}/{level}/{sign}"] = np.asarray(operation(picture()))
    return found


def levels() -> dict[str, list[list[float]]]:
    """The value that each level from 0 to 10 means, for each operation that takes one, in both
    directions.
    """
    found, random.uniform = {}, lambda low, high: low + (high - low) / 4
    for name, scale in aa.LEVEL_TO_ARG.items():
        if scale is not None and name not in ("TranslateX", "TranslateY", "GaussianBlurRand"):
            found[name] = []
            for value in (0.0, 0.9):
                random.random = lambda value=value: value
                found[name].append([scale(level, {})[0] for level in range(11)])
    return found


def trivial() -> dict[str, np.ndarray]:
    found = {}
    for name, (magnitudes, signed) in tv.TrivialAugmentWide()._augmentation_space(31).items():
        for step in TRIVIAL_STEPS:
            magnitude = float(magnitudes[step]) if magnitudes.ndim else 0.0
            for sign in (1, -1):
                value = magnitude * sign if signed else magnitude
                done = tv._apply_op(picture(), name, value, tv.InterpolationMode.NEAREST, None)
                found[f"trivial/{name}/{step}/{sign}"] = np.asarray(done)
    return found


def augmix() -> dict[str, np.ndarray]:
    operations = [
        aa.AugmentOp(name, 1.0, 5) for name in ("AutoContrast", "Equalize", "PosterizeIncreasing")
    ]
    weights = np.float32([0.2, 0.5, 0.3])
    share = np.float32(0.6)
    found = {}
    for blended in (False, True):
        chosen = iter(operations)
        np.random.choice = lambda *_, chosen=chosen, **__: [next(chosen)]
        mixer = aa.AugMixAugment(operations, width=3, depth=1, blended=blended)
        mixed = (mixer._apply_blended if blended else mixer._apply_basic)(picture(), weights, share)
        found[f"augmix/{blended}"] = np.asarray(mixed)
    return found


def described(operations: list) -> list:
    return [
        [op.name, op.prob, op.magnitude, op.magnitude_std, op.magnitude_max] for op in operations
    ]


def policies() -> dict:
    found = {"levels": levels()}
    for text in ("original", "originalr", "v0", "v0r-mstd0.5", "3a"):
        found[text] = [described(line) for line in aa.auto_augment_transform(text, {}).policy]
    for text in (
        "rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.7", "rand-m5-mstd101-mmax8", "rand-tweights-inc1", "rand-t3aw",
        "rand-t3a",
    ):  # fmt: skip
        policy = aa.rand_augment_transform(text, {})
        weights = None if policy.choice_weights is None else policy.choice_weights.tolist()
        found[text] = [described(policy.ops), policy.num_layers, weights]
    for text in ("augmix-m3-w3", "augmix-m5-w4-d2-b1-mstd0.5-a2"):
        policy = aa.augment_and_mix_transform(text, {})
        found[text] = [
            described(policy.ops),
            policy.width,
            policy.depth,
            policy.alpha,
            policy.blended,
        ]
    return found


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "policies.json").write_text(json.dumps(policies()).replace("Infinity", '"inf"') + "\n")
    pictures = {**trivial(), **operations(), **augmix()}
    np.savez_compressed(
        here / "augment.npz", names=list(pictures), pixels=np.stack(list(pictures.values()))
    )
