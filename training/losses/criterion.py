"""The training loss that a configuration asks for."""

import numpy as np
from paddle import nn

from errors import InputError
from loading.label_sets import LabelSets
from loading.transforms import gives_distributions
from settings.options import Configuration
from settings.registry import losses
from training.losses.binary import bce
from training.losses.distillation import TrainingLoss
from training.losses.softmax import cross_entropy, soft_target
from training.losses.targets import Targets, class_weights, pos_weights


@losses.register("auto", takes="any")
def auto(targets: Targets) -> nn.Layer:
    """Gives the cross-entropy of what mixup, or its absence, makes of the labels. If images have
    several, it is the binary one.
    """
    kind = bce if targets.several else soft_target if targets.distributions else cross_entropy
    return kind(targets)


def build_criterion(
    config: Configuration,
    labels: np.ndarray | LabelSets | None = None,
    teacher: nn.Layer | None = None,
) -> TrainingLoss:
    """Returns the training loss of a configuration; it takes the targets that ``BatchTransform``
    gives.

    Args:
        labels: [n] integers, of the training set, or several for each image; for weights that are
            "auto".
        teacher: where TRAIN.DISTILLATION_TYPE is set.

    Raises:
        InputError: keys that don't fit each other, the classes or the teacher.
    """
    train = config.TRAIN
    kind = config.TRAIN.DISTILLATION_TYPE
    if (kind is None) != (teacher is None):
        found = (
            "no teacher; set TRAIN.TEACHER_MODEL"
            if teacher is None
            else "a teacher; set it to hard or soft"
        )
        raise InputError(f"TRAIN.DISTILLATION_TYPE is {kind!r} and there is {found}")
    weights = class_weights(config, labels), pos_weights(config, labels)
    targets = Targets(
        gives_distributions(config), train.SMOOTHING, *weights, config.TASK == "multilabel"
    )
    return TrainingLoss(
        losses.choose(config)(targets),
        teacher,
        kind,
        train.DISTILLATION_ALPHA,
        train.DISTILLATION_TAU,
    )
