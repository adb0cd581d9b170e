"""The data of a trained model: that of its run, or another dataset that is given."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from config import default_values, get_config, with_values
from errors import InputError
from loading.layout import validation_files
from settings.configuration import Configuration, leaves
from settings.registry import datasets
from training.automatic import data_options
from training.command_line import run_file

# The keys of DATA that decide how a model's images are prepared.
_PREPARATION = (
    "IMAGE_SIZE",
    "IMAGE_CHANNELS",
    "IMAGE_DTYPE",
    "CROP_PCT",
    "CROP_MODE",
    "NUM_TOKENS",
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


def data_keys(
    weights: str | Path | None,
    flags: Sequence[tuple[str, Any]],
    purpose: str,
    has_validation: bool = False,
) -> list[Any]:
    """Returns the keys that name a training set, with their values.

    They form a flat list: key, value, key, value, ...

    They are the keys of the run that saved the weights, with the values of ``flags`` in place of
    the run's. If the flags choose another dataset, the run's keys don't count. Without a run and a
    -dataset, the dataset is recognised by what its folder contains.

    Args:
        purpose: what needs the training set; begins the error's line.
        has_validation: whether validation images are needed, too. They are split off if a recognised
            dataset has none.

    Raises:
        InputError: no run saved the weights, and ``flags`` names no data, or none that is recognised.
    """
    values: dict[str, Any] = dict(flags)
    file = run_file(weights) if weights else None
    run = get_config(file) if file else None
    dataset = values.get(datasets.key)
    if dataset is None:
        if run and ("DATA.DATA_PATH" not in values or _reads_folder(run.DATA.DATASET)):
            dataset = run.DATA.DATASET
        elif "DATA.DATA_PATH" in values:
            _, plan = data_options(values, is_evaluation=not has_validation)
            recognised = {option.key: option.value for option in plan.options}
            dataset = recognised.pop(datasets.key)
            values |= recognised
        else:
            raise InputError(f"{purpose}: pass its -data_path (and -dataset)")
    of_run: dict[str, Any] = {datasets.key: dataset}
    if run and dataset == run.DATA.DATASET:
        arguments = datasets.components[dataset].keys
        keys = [*map(datasets.key_of, arguments), *(f"DATA.{name}" for name in _SELECTION)]
        run_values = dict(leaves(run))
        defaults = default_values()
        of_run |= {key: run_values[key] for key in keys if run_values[key] != defaults[key]}
    return list(itertools.chain.from_iterable((of_run | values).items()))


def split_options(
    options: Iterable[tuple[str, Any]], dataset: str | None, data_path: str | None, purpose: str
) -> tuple[list[tuple[str, Any]], list[Any]]:
    """Divides the keys of a command line into those of the data and those of the model.

    Args:
        options: keys and values, as after ``-o``.
        dataset, data_path: of the flags of these names; None: they weren't given.
        purpose: what the data are for, in an error: "a probe".

    Returns:
        the keys of the data, as ``data_keys`` takes them, and the others as words after ``-o``.

    Raises:
        InputError: a key of DATA would have no effect.
    """
    flags = {"DATA.DATASET": dataset, "DATA.DATA_PATH": data_path}
    data: list[tuple[str, Any]] = [(key, value) for key, value in flags.items() if value]
    others: list[Any] = []
    for key, value in options:
        if is_data_key(key):
            data.append((key, value))
        elif key.startswith("DATA.") and not is_preparation_key(key):
            raise InputError(f"command line: {key} has no effect on {purpose}; leave it out")
        else:
            others += [key, value]
    return data, others


def is_data_key(key: str) -> bool:
    """Returns whether a dotted key decides which images a training set has."""
    if key == datasets.key or key in datasets.readers():
        return True
    return key.removeprefix("DATA.") in _SELECTION


def is_preparation_key(key: str) -> bool:
    """Returns whether a dotted key decides how a model's images are prepared."""
    return key.removeprefix("DATA.") in (*_PREPARATION, "EXIF_ORIENTATION")


def _reads_folder(dataset: str) -> bool:
    return "data_path" in datasets.components[dataset].keys


def data_config(config: Configuration, data: Sequence[Any]) -> Configuration:
    """Returns the configuration of a labelled dataset whose images are prepared for a model.

    Args:
        config: the configuration of the model.
        data: the keys that name the dataset, and their values (``data_keys``).
    """
    preparation: list[Any] = []
    packed = config.DATA.NUM_TOKENS is not None
    for key, value in leaves(config.DATA):
        if key in _PREPARATION and not (packed and key == "CROP_PCT"):
            preparation += [f"DATA.{key}", value]
    if packed:
        # The patches are the model's.
        for key in ("TYPE", "PATCH_SIZE"):
            preparation += [f"MODEL.{key}", config.MODEL[key]]
    orientation = config.DATA.EXIF_ORIENTATION
    config = get_config(None, [*data, *preparation, "MODEL.NUM_CLASSES", "auto"])
    config = with_values(config, DATA__EXIF_ORIENTATION=orientation)
    # The run's VAL_SPLIT doesn't fit another folder that has validation images of its own.
    if config.DATA.VAL_SPLIT is not None and validation_files(
        config.DATA.DATASET, config.DATA.DATA_PATH
    ):
        config = with_values(config, DATA__VAL_SPLIT=None)
    if datasets.components[config.DATA.DATASET].given.get("task") == "multilabel":
        config = with_values(config, TASK="multilabel")
    return config
