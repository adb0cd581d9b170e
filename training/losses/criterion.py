"""The training loss of a configuration."""

import numpy as np
from paddle import nn

from errors import InputError
from loading.label_sets import LabelSets
from loading.transforms import gives_distributions
from settings.configuration import Configuration
from settings.registry import losses
from settings.tasks import answers_of
from training.losses.binary import bce
from training.losses.distillation import TrainingLoss
from training.losses.softmax import cross_entropy, soft_target
from training.losses.targets import Targets, class_weights, pos_weights


@losses.register("auto", takes="any")
def auto(targets: Targets) -> nn.Layer:
    """Returns the cross-entropy of labels or distributions, or the binary one for multilabel."""
    if targets.several:
        return bce(targets)
    if targets.distributions:
        return soft_target(targets)
    return cross_entropy(targets)


def build_criterion(
    config: Configuration,
    labels: np.ndarray | LabelSets | None = None,
    teacher: nn.Layer | None = None,
) -> TrainingLoss:
    """Returns the training loss of a configuration, for the targets that ``BatchTransform`` makes.

    Args:
        labels: of the training set, [n] integers or several for each image. Weights that are "auto"
            are computed from them.
        teacher: given if, and only if, TRAIN.DISTILLATION_TYPE is set.

    Raises:
        InputError: keys contradict each other, the classes, or the teacher.
    """
    train = config.TRAIN
    kind = config.TRAIN.DISTILLATION_TYPE
    if kind is not None and teacher is None:
        raise InputError(
            f"TRAIN.DISTILLATION_TYPE is {kind!r} but there is no teacher; set TRAIN.TEACHER_MODEL"
        )
    if kind is None and teacher is not None:
        raise InputError(
            "TRAIN.DISTILLATION_TYPE is None but there is a teacher; set it to hard or soft"
        )
    targets = Targets(
        distributions=gives_distributions(config),
        smoothing=train.SMOOTHING,
        weight=class_weights(config, labels),
        pos_weight=pos_weights(config, labels),
        several=answers_of(config.TASK) == "sigmoid",
        cosine_scale=config.MODEL.get("HEAD_COSINE"),
    )
    return TrainingLoss(
        losses.choose(config)(targets),
        teacher,
        kind,
        alpha=train.DISTILLATION_ALPHA,
        tau=train.DISTILLATION_TAU,
    )
