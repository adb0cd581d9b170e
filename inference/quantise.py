"""Post-training quantisation by NNCF, of models of ONNX and OpenVINO.

"int8" computes in whole numbers. NNCF runs the model on images of the training set, to learn the
ranges of its activations. Weights have a scale for each output channel, and activations one for
each tensor. Both are symmetric. A range goes from the smallest to the largest value of all images.
By default, NNCF takes the mean of the images' smallest and largest values. That cuts off values
which transformers and ConvNeXts need: it cost a ConvNeXt 2.4 points, and the whole range none
(docs/inference.md).

"int8_weights" and "int4_weights" store the weights of linear layers and convolutions as whole
numbers, and compute in float32. They need no images. (They are NNCF's INT8_SYM and INT4_ASYM.)
"""

import logging
import math
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

# The precisions that store whole numbers and compute in float32.
OF_WEIGHTS = ("int8_weights", "int4_weights")
# So many weights of an output channel share a scale and a zero in int4. 32 divides the channels of
# nearly all layers. Of twice as many, the digits' logits were off by a third more, and the file was
# 5 % smaller. NNCF keeps layers whose channels it doesn't divide in int8.
_GROUP = 32


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


def compress_weights(model: Any, precision: str) -> Any:
    """Returns an ONNX ``ModelProto`` or an OpenVINO ``Model`` with weights in whole numbers.

    In int4, embeddings and the last layer are in int8, as NNCF advises.

    Args:
        precision: one of OF_WEIGHTS. For ONNX, "int8_weights" alone.

    Raises:
        InputError: NNCF isn't installed, or can't compress the model.
    """
    nncf = import_extra("nncf")
    options: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_SYM}
    if precision == "int4_weights":
        # A layer that the group doesn't divide would be an error by default.
        adjusting = nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST
        )
        options = {
            "mode": nncf.CompressWeightsMode.INT4_ASYM,
            "group_size": _GROUP,
            "advanced_parameters": adjusting,
        }
    logging.getLogger("nncf").setLevel(logging.ERROR)
    with refusing("quantised", "use another -precision"), quiet():
        model = nncf.compress_weights(model, **options)
    if type(model).__name__ == "ModelProto":
        _flatten_scales(model)
    return model


def _flatten_scales(model: Any) -> None:
    """Gives the scales of an ONNX model's weights one axis.

    Of a convolution, NNCF 3.4 writes [channels, 1, 1], which ONNX Runtime refuses.
    """
    scales = {node.input[1] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    for tensor in model.graph.initializer:
        if tensor.name in scales and len(tensor.dims) > 1:
            tensor.dims[:] = [math.prod(tensor.dims)]


def check_calibration(images: np.ndarray | None) -> np.ndarray:
    """Returns the images. Raises InputError if there are none."""
    if images is None or not len(images):
        raise InputError(
            "-precision int8 needs images of the training set: give its -data_path (and -dataset)"
        )
    return images
