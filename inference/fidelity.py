"""Compares an export's logits with the eager model's, on pictures and noise, in batches of several
sizes.
"""

import functools
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle
from paddle import nn
from PIL import Image

from errors import RunError, reading
from inference.backends import Runner
from loading.transforms import EvalTransform, Normalize, image_of, pixel_mode
from models.paddle_inference import TOLERANCE, quiet, refusing
from ops.device import exact_float32
from settings.configuration import Configuration

# Below float32, the share of pictures on which the most probable class has to be the model's.
LEAST_AGREEMENT = 0.8
# The numbers of images to compare: crops of photographs, images of noise, and, if the export was
# calibrated, images of the training set.
_PICTURES = 16
_NOISE = 4
_CALIBRATION = 64
# The sizes of the first batches. They differ, to detect an export for a single batch size.
_BATCHES = (1, 3, 8)


class Fidelity(NamedTuple):
    """How far an export's outputs are from the model's.

    Attributes:
        difference: the largest difference, divided by the range of the model's outputs.
        agreement: the share of images on which the most probable class is the model's; of
            features, the mean cosine similarity to the model's.
        images: the number of images that were compared, or of pixels.
        kinds: a text that says which images they are.
        outputs: what was compared: "logits", "probabilities", "features" or "maps".
    """

    difference: float
    agreement: float
    images: int
    kinds: str
    outputs: str = "logits"

    def __str__(self) -> str:
        agreement = (
            f"the best class is the same on {round(self.agreement * self.images)} of {self.images}"
        )
        if self.outputs == "features":
            agreement = f"their cosine similarity is {self.agreement:.3f} on average"
        if self.outputs == "maps":
            agreement = f"the class is the same in {100 * self.agreement:.4f} % of the pixels"
        return (
            f"on {self.kinds}, {self.outputs} differ from the eager ones by {self.difference:.1e} of their range;"
            f" {agreement}"
        )


def compare_with_eager(
    config: Configuration,
    model: nn.Layer,
    runner: Runner,
    precision: str,
    calibration: np.ndarray | None = None,
    least: float = LEAST_AGREEMENT,
    outputs: str = "logits",
) -> Fidelity:
    """Compares an export with ``model``.

    The images are those that calibrated the export, or crops of two photographs. In float32, images
    of noise are compared, too.

    Args:
        runner: computes the export.
        precision: the precision of the export.
        calibration: the images that calibrated it, [n, C, H, W] float32, if there are any.
        least: below float32, the least agreement (``Fidelity``).
        outputs: what the model returns.

    Raises:
        InputError: the export can't be run.
        RunError: logits aren't finite, or differ by too much.
    """
    if calibration is not None:
        images = calibration[:_CALIBRATION]
        kinds = "images of the training set"
    else:
        images = photographs(config)
        kinds = "crops of photographs"
    if precision == "float32":
        noise = np.random.default_rng(0).normal(size=(_NOISE, *images.shape[1:])).astype(np.float32)
        images = np.concatenate([images, noise])
        kinds = f"{kinds} and random images"
    expected = in_batches(functools.partial(eager, model), images)
    with refusing("run in the exported format", "use another -format or -precision"), quiet():
        logits = in_batches(runner, images)
    if not np.isfinite(expected).all():
        raise RunError("the weights yield non-finite logits", shared=True)
    if not np.isfinite(logits).all():
        raise RunError(
            f"the logits of the exported model aren't finite in {precision}; use another -precision"
        )
    difference = float(np.abs(logits - expected).max() / (np.ptp(expected) or 1))
    if outputs == "features":
        agreement = _mean_cosine(logits, expected)
    else:
        agreement = float((logits.argmax(1) == expected.argmax(1)).mean())
    fidelity = Fidelity(difference, agreement, len(images), kinds, outputs)
    if precision == "float32" and difference > TOLERANCE:
        raise RunError(
            "the logits of the exported model differ from those of the eager model by"
            f" {difference:.1e} of their range",
            shared=True,
        )
    if precision != "float32" and agreement < least:
        raise RunError(f"{precision}: {fidelity}; expected at least {least:.0%} (-least_agreement)")
    return fidelity


def _mean_cosine(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean cosine similarity of the rows of two arrays [N, D]."""
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(1) / np.maximum(lengths, 1e-12)).mean())


def in_batches(runner: Runner, images: np.ndarray) -> np.ndarray:
    """Returns the logits of all images, computed in batches of 1, 3 and then 8."""
    logits = []
    start = 0
    while start < len(images):
        size = _BATCHES[min(len(logits), len(_BATCHES) - 1)]
        logits.append(runner(np.ascontiguousarray(images[start : start + size])))
        start += size
    return np.concatenate(logits)


def eager(model: nn.Layer, images: np.ndarray) -> np.ndarray:
    with paddle.no_grad(), exact_float32():
        return model(paddle.to_tensor(images)).numpy()


def photographs(config: Configuration, count: int = _PICTURES, seed: int = 0) -> np.ndarray:
    """Returns crops of scikit-learn's two photographs, of many sizes, prepared: [n, C, S, S]
    float32.
    """
    transform = EvalTransform(config)
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    mode = pixel_mode(config)
    images = map(np.asarray, crops(count, seed))
    # Of images with more bands, they are red, green and blue in turn.
    if isinstance(mode, int):
        images = (image[:, :, np.arange(mode) % 3] for image in images)
    pixels = np.stack([transform(image_of(image, mode)) for image in images])
    return normalize(paddle.to_tensor(pixels)).numpy()


def crops(count: int, seed: int = 0) -> list[Image.Image]:
    """Returns crops of scikit-learn's two photographs, of any sides from 40 to 427 pixels, RGB."""
    images = []
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        photograph = _photograph(("china.jpg", "flower.jpg")[index % 2])
        width = int(rng.integers(40, 428))
        height = int(rng.integers(40, 428))
        left = int(rng.integers(0, photograph.width - width + 1))
        top = int(rng.integers(0, photograph.height - height + 1))
        images.append(photograph.crop((left, top, left + width, top + height)))
    return images


@functools.cache
def _photograph(name: str) -> Image.Image:
    """Returns one of scikit-learn's photographs, RGB, which is decoded once."""
    # The package isn't imported, because that would take a second.
    spec = importlib.util.find_spec("sklearn")
    packages = spec.submodule_search_locations if spec else None
    file = Path(packages[0] if packages else "") / "datasets" / "images" / name
    with reading(file, "a photograph from scikit-learn"), Image.open(file) as photograph:
        return photograph.convert("RGB")
