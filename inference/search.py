"""Finds the images most similar to a query, by the cosine similarity of their features.

It searches the images of a folder, or stored features.
"""

import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import get_config
from errors import InputError, printable
from inference.captions import SHEET_SIDE, side_by_side, small, tile
from inference.feature_store import FeatureExtractor, StoredFeatures, open_features
from inference.name_index import open_names
from inference.pictures import Pictures
from inference.search_index import SUFFIX, open_index
from loading.files import Paths
from loading.remote import is_url
from training.retrieval import normalised, percentages, retrieval_sums
from utils import writing_whole

# The number of images in a row of a grid.
_ACROSS = 5


class Neighbour(NamedTuple):
    """An image, and the cosine similarity of its features to the query's, from -1 to 1."""

    name: str
    similarity: float


def of_image(features: FeatureExtractor, image: str) -> np.ndarray:
    """Returns an image's features [D].

    Raises:
        InputError: it can't be read, or the features are maps.
    """
    [batch] = features.rows([image], workers=0)
    if batch.errors[0]:
        raise InputError(batch.errors[0])
    if batch.values.ndim != 2:
        raise InputError("-pool is map, but a search needs pooled features: use avg or token")
    return batch.values[0]


def of_text(features: FeatureExtractor, text: str, tell: Callable[[str], Any] = str) -> np.ndarray:
    """Returns the embedding [D] of a text, which is compared with those of images.

    Args:
        tell: called with a line if the text is too long to be read to its end.

    Raises:
        InputError: the features aren't compared with texts.
    """
    if features.made["pool"] != "embedding":
        raise InputError(
            f"{printable(text, 80)} isn't a file, and texts can only be compared with embeddings"
            " of CLIP"
            " and SigLIP: pass -pool embedding when the features are computed"
        )
    tokens = features.text_encoder.tokens([text])
    if note := features.text_encoder.cut_note([text], tokens.is_cut):
        tell(note)
    return features.text_encoder.embeddings(tokens.numbers)[0]


class Query(NamedTuple):
    """A query.

    Attributes:
        features: [D].
        rows: those of the query's own image among the stored ones, which aren't neighbours.
    """

    features: np.ndarray
    rows: Collection[int] = ()


def in_images(
    features: FeatureExtractor, image: str, images: Paths, top: int, workers: int = 2
) -> tuple[list[Neighbour], list[str]]:
    """Finds the images nearest to one image, as ``among_images`` does."""
    query = query_among(features, image, images)
    [neighbours], errors = among_images(features, [query], images, top, workers)
    return neighbours, errors


def query_among(features: FeatureExtractor, image: str, images: Paths) -> Query:
    """Returns an image as a query among ``images``, of which it may be one.

    Raises:
        InputError: it can't be read, or the features are maps.
    """
    path = os.path.abspath(image)
    rows = {row for row in range(len(images)) if os.path.abspath(images[row]) == path}
    return Query(of_image(features, image), rows)


def among_images(
    features: FeatureExtractor, queries: Sequence[Query], images: Paths, top: int, workers: int = 2
) -> tuple[list[list[Neighbour]], list[str]]:
    """Computes the features of ``images``, and returns the ``top`` nearest to each query.

    The memory that this takes doesn't depend on the number of images.

    Returns:
        the neighbours of each query, the nearest first, and the errors of images that can't be read.
    """
    errors = []

    def blocks() -> Iterator[np.ndarray]:
        for rows in features.rows(images, workers):
            errors.extend(error for error in rows.errors if error)
            yield rows.values

    vectors = np.stack([query.features for query in queries])
    best = nearest_of(vectors, blocks(), top, [query.rows for query in queries])
    neighbours = [
        [Neighbour(images[row], similarity) for row, similarity in found] for found in best
    ]
    return neighbours, errors


