"""What predictions come to: intervals, confusions, scores of classes, calibration, and whether two
runs differ.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

BINS = 15  # of a calibration, of equal width (Guo et al. 2017, arXiv:1706.04599)
_Z = 1.959963984540054  # of the normal distribution: 95 % lie within so many standard deviations


def wilson(right: int, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of the share of ``right`` in ``count``, 0 to 1 (Wilson's, without
    continuity correction). It holds near 0 and 1, too, where the share plus and minus its deviation
    doesn't.
    """
    share = right / count
    square = _Z**2 / count
    middle = share + square / 2
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    return (0.0 if right == 0 else low), (1.0 if right == count else high)


class Confusions(NamedTuple):
    """How often a label was predicted as a class: only what there is, [m] each, sorted by label,
    then by prediction.
    """

    label: np.ndarray
    predicted: np.ndarray
    count: np.ndarray

    def matrix(self, classes: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the counts between some classes: [n, n], rows are labels."""
        place = {int(own): number for number, own in enumerate(classes)}
        found = np.zeros((len(classes), len(classes)), np.int64)
        for label, predicted, count in zip(*(column.tolist() for column in self), strict=True):
            if label in place and predicted in place:
                found[place[label], place[predicted]] = count
        return found

    def worst(self, most: int) -> "Confusions":
        """Returns the mistakes that are made most often."""
        wrong = np.flatnonzero(self.label != self.predicted)
        chosen = wrong[np.argsort(-self.count[wrong], kind="stable")][:most]
        return Confusions(*(column[chosen] for column in self))


def confusions(label: np.ndarray, predicted: np.ndarray) -> Confusions:
    """Returns the confusions of labels [n] and predicted classes [n]."""
    outputs = int(max(label.max(), predicted.max())) + 1
    pairs, count = np.unique(label.astype(np.int64) * outputs + predicted, return_counts=True)
    return Confusions(pairs // outputs, pairs % outputs, count)


class Scores(NamedTuple):
    """Of each class, [K]: precision, recall and F1 from 0 to 1, and its images. Where there is
    nothing to divide by, a score is 0, as scikit-learn's.
    """

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    images: np.ndarray

    def means(self, told: np.ndarray) -> tuple[float, float, float]:
        """Returns the means of the three over the classes that have an image, or that is predicted
        for one.
        """
        there = (self.images > 0) | (told > 0)
        return (
            float(self.precision[there].mean()),
            float(self.recall[there].mean()),
            float(self.f1[there].mean()),
        )


def scores(label: np.ndarray, predicted: np.ndarray, outputs: int) -> tuple[Scores, np.ndarray]:
    """Returns the scores of ``outputs`` classes, and for how many images each was predicted."""
    right = np.bincount(label[label == predicted], minlength=outputs)
    told = np.bincount(predicted, minlength=outputs)
    images = np.bincount(label, minlength=outputs)
    precision = right / np.maximum(told, 1)
    recall = right / np.maximum(images, 1)
    return Scores(precision, recall, 2 * right / np.maximum(told + images, 1), images), told


class Calibration(NamedTuple):
    """Holds, by bin of the probability, [BINS]: images, the mean probability and the share of right
    ones (0 of an empty bin). ``error`` is the expected calibration error, 0 to 1.
    """

    images: np.ndarray
    probability: np.ndarray
    right: np.ndarray
    error: float


def calibration(probability: np.ndarray, right: np.ndarray) -> Calibration:
    """Returns how probabilities [n] of the predicted classes fit what is ``right`` [n] (bool).

    The expected calibration error is the mean over images of the distance between both means of
    their bin. A bin holds its upper edge: (0, 1/15], (1/15, 2/15], ...
    """
    place = np.clip(np.ceil(probability * BINS).astype(int) - 1, 0, BINS - 1)
    images = np.bincount(place, minlength=BINS)
    sums = [np.bincount(place, weights, BINS) for weights in (probability, right.astype(float))]
    mean, share = (own / np.maximum(images, 1) for own in sums)
    return Calibration(
        images, mean, share, float(np.abs(sums[0] - sums[1]).sum() / len(probability))
    )


def mcnemar(one: np.ndarray, other: np.ndarray) -> tuple[int, int, float]:
    """Returns how many samples are right in the first alone, how many in the second alone, and
    McNemar's probability. That is the probability that chance divides them so unevenly or more (the
    exact, two-sided binomial test). Both are [n], of the same samples.
    """
    from scipy.stats import binomtest  # scikit-learn brings it; its import takes a second

    alone = int((one & ~other).sum())
    there = int((other & ~one).sum())
    return alone, there, float(binomtest(alone, alone + there).pvalue) if alone + there else 1.0


def welch(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the two-sided probability that the means of several runs differ so much by chance;
    each side has two or more. It is Welch's t-test, for which the two needn't have the same spread.
    """
    from scipy.stats import ttest_ind

    if np.std(one) == np.std(other) == 0:  # a test divides by the spread
        return 1.0 if np.mean(one) == np.mean(other) else 0.0
    found: Any = ttest_ind(one, other, equal_var=False)
    return float(found.pvalue)
