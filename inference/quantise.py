"""Post-training quantisation to int8, by NNCF. It runs a model of ONNX or OpenVINO on images of the
training set, to learn the ranges of its activations.

Weights have a scale for each output channel, and activations one for each tensor. Both are
symmetric. A range goes from the smallest to the largest value of all images. By default, NNCF takes
the mean of the images' smallest and largest values. That cuts off values which transformers and
ConvNeXts need: it cost a ConvNeXt 2.4 points, and the whole range none (docs/inference.md).
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from datasets import get_dataset
from errors import InputError
from inference.backends import import_extra
from inference.run_data import data_config
from loading.transforms import Normalize
from models.paddle_inference import quiet, refusing
from settings.configuration import Configuration


def training_images(
    config: Configuration, data: Sequence[Any], count: int, seed: int = 0
) -> np.ndarray:
    """Returns some images of a training set, prepared as in an evaluation: [n, C, H, W] float32.

    Args:
        config: the configuration of the model.
        data: the keys that name the training set, and their values (``data_keys``). A folder of
            classes may be without training and validation folders.
        count: the number of images; all, if there are fewer.
        seed: decides which images are drawn.

    Raises:
        InputError: the training set can't be read.
    """
    config = data_config(config, data)
    dataset = get_dataset(config, "train", alone=True, pixels_alone=True)
    dataset.advice = ""
    dataset = dataset.as_evaluated(config)
    indices = np.random.default_rng(seed).permutation(len(dataset))[:count]
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    images = []
    for index in indices.tolist():
        pixels, *_ = dataset[index]
        images.append(normalize(paddle.to_tensor(pixels[None])).numpy())
    return np.concatenate(images)


def quantise(model: Any, images: np.ndarray) -> Any:
    """Returns the int8 model of an ONNX ``ModelProto`` or an OpenVINO ``Model``.

    Args:
        images: [n, C, H, W] float32; they decide the ranges of the activations.

    Raises:
        InputError: NNCF isn't installed, or can't quantise the model.
    """
    nncf = import_extra("nncf")
    estimators = import_extra("nncf.quantization.range_estimator")
    batches: list[Any] = [image[None] for image in images]
    # NNCF wants the name of the input for ONNX.
    if type(model).__name__ == "ModelProto":
        batches = [{"images": batch} for batch in batches]
    logging.getLogger("nncf").setLevel(logging.ERROR)
    with refusing("quantised", "use another -precision"), quiet():
        return nncf.quantize(
            model,
            nncf.Dataset(batches),
            preset=nncf.QuantizationPreset.PERFORMANCE,
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(batches),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                activations_range_estimator_params=estimators.RangeEstimatorParametersSet.MINMAX
            ),
        )


def check_calibration(images: np.ndarray | None) -> np.ndarray:
    """Returns the images. Raises InputError if there are none."""
    if images is None or not len(images):
        raise InputError(
            "-precision int8 needs images of the training set: give its -data_path (and -dataset)"
        )
    return images
