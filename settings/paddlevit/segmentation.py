"""Translates PaddleViT's files for semantic segmentation.

They have a ``config.py`` of their own (configs/paddlevit/segmentation.yaml). A file names its model
by MODEL.NAME, MODEL.ENCODER.TYPE and MODEL.DECODER_TYPE. All models share that file's keys, and each
reads some of them, so a key that the chosen model doesn't read has no effect in PaddleViT.
"""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from errors import InputError
from settings.paddlevit.segmentation_models import MODELS
from settings.paddlevit.tracked import TrackedSettings
from settings.suggestions import nearest_key
from settings.values import quoted

NAME = "segmentation"
# Keys that only files for segmentation have.
_SIGNS = frozenset({"MODEL.ENCODER.TYPE", "MODEL.DECODER_TYPE", "VAL.MULTI_SCALES_VAL"})
# Keys of training that have another name here and the same meaning.
_SAME = {
    "DATA.BATCH_SIZE": "DATA.BATCH_SIZE",
    "DATA.DATA_PATH": "DATA.DATA_PATH",
    "DATA.NUM_CLASSES": "MODEL.NUM_CLASSES",
    "DATA.NUM_WORKERS": "DATA.NUM_WORKERS",
    "MODEL.NAME": "MODEL.NAME",
    "MODEL.AUX.AUX_WEIGHT": "METHOD.AUX_WEIGHT",
    "TRAIN.BASE_LR": "TRAIN.BASE_LR",
    "TRAIN.END_LR": "TRAIN.END_LR",
    "SAVE_DIR": "SAVE",
    "KEEP_CHECKPOINT_MAX": "KEEP_LAST",
    "SAVE_FREQ_CHECKPOINT": "SAVE_STEPS",
    "LOGGING_INFO_FREQ": "REPORT_FREQ",
    "TAG": "TAG",
}
# The keys of each optimizer besides its rate and weight decay, by its name in lower case.
_OPTIMIZERS: dict[str, tuple[str, dict[str, str]]] = {
    "sgd": ("SGD", {"MOMENTUM": "MOMENTUM", "NESTEROV": "NESTEROV"}),
    "adam": ("Adam", {"EPS": "EPS"}),
    "adamw": ("AdamW", {"EPS": "EPS", "BETAS": "BETAS"}),
}


class _Dataset(NamedTuple):
    """A dataset of PaddleViT's.

    Attributes:
        name: of its reader here.
        images: number of its training images, by which iterations become epochs.
    """

    name: str
    images: int


# ADE20K and Cityscapes: their papers (arXiv:1608.05442, 1604.01685).
_DATASETS = {
    "ADE20K": _Dataset("ade20k", 20_210),
    "Cityscapes": _Dataset("cityscapes", 2_975),
    # train.txt of its 10,103 images, of which 5,105 are val.txt.
    "PascalContext": _Dataset("pascal_context", 4_998),
    # Its paper (arXiv:2003.13948): 5,000, 1,000 and 4,428 images.
    "Trans10kV2": _Dataset("trans10k", 5_000),
    # Patches of 512 pixels, 256 apart, as mmsegmentation cuts them (docs/en/user_guides/2_dataset_prepare.md).
    "Vaihingen": _Dataset("vaihingen", 344),
}


def is_segmentation(keys: Collection[str]) -> bool:
    """Returns whether a file without BASE is PaddleViT's for segmentation.

    Args:
        keys: the dotted keys that it sets.
    """
    return "MODEL.TYPE" not in keys and not _SIGNS.isdisjoint(keys)


def check_keys(path: Path, own: dict[str, Any], known: Collection[str]) -> None:
    """Checks a file's keys.

    Args:
        own: the dotted keys and values that it sets.
        known: PaddleViT's keys.

    Raises:
        InputError: PaddleViT has no such key.
    """
    for key in own:
        if key not in known:
            raise InputError(
                f"{path}: PaddleViT's files for semantic segmentation have no key"
                f" {quoted(key)}{nearest_key(key, known)}"
            )


