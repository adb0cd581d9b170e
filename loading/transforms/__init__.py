"""Transforms from files to the model's input.

``decode`` makes an image of a file, ``image`` the augmented pixels of a sample, and ``batch`` the
model's input from the pixels of a batch.
"""

from loading.transforms.band_files import Encoded, bands_of, encoded_image
from loading.transforms.bands import Bands, image_of, most_resized, pixel_dtype, pixel_mode, visible
from loading.transforms.batch import (
    BatchTransform,
    Mixup,
    Normalize,
    gives_distributions,
    smooth_one_hot,
)
from loading.transforms.decode import Broken, EncodedImage, convert, readable, scaling_problem
from loading.transforms.erase import RandomErasing
from loading.transforms.formats import largest_file, opened_image
from loading.transforms.image import EvalTransform, Picture, Size, TrainTransform
from loading.transforms.masks import Mask, UnknownValues, check_mask_size, mask_image
from loading.transforms.views import ViewTransform, draw_views, multi_crop

__all__ = [
    "Bands",
    "BatchTransform",
    "Broken",
    "Encoded",
    "EncodedImage",
    "EvalTransform",
    "Mask",
    "Mixup",
    "Normalize",
    "Picture",
    "RandomErasing",
    "Size",
    "TrainTransform",
    "UnknownValues",
    "ViewTransform",
    "bands_of",
    "check_mask_size",
    "convert",
    "draw_views",
    "encoded_image",
    "gives_distributions",
    "image_of",
    "largest_file",
    "mask_image",
    "most_resized",
    "multi_crop",
    "opened_image",
    "pixel_dtype",
    "pixel_mode",
    "readable",
    "scaling_problem",
    "smooth_one_hot",
    "visible",
]
