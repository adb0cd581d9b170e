"""Figures of images of several classes: what ranks them, and what answers yes from a threshold on.

They are functions of pairs of probability and truth, of whatever order: the same on any number of processes.
"""

import numpy as np


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Returns the probability of each logit, in float64; of large negative ones, too, they stay apart."""
    return np.exp(-np.logaddexp(0, -logits.astype(np.float64)))


def rank_images(shares: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a class's different probabilities, the highest first; images from each on that have the class; images.

    Args:
        shares: [n] probabilities.
        truth: [n] bool: whether an image has the class.
    """
    order = np.argsort(-shares, kind="stable")
    levels = shares[order]
    last = np.flatnonzero(np.diff(levels, append=-1.0))
    return levels[last], np.cumsum(truth[order])[last], last + 1


def average_precision(shares: np.ndarray, truth: np.ndarray) -> float | None:
    """Returns the mean of the precisions, each by the recall that it adds; None of a class that no image has.

    scikit-learn's ``average_precision_score``: nothing is interpolated, equal probabilities count at once.
    """
    _, hits, taken = rank_images(shares, truth)
    if not truth.any():
        return None
    return float((np.diff(hits, prepend=0) * hits / taken).sum() / hits[-1])


def best_threshold(shares: np.ndarray, truth: np.ndarray) -> float:
    """Returns the threshold with the highest F1, of equally good ones the highest; 0.5 of a class that no image has.

    It lies halfway to the next lower probability: rounding elsewhere, as of an export, changes no answer.
    """
    levels, hits, taken = rank_images(shares, truth)
    if not truth.any():
        return 0.5
    place = int(np.argmax(2 * hits / (taken + hits[-1])))
    below = levels[place + 1] if place + 1 < len(levels) else 0.0
    middle = (levels[place] + below) / 2
    return float(middle if middle > below else levels[place])


def count_answers(shares: np.ndarray, truth: np.ndarray, threshold: float) -> tuple[int, int, int]:
    """Returns the numbers of true positives, of images predicted to have the class, and of images that have it."""
    yes = shares >= threshold
    return int((yes & truth).sum()), int(yes.sum()), int(truth.sum())


def f1(right: np.ndarray, told: np.ndarray, have: np.ndarray) -> np.ndarray:
    """Returns F1, of ``count_answers``'s numbers or their sums; 0 if no image has the class or is predicted to."""
    return 2 * right / np.maximum(told + have, 1)
