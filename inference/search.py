"""The images most like one, by the cosine of their features, in a folder or among features that
were kept.
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

_ACROSS = 5  # images in a row of a grid


class Neighbour(NamedTuple):
    """An image, and the cosine of its features and the query's: -1 to 1."""

    name: str
    similarity: float


def of_image(features: FeatureExtractor, image: str) -> np.ndarray:
    """Returns an image's features [D].

    Raises:
        InputError: it can't be read, or the features are maps.
    """
    [found] = features.rows([image], workers=0)
    if found.errors[0]:
        raise InputError(found.errors[0])
    if found.values.ndim != 2:
        raise InputError("-pool is map; a search needs pooled features: choose avg or token")
    return found.values[0]


def in_images(
    features: FeatureExtractor, image: str, images: Paths, top: int, workers: int = 2
) -> tuple[list[Neighbour], list[str]]:
    """Returns the ``top`` of ``images`` nearest to ``image``, the nearest first, and the errors of
    unreadable ones.

    As much memory is taken for many as for a few.
    """
    query = of_image(features, image)
    errors = []

    def blocks() -> Iterator[np.ndarray]:
        for rows in features.rows(images, workers):
            errors.extend(error for error in rows.errors if error)
            yield rows.values

    best = nearest(query, blocks(), top, _own(image, map(images.__getitem__, range(len(images)))))
    return [Neighbour(images[row], similarity) for row, similarity in best], errors


def nearest_in(
    stored: StoredFeatures,
    image: str,
    top: int,
    checkpoint: str | None = None,
    tell: Callable[[str], Any] = str,
) -> list[Neighbour]:
    """Returns the ``top`` rows nearest to ``image``, the nearest first.

    Args:
        checkpoint: where the weights are now; None: where they were. They are read for an image
            that isn't among those stored, and where this is given.
        tell: as ``open_names``'s.

    Raises:
        InputError: other weights than those of the stored features, or an index that can't be read.
    """
    values = stored.values
    made = stored.made
    names = open_names(stored, tell)
    own = names.rows_of(os.path.abspath(image))
    known = [row for row in sorted(own) if not np.isnan(values[row]).any()]
    if known and not checkpoint:
        query = values[known[0]]
    else:
        path = checkpoint or made["checkpoint"]
        layer = (made["layer"], made["pool"], made["norm"])
        features = FeatureExtractor(path, made["cfg"], made["options"], 1, *layer)
        if features.made["sha256"] != made["sha256"]:
            found = f"{printable(str(features.weights))} isn't what the stored features were made by (another SHA-256)"
            raise InputError(
                f"{found}; give those weights by -checkpoint, or make the features anew"
            )
        query = of_image(features, image)
    if values.shape[1:] != query.shape:
        raise InputError(
            f"the query has {query.shape[0]} features, those stored {values.shape[1]}; of another model?"
        )
    return [
        Neighbour(names.name(row), cosine)
        for row, cosine in nearest(query, stored.blocks(), top, own)
    ]


def _own(image: str, names: Iterable[str]) -> set[int]:
    """The rows that are the query's own file."""
    path = os.path.abspath(image)
    return {row for row, name in enumerate(names) if os.path.abspath(name) == path}


def nearest(
    query: np.ndarray, blocks: Iterable[np.ndarray], top: int, left_out: Collection[int] = ()
) -> list[tuple[int, float]]:
    """Returns (row, cosine) of the rows nearest to ``query`` [D] in ``blocks`` [B, D], the nearest
    first.

    Of equal ones the first row comes first. Rows that aren't finite, and those of length 0, aren't
    near.
    """
    query = query.astype(np.float64)
    query = query / (np.linalg.norm(query) or 1)
    left_out = np.array(sorted(left_out), np.int64)
    rows = np.empty(0, np.int64)
    cosines = np.empty(0)
    first = 0
    for block in blocks:
        values = block.astype(np.float64)
        # einsum takes each row alone: equal rows have equal cosines, wherever they stand. A product
        # doesn't hold that.
        lengths = np.sqrt(np.einsum("ij,ij->i", values, values))
        products = np.einsum("ij,j->i", values, query)
        near = np.isfinite(lengths) & (lengths > 0)
        near[left_out[(left_out >= first) & (left_out < first + len(block))] - first] = False
        found = np.full(len(block), -np.inf)
        np.divide(products, lengths, out=found, where=near)
        # Of those that are as near as the last one so far, it came first.
        there = np.flatnonzero(found > (cosines[-1] if len(cosines) == top else -np.inf))
        rows = np.concatenate([rows, first + there])
        cosines = np.concatenate([cosines, found[there]])
        kept = np.argsort(-cosines, kind="stable")[:top]
        rows = rows[kept]
        cosines = cosines[kept]
        first = first + len(block)
    return list(zip(rows.tolist(), cosines.tolist(), strict=True))


def write_grid(
    query: str, neighbours: Sequence[Neighbour], output: Path, oriented: bool = False
) -> list[str]:
    """Writes a PNG, whole or not at all: the query, then its neighbours, each above its name and
    its similarity.

    Args:
        oriented: whether the model saw them rotated as their EXIF says (DATA.EXIF_ORIENTATION).

    Returns:
        what is wrong with those that can't be read.

    Raises:
        InputError: another ending.
    """
    if output.suffix.lower() != ".png":
        raise InputError(f"{output}: the grid is a PNG; give it the ending .png")
    told = [(query, "query"), *((name, f"{similarity:.3f}") for name, similarity in neighbours)]
    config = get_config(None, ["DATA.IMAGE_CHANNELS", "3", "DATA.EXIF_ORIENTATION", str(oriented)])
    pictures = Pictures(config, [name for name, _ in told])
    images = [small(pictures, place, SHEET_SIDE) for place in range(len(told))]
    tiles = [
        tile(image, SHEET_SIDE, name, [(said, "")], 1)
        for image, (name, said) in zip(images, told, strict=True)
    ]
    grid = side_by_side(tiles, min(_ACROSS, len(tiles)))
    with writing_whole(output, "wb") as file:
        grid.save(file, "PNG")
    return [problem for problem in images if isinstance(problem, str)]
