"""Image -> augmented image (``image``), batch -> what the model takes (``batch``)."""

from transforms.batch import Normalize
from transforms.image import EvalTransform, TrainTransform

__all__ = ["EvalTransform", "Normalize", "TrainTransform"]
