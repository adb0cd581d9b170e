"""Pictures of where a model looks."""

import io
from itertools import pairwise

import numpy as np
from PIL import Image

from inference import visualization
from inference.predictor import Predictor
from loading.transforms import visible

# Squares along a side that ``occlusion`` hides, one after the other.
_CELLS = 7
# Pixels of the longer side of the picture.
_SIDE = 448
_COLOUR = np.array([230, 30, 60])


def overlay(predictor: Predictor, data: bytes) -> bytes:
    """Returns a PNG of the image as the model sees it, in grey, coloured where the model looks.

    The colour shows the model's attention, or Grad-CAM if the model has no attention. An exported
    model gives neither, so its picture is that of ``occlusion``.

    Raises:
        RunError: the image can't be read.
    """
    if predictor.model is None:
        return occlusion(predictor, data)
    return visualization.overlay(predictor, data)


def occlusion(predictor: Predictor, data: bytes) -> bytes:
    """Returns a PNG of the image in grey, red where the predicted class depends on it.

    Red is how much the class's probability falls when a grey square hides that part of the image
    (Zeiler and Fergus 2014, arXiv:1311.2901).
    """
    pixels = predictor.pixels(data)
    rows, columns = (
        np.linspace(0, side, min(_CELLS, side) + 1).astype(int) for side in pixels.shape[:2]
    )
    # The image itself, then the image with each square hidden.
    images = [pixels]
    grey = 127 if pixels.dtype == np.uint8 else pixels.mean((0, 1))
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            image = pixels.copy()
            image[top:bottom, left:right] = grey
            images.append(image)
    size = predictor.config.DATA.BATCH_SIZE_EVAL
    batches = [np.stack(images[start : start + size]) for start in range(0, len(images), size)]
    probabilities = np.concatenate(
        [predictor.probabilities(predictor.logits(batch)) for batch in batches]
    )
    predicted = probabilities[0].argmax()
    falls = np.maximum(0, probabilities[0, predicted] - probabilities[1:, predicted])
    return _overlay_png(pixels, falls.reshape(len(rows) - 1, -1) / max(falls.max(), 1e-12))


def _overlay_png(pixels: np.ndarray, heat: np.ndarray) -> bytes:
    """Returns the PNG of pixels [H, W, C] under heat [m, n], which is from 0 to 1."""
    scale = max(1.0, _SIDE / max(pixels.shape[:2]))
    size = round(scale * pixels.shape[1]), round(scale * pixels.shape[0])
    if pixels.dtype != np.uint8:
        pixels = visible(pixels)
    if pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    image = Image.fromarray(pixels).convert("L").convert("RGB")
    image = image.resize(size, Image.Resampling.BICUBIC)
    weight = Image.fromarray((255 * heat).astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    weight = 0.7 * np.asarray(weight, np.float32)[..., None] / 255
    blended = np.asarray(image) * (1 - weight) + _COLOUR * weight
    file = io.BytesIO()
    Image.fromarray(blended.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()
