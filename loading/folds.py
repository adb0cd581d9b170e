"""k-fold cross-validation: the training samples in parts, each with its share of every class (DATA.FOLDS).

A fold is a pure function of the samples' order, their labels (and groups) and a seed: the folds of a folder are those
of its shards. (``splits`` takes one part for validation.)
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from errors import InputError, shown
from loading.files import Paths
from loading.label_sets import LabelSets, every_label
from loading.shards import Shards
from loading.sources import Arrays, Drawn, Files, Split
from loading.splits import drawn, groups_of

Source = Files | Shards | Arrays | Drawn


def part_of(data: Any, split: Split, reader: Callable[[Split], Source]) -> Source:
    """Returns what a dataset's reader gives. With DATA.FOLDS it is a part of its training samples: for validation fold
    number FOLD, for training the others; its own validation samples aren't read.

    Args:
        data: the configuration's DATA.

    Raises:
        InputError: as the reader, ``folds`` and ``groups_of``.
    """
    if data.FOLDS is None:
        return reader(split)
    source, mode = reader(split._replace(mode="train")), split.mode
    match source:
        case Arrays():
            return source._replace(read=lambda: _cut(data, mode, *source.read()))
        case Shards():
            names = [os.fsdecode(name) for name in source.names] if data.FOLDS_GROUPS else ()
            return source.chosen(_places(data, mode, names, source.labels, source.classes))
        case Files():
            labels = source.labels if isinstance(source.labels, LabelSets) else np.asarray(source.labels)
            places = _places(data, mode, source.paths, labels, source.classes)
            paths = Paths(str(source.paths[place]) for place in places.tolist())
            return source._replace(paths=paths, labels=every_label(labels)[places])
        case Drawn():  # a file's FOLDS, over which synthetic was chosen
            return source


def told(data: Any) -> str:
    """Returns which fold it is, for the name of what is kept of it; "" without folds."""
    return "" if data.FOLDS is None else f"fold {data.FOLD} of {data.FOLDS}, {data.FOLDS_SEED}"


def _cut(data: Any, mode: str, images: np.ndarray, labels: np.ndarray, classes: list[str]) -> tuple:
    places = _places(data, mode, (), labels, classes)
    return images[places], labels[places], classes


def _places(
    data: Any, mode: str, names: Sequence[str], labels: np.ndarray | LabelSets, classes: Sequence[str]
) -> np.ndarray:
    """The numbers of a part's samples, in rising order."""
    if isinstance(labels, LabelSets):
        raise InputError(f"DATA.FOLDS is {data.FOLDS}, which parts images of one class each; leave it out")
    groups = groups_of(names, data.FOLDS_GROUPS, "DATA.FOLDS_GROUPS") if data.FOLDS_GROUPS and names else None
    parts = folds(labels, data.FOLDS, data.FOLDS_SEED, groups, classes)
    return np.flatnonzero((parts == data.FOLD) == (mode == "val"))


def folds(
    labels: np.ndarray, count: int, seed: int, groups: Sequence[str] | None = None, classes: Sequence[str] = ()
) -> np.ndarray:
    """Returns each sample's fold, [n] from 0 to ``count`` - 1. Every class is in two of them at least: whichever fold
    is left out, there is something to learn it from.

    Without groups, folds differ by one sample at most, in all and in each class. Whole groups go, the largest first, to
    the fold that lacks most of their classes.

    Args:
        labels: [n] integers.
        groups: of the samples, [n].
        classes: names, for the error.

    Raises:
        InputError: a class is in one fold alone; a fold is empty.
    """
    values, numbers = np.unique(labels, return_inverse=True)
    if groups is None:
        parts = np.empty(len(labels), np.int64)
        parts[np.lexsort((drawn(map(str, range(len(labels))), seed), labels))] = np.arange(len(labels)) % count
    else:
        parts = _by_groups(numbers, count, groups, seed)
    low, high = (np.full(len(values), value) for value in (count, -1))
    np.minimum.at(low, numbers, parts)
    np.maximum.at(high, numbers, parts)
    what = "image" if groups is None else "group"
    if (alone := values[low == high]).size:
        name = shown(classes[int(alone[0])]) if classes else str(alone[0])
        raise InputError(
            f"DATA.FOLDS: the class {name} is in one fold alone, expected two {what}s of it or more ({alone.size} such)"
        )
    if empty := count - len(np.unique(parts)):
        raise InputError(f"DATA.FOLDS is {count}: {empty} folds of {len(parts)} images would be empty; take fewer")
    return parts


def _by_groups(labels: np.ndarray, count: int, groups: Sequence[str], seed: int) -> np.ndarray:
    """Each sample's fold; ``labels`` [n] are 0, 1, ... without a gap."""
    known, group = np.unique(np.array(groups), return_inverse=True)
    sizes, totals = np.bincount(group), np.append(np.bincount(labels), len(labels))
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(sizes)[:-1])
    lacks = np.full((count, len(totals)), 1 / count)  # what a fold lacks, as a share of each class, and of all samples
    chosen = np.empty(len(known), np.int64)
    for number in np.lexsort((drawn(known.tolist(), seed), -sizes)):
        own, counts = np.unique(labels[members[number]], return_counts=True)
        own, counts = np.append(own, len(totals) - 1), np.append(counts, sizes[number])
        weights = counts / totals[own]
        chosen[number] = np.argmax(lacks[:, own] @ weights)
        lacks[chosen[number], own] -= weights
    return chosen[group]
