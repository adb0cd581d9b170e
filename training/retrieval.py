"""Retrieval of images of the same class by their embeddings: Recall@K and mean average
precision.

Each image is a query, and all others are ranked by their cosine similarity to it. The query itself
isn't among them. Of equally similar images the one that comes first in the data ranks first.
Queries whose class has no other image have nothing to find and don't count.

- ``recall_K``: the share of queries with an image of their class among the first K.
- ``mAP``: the mean over queries of the average precision: the mean, over all R other images of the
  class, of the precision at the image's rank.
- ``mAP_R``: the same, but images beyond rank R count as 0 (Musgrave et al. 2020, arXiv:2003.08505).

They are those of pytorch-metric-learning's ``AccuracyCalculator`` over all neighbours.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

# Embeddings of length 1 are rounded to multiples of this. Their products are then multiples of its
# square, and fit the 53 bits of float64, as their sums do, which are at most 1. So similarities are
# exact, whatever the order of the sums: no number of ranks, threads or rows at once changes a tie.
_STEP = 2.0**-24
# The similarities that are computed at once.
_SIMILARITIES = 1 << 22
# The rows of all embeddings that are float64 at a time.
_ROWS = 1 << 14


def normalised(embeddings: np.ndarray) -> np.ndarray:
    """Returns embeddings of length 1, rounded as similarities need it: [n, D] float32.

    A row of zeros stays one: it is equally similar to all others.
    """
    rounded = np.empty(embeddings.shape, np.float32)
    for first in range(0, len(embeddings), _ROWS):
        rows = slice(first, first + _ROWS)
        values = embeddings[rows].astype(np.float64)
        lengths = np.sqrt(np.einsum("ij,ij->i", values, values))[:, None]
        values = np.divide(values, lengths, out=np.zeros_like(values), where=lengths > 0)
        # float32 holds these multiples exactly.
        rounded[rows] = np.rint(values / _STEP) * _STEP
    return rounded


def retrieval_sums(
    embeddings: np.ndarray,
    labels: np.ndarray,
    queries: np.ndarray,
    ks: Sequence[int],
    progress: Callable[[], Any] = lambda: None,
) -> np.ndarray:
    """Returns the sums over queries of each metric, and their number: [len(ks) + 3] float64.

    The metrics are those of ``names``. The memory besides ``embeddings`` doesn't grow with their
    square.

    Args:
        embeddings: of all images, as ``normalised`` returns them, [n, D].
        labels: [n] integers.
        queries: the rows that are queries, [m].
        progress: called after each block of queries.
    """
    sums = np.zeros(len(ks) + 3)
    members = _members(labels)
    of_row = labels.tolist()
    queries = np.array([row for row in queries.tolist() if len(members[of_row[row]]) > 1], np.int64)
    at_once = max(1, _SIMILARITIES // max(1, len(embeddings)))
    for first in range(0, len(queries), at_once):
        rows = queries[first : first + at_once]
        for row, similarities in zip(rows.tolist(), _similarities(embeddings, rows), strict=True):
            of_class = members[of_row[row]]
            ranks = _ranks(similarities, row, of_class[of_class != row])
            precisions = np.arange(1, len(ranks) + 1) / (ranks + 1)
            is_found = ranks < len(ranks)
            for place, k in enumerate(ks):
                sums[place] += ranks[0] < k
            sums[-3:] += (precisions.mean(), (precisions * is_found).mean(), 1)
        progress()
    return sums


def names(ks: Sequence[int]) -> list[str]:
    """Returns the names of the metrics, in the order of ``retrieval_sums``."""
    return [*(f"recall_{k}" for k in ks), "mAP", "mAP_R"]


def percentages(sums: np.ndarray, ks: Sequence[int]) -> dict[str, float]:
    """Returns the metrics in percent, by name, of the sums over all queries."""
    return dict(zip(names(ks), (100 * sums[:-1] / sums[-1]).tolist(), strict=True))


def _members(labels: np.ndarray) -> dict[int, np.ndarray]:
    """Returns the rows of each label, in rising order."""
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[order], return_index=True)
    return dict(zip(classes.tolist(), np.split(order, starts[1:]), strict=True))


def _similarities(embeddings: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the similarities of some rows to all, exactly: [len(rows), n] float64."""
    queries = embeddings[rows].astype(np.float64)
    similarities = np.empty((len(rows), len(embeddings)))
    for block in _blocks(len(embeddings)):
        similarities[:, block] = queries @ embeddings[block].astype(np.float64).T
    return similarities


def _blocks(count: int) -> Iterator[slice]:
    for first in range(0, count, _ROWS):
        yield slice(first, first + _ROWS)


def _ranks(similarities: np.ndarray, query: int, wanted: np.ndarray) -> np.ndarray:
    """Returns the ranks of some images among all but the query, from 0, in rising order.

    Args:
        similarities: of the query to all images, [n].
        wanted: their rows, in rising order.
    """
    values = np.unique(similarities[wanted])
    # Images that are farther than all that are wanted have no effect, and are most of all. The query
    # is nobody's neighbour.
    nearer = np.flatnonzero(similarities >= values[0])
    nearer = nearer[nearer != query]
    similarities = similarities[nearer]
    # The first of ``values`` that a similarity isn't above. That is faster than to sort them all.
    places = np.searchsorted(values, similarities)
    counts = np.bincount(places, minlength=len(values) + 1)
    # Of each value, how many similarities are larger.
    larger = counts[::-1].cumsum()[::-1][1:]
    # The images with one of these values, wanted or not, by value and then in the data's order.
    is_tied = np.append(values, np.inf)[places] == similarities
    of_value = places[is_tied]
    order = np.argsort(of_value, kind="stable")
    of_value = of_value[order]
    tied = nearer[is_tied][order]
    before = np.arange(len(tied)) - np.searchsorted(of_value, of_value)
    return np.sort((larger[of_value] + before)[np.isin(tied, wanted, assume_unique=True)])
