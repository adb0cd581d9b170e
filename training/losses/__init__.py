"""Training losses.

``softmax`` and ``binary`` have the losses that TRAIN.LOSS chooses. ``distillation`` adds a teacher's
loss to one of them. ``criterion`` builds the loss of a configuration.
"""

from training.losses.binary import Asymmetric, BinaryCrossEntropy, Focal, binary_cross_entropy
from training.losses.criterion import build_criterion
from training.losses.distillation import Teacher, TrainingLoss, reads_tokens
from training.losses.softmax import CrossEntropy, SoftTargetCrossEntropy, TokenLabelCrossEntropy
from training.losses.targets import Targets, class_weights, pos_weights

__all__ = [
    "Asymmetric",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Focal",
    "SoftTargetCrossEntropy",
    "Targets",
    "Teacher",
    "TokenLabelCrossEntropy",
    "TrainingLoss",
    "binary_cross_entropy",
    "build_criterion",
    "class_weights",
    "pos_weights",
    "reads_tokens",
]
