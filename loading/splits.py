"""Which samples are for training and which for validation, where a dataset has no validation part of its own.

Parts are pure functions of labels (and groups), seed and shares. Each class has its share in each part.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from errors import InputError, shown
from loading.files import Paths
from loading.shards import Shards
from loading.sources import Arrays, Drawn, Files, Split

_TAG = 0x73706C6974  # keeps these draws apart from the samples' own
Source = Files | Shards | Arrays | Drawn


def split_source(data: Any, split: Split, reader: Callable[[Split], Source]) -> Source:
    """Returns what a dataset's reader gives. With DATA.FOLDS it is a part of its training samples: for validation fold
    number FOLD, for training the others; its own validation samples aren't read.

    Args:
        data: the configuration's DATA.

    Raises:
        InputError: as the reader, ``folds`` and ``group_numbers``.
    """
    if data.FOLDS is None:
        return reader(split)
    source = reader(split._replace(mode="train"))
    if isinstance(source, Arrays):
        return source._replace(read=lambda: _cut(data, split.mode, *source.read()))
    if isinstance(source, Shards):
        names = map(source.name, range(len(source.labels)))
        return source.chosen(_places(data, split.mode, source.labels, source.classes, names))
    paths = source.paths if isinstance(source.paths, Paths) else Paths(source.paths)
    chosen = _places(data, split.mode, np.asarray(source.labels), source.classes, paths)
    return source._replace(paths=Paths(map(paths.encoded, chosen)), labels=np.asarray(source.labels)[chosen])


def told(data: Any) -> str:
    """Returns in which way a dataset is split, for the name of what is kept of a part; "": it isn't."""
    return "" if data.FOLDS is None else f"fold {data.FOLD} of {data.FOLDS}, {data.SPLIT_SEED}, {data.SPLIT_GROUPS}"


def _cut(data: Any, mode: str, images: np.ndarray, labels: np.ndarray, classes: list[str]) -> tuple:
    chosen = _places(data, mode, labels, classes, ())
    return images[chosen], labels[chosen], classes


def _places(data: Any, mode: str, labels: np.ndarray, classes: Sequence[str], names: Iterable[str]) -> np.ndarray:
    """The numbers of a part's samples, in rising order."""
    groups = group_numbers(names, data.SPLIT_GROUPS) if data.SPLIT_GROUPS else None
    parts = folds(labels, data.FOLDS, data.SPLIT_SEED, groups, classes)
    return np.flatnonzero((parts == data.FOLD) == (mode != "train"))


def held_out(labels: np.ndarray, share: float, seed: int, groups: np.ndarray | None = None) -> np.ndarray:
    """Returns which samples are for validation, [n] bool: ``share`` of them, and of each class.

    A class that would be in no training sample stays there: of one image, or of one group.

    Args:
        labels, seed, groups: as in ``split_labels``.

    Raises:
        InputError: there is nothing left for one of both.
    """
    parts = split_labels(labels, (1 - share, share), seed, groups)
    lost = ~np.isin(labels, labels[parts == 0])
    for label in np.unique(labels[lost]):
        first = np.flatnonzero(labels == label)[0]
        parts[first if groups is None else groups == groups[first]] = 0
    if not 0 < parts.sum() < len(parts):
        what = "images" if groups is None else "groups"
        raise InputError(f"{len(parts)} samples have too few {what} of a class for a validation share of {share:g}")
    return parts.astype(bool)


