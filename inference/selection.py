"""Chooses which unlabelled images to label next.

The rules are the smallest margin, the highest energy (Liu et al. 2020, arXiv:2010.03759), and the
coverage of features by a core-set (Sener and Savarese 2018, arXiv:1708.00489). Images that look
like a labelled one are left out. Of images that look alike, the first one stands for all.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import InputError, RunError, printable
from inference.acquisition import Rule, alike, distances_to, farthest, margins, unlike
from inference.calibration.rejection import score
from inference.captions import SHEET_SIDE, side_by_side, small, tile
from inference.feature_store import FeatureExtractor
from inference.label_errors import Images, features_of
from inference.pictures import Pictures
from inference.predictor import Predictor
from launch.files import making_folder, writing_whole
from loading.check.images import Source, check_images
from loading.dataset import ArrayDataset, EncodedDataset
from loading.files import Paths, contents
from loading.label_edits import class_text
from loading.tables import csv_line
from loading.transforms import largest_file

TABLE = "chosen.csv"
LIST = "chosen.txt"
# How many images "mixed" takes by their margin for each image that it chooses.
SHORTLIST = 10
_PER_SHEET = 24
_ACROSS = 6


class Pool(NamedTuple):
    """The images that may be chosen.

    Attributes:
        paths: all images.
        usable: the indices of those that may be chosen, in the order of their paths.
        problems: the errors of images that can't be read.
        known: how many images look like a labelled one.
        twins: how many others look like an image that may be chosen.
        blank: how many images have one colour alone.
    """

    paths: Paths
    usable: np.ndarray
    problems: list[str]
    known: int
    twins: int
    blank: int


class Chosen(NamedTuple):
    """Images to label, the first one first.

    Attributes:
        rows: their indices in the pool.
        values: what they were chosen by: the margin, the energy, or the distance to the nearest
            image that is labelled or was chosen before.
        answers: (class, probability) of the model's answer; empty for "coverage".
    """

    rows: list[int]
    values: list[float]
    answers: list[tuple[str, float]]


def read_pool(paths: Paths, labelled: Images, workers: int) -> Pool:
    """Returns the images that may be chosen. Every image is decoded, in several processes.

    Call it before anything is computed: a fork of a process that has computed may hang.

    Args:
        labelled: the images that have labels already.
        workers: the number of processes.

    Raises:
        InputError: the labelled images are drawn at random.
        RunError: a process was killed.
    """
    data = labelled.config.DATA
    mode = labelled.dataset.mode
    most = data.MAX_PIXELS
    largest = largest_file(most)
    source = Source(
        name=lambda index: printable(paths[index], 4000),
        data=lambda index: contents(paths[index], largest),
        labels=np.zeros(len(paths), np.int64),
        classes=(),
        mode=mode,
    )
    checked = check_images(source, most, data.EXIF_ORIENTATION, max(1, workers))
    known = check_images(_source_of(labelled), most, data.EXIF_ORIENTATION, max(1, workers))
    records = checked.records
    readable = records["readable"]
    seen = known.records[known.records["readable"] & ~known.records["blank"]]
    is_blank = readable & records["blank"]
    is_known = readable & ~is_blank & alike(records["hash"], seen["hash"])
    may = readable & ~is_blank & ~is_known
    order = sorted(np.flatnonzero(may).tolist(), key=paths.path_bytes)
    candidates = np.array(order, np.int64)
    usable = candidates[unlike(records["hash"][candidates])]
    # The messages of the first ones are kept.
    problems = [checked.messages.get(index, "") for index in np.flatnonzero(~readable).tolist()]
    twins = len(candidates) - len(usable)
    return Pool(paths, usable, problems, int(is_known.sum()), twins, int(is_blank.sum()))


def _source_of(images: Images) -> Source:
    dataset: Any = images.dataset
    labels = np.zeros(len(dataset), np.int64)
    if isinstance(dataset, EncodedDataset):
        return Source(dataset.name, dataset.data, labels, (), mode=dataset.mode)
    if isinstance(dataset, ArrayDataset):
        return Source(dataset.name, None, labels, (), np.asarray(dataset.images), dataset.mode)
    raise InputError(f"DATASET {images.config.DATA.DATASET} has random images; use labelled ones")


def choose(
    pool: Pool,
    labelled: Images,
    count: int,
    rule: Rule,
    workers: int = 2,
    after_batch: Callable[[int], Any] = int,
) -> Chosen:
    """Returns the ``count`` images to label next; fewer if there aren't so many.

    - "margin": the smallest difference of the two largest probabilities. Of several labels an
      image: the smallest difference of a class's probability and its complement.
    - "energy": the highest energy (``calibration.rejection``).
    - "coverage": again and again the image whose features are farthest from those of all labelled
      and chosen images (k-centre greedy).
    - "mixed": SHORTLIST x ``count`` images by margin, then those of them that "coverage" chooses.

    Equal images are in the order of their paths.

    Args:
        labelled: the model's own training images.
        workers: the number of processes that load images.
        after_batch: called with the number of images of each batch.

    Raises:
        InputError: the weights give no classes.
        RunError: a labelled image can't be read, or an answer isn't finite.
    """
    rows = pool.usable
    if rule == "coverage":
        places, distances = _covering(pool, rows, labelled, count, workers, after_batch)
        return Chosen(rows[places].tolist(), distances, [])
    judged = _judged(pool, rows, labelled, rule, workers, after_batch)
    # The highest energies come first.
    order = np.argsort(-judged.values if rule == "energy" else judged.values, kind="stable")
    if rule == "mixed":
        # In the order of their paths, which decides among equal distances.
        kept = np.sort(order[: SHORTLIST * count])
        places, numbers = _covering(pool, rows[kept], labelled, count, workers, after_batch)
        chosen = kept[places]
    else:
        chosen = order[:count]
        numbers = judged.values[chosen].tolist()
    answers = [
        (class_text(judged.classes, int(judged.labels[place])), float(judged.shares[place]))
        for place in chosen.tolist()
    ]
    return Chosen(rows[chosen].tolist(), numbers, answers)


class _Judged(NamedTuple):
    """A model's answers to images: margins or energies, the best classes, their probabilities [n]."""

    values: np.ndarray
    labels: np.ndarray
    shares: np.ndarray
    classes: Sequence[str]


