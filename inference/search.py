"""The images most like one, by the cosine of their features, in a folder or among features that were kept."""

import functools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from config import get_config
from errors import InputError, RunError, shown
from inference.features import Features, Stored
from inference.pictures import Pictures
from loading.files import Paths
from utils import written_whole

_ROWS = 8192  # of stored features at once
_SIDE, _GAP, _FONT, _ACROSS = 192, 8, 13, 5  # pixels; tiles in a row


class Neighbour(NamedTuple):
    """An image, and the cosine of its features and the query's: -1 to 1."""

    name: str
    similarity: float


def of_image(features: Features, image: str) -> np.ndarray:
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
    features: Features, image: str, images: Paths, top: int, workers: int = 2
) -> tuple[list[Neighbour], list[str]]:
    """Returns the ``top`` of ``images`` nearest to ``image``, the nearest first, and the errors of unreadable ones.

    As much memory is taken for many as for a few.
    """
    query, errors = of_image(features, image), []

    def blocks() -> Iterator[np.ndarray]:
        for rows in features.rows(images, workers):
            errors.extend(error for error in rows.errors if error)
            yield rows.values

    best = nearest(query, blocks(), top, _own(image, map(images.__getitem__, range(len(images)))))
    return [Neighbour(images[row], similarity) for row, similarity in best], errors


def in_stored(stored: Stored, image: str, top: int, checkpoint: str | None = None) -> list[Neighbour]:
    """Returns the ``top`` rows nearest to ``image``, the nearest first.

    Args:
        checkpoint: computes the features of an image that isn't among those stored; None: the one that made them.

    Raises:
        InputError: other features than the query's, or an index that can't be read.
    """
    values, made = stored.values, stored.made
    own = _own(image, stored.names())
    known = [row for row in own if row < len(values) and not np.isnan(values[row]).any()]
    if known:
        query = values[known[0]]
    else:
        layer = (made["layer"], made["pool"], made["norm"])
        query = of_image(Features(checkpoint or made["checkpoint"], made["cfg"], made["options"], 1, *layer), image)
    if values.shape[1:] != query.shape:
        raise InputError(f"the query has {query.shape[0]} features, those stored {values.shape[1]}; of another model?")
    best = nearest(query, (values[first : first + _ROWS] for first in range(0, len(values), _ROWS)), top, own)
    wanted = {row for row, _ in best}
    names = {row: name for row, name in enumerate(stored.names()) if row in wanted}
    if len(names) != len(wanted):
        raise InputError(f"{stored.index}: has fewer rows than there are features; make them again")
    return [Neighbour(names[row], similarity) for row, similarity in best]


def _own(image: str, names: Iterable[str]) -> set[int]:
    """The rows that are the query's own file."""
    path = os.path.abspath(image)
    return {row for row, name in enumerate(names) if os.path.abspath(name) == path}


def nearest(
    query: np.ndarray, blocks: Iterable[np.ndarray], top: int, left_out: Collection[int] = ()
) -> list[tuple[int, float]]:
    """Returns (row, cosine) of the rows nearest to ``query`` [D] in ``blocks`` [B, D], the nearest first.

    Of equal ones the first row comes first. Rows with NaN, and those of length 0, aren't near.
    """
    query = query.astype(np.float64)
    query = query / (np.linalg.norm(query) or 1)
    rows, cosines, first = np.empty(0, np.int64), np.empty(0), 0
    for block in blocks:
        values = block.astype(np.float64)
        lengths = np.linalg.norm(values, axis=1)
        there = np.array([row for row in np.flatnonzero(lengths > 0) if first + row not in left_out], np.int64)
        rows = np.concatenate([rows, first + there])
        cosines = np.concatenate([cosines, values[there] @ query / lengths[there]])
        kept = np.argsort(-cosines, kind="stable")[:top]
        rows, cosines, first = rows[kept], cosines[kept], first + len(block)
    return list(zip(rows.tolist(), cosines.tolist(), strict=True))


def write_grid(query: str, neighbours: Sequence[Neighbour], output: Path) -> None:
    """Writes a PNG, whole or not at all: the query, then its neighbours, each above its similarity and its name.

    Raises:
        InputError: another ending.
    """
    if output.suffix.lower() != ".png":
        raise InputError(f"{output}: the grid is a PNG; give it the ending .png")
    tiles = [_tile(query, "query"), *(_tile(name, f"{similarity:.3f}") for name, similarity in neighbours)]
    width, height = (side + _GAP for side in tiles[0].size)
    across = min(_ACROSS, len(tiles))
    grid = Image.new("RGB", (across * width + _GAP, -(-len(tiles) // across) * height + _GAP), "white")
    for place, tile in enumerate(tiles):
        grid.paste(tile, (_GAP + place % across * width, _GAP + place // across * height))
    with written_whole(output, "wb") as file:
        grid.save(file, "PNG")


def _tile(name: str, caption: str) -> Image.Image:
    paper = Image.new("RGB", (_SIDE, _SIDE + 2 * (_FONT + 5)), "white")
    draw = ImageDraw.Draw(paper)
    try:
        image = Pictures(get_config(None, ["DATA.IMAGE_CHANNELS", "3"]), [name]).image(0)
        scale = _SIDE / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST)
        paper.paste(image, ((_SIDE - size[0]) // 2, (_SIDE - size[1]) // 2))
    except RunError:  # it was read before: it has gone, or was changed
        draw.rectangle((0, 0, _SIDE - 1, _SIDE - 1), fill="#eeeeee")
        draw.text((_GAP, _SIDE // 2), "can't be read", "#b00020", _font())
    title = shown(os.path.basename(name), 200)
    while draw.textlength(title, _font()) > _SIDE:
        title = "..." + title.removeprefix("...")[1:]
    draw.text((0, _SIDE + 2), caption, "black", _font())
    draw.text((0, _SIDE + _FONT + 7), title, "#666666", _font())
    return paper


@functools.cache
def _font() -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which has most alphabets; Pillow's own has Latin letters alone."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")), _FONT)
