"""Zero-shot classifiers: image towers whose classifier is computed from class names.

Such a classifier is an ordinary model with a neck (``models.layers.neck``). Every command takes it,
and training can start from it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from config import with_values
from errors import InputError
from inference.text.encoder import TextEncoder
from models.text_pretrained import has_text_tower
from settings.configuration import Configuration
from weights.layout import sublayer


def is_zero_shot(path: str | Path, classes: Sequence[str] | None) -> bool:
    """Returns whether classes are given for weights of images and texts, which have none of their
    own.

    Raises:
        InputError: the weights can't be read.
    """
    return bool(classes) and has_text_tower(path)


def with_text_classes(config: Configuration, encoder: TextEncoder, count: int) -> Configuration:
    """Returns the configuration of an image tower with a classifier of ``count`` classes, which
    reads what the text tower's embeddings are compared with.

    Raises:
        InputError: the architecture has no neck.
    """
    model = config.MODEL
    if "NECK_NORM" not in model:
        raise InputError(
            f"MODEL.TYPE is {model.TYPE}, which has no NECK; zero-shot classes need a ViT of"
            " CLIP or"
            " SigLIP"
        )
    # SigLIP's pooling makes the embedding itself.
    projected = None if model.GLOBAL_POOL == "map" else encoder.tower.arguments.out_dim
    return with_values(
        config,
        "the text tower",
        MODEL__NUM_CLASSES=count,
        MODEL__NECK_DIM=projected,
        MODEL__NECK_NORM=True,
    )


def set_classifier(model: Any, weights: np.ndarray, biases: np.ndarray) -> None:
    """Sets the classifier of a model.

    Args:
        weights: [D, K].
        biases: [K].

    Raises:
        InputError: the model's embeddings have another number of channels.
    """
    [name] = model.classifier_names()
    classifier = sublayer(model, name)
    if list(classifier.weight.shape) != list(weights.shape):
        raise InputError(
            f"the texts have {weights.shape[0]} channels, the images {classifier.weight.shape[0]}:"
            " their towers belong to different models"
        )
    with paddle.no_grad():
        classifier.weight.set_value(weights)
        classifier.bias.set_value(biases)
