"""Sets of classes that contain the right one with a given probability (conformal prediction).

The scores are those of RAPS (Angelopoulos et al. 2021, arXiv:2009.14193), without its random
numbers: the same image always has the same set. For images drawn as those that chose the threshold,
the right class is in the set with at least the probability that was asked for.
"""

import math
from collections.abc import Sequence

import numpy as np

from training.checkpoint.calibration import PredictionSets

# The penalties that the paper tries.
PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)


def places(probabilities: np.ndarray) -> np.ndarray:
    """Returns the rank of each class, from 1 for the most probable one: [n, K] int64.

    Of equal probabilities the lowest class comes first.
    """
    order = np.argsort(-probabilities, axis=1, kind="stable")
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.arange(1, order.shape[1] + 1)[None], 1)
    return found


def scores(probabilities: np.ndarray, penalty: float, rank: int) -> np.ndarray:
    """Returns the score of each class: the sum of the probabilities down to it, and the penalty for
    each place beyond ``rank``.

    Args:
        probabilities: [n, K].

    Returns:
        [n, K] float64.
    """
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ranked = np.take_along_axis(probabilities.astype(np.float64), order, 1).cumsum(1)
    ranked += penalty * np.maximum(0, np.arange(1, order.shape[1] + 1) - rank)
    found = np.empty_like(ranked)
    np.put_along_axis(found, order, ranked, 1)
    return found


def quantile(values: np.ndarray, share: float) -> float:
    """Returns the least of ``values`` that a further value exceeds with a probability of at most
    1 - ``share``; infinity if there are too few values for that.

    Args:
        values: [n].
    """
    # Without the small number, (n + 1) * share may be just above a whole number.
    place = math.ceil((len(values) + 1) * share - 1e-9)
    if place > len(values):
        return math.inf
    return float(np.partition(values, place - 1)[place - 1])


def quantiles_by_class(
    values: np.ndarray, labels: np.ndarray, classes: int, share: float
) -> list[float]:
    """Returns the ``quantile`` of each class's own values, [K]."""
    return [quantile(values[labels == label], share) for label in range(classes)]


def sets(
    probabilities: np.ndarray, threshold: float | Sequence[float], penalty: float, rank: int
) -> np.ndarray:
    """Returns which classes are in the set of each image, [n, K] bool.

    The most probable class always is.

    Args:
        probabilities: [n, K].
        threshold: the largest score of a class in the set; of all classes, or [K].
    """
    found = scores(probabilities, penalty, rank) <= np.asarray(threshold, np.float64)
    found |= places(probabilities) == 1
    return found


def in_set(probabilities: np.ndarray, chosen: PredictionSets) -> np.ndarray:
    """Returns which classes are in the set of one image, [K] bool.

    Args:
        probabilities: [K].
        chosen: as it is stored with the weights.
    """
    thresholds = [math.inf if one is None else one for one in chosen.thresholds]
    return sets(probabilities[None], thresholds, chosen.penalty, chosen.rank)[0]


def tune(probabilities: np.ndarray, labels: np.ndarray, coverage: float) -> tuple[float, int]:
    """Returns the penalty and the rank that make small sets.

    The rank is the place within which the right class is with the probability ``coverage``. The
    penalty is the one of PENALTIES that has the smallest sets, the least of equal ones.

    Args:
        probabilities: [n, K], of images that choose no threshold.
        labels: [n].
    """
    of_label = np.take_along_axis(places(probabilities), labels[:, None], 1)[:, 0]
    rank = quantile(of_label, coverage)
    if rank == math.inf:
        rank = probabilities.shape[1]
    sizes = []
    for penalty in PENALTIES:
        of_classes = scores(probabilities, penalty, int(rank))
        threshold = quantile(np.take_along_axis(of_classes, labels[:, None], 1)[:, 0], coverage)
        sizes.append(sets(probabilities, threshold, penalty, int(rank)).sum(1).mean())
    return PENALTIES[int(np.argmin(sizes))], int(rank)
