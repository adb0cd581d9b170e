"""Stratified k-fold cross-validation (DATA.FOLDS): each fold has its share of every class.

The folds are a function of the samples' order, their labels, their groups and a seed. So a folder
of images and the shards that are packed from it have the same folds.
"""

from collections.abc import Sequence

import numpy as np

from errors import InputError, counted, printable
from loading.label_sets import LabelSets, rarest
from loading.splits import random_numbers


def folds(
    labels: np.ndarray | LabelSets,
    count: int,
    seed: int,
    groups: Sequence[str] | None = None,
    classes: Sequence[str] = (),
) -> np.ndarray:
    """Returns each sample's fold, [n] from 0 to ``count`` - 1.

    Every class is in two folds at least, so that it can be learnt whichever fold is left out. Only
    where samples have several labels may a class be in one fold.

    Without groups, the sizes of two folds differ by one sample at most, and so do their numbers of
    samples of a class. Groups are kept whole. The largest comes first, and each goes to the fold
    that lacks most of its classes.

    Args:
        labels: [n] integers; if a sample has several, its rarest one counts.
        groups: of the samples, [n].
        classes: names, for the error.

    Raises:
        InputError: a class is in one fold alone, or a fold is empty.
    """
    values, numbers = np.unique(rarest(labels), return_inverse=True)
    if groups is None:
        # In random order within each class, the samples go to the folds in turn.
        order = np.lexsort((random_numbers(map(str, range(len(labels))), seed), numbers))
        fold = np.empty(len(labels), np.int64)
        fold[order] = np.arange(len(labels)) % count
    else:
        fold = _by_groups(numbers, count, groups, seed)
    if empty := count - len(np.unique(fold)):
        raise InputError(
            f"DATA.FOLDS is {count}: {empty} folds of {len(fold)} images would be empty; use fewer"
        )
    # The lowest and the highest fold of each class.
    low = np.full(len(values), count)
    high = np.full(len(values), -1)
    np.minimum.at(low, numbers, fold)
    np.maximum.at(high, numbers, fold)
    what = "image" if groups is None else "group"
    if (alone := values[low == high]).size and not isinstance(labels, LabelSets):
        name = printable(classes[int(alone[0])]) if classes else str(alone[0])
        raise InputError(
            f"DATA.FOLDS: the class {name} is in only one fold, expected two {what}s of it or more"
            f" ({counted(alone.size, 'such class', 'such classes')})"
        )
    return fold


def _by_groups(labels: np.ndarray, count: int, groups: Sequence[str], seed: int) -> np.ndarray:
    """Returns each sample's fold, [n]. The ``labels`` [n] are 0, 1, ... without a gap."""
    known, group = np.unique(np.array(groups), return_inverse=True)
    sizes = np.bincount(group)
    totals = np.append(np.bincount(labels), len(labels))
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(sizes)[:-1])
    # What each fold lacks still, as a share of each class, and in the last column of all samples.
    lacks = np.full((count, len(totals)), 1 / count)
    chosen = np.empty(len(known), np.int64)
    for number in np.lexsort((random_numbers(known.tolist(), seed), -sizes)):
        columns, counts = np.unique(labels[members[number]], return_counts=True)
        columns = np.append(columns, len(totals) - 1)
        counts = np.append(counts, sizes[number])
        weights = counts / totals[columns]
        chosen[number] = np.argmax(lacks[:, columns] @ weights)
        lacks[chosen[number], columns] -= weights
    return chosen[group]