class Collected:
    """Stored features that are searched.

    A query is a vector of features, wherever it comes from: ``of_image`` makes one of an image.

    Args:
        path: FILE.npy or FILE.safetensors of tools/features.py, or FILE.index.
        checkpoint: the weights; None: those at the path where the features were computed. They are
            only needed for an image that isn't stored, or if this is given.
        tell: see ``open_names`` and ``of_text``.

    Raises:
        InputError: the features can't be read.
    """

    def __init__(
        self,
        path: Path,
        checkpoint: str | None = None,
        tell: Callable[[str], Any] = str,
    ) -> None:
        self.checkpoint = checkpoint
        self.tell = tell
        if path.suffix == SUFFIX:
            self.stored, self.names = open_index(path)
        else:
            self.stored = open_features(path)
            self.names = open_names(self.stored, tell)

    @functools.cached_property
    def extractor(self) -> FeatureExtractor:
        """Computes features as the stored ones were computed.

        Raises:
            InputError: the weights aren't those of the stored features.
        """
        made = self.stored.made
        features = FeatureExtractor(
            self.checkpoint or made["checkpoint"],
            made["cfg"],
            made["options"],
            batch_size=1,
            layer=made["layer"],
            pool=made["pool"],
            norm=made["norm"],
        )
        if features.made["sha256"] != made["sha256"]:
            weights = printable(str(features.weights))
            raise InputError(
                f"{weights} doesn't have the weights of the stored features (its SHA-256 differs);"
                " pass those weights by -checkpoint, or make the features again"
            )
        return features

    def of_image(self, image: str) -> Query:
        """Returns an image as a query. Its features are the stored ones, if it is stored.

        Raises:
            InputError: it can't be read, or the weights aren't those of the stored features.
        """
        values = self.stored.values
        rows = self.names.rows_of(os.path.abspath(image))
        known = [row for row in sorted(rows) if not np.isnan(values[row]).any()]
        if known and not self.checkpoint:
            return Query(values[known[0]], rows)
        return Query(of_image(self.extractor, image), rows)

    def of_text(self, text: str) -> Query:
        """Returns a text as a query.

        Raises:
            InputError: as the function ``of_text``.
        """
        return Query(of_text(self.extractor, text, self.tell))

    def nearest(
        self, queries: Sequence[Query], top: int, approximate: Any = None
    ) -> list[list[Neighbour]]:
        """Returns the ``top`` stored images nearest to each query, the nearest first.

        Args:
            approximate: an ``ApproximateSearch`` of the stored features; None: the search is exact.

        Raises:
            InputError: a query has another number of features than the stored images.
        """
        return [
            [Neighbour(self.names.name(row), cosine) for row, cosine in found]
            for found in self.rows(queries, top, approximate)
        ]

    def rows(
        self, queries: Sequence[Query], top: int, approximate: Any = None
    ) -> list[list["Found"]]:
        """``nearest``, as rows of the stored features."""
        width = self.stored.values.shape[1]
        for query in queries:
            if query.features.shape != (width,):
                raise InputError(
                    f"the query has {query.features.shape[0]} features, the stored ones {width};"
                    " are they"
                    " from another model?"
                )
        features = np.stack([query.features for query in queries])
        left_out = [query.rows for query in queries]
        if approximate is not None:
            return approximate.nearest(features, top, left_out)
        return nearest_of(features, self.stored.blocks(), top, left_out)


def nearest_in(
    stored: StoredFeatures,
    image: str,
    top: int,
    checkpoint: str | None = None,
    tell: Callable[[str], Any] = str,
) -> list[Neighbour]:
    """Returns the ``top`` stored images nearest to ``image``, as ``Collected`` finds them."""
    collected = Collected(stored.path, checkpoint, tell)
    [neighbours] = collected.nearest([collected.of_image(image)], top)
    return neighbours


class Found(NamedTuple):
    """A row, and its cosine similarity to the query."""

    row: int
    similarity: float


def nearest(
    query: np.ndarray, blocks: Iterable[np.ndarray], top: int, left_out: Collection[int] = ()
) -> list[Found]:
    """``nearest_of`` for one query [D]."""
    [found] = nearest_of(query[None], blocks, top, [left_out])
    return found


