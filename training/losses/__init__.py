"""Training losses: ``softmax`` and ``binary`` by TRAIN.LOSS, ``distillation`` around them,
``criterion`` makes one.
"""

from training.losses.binary import Asymmetric, BinaryCrossEntropy, Focal, binary_cross_entropy
from training.losses.criterion import build_criterion
from training.losses.distillation import Teacher, TrainingLoss, reads_tokens
from training.losses.softmax import CrossEntropy, SoftTargetCrossEntropy, TokenLabelCrossEntropy
from training.losses.targets import Targets, class_weights, pos_weights

__all__ = [
    "Asymmetric", "BinaryCrossEntropy", "CrossEntropy", "Focal", "SoftTargetCrossEntropy", "Targets", "Teacher",
    "TokenLabelCrossEntropy", "TrainingLoss", "binary_cross_entropy", "build_criterion", "class_weights",
    "pos_weights", "reads_tokens",
]  # fmt: skip