def translate(values: dict[str, Any], path: Path) -> tuple[dict[str, Any], set[str]]:
    """Returns (this toolkit's keys and values, PaddleViT's keys that its code reads).

    Args:
        values: of all of PaddleViT's keys.
        path: of the file, for errors.

    Raises:
        InputError: a value that this toolkit doesn't have.
    """
    settings = TrackedSettings(values, path)
    names = [name for name in MODELS if name in settings["MODEL.NAME"]]
    if not names:
        settings.refuse("MODEL.NAME", f"a name with {', '.join(MODELS)}")
    translated: dict[str, Any] = {"TASK": "segmentation", "VALIDATE_FREQ": 1, "NGPUS": -1}
    translated |= {own: settings[key] for key, own in _SAME.items()}
    translated |= _of_training(settings)
    translated |= _of_evaluation(settings)
    return translated | MODELS[names[0]](settings), settings.keys_read


def _of_training(settings: TrackedSettings) -> dict[str, Any]:
    dataset = _DATASETS.get(settings["DATA.DATASET"])
    if dataset is None:
        settings.refuse("DATA.DATASET", f"one of {', '.join(_DATASETS)}")
    settings.require("TRAIN.LOSS", "MixSoftmaxCrossEntropyLoss", "CrossEntropyLoss")
    # What the file ignores: -1 is none, because no mask has it.
    settings.require("TRAIN.IGNORE_INDEX", 255, -1)
    if not settings["MODEL.AUX.LOSS"]:
        settings.refuse("MODEL.AUX.LOSS", "True; set MODEL.AUX.AUX_WEIGHT to weigh the losses")
    height, width = settings.sides("DATA.CROP_SIZE")
    images_per_step = settings["DATA.BATCH_SIZE"]
    steps = settings["TRAIN.ITERS"]
    values = {
        "DATA.DATASET": dataset.name,
        "DATA.IMAGE_SIZE": height if height == width else [height, width],
        # Its files have iterations, of which one process makes this many epochs.
        "TRAIN.NUM_EPOCHS": max(1, math.ceil(steps * images_per_step / dataset.images)),
        "TRAIN.CROP": "scale_jitter",
        "TRAIN.CROP_BASE": "own",
        "TRAIN.CROP_SCALE": [0.5, 2.0],
        "TRAIN.CROP_MAX_CLASS": 1.0,
        "TRAIN.PHOTOMETRIC": True,
        "TRAIN.HFLIP": 0.5,
        "TRAIN.INTERPOLATION": "bilinear",
        "TRAIN.WEIGHT_DECAY": settings["TRAIN.OPTIMIZER.WEIGHT_DECAY"],
        "TRAIN.HEAD_LR": 1.0,
    }
    if settings["DATA.DATASET"] == "Trans10kV2":
        values |= {"TRAIN.CROP": "squash", "TRAIN.CROP_PCT": 1.0, "TRAIN.PHOTOMETRIC": False}
        del values["TRAIN.CROP_SCALE"], values["TRAIN.CROP_BASE"], values["TRAIN.CROP_MAX_CLASS"]
    values |= _of_schedule(settings, images_per_step / dataset.images)
    return values | _of_optimizer(settings)


def _of_schedule(settings: TrackedSettings, epochs_per_step: float) -> dict[str, Any]:
    """Returns the keys of the schedule.

    WarmupPolyLR falls to WARM_UP_LR_INIT, and END_LR is the lowest rate: with both 0, as all files
    have them, that is ``poly`` after a warm-up.
    """
    name = settings.require("TRAIN.LR_SCHEDULER.NAME", "PolynomialDecay", "WarmupPolyLR")
    values = {"TRAIN.LR_SCHEDULER.NAME": "poly", "TRAIN.WARMUP_EPOCHS": 0.0}
    if name == "PolynomialDecay":
        return values | {"TRAIN.LR_SCHEDULER.POWER": settings["TRAIN.POWER"]}
    settings.require("TRAIN.END_LR", 0.0)
    return values | {
        "TRAIN.LR_SCHEDULER.POWER": settings["TRAIN.LR_SCHEDULER.POWER"],
        "TRAIN.WARMUP_EPOCHS": settings["TRAIN.LR_SCHEDULER.WARM_UP_STEPS"] * epochs_per_step,
        "TRAIN.WARMUP_START_LR": settings.require("TRAIN.LR_SCHEDULER.WARM_UP_LR_INIT", 0.0),
    }


