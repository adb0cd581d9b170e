"""The arguments that all losses share, and class weights.

A criterion takes a model's outputs and the targets, and returns one loss per sample, [B] float32.
It isn't averaged: the engine divides once, by the true number of samples. Losses are computed in
float32 whatever the logits' type. A class weight multiplies its class's term of the sum, as in
torch with reduction="none". Nothing is divided by the sum of the weights.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import paddle

from errors import InputError
from loading.label_sets import LabelSets, every_label
from settings.configuration import Configuration


class Targets(NamedTuple):
    """The form of the targets that a loss gets, and the weights of its classes.

    Args:
        distributions: whether targets are distributions [B, K], which are smoothed already;
            otherwise they are labels [B].
        smoothing: label smoothing.
        weight: a factor per class, or None.
        pos_weight: a factor per class, or one for all, on the loss of images that have the class;
            or None.
        several: whether targets [B, K] are a yes or no for each class instead of distributions.
        cosine_scale: the factor by which logits are larger than cosines (MODEL.HEAD_COSINE); None:
            logits aren't cosines.
    """

    distributions: bool
    smoothing: float
    weight: Sequence[float] | None
    pos_weight: Sequence[float] | None = None
    several: bool = False
    cosine_scale: float | None = None


def factors(weight: Sequence[float] | None) -> paddle.Tensor | None:
    """Returns class weights as a tensor [K] float32, or None."""
    return None if weight is None else paddle.to_tensor(weight, dtype="float32")


def class_weights(
    config: Configuration, labels: np.ndarray | LabelSets | None
) -> list[float] | None:
    """Returns TRAIN.CLASS_WEIGHTS, a factor per class or None.

    "auto" means n / (number of classes present * labels of the class). The mean of these factors
    over the n training labels is 1.

    A class without a training image gets 0, so the share that label smoothing gives it is lost.
    With several classes per image it gets the factor of a class with one image: otherwise the model
    wouldn't learn to say no to it.

    Args:
        labels: of the training set, [n] integers or several for each image.

    Raises:
        InputError: there are more or fewer factors than classes, or "auto" without labels.
    """
    weights = config.TRAIN.CLASS_WEIGHTS
    classes = config.MODEL.NUM_CLASSES
    if weights == "auto":
        _, counts = _counts("TRAIN.CLASS_WEIGHTS", labels, classes)
        balanced = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
        used = (counts > 0) | isinstance(labels, LabelSets)
        return np.where(used, balanced, 0.0).tolist()
    if weights is not None and len(weights) != classes:
        raise InputError(
            f"TRAIN.CLASS_WEIGHTS has {len(weights)} values, expected {classes}, one per class of"
            " MODEL.NUM_CLASSES"
        )
    return weights


def pos_weights(config: Configuration, labels: np.ndarray | LabelSets | None) -> list[float] | None:
    """Returns TRAIN.POS_WEIGHT, torch's ``pos_weight``: a factor per class, one for all, or None.

    "auto" means the number of images without the class over that of images with it, and 1 for a
    class without images.

    Args:
        labels: as for ``class_weights``.

    Raises:
        InputError: as for ``class_weights``.
    """
    weights = config.TRAIN.POS_WEIGHT
    classes = config.MODEL.NUM_CLASSES
    if weights == "auto":
        images, counts = _counts("TRAIN.POS_WEIGHT", labels, classes)
        return np.where(counts > 0, (images - counts) / np.maximum(counts, 1), 1.0).tolist()
    if weights is not None and len(weights) not in (1, classes):
        raise InputError(
            f"TRAIN.POS_WEIGHT has {len(weights)} values, expected 1 or {classes}, one per class of"
            " MODEL.NUM_CLASSES"
        )
    return weights


def _counts(
    key: str, labels: np.ndarray | LabelSets | None, classes: int
) -> tuple[int, np.ndarray]:
    """Returns the number of images, and the number of images of each class."""
    if labels is None or not len(labels):
        raise InputError(
            f"{key} is 'auto', but there are no training labels; set a factor per class"
        )
    return len(labels), np.bincount(every_label(labels), minlength=classes)
