"""An image as somebody looks at it: what the model sees, what it says, and where that lies in the
original.
"""

from typing import NamedTuple

import numpy as np
import paddle
from PIL import ImageOps

from errors import InputError, printable
from inference.pictures import Picture, Pictures
from inference.predictor import Prediction, Predictor
from inference.visualization.draw import Box, enlarge
from loading.transforms import Bands, EncodedImage, Normalize
from loading.transforms.image import before_crop, covering
from models.base import ImageModel
from settings.options import nearest, pair

_EXPORT = "an exported model has no layers to look into; give the checkpoint that it was made from"
_WIDEST = 800  # pixels along the longer side of an original that is drawn
# times as long as it is wide: of a longer one the middle is drawn; a squashed one is drawn wider
_LONGEST = 8


class PredictedImage(NamedTuple):
    """An image: ``base`` [H, W, 3] uint8 to draw on, where the model's part of it lies (``box``),
    and what it says.
    """

    name: str
    image: paddle.Tensor  # [1, C, H, W], normalised
    base: np.ndarray
    box: Box | None
    said: Prediction


def model_of(predictor: Predictor) -> ImageModel:
    """Returns the model.

    Raises:
        InputError: it is an exported one.
    """
    if predictor.model is None:
        raise InputError(_EXPORT)
    return predictor.model


def predict_image(predictor: Predictor, picture: Picture, original: bool = False) -> PredictedImage:
    """Returns an image that is looked at, ``original``: on the whole image, as it is in the file.

    Raises:
        RunError: it can't be read.
    """
    model_of(predictor)
    pixels = predictor.pixels(picture)
    data = predictor.config.DATA
    image = Normalize(data.IMAGENET_MEAN, data.IMAGENET_STD)(paddle.to_tensor(pixels[None]))
    name = Pictures(predictor.config, [picture]).name(0)
    [shares] = predictor.probabilities(predictor.logits(pixels[None]))
    said = predictor.prediction_of(name, shares, top=1, threshold=0)
    base, box = _original(predictor, picture) if original else (enlarge(pixels), None)
    return PredictedImage(name, image, base, box, said)


def _original(predictor: Predictor, picture: Picture) -> tuple[np.ndarray, Box]:
    """The whole image, and the part that ``EvalTransform`` cuts out of it."""
    pictures = Pictures(predictor.config, [picture])
    whole = pictures.picture(0)
    whole = whole.decode() if isinstance(whole, EncodedImage) else whole
    whole = whole.picture() if isinstance(whole, Bands) else whole
    data = predictor.config.DATA
    most = _LONGEST * min(whole.size)
    # else a hair: of its middle one sees something
    if data.CROP_MODE != "squash" and max(whole.size) > most:
        whole = ImageOps.fit(whole, (min(whole.width, most), min(whole.height, most)))
    size = whole.size
    crop = pair(data.IMAGE_SIZE)
    to = before_crop(crop, data.CROP_PCT)
    sides = to[::-1] if data.CROP_MODE == "squash" else covering(*size, to)
    whole.thumbnail((_WIDEST, _WIDEST))
    least = -(-max(whole.size) // _LONGEST)
    whole = whole.resize((max(whole.width, least), max(whole.height, least)))
    base = enlarge(np.asarray(whole))
    edges = []
    for drawn, side, cut in zip(base.shape[1::-1], sides, crop[::-1], strict=True):
        start = round((side - cut) / 2)
        edges.append((start * drawn / side, (start + cut) * drawn / side))
    (left, right), (top, bottom) = edges
    return base, (left, top, right, bottom)


def class_index(predictor: Predictor, name: str) -> int:
    """Returns the output that a class's name, or a number, means.

    Raises:
        InputError: there is none.
    """
    if name in predictor.classes:
        return predictor.classes.index(name)
    count = model_of(predictor).num_classes
    if name.isdecimal() and len(name) < 10 and int(name) < count:
        return int(name)
    known = nearest(name, predictor.classes) or f"; give a name, or a number from 0 to {count - 1}"
    raise InputError(f"-class is '{printable(name)}', which the model doesn't know{known}")
