"""Confident learning (Northcutt et al. 2021, arXiv:1911.00068): which labels are probably wrong.

It reads the labels that people gave, and probabilities of a model that wasn't trained on these
images. An image counts as confidently of class j if its probability of j is at least the mean over
the images labelled j. The counts of (label, confident class) say how many labels of i should be j.
The filters then choose which images these are.

The filters and scores equal those of cleanlab 2.9.0 of the same names (``tests/golden``). Among
equal probabilities, the first image counts as the more suspicious one.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

Filter = Literal["prune_by_noise_rate", "prune_by_class", "both", "confident_learning"]
FILTERS = ("prune_by_noise_rate", "prune_by_class", "both", "confident_learning")
Score = Literal["self_confidence", "normalized_margin"]
SCORES = ("self_confidence", "normalized_margin")
# cleanlab's tolerance where it compares probabilities.
_TOLERANCE = 1e-6
# A threshold that no probability reaches, of classes without an image.
_UNREACHED = 2.0
# Values of probabilities that are looked at together.
_VALUES = 1 << 22


def label_errors(
    labels: np.ndarray, probabilities: np.ndarray, method: Filter = "prune_by_noise_rate"
) -> np.ndarray:
    """Returns which labels are probably wrong, [n] bool.

    - "confident_learning": the image is confidently of another class than its label.
    - "prune_by_class": of each class, as many images as the counts say, those with the lowest
      probability of their label.
    - "prune_by_noise_rate": of each pair of label i and class j, as many images as the counts say,
      those with the largest difference of the probabilities of j and i.
    - "both": what the last two agree on.

    No image is chosen whose label is the most probable class, and a class keeps an image at least.

    Args:
        labels: [n] integers from 0 to K - 1.
        probabilities: [n, K]; it may be memory-mapped, and is read a few rows at a time.
    """
    classes = probabilities.shape[1]
    if not len(labels):
        return np.zeros(0, bool)
    counts = np.bincount(labels, minlength=classes)
    guesses = confident_classes(probabilities, thresholds(labels, probabilities))
    if method == "confident_learning":
        chosen = (guesses >= 0) & (guesses != labels)
    else:
        joint = calibrated(confident_joint(labels, guesses, classes), counts)
        removed = _prune_counts(joint)
        chosen = np.zeros(len(labels), bool)
        for label in np.flatnonzero(counts > 1).tolist():
            places = np.flatnonzero(labels == label)
            rows = np.asarray(probabilities[places])
            chosen[places] = _pruned(rows, label, removed[label], method)
    for rows in _blocks(probabilities):
        own = labels[rows]
        raised = np.array(probabilities[rows])
        raised[np.arange(len(own)), own] += _TOLERANCE
        chosen[rows] &= raised.argmax(1) != own
    return chosen


def thresholds(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Returns the mean probability of each class over the images with this label, [K].

    It is above 1 for a class without an image.
    """
    result = np.full(probabilities.shape[1], _UNREACHED)
    for label in np.unique(labels).tolist():
        result[label] = np.mean(probabilities[labels == label, label])
    return np.maximum(result, 2 * _TOLERANCE)


