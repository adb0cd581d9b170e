"""Writes what ``label_errors`` found: a table that a person edits, and sheets of the images."""

import collections
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datasets import ImageDataset
from errors import counted, printable
from inference.captions import SHEET_SIDE, side_by_side, small, tile
from inference.label_errors import Found, Suspect, features_of
from launch.files import making_folder, writing_whole
from loading.label_edits import class_text, write_table
from loading.label_sets import LabelSets
from training.probing import knn

TABLE = "label_errors.csv"
# The neighbours that are drawn beside an image.
_DRAWN = 2
# The images of a sheet, and how many of them are in a row.
_PER_SHEET = 24
_ACROSS = 3
# The most pairs of a label and its suggestion that a summary names.
_PAIRS = 10


def summary(found: Found) -> str:
    """Returns a summary in a few lines: the number of labels, and the most frequent pairs."""
    images = counted(found.images, "image")
    wrong = len(found.suspects)
    share = 100 * wrong / max(1, found.labels)
    verb = "look" if wrong != 1 else "looks"
    of = f" of {found.labels} for each image and class" if found.has_several else ""
    lines = [f"{images}: {counted(wrong, 'label')}{of} {verb} wrong ({share:.2f} %)"]
    pairs = collections.Counter(_pair(found, suspect) for suspect in found.suspects)
    ranked = sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))
    lines += [f"{count:6}  {printable(pair)}" for pair, count in ranked[:_PAIRS]]
    return "\n".join(lines)


def _pair(found: Found, suspect: Suspect) -> str:
    label = class_text(found.classes, suspect.label)
    if isinstance(suspect.suggestion, str):
        return f"{label}: {suspect.suggestion}"
    return f"{label}, suggested {class_text(found.classes, suspect.suggestion)}"


def write(output: Path, found: Found, drawn: int, features: Sequence[np.ndarray] = ()) -> list[str]:
    """Writes the table and the sheets into a new folder, all or none.

    Args:
        drawn: the images that are drawn, the most suspicious ones.
        features: of each part's images. Empty: they are computed where they are needed.

    Returns:
        the names of the files.
    """
    with making_folder(output) as folder:
        with writing_whole(folder / TABLE, "wb") as file:
            write_table(file, (_row(found, one) for one in found.suspects), found.has_several)
        names = [TABLE]
        tiles = _tiles(found, found.suspects[:drawn], features)
        for number, first in enumerate(range(0, len(tiles), _PER_SHEET), 1):
            papers = [paper for row in tiles[first : first + _PER_SHEET] for paper in row]
            across = min(_ACROSS, len(tiles)) * (1 + _DRAWN)
            names.append(f"sheet_{number}.png")
            with writing_whole(folder / names[-1], "wb") as file:
                side_by_side(papers, across).save(file, "PNG")
    return names


def _row(found: Found, suspect: Suspect) -> tuple[Any, ...]:
    suggestion = suspect.suggestion
    if not isinstance(suggestion, str):
        suggestion = class_text(found.classes, suggestion)
    label = class_text(found.classes, suspect.label)
    return suspect.name, label, suggestion, round(suspect.score, 6), "relabel"


def _tiles(
    found: Found, suspects: Sequence[Suspect], features: Sequence[np.ndarray]
) -> list[list[Any]]:
    """Returns a row of tiles for each suspect: its image, and the images nearest to it.

    The nearest ones are of the same part, so the model was trained on none of them.
    """
    tiles: list[list[Any]] = [[] for _ in suspects]
    for part, images in enumerate(found.parts):
        chosen = [place for place, suspect in enumerate(suspects) if suspect.part == part]
        if not chosen:
            continue
        values = features[part] if len(features) else features_of(images)
        own = np.array([suspects[place].index for place in chosen])
        similarities, rows = knn.nearest_others(values[own], values, own, _DRAWN)
        for place, cosines, nearest in zip(chosen, similarities, rows, strict=True):
            suspect = suspects[place]
            dataset: Any = images.dataset
            answer = suspect.suggestion
            if not isinstance(answer, str):
                answer = class_text(found.classes, answer)
            captions = [
                (
                    "class" if found.has_several else "label",
                    class_text(found.classes, suspect.label),
                )
            ]
            captions.append((f"{100 * suspect.probability:.1f} %", answer))
            picture = small(dataset, suspect.index, SHEET_SIDE)
            name = f"{place + 1}. {os.path.basename(suspect.name)}"
            tiles[place].append(tile(picture, SHEET_SIDE, name, captions, 2))
            for cosine, row in zip(cosines.tolist(), nearest.tolist(), strict=True):
                own_label = ", ".join(
                    class_text(found.classes, one) for one in _labels_of(dataset, row)
                )
                captions = [("label", own_label), (f"{cosine:.3f}", "similarity")]
                picture = small(dataset, row, SHEET_SIDE)
                tiles[place].append(tile(picture, SHEET_SIDE, images.name(row), captions, 2))
            while len(tiles[place]) <= _DRAWN:
                tiles[place].append(tile("", SHEET_SIDE, "", [], 2))
    return tiles


def _labels_of(dataset: ImageDataset, index: int) -> list[int]:
    if isinstance(dataset.labels, LabelSets):
        return dataset.labels.of(index).tolist()
    return [int(dataset.labels[index])]
