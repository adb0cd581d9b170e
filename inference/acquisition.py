"""Scores that choose the images to label next, and the search for similar images.

``selection`` applies them to the images of a folder.
"""

from typing import Literal

import numpy as np

from loading.check.duplicates import near_pairs

Rule = Literal["margin", "energy", "coverage", "mixed"]
RULES = ("margin", "energy", "coverage", "mixed")
# Rows of features that are compared at once.
_ROWS = 1024


def alike(hashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns which hashes are near one of the others, [n] bool."""
    known, node = np.unique(np.concatenate([others, hashes]), return_inverse=True)
    is_other = np.zeros(len(known), bool)
    is_other[node[: len(others)]] = True
    is_near = is_other.copy()

    def meet(one: np.ndarray, other: np.ndarray) -> None:
        is_near[one[is_other[other]]] = True
        is_near[other[is_other[one]]] = True

    near_pairs(known, meet)
    return is_near[node[len(others) :]]


def unlike(hashes: np.ndarray) -> np.ndarray:
    """Returns the indices of hashes of which no two are near each other, in rising order.

    A hash is left out if it is near one that comes before it and is taken.
    """
    known, first = np.unique(hashes, return_index=True)
    pairs: list[np.ndarray] = []
    near_pairs(known, lambda one, other: pairs.append(np.stack([first[one], first[other]])))
    near: dict[int, list[int]] = {}
    for one, other in np.concatenate([np.empty((2, 0), np.int64), *pairs], axis=1).T.tolist():
        near.setdefault(min(one, other), []).append(max(one, other))
    is_taken = np.zeros(len(hashes), bool)
    is_taken[first] = True
    for place in np.sort(first).tolist():
        if is_taken[place]:
            is_taken[near.get(place, [])] = False
    return np.flatnonzero(is_taken)


def margins(probabilities: np.ndarray, several: bool = False) -> np.ndarray:
    """Returns how certain a model is of each image, [n] from 0 to 1: the margin between its two most
    probable classes.

    Args:
        probabilities: [n, K].
        several: whether each class has a probability of its own.
    """
    if several:
        return np.abs(2 * probabilities - 1).min(1)
    if probabilities.shape[1] < 2:
        return np.ones(len(probabilities))
    two = np.partition(probabilities, -2, axis=1)[:, -2:]
    return two[:, 1] - two[:, 0]


def farthest(
    features: np.ndarray, distances: np.ndarray, count: int
) -> tuple[list[int], list[float]]:
    """Returns the indices of the ``count`` images that best cover the features, and their
    distances.

    Each is the image farthest from all centres: those that ``distances`` are to, and the images
    chosen before. Of equally far ones it is the first. Memory and time grow with n, and time with
    ``count``.

    Args:
        features: [n, channels].
        distances: squared ones, to the nearest centre so far, [n]; infinite: there is none.
    """
    nearest = distances.astype(np.float64)
    chosen: list[int] = []
    found: list[float] = []
    while len(chosen) < min(count, len(features)):
        # In float32, so that equal images are equally far, whatever the order of a sum was.
        place = int(np.argmax(nearest.astype(np.float32)))
        chosen.append(place)
        found.append(float(np.sqrt(nearest[place])))
        for first in range(0, len(features), _ROWS):
            rows = slice(first, first + _ROWS)
            change = features[rows].astype(np.float64) - features[place]
            squares = np.einsum("ij,ij->i", change, change)
            nearest[rows] = np.minimum(nearest[rows], squares)
        # It isn't chosen again, even if all others are where a centre is.
        nearest[chosen] = -1
    return chosen, found


def distances_to(features: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Returns the squared distance of each row to the nearest centre, [n] float64.

    It is infinite if there is no centre. Blocks of rows are compared with blocks of centres.

    Args:
        features, centres: [n, channels] and [m, channels].
    """
    nearest = np.full(len(features), np.inf)
    for start in range(0, len(centres), _ROWS):
        block = centres[start : start + _ROWS].astype(np.float64)
        lengths = np.einsum("ij,ij->i", block, block)
        for first in range(0, len(features), _ROWS):
            rows = features[first : first + _ROWS].astype(np.float64)
            squares = np.einsum("ij,ij->i", rows, rows)[:, None] + lengths - 2 * rows @ block.T
            part = slice(first, first + _ROWS)
            nearest[part] = np.minimum(nearest[part], np.maximum(squares, 0).min(1))
    return nearest
