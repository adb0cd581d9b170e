"""Post-training quantisation to int8: NNCF watches a model of ONNX or OpenVINO on images of the
training set.

Weights get a scale per output channel, activations one per tensor; both are symmetric. The ranges
are the least and largest values that were seen. NNCF would take the mean over the images of each
one's least and largest. That cuts off what transformers and ConvNeXts compute with. It cost a
ConvNeXt 2.4 points, the extremes none (docs/inference.md).
"""

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
from settings.options import Configuration, leaves
from settings.registry import datasets
from training.command_line import run_file

_PREPARED = (
    "IMAGE_SIZE",
    "IMAGE_CHANNELS",
    "CROP_PCT",
    "CROP_MODE",
    "INTERPOLATION",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
)
_PREPARED += ("IMAGE_DTYPE",)
# Keys that decide which images of any dataset are trained on. A dataset has keys of its own
# besides.
_PARTS = ("VAL_SPLIT", "FOLDS", "FOLD", "SPLIT_SEED", "SPLIT_GROUPS", "SKIP_BROKEN", "MAX_PIXELS")


def calibration_data(weights: Path | None, flags: Sequence[tuple[str, str]]) -> list[Any]:
    """Returns the keys that name the training set, and their values, as words after ``-o``.

    They are the keys of the run that saved the weights, with the values of ``flags`` in place of
    the run's. If the flags choose another dataset, the run's keys don't count.

    Raises:
        InputError: no run saved the weights, and ``flags`` names no data.
    """
    given = dict(flags)
    file = run_file(weights) if weights else None
    run = get_config(file) if file else None
    dataset = given.get(datasets.key)
    if dataset is None:
        if run and ("DATA.DATA_PATH" not in given or _reads_folder(run.DATA.DATASET)):
            dataset = run.DATA.DATASET
        elif "DATA.DATA_PATH" in given:
            dataset = "folder"
        else:
            told = "-precision int8 is calibrated on a training set"
            raise InputError(f"{told}: give its -data_path (and -dataset)")
    chosen: dict[str, Any] = {datasets.key: dataset}
    if run and dataset == run.DATA.DATASET:
        own = dict(leaves(run))
        defaults = default_values()
        words = datasets.components[dataset].reads
        keys = [*map(datasets.key_of, words), *(f"DATA.{name}" for name in _PARTS)]
        chosen |= {key: own[key] for key in keys if own[key] != defaults[key]}
    return [word for pair in (chosen | given).items() for word in pair]


def is_data_key(key: str) -> bool:
    """Returns whether a dotted key decides which images there are, and so which ones calibrate."""
    return key == datasets.key or key.removeprefix("DATA.") in _PARTS or key in datasets.readers()


def _reads_folder(dataset: str) -> bool:
    return "data_path" in datasets.components[dataset].reads


def training_images(
    config: Configuration, data: Sequence[Any], count: int, seed: int = 0
) -> np.ndarray:
    """Returns some images of a training set, prepared as an evaluation does: [n, C, H, W] float32.

    Args:
        config: of the model.
        data: the keys that name the training set, and their values. Folders of classes may stand
            alone.
        count: of the images; all, if there are fewer.
        seed: which ones are drawn, the same ones each time.

    Raises:
        InputError: the training set can't be read.
    """
    prepared = [
        word
        for key, value in leaves(config.DATA)
        if key in _PREPARED
        for word in (f"DATA.{key}", value)
    ]
    turned = config.DATA.EXIF_ORIENTATION
    config = get_config(None, [*data, *prepared, "MODEL.NUM_CLASSES", "auto"])
    config = with_values(config, DATA__EXIF_ORIENTATION=turned)
    # The run's VAL_SPLIT doesn't fit another folder that has validation images of its own.
    if config.DATA.VAL_SPLIT is not None and validation_files(config.DATA):
        config = with_values(config, DATA__VAL_SPLIT=None)
    if datasets.components[config.DATA.DATASET].given.get("task") == "multilabel":
        config = with_values(config, TASK="multilabel")
    dataset = get_dataset(config, "train", alone=True)
    dataset.transform = EvalTransform(config)
    dataset.erasing = None
    dataset.advice = ""
    places = np.random.default_rng(seed).permutation(len(dataset))[:count]
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    pixels = (dataset[int(place)][0] for place in places)
    return np.concatenate([normalize(paddle.to_tensor(image[None])).numpy() for image in pixels])


def quantise(model: Any, images: np.ndarray) -> Any:
    """Returns an int8 model of an ONNX ``ModelProto``, or of OpenVINO's ``Model``.

    Args:
        images: [n, C, H, W] float32, which set the activations' ranges.

    Raises:
        InputError: NNCF isn't installed, or can't do it.
    """
    nncf = import_extra("nncf")
    estimators = import_extra("nncf.quantization.range_estimator")
    onnx = type(model).__name__ == "ModelProto"
    batches = [{"images": image[None]} if onnx else image[None] for image in images]
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
    """Returns the images; raises InputError where there are none."""
    if images is None or not len(images):
        raise InputError(
            "-precision int8 needs images of the training set: give its -data_path (and -dataset)"
        )
    return images
