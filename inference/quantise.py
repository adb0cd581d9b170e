"""Post-training quantisation to int8, by NNCF. It runs a model of ONNX or OpenVINO on images of the
training set, to learn the ranges of its activations.

Weights have a scale for each output channel, and activations one for each tensor. Both are
symmetric. A range goes from the smallest to the largest value of all images. By default, NNCF takes
the mean of the images' smallest and largest values. That cuts off values which transformers and
ConvNeXts need: it cost a ConvNeXt 2.4 points, and the whole range none (docs/inference.md).
"""

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from config import default_values, get_config, with_values
from datasets import get_dataset
from errors import InputError
from inference.backends import import_extra
from loading.subsets import validation_files
from loading.transforms import EvalTransform, Normalize
from models.paddle_inference import quiet, refusing
from settings.configuration import Configuration, leaves
from settings.registry import datasets
from settings.tasks import columns_of
from training.command_line import run_file

# The keys of DATA that decide how a model's images are prepared.
_PREPARATION = (
    "IMAGE_SIZE",
    "IMAGE_CHANNELS",
    "IMAGE_DTYPE",
    "CROP_PCT",
    "CROP_MODE",
    "INTERPOLATION",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
)
# The keys of DATA that decide which images of a dataset are trained on, for all datasets. Each
# dataset has keys of its own, too.
_SELECTION = (
    "VAL_SPLIT",
    "FOLDS",
    "FOLD",
    "SPLIT_SEED",
    "SPLIT_GROUPS",
    "SKIP_BROKEN",
    "MAX_PIXELS",
)


def calibration_data(weights: Path | None, flags: Sequence[tuple[str, str]]) -> list[Any]:
    """Returns the keys that name the training set, with their values.

    They form a flat list: key, value, key, value, ...

    They are the keys of the run that saved the weights, with the values of ``flags`` in place of
    the run's. If the flags choose another dataset, the run's keys don't count.

    Raises:
        InputError: no run saved the weights, and ``flags`` names no data.
    """
    values: dict[str, Any] = dict(flags)
    file = run_file(weights) if weights else None
    run = get_config(file) if file else None
    dataset = values.get(datasets.key)
    if dataset is None:
        if run and ("DATA.DATA_PATH" not in values or _reads_folder(run.DATA.DATASET)):
            dataset = run.DATA.DATASET
        elif "DATA.DATA_PATH" in values:
            dataset = "folder"
        else:
            raise InputError(
                "-precision int8 is calibrated on a training set:"
                " give its -data_path (and -dataset)"
            )
    of_run: dict[str, Any] = {datasets.key: dataset}
    if run and dataset == run.DATA.DATASET:
        arguments = datasets.components[dataset].reads
        keys = [*map(datasets.key_of, arguments), *(f"DATA.{name}" for name in _SELECTION)]
        run_values = dict(leaves(run))
        defaults = default_values()
        of_run |= {key: run_values[key] for key in keys if run_values[key] != defaults[key]}
    return list(itertools.chain.from_iterable((of_run | values).items()))


def is_data_key(key: str) -> bool:
    """Returns whether a dotted key decides which images a training set has."""
    if key == datasets.key or key in datasets.readers():
        return True
    return key.removeprefix("DATA.") in _SELECTION


def _reads_folder(dataset: str) -> bool:
    return "data_path" in datasets.components[dataset].reads


def training_images(
    config: Configuration,
    data: Sequence[Any],
    count: int,
    seed: int = 0,
    task: str = "classification",
) -> np.ndarray:
    """Returns some images of a training set, prepared as in an evaluation: [n, C, H, W] float32.

    Args:
        config: the configuration of the model.
        data: the keys that name the training set, and their values (``calibration_data``). A
            folder of classes may be without training and validation folders.
        count: the number of images; all, if there are fewer.
        seed: decides which images are drawn.
        task: the TASK of the model. If it reads no labels, the images need none.

    Raises:
        InputError: the training set can't be read.
    """
    preparation: list[Any] = []
    for key, value in leaves(config.DATA):
        if key in _PREPARATION:
            preparation += [f"DATA.{key}", value]
    orientation = config.DATA.EXIF_ORIENTATION
    words = ["MODEL.NUM_CLASSES", "auto"] if "labels" in columns_of(task) else ["TASK", task]
    config = get_config(None, [*data, *preparation, *words])
    config = with_values(config, DATA__EXIF_ORIENTATION=orientation)
    # The run's VAL_SPLIT doesn't fit another folder that has validation images of its own.
    if config.DATA.VAL_SPLIT is not None and validation_files(config.DATA):
        config = with_values(config, DATA__VAL_SPLIT=None)
    own_task = datasets.components[config.DATA.DATASET].given.get("task")
    if own_task == "multilabel" and "labels" in columns_of(task):
        config = with_values(config, TASK="multilabel")
    dataset = get_dataset(config, "train", alone=True)
    dataset.transform = EvalTransform(config)
    dataset.erasing = None
    dataset.advice = ""
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