def _judged(
    pool: Pool,
    rows: np.ndarray,
    labelled: Images,
    rule: Rule,
    workers: int,
    after_batch: Callable[[int], Any],
) -> _Judged:
    """Returns the answers to some rows of the pool."""
    predictor = Predictor(labelled.path, batch_size=labelled.batch_size)
    predictor.check_classifier()
    count = len(rows)
    judged = _Judged(np.zeros(count), np.zeros(count, np.int64), np.zeros(count), predictor.classes)
    done = 0
    for logits in _logits(predictor, Paths(pool.paths[row] for row in rows.tolist()), workers):
        probabilities = predictor.probabilities(logits)
        part = slice(done, done + len(logits))
        if rule == "energy":
            judged.values[part] = score("energy", logits, labelled.has_several)
        else:
            judged.values[part] = margins(probabilities, labelled.has_several)
        judged.labels[part] = probabilities.argmax(1)
        judged.shares[part] = probabilities.max(1)
        done += len(logits)
        after_batch(len(logits))
    return judged


def _covering(
    pool: Pool,
    rows: np.ndarray,
    labelled: Images,
    count: int,
    workers: int,
    after_batch: Callable[[int], Any],
) -> tuple[list[int], list[float]]:
    """``farthest`` for some rows of the pool, with the labelled images as centres."""
    centres = features_of(labelled, after_batch)
    extractor = FeatureExtractor(labelled.path, batch_size=labelled.batch_size)
    values = np.empty((len(rows), centres.shape[1]), np.float32)
    images = Paths(pool.paths[row] for row in rows.tolist())
    done = 0
    for block in _logits(extractor, images, workers):
        values[done : done + len(block)] = block
        done += len(block)
        after_batch(len(block))
    return farthest(values, distances_to(values, centres), count)


def _logits(predictor: Predictor, images: Paths, workers: int) -> Iterator[np.ndarray]:
    """Yields a model's outputs for images, batch by batch."""
    for batch in predictor.batches(Pictures(predictor.config, images), workers):
        for problem in filter(None, batch.problems):
            raise RunError(problem)
        logits = predictor.logits(batch.pixels)
        if not np.isfinite(logits).all():
            raise RunError(f"{predictor.path}: the predictions aren't finite")
        yield logits


def write(output: Path, pool: Pool, chosen: Chosen, rule: Rule, labelled: Images) -> list[str]:
    """Writes a table, a list of the paths and sheets of the images into a new folder, all or none.

    Returns:
        the names of the files.
    """
    value = {"margin": "margin", "energy": "energy"}.get(rule, "distance")
    answers: Sequence[tuple[Any, Any]] = chosen.answers or [(None, None)] * len(chosen.rows)
    names = [TABLE, LIST]
    with making_folder(output) as folder:
        with writing_whole(folder / TABLE, "wb") as table:
            table.write(f"image,{value},class,probability\n".encode())
            for row, number, (label, probability) in zip(
                chosen.rows, chosen.values, answers, strict=True
            ):
                share = None if probability is None else round(probability, 6)
                line = csv_line(pool.paths[row], round(number, 6), label, share)
                table.write(line.encode(errors="surrogateescape"))
        with writing_whole(folder / LIST, "wb") as file:
            for row in chosen.rows:
                file.write(pool.paths.path_bytes(row) + b"\n")
        pictures = Pictures(labelled.config, Paths(pool.paths[row] for row in chosen.rows))
        for number, first in enumerate(range(0, len(chosen.rows), _PER_SHEET), 1):
            papers = []
            for place in range(first, min(first + _PER_SHEET, len(chosen.rows))):
                label = answers[place][0] or ""
                text = [(f"{chosen.values[place]:.3g}", label)]
                picture = small(pictures, place, SHEET_SIDE)
                name = f"{place + 1}. {os.path.basename(pictures.name(place))}"
                papers.append(tile(picture, SHEET_SIDE, name, text, 1))
            names.append(f"sheet_{number}.png")
            with writing_whole(folder / names[-1], "wb") as file:
                side_by_side(papers, min(_ACROSS, len(papers))).save(file, "PNG")
    return names
