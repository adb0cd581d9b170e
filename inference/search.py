"""Finds the images most similar to one, by the cosine similarity of their features.

It searches the images of a folder, or stored features.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import get_config
from errors import InputError, printable
from inference.captions import SHEET_SIDE, side_by_side, small, tile
from inference.feature_store import FeatureExtractor, StoredFeatures
from inference.name_index import open_names
from inference.pictures import Pictures
from loading.files import Paths
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
        raise InputError("-pool is map; a search needs pooled features: choose avg or token")
    return batch.values[0]


def in_images(
    features: FeatureExtractor, image: str, images: Paths, top: int, workers: int = 2
) -> tuple[list[Neighbour], list[str]]:
    """Computes the features of ``images``, and returns the ``top`` that are nearest to ``image``.

    The memory that this takes doesn't depend on the number of images.

    Returns:
        the neighbours, the nearest first, and the errors of images that can't be read.
    """
    query = of_image(features, image)
    errors = []

    def blocks() -> Iterator[np.ndarray]:
        for rows in features.rows(images, workers):
            errors.extend(error for error in rows.errors if error)
            yield rows.values

    path = os.path.abspath(image)
    query_rows = {row for row in range(len(images)) if os.path.abspath(images[row]) == path}
    best = nearest(query, blocks(), top, query_rows)
    return [Neighbour(images[row], similarity) for row, similarity in best], errors


def nearest_in(
    stored: StoredFeatures,
    image: str,
    top: int,
    checkpoint: str | None = None,
    tell: Callable[[str], Any] = str,
) -> list[Neighbour]:
    """Returns the ``top`` stored images nearest to ``image``, the nearest first.

    Args:
        checkpoint: the weights; None: those at the path where the features were computed. They are
            only needed for an image that isn't stored, or if this is given.
        tell: see ``open_names``.

    Raises:
        InputError: the weights aren't those of the stored features, or the index can't be read.
    """
    values = stored.values
    made = stored.made
    names = open_names(stored, tell)
    query_rows = names.rows_of(os.path.abspath(image))
    known = [row for row in sorted(query_rows) if not np.isnan(values[row]).any()]
    if known and not checkpoint:
        query = values[known[0]]
    else:
        features = FeatureExtractor(
            checkpoint or made["checkpoint"],
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
                f"{weights} isn't what the stored features were made by (another SHA-256);"
                " give those weights by -checkpoint, or make the features anew"
            )
        query = of_image(features, image)
    if values.shape[1:] != query.shape:
        raise InputError(
            f"the query has {query.shape[0]} features, those stored {values.shape[1]}; of another model?"
        )
    return [
        Neighbour(names.name(row), cosine)
        for row, cosine in nearest(query, stored.blocks(), top, query_rows)
    ]


def nearest(
    query: np.ndarray, blocks: Iterable[np.ndarray], top: int, left_out: Collection[int] = ()
) -> list[tuple[int, float]]:
    """Returns (row, cosine similarity) of the rows nearest to a query, the nearest first.

    Among equal ones the first row comes first. Rows that aren't finite, or have the length 0, are
    skipped.

    Args:
        query: [D].
        blocks: the rows, in blocks [B, D].
        left_out: rows to skip, such as the query's own.
    """
    query = query.astype(np.float64)
    query = query / (np.linalg.norm(query) or 1)
    left_out = np.array(sorted(left_out), np.int64)
    rows = np.empty(0, np.int64)
    cosines = np.empty(0)
    first = 0
    for block in blocks:
        values = block.astype(np.float64)
        # einsum computes each row alone, so that equal rows have equal cosines, wherever they are.
        # A matrix product doesn't guarantee that.
        lengths = np.sqrt(np.einsum("ij,ij->i", values, values))
        products = np.einsum("ij,j->i", values, query)
        is_valid = np.isfinite(lengths) & (lengths > 0)
        is_valid[left_out[(left_out >= first) & (left_out < first + len(block))] - first] = False
        similarities = np.full(len(block), -np.inf)
        np.divide(products, lengths, out=similarities, where=is_valid)
        # A row as near as the last of the best so far comes behind it, and isn't kept.
        least = cosines[-1] if len(cosines) == top else -np.inf
        better = np.flatnonzero(similarities > least)
        rows = np.concatenate([rows, first + better])
        cosines = np.concatenate([cosines, similarities[better]])
        kept = np.argsort(-cosines, kind="stable")[:top]
        rows = rows[kept]
        cosines = cosines[kept]
        first += len(block)
    return list(zip(rows.tolist(), cosines.tolist(), strict=True))


def write_grid(
    query: str, neighbours: Sequence[Neighbour], output: Path, oriented: bool = False
) -> list[str]:
    """Writes a PNG of the query and its neighbours with their names and similarities, whole or not
    at all.

    Args:
        oriented: whether images are rotated by their EXIF, as for the model
            (DATA.EXIF_ORIENTATION).

    Returns:
        the errors of images that can't be read.

    Raises:
        InputError: the file has another ending than .png.
    """
    if output.suffix.lower() != ".png":
        raise InputError(f"{output}: the grid is a PNG; give it the ending .png")
    captions = [(query, "query")]
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
