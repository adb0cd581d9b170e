"""k-fold cross-validation: the training samples in parts, each with its share of every class
(DATA.FOLDS).

A fold is a pure function of the samples' order, their labels (and groups) and a seed. So a folder
and its shards have the same folds. (``splits`` takes one part for validation.)
"""

from collections.abc import Sequence

import numpy as np

from errors import InputError, printable
from loading.label_sets import LabelSets, rarest
from loading.splits import random_numbers


def folds(
    labels: np.ndarray | LabelSets,
    count: int,
    seed: int,
    groups: Sequence[str] | None = None,
    classes: Sequence[str] = (),
) -> np.ndarray:
    """Returns each sample's fold, [n] from 0 to ``count`` - 1. Every class is in two of them at
    least: whichever fold is left out, there is something to learn it from. Only where a sample has
    several labels, a class may be in one.

    Without groups, folds differ by one sample at most, in all and in each class. Whole groups go,
    the largest first, to the fold that lacks most of their classes.

    Args:
        labels: [n] integers; of label sets the rarest label of each counts.
        groups: of the samples, [n].
        classes: names, for the error.

    Raises:
        InputError: a class is in one fold alone; a fold is empty.
    """
    values, numbers = np.unique(rarest(labels), return_inverse=True)
    if groups is None:
        parts = np.empty(len(labels), np.int64)
        parts[np.lexsort((random_numbers(map(str, range(len(labels))), seed), numbers))] = (
            np.arange(len(labels)) % count
        )
    else:
        parts = _by_groups(numbers, count, groups, seed)
    low, high = (np.full(len(values), value) for value in (count, -1))
    np.minimum.at(low, numbers, parts)
    np.maximum.at(high, numbers, parts)
    what = "image" if groups is None else "group"
    if (alone := values[low == high]).size and not isinstance(labels, LabelSets):
        name = printable(classes[int(alone[0])]) if classes else str(alone[0])
        raise InputError(
            f"DATA.FOLDS: the class {name} is in only one fold, expected two {what}s of it or more"
            f" ({alone.size} such classes)"
        )
    if empty := count - len(np.unique(parts)):
        raise InputError(
            f"DATA.FOLDS is {count}: {empty} folds of {len(parts)} images would be empty; take fewer"
        )
    return parts


def _by_groups(labels: np.ndarray, count: int, groups: Sequence[str], seed: int) -> np.ndarray:
    """Each sample's fold; ``labels`` [n] are 0, 1, ... without a gap."""
    known, group = np.unique(np.array(groups), return_inverse=True)
    sizes = np.bincount(group)
    totals = np.append(np.bincount(labels), len(labels))
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(sizes)[:-1])
    # what a fold lacks, as a share of each class, and of all samples
    lacks = np.full((count, len(totals)), 1 / count)
    chosen = np.empty(len(known), np.int64)
    for number in np.lexsort((random_numbers(known.tolist(), seed), -sizes)):
        own, counts = np.unique(labels[members[number]], return_counts=True)
        own = np.append(own, len(totals) - 1)
        counts = np.append(counts, sizes[number])
        weights = counts / totals[own]
        chosen[number] = np.argmax(lacks[:, own] @ weights)
        lacks[chosen[number], own] -= weights
    return chosen[group]
