"""Training losses.

``softmax``, ``binary`` and ``metric`` have the losses that TRAIN.LOSS chooses. ``distillation`` adds
a teacher's loss to one of them. ``criterion`` builds the loss of a configuration.
"""

from training.losses.binary import Asymmetric, BinaryCrossEntropy, Focal, binary_cross_entropy
from training.losses.criterion import build_criterion
from training.losses.distillation import Teacher, TrainingLoss, reads_tokens
from training.losses.metric import ArcFace, ProxyAnchor, Triplet, reads_embeddings
from training.losses.softmax import CrossEntropy, SoftTargetCrossEntropy, TokenLabelCrossEntropy
from training.losses.targets import Targets, class_weights, pos_weights

__all__ = [
    "ArcFace",
    "Asymmetric",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Focal",
    "ProxyAnchor",
    "SoftTargetCrossEntropy",
    "Targets",
    "Teacher",
    "TokenLabelCrossEntropy",
    "TrainingLoss",
    "Triplet",
    "binary_cross_entropy",
    "build_criterion",
    "class_weights",
    "pos_weights",
    "reads_embeddings",
    "reads_tokens",
]
