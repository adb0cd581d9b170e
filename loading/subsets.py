"""Parts of the training samples, where the data has none of its own for validation (DATA.VAL_SPLIT,
DATA.FOLDS).
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from config import default_values, with_values
from errors import InputError
from loading.files import Paths
from loading.folds import folds
from loading.label_sets import LabelSets, take_labels
from loading.layout import check_data_path
from loading.shards import Shards
from loading.sources import Arrays, Drawn, Files, Split
from loading.splits import groups_of, validation
from settings.options import Configuration, add_note, leaves
from settings.registry import datasets

Source = Files | Shards | Arrays | Drawn


def read_split(data: Any, split: Split, reader: Callable[[Split], Source]) -> Source:
    """Returns what a dataset's reader gives; with DATA.VAL_SPLIT or FOLDS a part of its training
    samples.

    With FOLDS the validation samples are fold number FOLD, and the others train; the data's own
    validation isn't read.

    Args:
        data: the configuration's DATA.

    Raises:
        InputError: as the reader, ``validation``, ``folds`` and ``groups_of``; VAL_SPLIT, and the
            data has a validation part.
    """
    component = datasets.components[data.DATASET]
    if "data_path" in component.reads:
        check_data_path(
            data.DATA_PATH, default_values()["DATA.DATA_PATH"], component.returns == "Files"
        )
    if data.FOLDS is None and data.VAL_SPLIT is None:
        return reader(split)
    if data.VAL_SPLIT is not None:
        _check_alone(data)
    source = reader(split._replace(mode="train", alone=True))
    mode = split.mode
    match source:
        case Arrays():
            return source._replace(read=lambda: _cut(data, mode, *source.read()))
        case Shards():
            names = [os.fsdecode(name) for name in source.names]
            return source.at_places(_places(data, mode, names, source.labels, source.classes))
        case Files():
            places = _places(data, mode, source.paths, source.labels, source.classes)
            paths = Paths(str(source.paths[place]) for place in places.tolist())
            return source._replace(paths=paths, labels=take_labels(source.labels, places))
        case Drawn():  # a file's key, over which synthetic was chosen
            return source


def with_subset_note(config: Configuration, count: int) -> Configuration:
    """Returns an evaluation's configuration, with a note if only a part of the data is evaluated. A
    run's keys go with its weights, so they may choose a part of other data, too.
    """
    key = "DATA.VAL_SPLIT" if config.DATA.VAL_SPLIT is not None else "DATA.FOLDS"
    if (value := dict(leaves(config))[key]) is not None:
        config = with_values(config)  # a copy: the note is this start's
        add_note(
            config,
            f"only a part of the data is evaluated, {count} images ({key} {value}); set {key} null for all",
        )
    return config


def fold_name(data: Any) -> str:
    """Returns which fold it is, for the name of what is kept of it; "" without folds."""
    return "" if data.FOLDS is None else f"fold {data.FOLD} of {data.FOLDS}, {data.SPLIT_SEED}"


def validation_files(data: Any) -> list[Path]:
    """Returns the files or the folder of the data's own validation part; an empty list if it has
    none.
    """
    pattern = datasets.components[data.DATASET].given.get("val")
    return sorted(Path(data.DATA_PATH).glob(pattern)) if pattern else []


def _check_alone(data: Any) -> None:
    if found := validation_files(data):
        there = f"{found[0]} is there, and DATA.VAL_SPLIT {data.VAL_SPLIT} would make another validation set"
        raise InputError(f"{there}; -o DATA.VAL_SPLIT null evaluates on it")


def _cut(data: Any, mode: str, images: np.ndarray, labels: np.ndarray, classes: list[str]) -> tuple:
    places = _places(data, mode, (), labels, classes)
    return images[places], labels[places], classes


def _places(
    data: Any,
    mode: str,
    names: Sequence[str],
    labels: np.ndarray | LabelSets,
    classes: Sequence[str],
) -> np.ndarray:
    """The numbers of a part's samples, in rising order."""
    groups = (
        groups_of(names, data.SPLIT_GROUPS)
        if data.SPLIT_GROUPS is not None and len(names)
        else None
    )
    if data.FOLDS is None:
        held = validation(names, labels, data.VAL_SPLIT, data.SPLIT_SEED, groups)
    else:
        held = folds(labels, data.FOLDS, data.SPLIT_SEED, groups, classes) == data.FOLD
    return np.flatnonzero(held == (mode == "val"))
