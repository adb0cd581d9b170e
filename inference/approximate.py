"""Approximate search by FAISS, for many queries in many images.

FAISS's structure is built in memory from stored features, and isn't kept. Its own files are read by
C++ that trusts them, and a file beside the features may be somebody else's. Building takes longer
than an exact search of some queries; it pays off for hundreds of them.

The rows that FAISS proposes are ranked by their exact similarities. So what is found has the exact
search's numbers and order, and only rows that weren't proposed are missing.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from errors import InputError, install
from inference.feature_store import StoredFeatures
from inference.search import Found, nearest_of

KINDS = ("flat", "hnsw", "ivf")
# Links of a node of HNSW, and candidates that a search keeps (Malkov and Yashunin 2016,
# arXiv:1603.09320).
_LINKS = 32
_CANDIDATES = 128
# Of IVF: the least rows to train a cell by, FAISS's own, and the share of the cells that are searched.
_ROWS_OF_CELL = 39
_SEARCHED = 1 / 8
# Rows that are proposed besides twice as many as are asked for.
_SPARE = 16


class ApproximateSearch:
    """A structure of FAISS over the directions of stored features.

    Args:
        stored: the features. Rows that aren't finite, or have the length 0, are never found.
        kind: "flat": FAISS's exact search; "hnsw": a graph of neighbours; "ivf": rows in cells, of
            which an eighth is searched.

    Raises:
        InputError: FAISS isn't installed, or no row can be found.
    """

    def __init__(self, stored: StoredFeatures, kind: str) -> None:
        try:
            import faiss
        except ImportError:
            raise InputError(
                f"-faiss needs FAISS, which isn't installed: {install('index')}, or leave it out"
            ) from None
        self.stored = stored
        width = stored.values.shape[1]
        # The rows that FAISS holds, in its order.
        rows = []
        count = 0
        for values in stored.blocks():
            rows.append(count + np.flatnonzero(np.isfinite(values).all(1) & values.any(1)))
            count += len(values)
        self.rows = np.concatenate(rows)
        if not len(self.rows):
            raise InputError(f"{stored.path} has no features to search")
        metric = faiss.METRIC_INNER_PRODUCT
        if kind == "hnsw":
            self.index: Any = faiss.IndexHNSWFlat(width, _LINKS, metric)
        elif kind == "ivf":
            cells = max(1, min(math.isqrt(len(self.rows)), len(self.rows) // _ROWS_OF_CELL))
            self.index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, metric)
            self.index.nprobe = max(1, math.ceil(cells * _SEARCHED))
            # The cells are chosen by rows from all of the file.
            chosen = self.rows[:: max(1, len(self.rows) // (256 * cells))]
            self.index.train(_directions(np.array(stored.values[chosen])))
        else:
            self.index = faiss.IndexFlatIP(width)
        for values in stored.blocks():
            is_valid = np.isfinite(values).all(1) & values.any(1)
            if is_valid.any():
                self.index.add(_directions(values[is_valid]))

    def nearest(
        self, queries: np.ndarray, top: int, left_out: Sequence[Collection[int]] = ()
    ) -> list[list[Found]]:
        """``search.nearest_of`` among the rows that FAISS proposes.

        Args:
            queries: [m, D].
            left_out: for each query, rows to skip.
        """
        left_out = left_out or [()] * len(queries)
        # FAISS's similarities are float32, and it gives equal ones in any order. More rows than are
        # asked for leave the choice to the exact similarities.
        proposed = 2 * top + _SPARE + max(map(len, left_out), default=0)
        proposed = min(proposed, len(self.rows))
        if hasattr(self.index, "hnsw"):
            self.index.hnsw.efSearch = max(_CANDIDATES, 2 * proposed)
        _, places = self.index.search(_directions(queries), proposed)
        neighbours = []
        for query, own, skipped in zip(queries, places, left_out, strict=True):
            rows = np.sort(self.rows[own[own >= 0]])
            rows = rows[~np.isin(rows, list(skipped))]
            [found] = nearest_of(query[None], [np.array(self.stored.values[rows])], top)
            neighbours.append([Found(int(rows[place]), cosine) for place, cosine in found])
        return neighbours


def recall(found: Sequence[Sequence[Found]], exact: Sequence[Sequence[Found]]) -> float:
    """Returns the share of the exact neighbours that were found, of all queries."""
    right = sum(
        len({each.row for each in some} & {each.row for each in all_of})
        for some, all_of in zip(found, exact, strict=True)
    )
    return right / max(1, sum(map(len, exact)))


def _directions(values: np.ndarray) -> np.ndarray:
    """Returns rows of length 1, [n, D] float32."""
    values = values.astype(np.float64)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return (values / np.where(lengths > 0, lengths, 1)).astype(np.float32)
