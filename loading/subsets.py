"""Subsets of the training samples.

They are for data without a validation set of its own (DATA.VAL_SPLIT), and for cross-validation
(DATA.FOLDS).
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from config import default_values
from errors import InputError
from loading.folds import folds
from loading.label_sets import LabelSets
from loading.layout import check_data_path, validation_files
from loading.rows import Rows
from loading.shards import Shards
from loading.sources import Arrays, Decoded, Drawn, Files, Split, checked_columns
from loading.splits import groups_of, validation
from settings.configuration import Configuration, add_note, leaves
from settings.registry import datasets

Source = Files | Shards | Rows | Arrays | Drawn


def read_split(data: Any, split: Split, reader: Callable[[Split], Source]) -> Source:
    """Returns what a dataset's reader returns for ``split``.

    With DATA.VAL_SPLIT or FOLDS this is a subset of the training samples. With FOLDS, the
    validation samples are fold number FOLD, and the others are trained on. A validation set of the
    data's own isn't read then.

    Args:
        data: the configuration's DATA.

    Raises:
        InputError: as of the reader, ``checked_columns``, ``validation``, ``folds`` and
            ``groups_of``; or VAL_SPLIT is set and the data has a validation set.
    """
    component = datasets.components[data.DATASET]
    if "data_path" in component.keys:
        check_data_path(
            data.DATA_PATH,
            default_values()["DATA.DATA_PATH"],
            component.returns == "Files",
            tuple(component.given.get("files", "").split()),
        )
    if data.FOLDS is None and data.VAL_SPLIT is None:
        return _checked(reader(split))
    if data.VAL_SPLIT is not None:
        _check_no_validation(data)
    source = _checked(reader(split._replace(mode="train", alone=True)))
    mode = split.mode
    match source:
        case Arrays():
            # The images are decoded when they are needed, so the subset is taken then, too.
            return source._replace(read=lambda: _subset_of_arrays(data, mode, *source.read()))
        case Shards() | Rows():
            names = [os.fsdecode(name) for name in source.names]
            return source.at_places(_places(data, mode, names, source.labels, source.classes))
        case Files():
            places = _places(data, mode, source.paths, source.labels, source.classes)
            return source.at_places(places)
        case Drawn():
            # VAL_SPLIT is of a configuration file, for which -dataset=synthetic was chosen.
            return source


def _checked(source: Source) -> Source:
    """Returns what a reader returned; raises InputError where a further column is a wrong one."""
    if isinstance(source, Files):
        return source._replace(columns=checked_columns(source.columns, len(source.paths)))
    return source


def note_subset(config: Configuration, count: int) -> None:
    """Adds a note to an evaluation's configuration if only a subset of the data is evaluated.

    A run's keys are stored with its weights. So an evaluation of these weights on other data takes
    a subset of it, too, unless the keys are reset.

    Args:
        count: images that are evaluated.
    """
    key = "DATA.VAL_SPLIT" if config.DATA.VAL_SPLIT is not None else "DATA.FOLDS"
    value = dict(leaves(config))[key]
    if value is None:
        return
    add_note(
        config,
        f"only {count} images of the data are evaluated ({key} {value}); set {key} null for all",
    )


def fold_name(data: Any) -> str:
    """Returns the name of the fold, for the cache of its images; "" without folds."""
    if data.FOLDS is None:
        return ""
    return f"fold {data.FOLD} of {data.FOLDS}, {data.SPLIT_SEED}"


def _check_no_validation(data: Any) -> None:
    if files := validation_files(data.DATASET, data.DATA_PATH):
        raise InputError(
            f"{files[0]} exists, but DATA.VAL_SPLIT {data.VAL_SPLIT} makes another"
            " validation set; use -o DATA.VAL_SPLIT null to evaluate on it"
        )


def _subset_of_arrays(
    data: Any, mode: str, images: np.ndarray, labels: np.ndarray, classes: list[str]
) -> Decoded:
    places = _places(data, mode, (), labels, classes)
    return images[places], labels[places], classes


def _places(
    data: Any,
    mode: str,
    names: Sequence[str],
    labels: np.ndarray | LabelSets | None,
    classes: Sequence[str],
) -> np.ndarray:
    """Returns the places of a subset's samples, in rising order.

    Args:
        names: of the samples, [n]; empty where they have none.
        labels: None: the samples are taken as if all had the same label.
    """
    if labels is None:
        labels = np.zeros(len(names), np.int64)
    groups = None
    if data.SPLIT_GROUPS is not None and len(names):
        groups = groups_of(names, data.SPLIT_GROUPS)
    if data.FOLDS is None:
        is_validation = validation(names, labels, data.VAL_SPLIT, data.SPLIT_SEED, groups)
    else:
        fold = folds(labels, data.FOLDS, data.SPLIT_SEED, groups, classes)
        is_validation = fold == data.FOLD
    return np.flatnonzero(is_validation == (mode == "val"))