def confident_classes(probabilities: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Returns the class that each image confidently belongs to, [n]; -1: none.

    If an image reaches the thresholds of several classes, it is of its most probable class. In the
    paper the most probable of those several is taken; cleanlab takes that of all classes.

    Args:
        least: the thresholds [K].
    """
    result = np.empty(len(probabilities), np.int64)
    for rows in _blocks(probabilities):
        values = np.asarray(probabilities[rows])
        reached = values >= least - _TOLERANCE
        how_many = reached.sum(1)
        found = np.where(how_many > 1, values.argmax(1), reached.argmax(1))
        result[rows] = np.where(how_many > 0, found, -1)
    return result


def confident_joint(labels: np.ndarray, guesses: np.ndarray, classes: int) -> np.ndarray:
    """Counts images by their label (row) and the class they confidently belong to (column), [K, K].

    Every class counts as having one image that is labelled rightly.

    Args:
        guesses: what ``confident_classes`` returned.
    """
    is_known = guesses >= 0
    pairs = labels[is_known] * classes + guesses[is_known]
    joint = np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
    np.fill_diagonal(joint, np.maximum(joint.diagonal(), 1))
    return joint


def calibrated(joint: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns a confident joint whose rows sum up to the number of images of each label, [K, K].

    Args:
        counts: the images of each label, [K].
    """
    # The order of these operations, and that of the values in memory, decide the last bits, and so
    # how halves are rounded. Both are cleanlab's.
    shares = (np.ascontiguousarray(joint.T) / joint.sum(1) * counts).T
    shares = shares / np.sum(shares) * counts.sum()
    return np.array([_rounded(row) for row in shares])


def self_confidence(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Returns the probability of each image's label, [n]: from 0 (suspicious) to 1."""
    return np.asarray(probabilities[np.arange(len(labels)), labels])


def normalized_margin(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Returns how far each label's probability is above that of the best other class, [n].

    The difference, from -1 to 1, is mapped to 0 (suspicious) to 1.
    """
    own = self_confidence(labels, probabilities)
    return (own - _other(labels, probabilities)[1] + 1) / 2


def quality(labels: np.ndarray, probabilities: np.ndarray, score: Score) -> np.ndarray:
    """Returns the score of each label, [n]; the lowest are the most suspicious."""
    function = self_confidence if score == "self_confidence" else normalized_margin
    return function(labels, probabilities)


def suggested(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Returns the most probable class besides each image's label, [n]; of equal ones the first."""
    return _other(labels, probabilities)[0]


def binary(probabilities: np.ndarray) -> np.ndarray:
    """Returns the probabilities [n, 2] that an image hasn't, and has, one class of several.

    ``label_errors`` and the scores then take labels of 0 and 1.

    Args:
        probabilities: of the class, [n].
    """
    return np.stack([1 - probabilities, probabilities], axis=1)


def _other(labels: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the most probable class besides the label, its probability), [n] each."""
    classes = np.empty(len(labels), np.int64)
    values = np.empty(len(labels))
    for rows in _blocks(probabilities):
        others = np.array(probabilities[rows], np.float64)
        places = np.arange(len(others))
        others[places, labels[rows]] = -1
        classes[rows] = others.argmax(1)
        values[rows] = others[places, classes[rows]]
    return classes, values


def _blocks(probabilities: np.ndarray) -> Iterator[slice]:
    count, classes = probabilities.shape
    step = max(1, _VALUES // classes)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _prune_counts(joint: np.ndarray) -> np.ndarray:
    """Returns how many images of a label (row) are of each class (column), [K, K].

    A label keeps an image at least: where the diagonal has none, one is taken from the others.
    """
    diagonal = joint.diagonal()
    kept = np.maximum(diagonal, 1)
    others = np.maximum(np.count_nonzero(joint, axis=1) - 1.0, 1.0)
    removed = joint - ((kept - diagonal) / others)[:, None]
    removed = np.maximum(removed, 0).astype(np.int64)
    np.fill_diagonal(removed, kept)
    return removed


def _pruned(rows: np.ndarray, label: int, removed: np.ndarray, method: Filter) -> np.ndarray:
    """Returns which images of one label are chosen, [m] bool.

    Args:
        rows: their probabilities, [m, K].
        removed: this label's row of ``_prune_counts``.
    """
    by_class = np.zeros(len(rows), bool)
    count = max(0, len(rows) - int(removed[label]))
    by_class[np.argsort(rows[:, label], kind="stable")[:count]] = True
    if method == "prune_by_class":
        return by_class
    by_rate = np.zeros(len(rows), bool)
    for other in np.flatnonzero(removed).tolist():
        if other != label:
            margins = rows[:, other] - rows[:, label]
            by_rate[np.argsort(-margins, kind="stable")[: removed[other]]] = True
    return by_rate & by_class if method == "both" else by_rate


def _rounded(values: np.ndarray) -> np.ndarray:
    """Returns whole numbers whose sum is the rounded sum of ``values`` [K].

    Where rounding changes the sum, the values that it changed most are rounded the other way.
    """
    numbers = np.round(values)
    wanted = np.round(np.sum(values))
    while (missing := int(wanted - np.sum(numbers))) != 0:
        step = 1 if missing > 0 else -1
        order = np.argsort(values - numbers, kind="stable")[::-step]
        numbers[order[: abs(missing)]] += step
    return numbers.astype(np.int64)
