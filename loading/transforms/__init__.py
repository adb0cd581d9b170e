"""File -> pixels (``decode``), image -> augmented image (``image``), batch -> what the model takes (``batch``)."""

from loading.transforms.batch import BatchTransform, Mixup, Normalize, gives_distributions, smooth_one_hot
from loading.transforms.decode import Broken, EncodedImage, converted, readable, unscaled
from loading.transforms.erase import RandomErasing
from loading.transforms.formats import largest_file, opened_image
from loading.transforms.image import EvalTransform, TrainTransform

__all__ = [
    "BatchTransform",
    "Broken",
    "EncodedImage",
    "EvalTransform",
    "Mixup",
    "Normalize",
    "RandomErasing",
    "TrainTransform",
    "converted",
    "gives_distributions",
    "largest_file",
    "opened_image",
    "readable",
    "smooth_one_hot",
    "unscaled",
]
