"""Post-training quantisation by NNCF, of models of ONNX and OpenVINO.

"int8" computes in whole numbers. NNCF runs the model on images of the training set, to learn the
ranges of its activations. Weights have a scale for each output channel, and activations one for
each tensor. Both are symmetric. A range goes from the smallest to the largest value of all images.
By default, NNCF takes the mean of the images' smallest and largest values. That cuts off values
which transformers and ConvNeXts need: it cost a ConvNeXt 2.4 points, and the whole range none
(docs/evidence/performance.md).

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
        precision: one of OF_WEIGHTS. "int4_weights" takes an ONNX model of ``formats.with_int4``.

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
    if type(model).__name__ != "ModelProto" and (names := _of_pooled(model)):
        options["ignored_scope"] = nncf.IgnoredScope(names=names)
    logging.getLogger("nncf").setLevel(logging.ERROR)
    with refusing("quantised", "use another -precision"), quiet():
        model = nncf.compress_weights(model, **options)
    if type(model).__name__ == "ModelProto":
        _repair_scales(model)
    return model


def _of_pooled(model: Any) -> list[str]:
    """Returns the names of an OpenVINO model's convolutions of vectors that were reshaped to
    [B, C, 1, 1], as those of squeeze-and-excitation are.

    OpenVINO 2026.4 fails to make products of them if their weights are whole numbers.
    """
    return [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() == "Convolution"
        and node.input_value(0).get_node().get_type_name() in ("Reshape", "Unsqueeze")
    ]


def _repair_scales(model: Any) -> None:
    """Makes the scales of an ONNX model's weights such as ONNX Runtime takes.

    Of a convolution, NNCF 3.4 writes [channels, 1, 1] instead of [channels]. Of a stack of matrices
    [n, inputs, channels] it writes [n, channels], for which DequantizeLinear has one axis too few.
    There a product takes its place.
    """
    onnx = import_extra("onnx")
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for place, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type != "DequantizeLinear" or len(tensors[node.input[1]].dims) < 2:
            continue
        # int4 has a scale for each block of weights, as ONNX describes it.
        if any(attribute.name == "block_size" and attribute.i for attribute in node.attribute):
            continue
        # The scale and, of weights that aren't symmetric, the zero.
        of_channels = [tensors[name] for name in node.input[1:]]
        sides = list(tensors[node.input[0]].dims)
        [axis] = [
            attribute.i % len(sides) for attribute in node.attribute if attribute.name == "axis"
        ]
        if math.prod(of_channels[0].dims) == sides[axis]:
            for tensor in of_channels:
                tensor.dims[:] = [sides[axis]]
            continue
        # The sums of a product go over the other one of the last two axes.
        summed = {len(sides) - 1: len(sides) - 2, len(sides) - 2: len(sides) - 1}[axis]
        for tensor in of_channels:
            tensor.dims[:] = [1 if each == summed else side for each, side in enumerate(sides)]
        real = [f"{node.output[0]}_real_{number}" for number in range(3)]
        casts = {name: real[number] for number, name in enumerate([node.input[0], *node.input[2:]])}
        nodes = [
            onnx.helper.make_node("Cast", [name], [to], to=onnx.TensorProto.FLOAT)
            for name, to in casts.items()
        ]
        values = real[0]
        if len(casts) > 1:
            nodes.append(onnx.helper.make_node("Sub", real[:2], real[2:]))
            values = real[2]
        nodes.append(onnx.helper.make_node("Mul", [values, node.input[1]], list(node.output)))
        del model.graph.node[place]
        for added in reversed(nodes):
            model.graph.node.insert(place, added)


def check_calibration(images: np.ndarray | None) -> np.ndarray:
    """Returns the images. Raises InputError if there are none."""
    if images is None or not len(images):
        raise InputError(
            "-precision int8 needs images of the training set: pass its -data_path (and -dataset)"
        )
    return images
