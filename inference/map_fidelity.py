"""Compares an export's maps with the eager model's, on photographs and noise of several sizes."""

from collections.abc import Iterator

import numpy as np
import paddle
from paddle import nn
from PIL import Image

from errors import RunError
from inference.backends import Runner
from inference.fidelity import Fidelity, crops, eager
from loading.transforms import Normalize, image_of, pixel_mode
from loading.transforms.image import WHOLE
from models.paddle_inference import TOLERANCE, quiet, refusing
from settings.configuration import Configuration, pair

# In float32, the least share of pixels whose class is the model's.
LEAST_PIXELS = 0.9999
# What to do where a graph can be of one size alone.
ONE_SIZE = (
    "the images of the model differ in size: pass -o HEAD.STRIDE for windows of IMAGE_SIZE, or"
    " DATA.CROP_MODE squash and DATA.CROP_PCT 1.0"
)


def images_differ(config: Configuration) -> bool:
    """Returns whether the model of a configuration computes images of several sizes."""
    return config.HEAD.STRIDE is None and config.DATA.CROP_MODE in WHOLE


def compare_maps(
    config: Configuration, model: nn.Layer, runner: Runner, precision: str, least: float
) -> Fidelity:
    """Compares the maps of an export with those of ``model``.

    Args:
        runner: computes the export.
        precision: the precision of the export.
        least: below float32, the least share of pixels whose class is the model's.

    Raises:
        InputError: the export can't be run.
        RunError: logits aren't finite, or differ by too much.
    """
    largest = 0.0
    same = 0
    pixels = 0
    sizes = []
    for images in _images(config):
        sizes.append("{} x {}".format(*images.shape[2:]))
        expected = eager(model, images)
        with refusing("run in the exported format", f"{_advice(config)}"), quiet():
            logits = runner(images)
        if not np.isfinite(expected).all():
            raise RunError("the weights yield non-finite logits", shared=True)
        if not np.isfinite(logits).all():
            raise RunError(
                f"the logits of the exported model aren't finite in {precision}; use another"
                " -precision"
            )
        largest = max(largest, float(np.abs(logits - expected).max() / (np.ptp(expected) or 1)))
        classes = expected.argmax(1)
        same += int((logits.argmax(1) == classes).sum())
        pixels += classes.size
    kinds = f"photographs and random images of {', '.join(dict.fromkeys(sizes))} pixels"
    fidelity = Fidelity(largest, same / pixels, pixels, kinds, "maps")
    if precision == "float32" and (largest > TOLERANCE or fidelity.agreement < LEAST_PIXELS):
        raise RunError(f"the exported model differs from the eager one: {fidelity}", shared=True)
    if precision != "float32" and fidelity.agreement < least:
        raise RunError(f"{precision}: {fidelity}; expected at least {least:.0%} (-least_agreement)")
    return fidelity


def _advice(config: Configuration) -> str:
    return ONE_SIZE if images_differ(config) else "use another -format or -precision"


def _images(config: Configuration) -> Iterator[np.ndarray]:
    """Yields batches of prepared images: photographs and one of noise, of each size."""
    height, width = pair(config.DATA.IMAGE_SIZE)
    sizes = [(height, width)]
    if images_differ(config):
        # Odd ones, higher and wider.
        sizes += [(height + 13, width + 31), (height + height // 3 + 1, width)]
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    mode = pixel_mode(config)
    rng = np.random.default_rng(0)
    for size in sizes:
        pictures = []
        for crop in crops(2):
            pixels = np.asarray(crop.resize((size[1], size[0]), Image.Resampling.BICUBIC))
            if isinstance(mode, int):
                # Of images with more bands, they are red, green and blue in turn.
                pixels = pixels[:, :, np.arange(mode) % 3]
            image = np.asarray(image_of(pixels, mode))
            pictures.append(image.reshape([*size, -1]))
        photographs = normalize(paddle.to_tensor(np.stack(pictures))).numpy()
        noise = rng.normal(size=(1, *photographs.shape[1:])).astype(np.float32)
        yield np.concatenate([photographs, noise])