def folds(
    labels: np.ndarray, count: int, seed: int, groups: np.ndarray | None = None, classes: Sequence[str] = ()
) -> np.ndarray:
    """Returns each sample's fold, [n] from 0 to ``count`` - 1. Each class is in two folds at least: whichever is left
    out, there is something to learn it from.

    Args:
        labels, seed, groups: as in ``split_labels``.
        classes: names, for the error.

    Raises:
        InputError: a class has one image or group alone; there are fewer samples, or groups, than folds.
    """
    parts = split_labels(labels, [1 / count] * count, seed, groups)
    values, numbers = np.unique(labels, return_inverse=True)
    low, high = (np.full(len(values), value) for value in (count, -1))
    np.minimum.at(low, numbers, parts)
    np.maximum.at(high, numbers, parts)
    what = "image" if groups is None else "group"
    if (alone := values[low == high]).size:
        name = shown(classes[alone[0]]) if classes else str(alone[0])
        raise InputError(f"the class {name} is in one fold alone: it needs two {what}s or more ({alone.size} such)")
    if (empty := count - len(np.unique(parts))) > 0:
        raise InputError(f"{len(parts)} samples leave {empty} of {count} folds empty; take fewer folds than {what}s")
    return parts


def split_labels(
    labels: np.ndarray, shares: Sequence[float], seed: int, groups: np.ndarray | None = None
) -> np.ndarray:
    """Returns each sample's part, [n] from 0 to len(shares) - 1.

    Without groups a part's number differs from its share by less than one sample, in all and in each class (with
    more than two unequal shares by two): the classes, each shuffled, take their turns one after the other.
    Samples of a group stay together; then the largest groups choose first, each the part that lacks most of its
    classes.

    Args:
        labels: [n] integers.
        shares: of the parts; they add up to 1.
        groups: [n] integers.
    """
    rng = np.random.default_rng([seed, _TAG])
    if groups is not None:
        return _by_groups(labels, np.asarray(shares), rng, np.unique(groups, return_inverse=True)[1])
    shuffled = rng.permutation(len(labels))
    parts = np.empty(len(labels), np.int64)
    parts[shuffled[np.argsort(labels[shuffled], kind="stable")]] = _turns(len(labels), shares)
    return parts


def _turns(count: int, shares: Sequence[float]) -> np.ndarray:
    """Whose turn it is, [count]: the parts' seats by Sainte-Lague's method, in their order; equal shares take turns."""
    due = [(np.arange(int(np.ceil(count * share)) + 1) + 0.5) / share for share in shares]
    whose = np.repeat(np.arange(len(shares)), [len(times) for times in due])
    return whose[np.argsort(np.concatenate(due), kind="stable")][:count]


def _by_groups(labels: np.ndarray, shares: np.ndarray, rng: np.random.Generator, groups: np.ndarray) -> np.ndarray:
    labels, sizes = np.unique(labels, return_inverse=True)[1], np.bincount(groups)
    order = rng.permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    places = np.split(np.argsort(groups, kind="stable"), np.cumsum(sizes)[:-1])
    # What a part still lacks, as a share of each class; the last column is of all samples.
    lacks = np.repeat(shares[:, None], labels.max(initial=0) + 2, axis=1)
    totals = np.append(np.bincount(labels, minlength=lacks.shape[1] - 1), len(labels))
    chosen = np.empty(len(sizes), np.int64)
    for group in order:
        own, counts = np.unique(labels[places[group]], return_counts=True)
        own, counts = np.append(own, lacks.shape[1] - 1), np.append(counts, sizes[group])
        weights = counts / totals[own]
        chosen[group] = np.argmax(lacks[:, own] @ weights)
        lacks[chosen[group], own] -= weights
    return chosen[groups]


def group_numbers(names: Iterable[str], pattern: str) -> np.ndarray:
    """Returns the number of each name's group, [n]: what ``pattern``, a regular expression, finds in it, or what its
    first parentheses enclose.

    Raises:
        InputError: it is no regular expression, or finds nothing in a name.
    """
    try:
        find = re.compile(pattern).search
    except re.error as error:
        raise InputError(f"the groups' pattern '{shown(pattern)}' is no regular expression: {error}") from None
    known: dict[str, int] = {}
    numbers = []
    for name in names:
        if not (found := find(name)):
            raise InputError(f"the groups' pattern '{shown(pattern)}' finds nothing in {shown(name)}")
        numbers.append(known.setdefault(found[found.re.groups > 0] or "", len(known)))
    return np.array(numbers, np.int64)
