"""Where a model looks, as a picture."""

import io
from itertools import pairwise

import numpy as np
from PIL import Image

from inference import visualization
from inference.predictor import Predictor
from loading.transforms import visible

_CELLS = 7  # per side
_SIDE = 448  # pixels along the longer side of the picture
_COLOUR = np.array([230, 30, 60])


def overlay(predictor: Predictor, data: bytes) -> bytes:
    """Returns a PNG: the image as the model sees it, in grey, and over it where the model looks.

    Attention, or Grad-CAM of a model without any; of an exported model, which shows neither,
    ``occlusion``.

    Raises:
        RunError: the image can't be read.
    """
    return (
        occlusion(predictor, data)
        if predictor.model is None
        else visualization.overlay(predictor, data)
    )


def occlusion(predictor: Predictor, data: bytes) -> bytes:
    """Returns a PNG: the image in grey, and red where the first class depends on it.

    Red is how far the class's probability falls where a grey square hides the image (Zeiler and
    Fergus 2014, arXiv:1311.2901).
    """
    pixels = predictor.pixels(data)
    rows, columns = (
        np.linspace(0, side, min(_CELLS, side) + 1).astype(int) for side in pixels.shape[:2]
    )
    hidden = [pixels]
    grey = 127 if pixels.dtype == np.uint8 else pixels.mean((0, 1))
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            hidden.append(pixels.copy())
            hidden[-1][top:bottom, left:right] = grey
    most = predictor.config.DATA.BATCH_SIZE_EVAL
    parts = [np.stack(hidden[start : start + most]) for start in range(0, len(hidden), most)]
    shares = np.concatenate([predictor.probabilities(predictor.logits(part)) for part in parts])
    falls = np.maximum(0, shares[0].max() - shares[1:, shares[0].argmax()])
    return _overlay_png(pixels, falls.reshape(len(rows) - 1, -1) / max(falls.max(), 1e-12))


def _overlay_png(pixels: np.ndarray, heat: np.ndarray) -> bytes:
    """The PNG of pixels [H, W, C] under heat [m, n] of 0 to 1."""
    times = max(1.0, _SIDE / max(pixels.shape[:2]))
    side = round(times * pixels.shape[1]), round(times * pixels.shape[0])
    pixels = pixels if pixels.dtype == np.uint8 else visible(pixels)
    grey = pixels.shape[2] == 1
    image = Image.fromarray(pixels[:, :, 0] if grey else pixels).convert("L").convert("RGB")
    image = image.resize(side, Image.Resampling.BICUBIC)
    weight = Image.fromarray((255 * heat).astype(np.uint8)).resize(side, Image.Resampling.BICUBIC)
    weight = 0.7 * np.asarray(weight, np.float32)[..., None] / 255
    blended = np.asarray(image) * (1 - weight) + _COLOUR * weight
    file = io.BytesIO()
    Image.fromarray(blended.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()
