"""What every criterion is built from, and what its class weights are.

A criterion takes what a model gives and what it should give in, and gives one loss per sample [B]
(float32). It is never averaged: the engine divides once, by the true number of samples. Whatever
the logits' type, losses are computed in float32. Class weights are a factor per class on its term
of the sum, a label's too (as torch's reduction="none"); nothing is divided by their sum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import paddle

from errors import InputError
from loading.label_sets import LabelSets, every_label
from settings.options import Configuration


class Targets(NamedTuple):
    """What every loss gets.

    Args:
        distributions: targets are distributions [B, K], which are smoothed; else labels [B].
        smoothing: of labels.
        weight: a factor per class, or None.
        pos_weight: a factor per class on what its images lose, not those of other classes; one for
            all; or None.
        several: targets [B, K] are a yes or no for each class, not distributions.
    """

    distributions: bool
    smoothing: float
    weight: Sequence[float] | None
    pos_weight: Sequence[float] | None = None
    several: bool = False


def factors(weight: Sequence[float] | None) -> paddle.Tensor | None:
    """Returns class weights as a loss takes them."""
    return None if weight is None else paddle.to_tensor(weight, dtype="float32")


def class_weights(
    config: Configuration, labels: np.ndarray | LabelSets | None
) -> list[float] | None:
    """Returns a factor per class, or None without TRAIN.CLASS_WEIGHTS.

    "auto" gives n / (number of classes present * labels of the class), whose mean over the n
    training labels is 1. A class without a training image gets 0: distributions lose what smoothing
    puts on it. Where images have several classes it gets what a class of one image has: nothing
    else would teach it to say no.

    Args:
        labels: [n] integers, of the training set, or several for each image.

    Raises:
        InputError: not as many factors as classes, or "auto" without labels.
    """
    given = config.TRAIN.CLASS_WEIGHTS
    classes = config.MODEL.NUM_CLASSES
    if given == "auto":
        _, counts = _counts("TRAIN.CLASS_WEIGHTS", labels, classes)
        found = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return np.where((counts > 0) | isinstance(labels, LabelSets), found, 0.0).tolist()
    if given is not None and len(given) != classes:
        raise _unfitting(
            "TRAIN.CLASS_WEIGHTS", given, f"{classes}, one per class of MODEL.NUM_CLASSES"
        )
    return given


def pos_weights(config: Configuration, labels: np.ndarray | LabelSets | None) -> list[float] | None:
    """Returns torch's ``pos_weight``, a factor per class or one for all, or None without
    TRAIN.POS_WEIGHT.

    "auto" gives the images without the class over those with it; 1 where there are none with it.

    Args:
        labels: as of ``class_weights``.

    Raises:
        InputError: as ``class_weights``.
    """
    given = config.TRAIN.POS_WEIGHT
    classes = config.MODEL.NUM_CLASSES
    if given == "auto":
        images, counts = _counts("TRAIN.POS_WEIGHT", labels, classes)
        return np.where(counts > 0, (images - counts) / np.maximum(counts, 1), 1.0).tolist()
    if given is not None and len(given) not in (1, classes):
        raise _unfitting(
            "TRAIN.POS_WEIGHT", given, f"1 or {classes}, one per class of MODEL.NUM_CLASSES"
        )
    return given


def _counts(
    key: str, labels: np.ndarray | LabelSets | None, classes: int
) -> tuple[int, np.ndarray]:
    """How many images there are, and how many each class has."""
    if labels is None or not len(labels):
        raise InputError(
            f"{key} is 'auto' and there are no training labels; give a factor per class"
        )
    return len(labels), np.bincount(every_label(labels), minlength=classes)


def _unfitting(key: str, found: list[float], expected: str) -> InputError:
    return InputError(f"{key} has {len(found)} values, expected {expected}")
