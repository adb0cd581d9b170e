"""Statistics of predictions.

Confidence intervals, confusions, scores of classes, calibration, and tests of whether two runs
differ.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# Bins of equal width of a calibration (Guo et al. 2017, arXiv:1706.04599).
BINS = 15
# 95 % of a normal distribution lie within so many standard deviations.
_Z = 1.959963984540054


def wilson(right: int, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of the share of ``right`` in ``count``, from 0 to 1.

    It has no continuity correction. Unlike the share plus and minus its deviation, it is valid near
    0 and 1, too.
    """
    share = right / count
    square = _Z**2 / count
    middle = share + square / 2
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    low = (middle - half) / (1 + square)
    high = (middle + half) / (1 + square)
    # Both are exact here, without rounding.
    return (0.0 if right == 0 else low), (1.0 if right == count else high)


class Confusions(NamedTuple):
    """The confusion matrix, as three arrays [m]: a label, a predicted class, and how often they met.

    Only pairs that occur are in it, sorted by label, then by prediction.
    """

    label: np.ndarray
    predicted: np.ndarray
    count: np.ndarray

    def matrix(self, classes: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the counts between some classes: [n, n], rows are labels."""
        place = {int(number): index for index, number in enumerate(classes)}
        matrix = np.zeros((len(classes), len(classes)), np.int64)
        for label, predicted, count in self.rows():
            if label in place and predicted in place:
                matrix[place[label], place[predicted]] = count
        return matrix

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yields (label, predicted class, number of images) of each pair."""
        return zip(self.label.tolist(), self.predicted.tolist(), self.count.tolist(), strict=True)

    def worst(self, most: int) -> "Confusions":
        """Returns the most frequent mistakes, at most ``most`` pairs."""
        wrong = np.flatnonzero(self.label != self.predicted)
        chosen = wrong[np.argsort(-self.count[wrong], kind="stable")][:most]
        return Confusions(*(column[chosen] for column in self))


def confusions(label: np.ndarray, predicted: np.ndarray) -> Confusions:
    """Returns the confusions of labels [n] and predicted classes [n]."""
    outputs = int(max(label.max(), predicted.max())) + 1
    pairs, count = np.unique(label.astype(np.int64) * outputs + predicted, return_counts=True)
    return Confusions(pairs // outputs, pairs % outputs, count)


class Scores(NamedTuple):
    """Scores of each class, [K].

    Attributes:
        precision, recall, f1: from 0 to 1. Where a denominator is 0, the score is 0, as in
            scikit-learn.
        images: number of images of the class.
    """

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    images: np.ndarray

    def means(self, predicted: np.ndarray) -> tuple[float, float, float]:
        """Returns the means of precision, recall and F1.

        They are over the classes that have an image or were predicted for one.

        Args:
            predicted: [K], for how many images each class was predicted.
        """
        occurs = (self.images > 0) | (predicted > 0)
        return (
            float(self.precision[occurs].mean()),
            float(self.recall[occurs].mean()),
            float(self.f1[occurs].mean()),
        )


def scores(label: np.ndarray, predicted: np.ndarray, classes: int) -> tuple[Scores, np.ndarray]:
    """Returns the scores of each class, and for how many images each was predicted, [K].

    Args:
        label: [n] classes.
        predicted: [n] classes.
        classes: K.
    """
    right = np.bincount(label[label == predicted], minlength=classes)
    predictions = np.bincount(predicted, minlength=classes)
    images = np.bincount(label, minlength=classes)
    precision = right / np.maximum(predictions, 1)
    recall = right / np.maximum(images, 1)
    f1 = 2 * right / np.maximum(predictions + images, 1)
    return Scores(precision, recall, f1, images), predictions


class Calibration(NamedTuple):
    """A reliability diagram: the probabilities of predictions, and the share that was right.

    Attributes:
        images: [BINS], number of images whose probability is in the bin.
        probability: [BINS], their mean probability; 0 for an empty bin.
        right: [BINS], the share of them that is right; 0 for an empty bin.
        error: the expected calibration error, from 0 to 1.
    """

    images: np.ndarray
    probability: np.ndarray
    right: np.ndarray
    error: float


def calibration(probability: np.ndarray, right: np.ndarray) -> Calibration:
    """Returns the calibration of predictions.

    The error of a bin is the distance between its mean probability and its share of right
    predictions. The expected calibration error is the mean of these errors over all images. A bin
    includes its upper edge: (0, 1/15], (1/15, 2/15], ...

    Args:
        probability: [n], of the predicted classes.
        right: [n] bool.
    """
    bins = np.clip(np.ceil(probability * BINS).astype(int) - 1, 0, BINS - 1)
    images = np.bincount(bins, minlength=BINS)
    probability_sum = np.bincount(bins, probability, BINS)
    right_sum = np.bincount(bins, right.astype(float), BINS)
    return Calibration(
        images=images,
        probability=probability_sum / np.maximum(images, 1),
        right=right_sum / np.maximum(images, 1),
        error=float(np.abs(probability_sum - right_sum).sum() / len(probability)),
    )


def mcnemar(one: np.ndarray, other: np.ndarray) -> tuple[int, int, float]:
    """Makes McNemar's test of two runs on the same samples (the exact, two-sided binomial test).

    Args:
        one, other: [n] bool, which samples are right in either run.

    Returns:
        The number of samples that are right in the first run alone, and in the second alone. Then
        the probability that chance divides them so unevenly or more.
    """
    # SciPy comes with scikit-learn. Its import takes a second.
    from scipy.stats import binomtest

    first_alone = int((one & ~other).sum())
    second_alone = int((other & ~one).sum())
    differing = first_alone + second_alone
    probability = float(binomtest(first_alone, differing).pvalue) if differing else 1.0
    return first_alone, second_alone, probability


def wilcoxon(one: np.ndarray, other: np.ndarray) -> tuple[int, int, float]:
    """Makes Wilcoxon's signed-rank test of two runs' scores of the same samples, two-sided.

    Equal pairs are left out.

    Args:
        one, other: [n] scores.

    Returns:
        The number of samples that are better in the first run, and in the second. Then the
        probability that chance makes a difference as large or larger.
    """
    from scipy.stats import wilcoxon as test

    better = int((one > other).sum())
    other_better = int((other > one).sum())
    if not (better or other_better):
        return 0, 0, 1.0
    result: Any = test(one, other)
    return better, other_better, float(result.pvalue)


def welch(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the two-sided probability that two means differ so much by chance.

    This is Welch's t-test, which doesn't assume that both sides have the same spread.

    Args:
        one, other: scores of two or more runs each.
    """
    from scipy.stats import ttest_ind

    # The test would divide by a spread of 0.
    if np.std(one) == np.std(other) == 0:
        return 1.0 if np.mean(one) == np.mean(other) else 0.0
    result: Any = ttest_ind(one, other, equal_var=False)
    return float(result.pvalue)