def nearest_of(
    queries: np.ndarray,
    blocks: Iterable[np.ndarray],
    top: int,
    left_out: Sequence[Collection[int]] = (),
) -> list[list[Found]]:
    """Returns the rows nearest to each query, by their cosine similarity, the nearest first.

    Among equal ones the first row comes first. Rows that aren't finite, or have the length 0, are
    skipped. The blocks are read once, whatever the number of queries.

    Args:
        queries: [m, D].
        blocks: the rows, in blocks [B, D].
        left_out: for each query, rows to skip, such as its own.
    """
    directions = queries.astype(np.float64)
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    directions = directions / np.where(lengths == 0, 1, lengths)
    skipped = [np.array(sorted(rows), np.int64) for rows in left_out or [()] * len(queries)]
    best: list[Any] = [(np.empty(0, np.int64), np.empty(0))] * len(queries)
    first = 0
    for block in blocks:
        values = block.astype(np.float64)
        # einsum computes each row alone, so that equal rows have equal cosines, wherever they are.
        # A matrix product doesn't guarantee that.
        lengths = np.sqrt(np.einsum("ij,ij->i", values, values))
        is_valid = np.isfinite(lengths) & (lengths > 0)
        for place, direction in enumerate(directions):
            rows, cosines = best[place]
            products = np.einsum("ij,j->i", values, direction)
            similarities = np.full(len(block), -np.inf)
            np.divide(products, lengths, out=similarities, where=is_valid)
            own = skipped[place]
            similarities[own[(own >= first) & (own < first + len(block))] - first] = -np.inf
            # A row as near as the last of the best so far comes behind it, and isn't kept.
            least = cosines[-1] if len(cosines) == top else -np.inf
            better = np.flatnonzero(similarities > least)
            rows = np.concatenate([rows, first + better])
            cosines = np.concatenate([cosines, similarities[better]])
            kept = np.argsort(-cosines, kind="stable")[:top]
            best[place] = (rows[kept], cosines[kept])
        first += len(block)
    return [
        [Found(*pair) for pair in zip(rows.tolist(), cosines.tolist(), strict=True)]
        for rows, cosines in best
    ]


def folder_metrics(collected: Collected, ks: Sequence[int]) -> tuple[dict[str, float], int, int]:
    """Returns the metrics of ``training.retrieval`` in percent, if an image's class is the folder
    that it is in; and the number of images and of queries.

    Images that couldn't be read don't count.

    Raises:
        InputError: no folder has two images.
    """
    values = collected.stored.values
    readable = np.concatenate(
        [np.isfinite(block).all(1) for block in collected.stored.blocks()]
    ).nonzero()[0]
    classes: dict[str, int] = {}
    labels = np.array(
        [
            classes.setdefault(os.path.dirname(collected.names.name(row)), len(classes))
            for row in readable.tolist()
        ],
        np.int64,
    )
    embeddings = normalised(values[readable])
    sums = retrieval_sums(embeddings, labels, np.arange(len(labels)), ks)
    if not sums[-1]:
        raise InputError(
            f"{collected.stored.path} has no folder with two images; folders are used as classes"
        )
    return percentages(sums, ks), len(labels), int(sums[-1])


def write_grid(
    query: str, neighbours: Sequence[Neighbour], output: Path, oriented: bool = False
) -> list[str]:
    """Writes a PNG of the query and its neighbours with their names and similarities, whole or not
    at all.

    Args:
        query: an image; if there is no such file, a text, which isn't drawn.
        oriented: whether images are rotated by their EXIF, as for the model
            (DATA.EXIF_ORIENTATION).

    Returns:
        the errors of images that can't be read.

    Raises:
        InputError: the file has another ending than .png.
    """
    if output.suffix.lower() != ".png":
        raise InputError(f"{output}: the grid is a PNG; use the ending .png")
    # A text has no picture.
    captions = [(query, "query")] if is_url(query) or os.path.lexists(query) else []
    captions += [(name, f"{similarity:.3f}") for name, similarity in neighbours]
    config = get_config(None, ["DATA.IMAGE_CHANNELS", "3", "DATA.EXIF_ORIENTATION", str(oriented)])
    pictures = Pictures(config, [name for name, _ in captions])
    images = [small(pictures, place, SHEET_SIDE) for place in range(len(captions))]
    tiles = [
        tile(image, SHEET_SIDE, name, [(text, "")], 1)
        for image, (name, text) in zip(images, captions, strict=True)
    ]
    grid = side_by_side(tiles, min(_ACROSS, len(tiles)))
    with writing_whole(output, "wb") as file:
        grid.save(file, "PNG")
    return [problem for problem in images if isinstance(problem, str)]