def _of_optimizer(settings: TrackedSettings) -> dict[str, Any]:
    name = str(settings["TRAIN.OPTIMIZER.NAME"]).lower()
    if name not in _OPTIMIZERS:
        settings.refuse("TRAIN.OPTIMIZER.NAME", "SGD, Adam or AdamW")
    own_name, keys = _OPTIMIZERS[name]
    values = {"TRAIN.OPTIMIZER.NAME": own_name, "TRAIN.GRAD_CLIP": None}
    for key, own in keys.items():
        values[f"TRAIN.OPTIMIZER.{own}"] = settings[f"TRAIN.OPTIMIZER.{key}"]
    # PaddleViT's Adam doesn't clip. 0 means None there.
    if name != "adam":
        values["TRAIN.GRAD_CLIP"] = settings["TRAIN.OPTIMIZER.GRAD_CLIP"] or None
    return values


def _of_evaluation(settings: TrackedSettings) -> dict[str, Any]:
    """Returns the keys of sizes, windows and colours.

    PaddleViT's windows and strides are (width, height), its sizes of images (height, width).
    """
    size = settings.sides("DATA.CROP_SIZE")
    settings.require("VAL.RESCALE_FROM_ORI", False)
    values: dict[str, Any] = {
        "HEAD.STRIDE": None,
        "DATA.CROP_PCT": 1.0,
        "DATA.INTERPOLATION": "bilinear",
        "DATA.IMAGENET_MEAN": _of_levels(settings, "VAL.MEAN"),
        "DATA.IMAGENET_STD": _of_levels(settings, "VAL.STD"),
    }
    if settings["VAL.IS_SLIDE"]:
        if settings.sides("VAL.CROP_SIZE")[::-1] != size:
            settings.refuse("VAL.CROP_SIZE", f"{size[::-1]}, the windows of DATA.CROP_SIZE")
        down, right = settings.sides("VAL.STRIDE_SIZE")[::-1]
        values["HEAD.STRIDE"] = down if down == right else [down, right]
    if settings["VAL.KEEP_ORI_SIZE"]:
        return values | {"DATA.CROP_MODE": "own"}
    base = settings["VAL.IMAGE_BASE_SIZE"]
    if isinstance(base, list):
        sides = settings.sides("VAL.IMAGE_BASE_SIZE")
        if settings["VAL.SIZE_DIVISOR"] is not None:
            settings.refuse("VAL.IMAGE_BASE_SIZE", "a number, because there is a SIZE_DIVISOR")
        values["DATA.CROP_MODE"] = "squash"
        values["DATA.EVAL_SIZE"] = None if sides == size else sides
    elif type(base) is int and base > 0:
        # SIZE_DIVISOR stretches the long side to a multiple; here, images are padded to one.
        settings.require("VAL.SIZE_DIVISOR", None, 32)
        values["DATA.CROP_MODE"] = "short"
        values["DATA.EVAL_SIZE"] = None if size == [base, base] else base
    else:
        settings.refuse("VAL.IMAGE_BASE_SIZE", "the pixels of the short side, or of both sides")
    return values


def _of_levels(settings: TrackedSettings, key: str) -> list[float]:
    """Returns a value for each channel, from 0 to 255 there, from 0 to 1."""
    levels = settings[key]
    if not isinstance(levels, list) or any(not isinstance(level, int | float) for level in levels):
        settings.refuse(key, "a number per channel")
    return [level / 255 for level in levels]
