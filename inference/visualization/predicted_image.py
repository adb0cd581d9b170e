"""Predicts an image, and prepares the picture of it on which maps are drawn."""

from typing import NamedTuple

import numpy as np
import paddle
from PIL import ImageOps

from errors import InputError, printable
from inference.calibration.choice import BEST
from inference.pictures import Picture, Pictures
from inference.predictor import Prediction, Predictor
from inference.visualization.draw import Box
from loading.transforms import Bands, EncodedImage, Normalize
from loading.transforms.image import before_crop, covering, crop_begin
from models.base import ImageModel
from settings.configuration import pair
from settings.suggestions import nearest
from training.pages.panels import enlarge

# The pixels along the longer side of an original that is drawn.
_WIDEST = 800
# The largest ratio of the sides of an original. Of a longer image, the middle is drawn; if the
# model sees it squashed, all of it is, but wider.
_LARGEST_RATIO = 8


class PredictedImage(NamedTuple):
    """An image with its prediction.

    Attributes:
        name: the image's path or number.
        image: the model's input, [1, C, H, W], normalised.
        base: the picture to draw on, [H, W, 3] uint8: the input, or the original image.
        box: the part of ``base`` that the model sees; None: all of it.
        prediction: the most probable class; of a model without classes: none.
    """

    name: str
    image: paddle.Tensor
    base: np.ndarray
    box: Box | None
    prediction: Prediction


def model_of(predictor: Predictor) -> ImageModel:
    """Returns a predictor's model.

    Raises:
        InputError: the predictor runs an export, which has no layers.
    """
    if predictor.model is None:
        raise InputError(
            "an exported model has no accessible layers; use the checkpoint that it was made from"
        )
    return predictor.model


def predict_image(predictor: Predictor, picture: Picture, original: bool = False) -> PredictedImage:
    """Predicts an image, and returns it with its prediction.

    Args:
        original: whether to draw on the original image instead of the model's input.

    Raises:
        RunError: the image can't be read.
    """
    model_of(predictor)
    pixels = predictor.pixels(picture)
    data = predictor.config.DATA
    image = Normalize(data.IMAGENET_MEAN, data.IMAGENET_STD)(paddle.to_tensor(pixels[None]))
    name = Pictures(predictor.config, [picture]).name(0)
    prediction = Prediction(name, [], [], [])
    if predictor.has_classes:
        [probabilities] = predictor.probabilities(predictor.logits(pixels[None]))
        prediction = predictor.prediction_of(name, probabilities, BEST)
    base, box = _original(predictor, picture) if original else (enlarge(pixels), None)
    return PredictedImage(name, image, base, box, prediction)


def _original(predictor: Predictor, picture: Picture) -> tuple[np.ndarray, Box]:
    """Returns the whole image, and the box that ``EvalTransform`` crops from it."""
    whole = Pictures(predictor.config, [picture]).picture(0)
    if isinstance(whole, EncodedImage):
        whole = whole.decode()
    if isinstance(whole, Bands):
        whole = whole.picture()
    data = predictor.config.DATA
    is_squashed = data.CROP_MODE == "squash"
    longest = _LARGEST_RATIO * min(whole.size)
    # The picture of a very long image would be only a few pixels wide, so its middle is drawn.
    if not is_squashed and max(whole.size) > longest:
        whole = ImageOps.fit(whole, (min(whole.width, longest), min(whole.height, longest)))

    # The size to which the transform resizes the image before it crops.
    crop_height, crop_width = pair(data.IMAGE_SIZE)
    target = before_crop((crop_height, crop_width), data.CROP_PCT)
    width, height = target[::-1] if is_squashed else covering(*whole.size, target)

    whole.thumbnail((_WIDEST, _WIDEST))
    shortest = -(-max(whole.size) // _LARGEST_RATIO)
    whole = whole.resize((max(whole.width, shortest), max(whole.height, shortest)))
    base = enlarge(np.asarray(whole))

    # The crop's edges, from pixels of the resized image to pixels of the picture.
    left = crop_begin(width, crop_width)
    top = crop_begin(height, crop_height)
    drawn_height, drawn_width = base.shape[:2]
    box = (
        left * drawn_width / width,
        top * drawn_height / height,
        (left + crop_width) * drawn_width / width,
        (top + crop_height) * drawn_height / height,
    )
    return base, box


def class_index(predictor: Predictor, name: str) -> int:
    """Returns the index of the output of a class.

    Args:
        name: the class's name, or the index as a text.

    Raises:
        InputError: the model has no such class.
    """
    if name in predictor.classes:
        return predictor.classes.index(name)
    count = model_of(predictor).num_classes
    if name.isdecimal() and len(name) < 10 and int(name) < count:
        return int(name)
    known = nearest(name, predictor.classes) or f"; give a name, or a number from 0 to {count - 1}"
    raise InputError(f"-class is '{printable(name)}', which the model doesn't know{known}")
