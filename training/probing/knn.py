"""Weighted k-nearest neighbours, as DINO evaluates features (Caron et al. 2021, arXiv:2104.14294,
after Wu et al. 2018, arXiv:1805.01978).

The k training images with the largest cosine similarity s vote for their classes, each with a
weight of exp(s / 0.07). No image is compared with all others at once: the training images are
taken block by block, and each rank compares its own share of them.
"""

from collections.abc import Sequence

import numpy as np
import paddle

from training.probing.features import ROWS, Features, normalised
from utils import all_gather

# As in DINO's paper.
TEMPERATURE = 0.07
# The training images that are compared at once.
_BLOCK = 16_384
# A similarity is rounded to a multiple of 2^-24, float32's precision below 1. So it and an image's
# place fit one integer, whose order is that of the neighbours, equal similarities included.
_STEPS = 1 << 24
_PLACES = 1 << 32


def knn_accuracies(
    train: Features, val: Features, ks: Sequence[int], temperature: float = TEMPERATURE
) -> dict[int, float]:
    """Returns the accuracy on ``val`` in percent, for each k.

    Of equally similar images, those that come first in the training set are the nearest. Of classes
    with equally many votes, the first is chosen. All ranks call this, and get the same.
    """
    bank = normalised(train.values)
    correct = dict.fromkeys(ks, 0)
    for values, queried in val.blocks():
        by_rank = all_gather(_nearest(normalised(values), bank, train.places, max(ks)))
        keys = _largest(np.concatenate(by_rank, axis=1), max(ks))
        similarities, neighbours = _decoded(keys)
        labels = train.labels[neighbours]
        weights = np.exp(similarities / temperature)
        truth = val.labels[queried]
        for k in correct:
            chosen = elected(labels[:, :k], weights[:, :k])
            correct[k] += int((chosen == truth).sum())
    return {k: 100 * count / len(val.labels) for k, count in correct.items()}


def nearest_others(
    queries: np.ndarray, bank: np.ndarray, own: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (cosine similarities, rows) of the rows of ``bank`` nearest to each query, without
    the query's own: [m, at most k] each, the nearest first.

    Of equally similar rows the first is the nearest. Ranks aren't involved.

    Args:
        queries, bank: [m, channels] and [n, channels] float32.
        own: the row of each query in the bank, [m].
    """
    bank = normalised(bank)
    count = max(0, min(k, len(bank) - 1))
    similarities = np.empty((len(queries), count))
    rows = np.empty((len(queries), count), np.int64)
    for first in range(0, len(queries), ROWS):
        part = slice(first, first + ROWS)
        keys = _nearest(normalised(queries[part]), bank, np.arange(len(bank)), count + 1)
        found, places = _decoded(keys)
        # The query's own row goes to the end; without one, the farthest row is there.
        order = np.argsort(places == own[part, None], axis=1, kind="stable")[:, :count]
        similarities[part] = np.take_along_axis(found, order, axis=1)
        rows[part] = np.take_along_axis(places, order, axis=1)
    return similarities, rows


def elected(labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the class with the most weight for each row; of equal ones the first.

    Args:
        labels, weights: of the neighbours, [m, k].
    """
    same = labels[:, :, None] == labels[:, None, :]
    votes = (same * weights[:, None, :]).sum(2)
    is_best = votes == votes.max(1, keepdims=True)
    return np.where(is_best, labels, np.iinfo(labels.dtype).max).min(1)


def _nearest(queries: np.ndarray, bank: np.ndarray, places: np.ndarray, k: int) -> np.ndarray:
    """Returns the keys of each query's nearest rows of ``bank``, the nearest first: [m, at most k].

    Args:
        queries, bank: normalised, [m, channels] and [n, channels].
        places: of the bank's rows in the training set, [n].
    """
    device_queries = paddle.to_tensor(queries)
    best = np.empty((len(queries), 0), np.int64)
    for first in range(0, len(bank), _BLOCK):
        rows = slice(first, first + _BLOCK)
        product = paddle.matmul(device_queries, paddle.to_tensor(bank[rows]), transpose_y=True)
        steps = np.rint(product.numpy().astype(np.float64) * _STEPS).astype(np.int64)
        keys = steps * _PLACES - places[rows]
        best = _largest(np.concatenate([best, _largest(keys, k)], axis=1), k)
    return best


def _largest(keys: np.ndarray, k: int) -> np.ndarray:
    """Returns the largest keys of each row in falling order, [m, at most k]."""
    if keys.shape[1] > k:
        keys = np.partition(keys, keys.shape[1] - k, axis=1)[:, -k:]
    return np.sort(keys, axis=1)[:, ::-1]


def _decoded(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the similarities and the places that keys were made of."""
    places = -keys % _PLACES
    return (keys + places) / _PLACES / _STEPS, places
