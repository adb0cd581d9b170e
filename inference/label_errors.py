"""Finds training images whose labels are probably wrong.

Each image's probabilities come from a run that wasn't trained on it (DATA.FOLDS), or from the
labels of the images whose features are nearest to its own. ``confident_learning`` says which labels
don't fit them. ``label_sheets`` writes the result.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import get_config, with_values
from datasets import ImageDataset, get_dataloader, get_dataset
from errors import InputError, RunError, printable
from inference.confident_learning import (
    Filter,
    Score,
    binary,
    label_errors,
    quality,
    suggested,
)
from inference.export_manifest import is_export
from inference.feature_store import FeatureExtractor
from inference.predictor import Predictor, config_of
from inference.run_data import data_config, data_keys
from launch.files import temporary_folder
from loading.files import Paths
from loading.label_edits import MISSING, SUPERFLUOUS
from loading.label_sets import LabelSets, are_known, every_label
from settings.configuration import Configuration
from training.checkpoint.state import state_beside
from training.command_line import run_file
from training.probing import knn
from training.probing.features import ROWS
from weights.hub import best_of_run, find_weights

# The nearest images whose labels vote, without folds.
NEIGHBOURS = 10


class Images(NamedTuple):
    """Images that a model wasn't trained on, or all images of a run.

    Attributes:
        path: the model's weights.
        config: of the images, prepared as for an evaluation.
        batch_size: the run's, so that probabilities are those of its evaluation.
        task: TASK of the weights.
        dataset: the images with their labels.
        names: the images' paths relative to the dataset's folder; None: they have none.
    """

    path: str | Path
    config: Configuration
    batch_size: int
    task: str
    dataset: ImageDataset
    names: Paths | np.ndarray | None

    @property
    def has_several(self) -> bool:
        """Returns whether an image may have several labels."""
        return self.task == "multilabel"

    def name(self, index: int) -> str:
        """Returns an image's path relative to the dataset's folder, as it is on the disk."""
        if self.names is None:
            return self.dataset.name(index)
        return os.fsdecode(self.names[index])

    def has_class(self, label: int) -> np.ndarray:
        """Returns whether each image has a class, [n] integers of 0 and 1."""
        labels: Any = self.dataset.labels
        has = np.zeros(len(labels), np.int64)
        owners = np.repeat(np.arange(len(labels)), np.diff(labels.ends))
        has[owners[labels.labels == label]] = 1
        return has


class Suspect(NamedTuple):
    """A label that is probably wrong.

    Attributes:
        part: which of the ``Images`` the image is in.
        index: of the image in them.
        name: the image's, as ``Images.name``.
        label: the label; of several labels the class that is missing or superfluous.
        suggestion: the class to take instead; of several labels MISSING or SUPERFLUOUS.
        score: from 0 (suspicious) to 1.
        probability: that the suggestion is right, from 0 to 1.
    """

    part: int
    index: int
    name: str
    label: int
    suggestion: int | str
    score: float
    probability: float


class Found(NamedTuple):
    """The label errors that were found.

    Attributes:
        parts: the images; several parts have the same classes.
        classes: names; empty: they have none.
        suspects: the labels that are probably wrong, the most suspicious first.
        labels: how many labels were looked at.
    """

    parts: Sequence[Images]
    classes: Sequence[str]
    suspects: Sequence[Suspect]
    labels: int

    @property
    def has_several(self) -> bool:
        """Returns whether an image may have several labels."""
        return self.parts[0].has_several

    @property
    def images(self) -> int:
        """Returns how many images were examined."""
        return _count(self.parts)


# ------------------------------------------------------------------- the images


def held_out(
    paths: Sequence[str], data: Sequence[tuple[str, Any]] = (), workers: int = 2
) -> list[Images]:
    """Returns the images that each run of a cross-validation wasn't trained on, by fold.

    No weights are loaded.

    Args:
        paths: a run, or a checkpoint of one, for each fold.
        data: keys of the data whose values aren't the runs', such as DATA.DATA_PATH.

    Raises:
        InputError: these aren't all folds of one cross-validation, or their data can't be read.
    """
    configs = [_data_of_run(path, data, workers) for path in paths]
    first, _, _ = configs[0]
    for path, (config, _, _) in zip(paths, configs, strict=True):
        if config.DATA.FOLDS is None:
            raise InputError(
                f"{printable(path)}: its run has no DATA.FOLDS, so it was trained on all images;"
                " train a run per fold, or find label errors by its features (-features)"
            )
        if difference := _difference(first, config):
            raise InputError(
                f"{printable(path)} and {printable(paths[0])} aren't folds of one"
                f" cross-validation: {difference}"
            )
    folds = [config.DATA.FOLD for config, _, _ in configs]
    if sorted(folds) != list(range(first.DATA.FOLDS)):
        raise InputError(
            f"the runs are of the folds {', '.join(map(str, sorted(folds)))} of {first.DATA.FOLDS}"
            " (DATA.FOLD); pass one run of each fold, so that each image has one that wasn't"
            " trained on it"
        )
    parts = []
    for _, path, (config, batch_size, task) in sorted(zip(folds, paths, configs, strict=True)):
        dataset = get_dataset(config, "val")
        names = dataset.relative_names()
        parts.append(Images(best_of_run(path), config, batch_size, task, dataset, names))
    _check_counts(_checked(parts))
    return parts


def _check_counts(parts: Sequence[Images]) -> None:
    """Raises InputError if a run was trained on another number of images than the other folds have.

    Files that are added or removed change all folds, so a run may have seen images of its own fold.
    """
    total = _count(parts)
    for images in parts:
        state = state_beside(find_weights(images.path), "images")
        others = total - len(images.dataset)
        if state and state["images"] != others:
            raise InputError(
                f"{images.path}: its run was trained on {state['images']} images, but now the other"
                f" folds have {others}; restore the data, or train the folds again"
            )


def all_images(path: str, data: Sequence[tuple[str, Any]] = (), workers: int = 2) -> Images:
    """Returns all images of a run's training set, those of DATA.VAL_SPLIT and FOLDS included.

    No weights are loaded.

    Args:
        path: the run, or a checkpoint of it.
        data: as of ``held_out``. Weights that no run saved need their data.

    Raises:
        InputError: the data can't be read.
    """
    config, batch_size, task = _data_of_run(path, data, workers)
    # An image that can't be read is named, instead of replaced by the next one.
    config = with_values(config, DATA__FOLDS=None, DATA__FOLD=0, DATA__VAL_SPLIT=None)
    config = with_values(config, DATA__SKIP_BROKEN=False)
    dataset = get_dataset(config, "train", alone=True).as_evaluated(config)
    names = dataset.relative_names()
    [images] = _checked([Images(best_of_run(path), config, batch_size, task, dataset, names)])
    return images


def _data_of_run(
    path: str, data: Sequence[tuple[str, Any]], workers: int
) -> tuple[Configuration, int, str]:
    """Returns (configuration of a run's data, its batch size in an evaluation, its TASK)."""
    best = best_of_run(path)
    if is_export(best):
        raise InputError(f"{printable(path)} is an export; pass the run that it was made from")
    model, description = config_of(best, None, ["EVAL", "True"])
    if description.task not in ("classification", "multilabel"):
        raise InputError(
            f"{printable(path)} was trained by TASK {description.task}; labels are checked for"
            " classification and multilabel"
        )
    config = data_config(
        model, data_keys(best, data, f"{printable(path)}: it wasn't saved by a run")
    )
    file = run_file(best)
    batch_size = get_config(file).DATA.BATCH_SIZE_EVAL if file else 32
    config = with_values(config, DATA__BATCH_SIZE_EVAL=batch_size, DATA__NUM_WORKERS=workers)
    return config, batch_size, description.task


def _difference(one: Configuration, other: Configuration) -> str:
    """Returns the first key of the data in which two folds' runs differ, with its values, or ""."""
    for name, value in one.DATA.items():
        # Models may see the images in different ways.
        chooses = name in ("DATASET", "DATA_PATH") or name.startswith(("FOLDS", "SPLIT_"))
        if chooses and other.DATA[name] != value:
            return f"DATA.{name} is {other.DATA[name]} and {value}"
    return ""


def _checked(parts: list[Images]) -> list[Images]:
    """Returns ``parts``; raises InputError if their labels can't be checked."""
    names: set[str] = set()
    classes = parts[0].dataset.classes
    for images in parts:
        dataset = images.dataset
        if dataset.classes != classes:
            raise InputError(
                "the folds' images have different classes; have files changed since the training?"
            )
        if not are_known(dataset.labels):
            raise InputError(f"the images of '{images.config.DATA.DATASET}' have no labels")
        if images.has_several != isinstance(dataset.labels, LabelSets):
            raise InputError(
                f"{printable(str(images.path))} was trained by TASK {images.task}, which doesn't"
                " match the labels"
                f" of '{images.config.DATA.DATASET}'"
            )
        if images.names is None:
            continue
        for index in range(len(dataset)):
            name = images.name(index)
            if name in names:
                raise InputError(
                    f"the dataset has the image {printable(name)} twice; list each image once"
                )
            names.add(name)
    return parts


# ------------------------------------------------------------ the probabilities


@contextlib.contextmanager
def probabilities_of(
    parts: Sequence[Images], folder: Path, after_batch: Callable[[int], Any] = int
) -> Iterator[np.ndarray]:
    """Yields each image's probabilities by the model of its part, [n, K] float64.

    They are, bit by bit, those of ``-eval``. They stand in a file, which is removed afterwards: it
    takes 8 bytes for each image and class.

    Args:
        folder: where the file is made.
        after_batch: called with the number of images of each batch.

    Raises:
        InputError: a run's weights can't be read, or haven't the data's classes.
        RunError: an image can't be read, or an answer isn't finite.
    """
    done = 0
    with temporary_folder(folder) as place:
        values: Any = None
        for images in parts:
            predictor = Predictor(images.path, batch_size=images.batch_size)
            predictor.check_classifier()
            _check_classes(predictor, images)
            if values is None:
                shape = (_count(parts), predictor.config.MODEL.NUM_CLASSES)
                values = np.memmap(place / "probabilities", np.float64, "w+", shape=shape)
            for logits in _outputs(predictor, images, after_batch):
                if not np.isfinite(logits).all():
                    raise RunError(f"{predictor.path}: the predictions aren't finite")
                values[done : done + len(logits)] = predictor.probabilities(logits)
                done += len(logits)
        yield values


def _check_classes(predictor: Predictor, images: Images) -> None:
    """Raises InputError if a model's outputs aren't the classes of the data, in their order."""
    outputs = predictor.config.MODEL.NUM_CLASSES
    labels = images.dataset.labels
    if isinstance(labels, LabelSets):
        labels.outputs = max(outputs, labels.outputs)
        labels = labels.labels
    classes = images.dataset.classes
    if len(classes) > outputs or int(labels.max(initial=-1)) >= outputs:
        count = len(classes) or int(labels.max(initial=-1)) + 1
        raise InputError(
            f"{predictor.path}: it has {outputs} outputs, but the data has {count} classes; use the"
            " data that it was trained on"
        )
    named = zip(predictor.classes, classes, strict=False)
    for place, (output, name) in enumerate(named):
        if output != name:
            raise InputError(
                f"{predictor.path}: its output {place} is the class '{printable(output, 40)}', but"
                f" that of the data is '{printable(name, 40)}'; use the data that it was trained on"
            )


def _count(parts: Sequence[Images]) -> int:
    return sum(len(images.dataset) for images in parts)


def _outputs(
    predictor: Predictor, images: Images, after_batch: Callable[[int], Any] = int
) -> Iterator[np.ndarray]:
    """Yields a model's outputs for the images, batch by batch."""
    for batch in get_dataloader(images.config, images.dataset, "val"):
        yield predictor.logits(batch["pixels"])
        after_batch(len(batch["pixels"]))


def features_of(images: Images, after_batch: Callable[[int], Any] = int) -> np.ndarray:
    """Returns the features that the classifier reads, [n, channels] float32.

    Raises:
        RunError: an image can't be read, or a feature isn't finite.
    """
    extractor = FeatureExtractor(images.path, batch_size=images.batch_size)
    values = np.empty((0, 0), np.float32)
    done = 0
    for rows in _outputs(extractor, images, after_batch):
        if not done:
            values = np.empty((len(images.dataset), rows.shape[1]), np.float32)
        values[done : done + len(rows)] = rows
        done += len(rows)
    if not np.isfinite(values).all():
        raise RunError(f"{extractor.path}: the features aren't finite")
    return values


@contextlib.contextmanager
def votes_of(images: Images, features: np.ndarray, k: int, folder: Path) -> Iterator[np.ndarray]:
    """Yields the share of each image's k nearest images that has each class, [n, K] float64.

    An image itself isn't among its nearest ones.

    Args:
        features: what ``features_of`` returned.
        folder: as of ``probabilities_of``.
    """
    labels: Any = images.dataset.labels
    if isinstance(labels, LabelSets):
        classes = labels.outputs = max(labels.outputs, len(images.dataset.classes))
    else:
        classes = max(int(labels.max()) + 1, len(images.dataset.classes))
    shape = (len(labels), classes)
    with temporary_folder(folder) as place:
        values: Any = np.memmap(place / "votes", np.float64, "w+", shape=shape)
        for first in range(0, len(labels), ROWS):
            own = np.arange(first, min(first + ROWS, len(labels)))
            _, rows = knn.nearest_others(features[own], features, own, k)
            for index, nearest in zip(own.tolist(), rows, strict=True):
                if isinstance(labels, LabelSets):
                    votes = sum((labels[row] for row in nearest.tolist()), np.zeros(classes))
                else:
                    votes = np.bincount(labels[nearest], minlength=classes)
                values[index] = votes / max(1, len(nearest))
        yield values


# ------------------------------------------------------------------- the labels


def find(
    parts: Sequence[Images],
    probabilities: np.ndarray,
    method: Filter = "prune_by_noise_rate",
    score: Score = "self_confidence",
) -> Found:
    """Returns the labels that are probably wrong, the most suspicious first.

    Equal scores are in the order of the images' names.

    Args:
        probabilities: of all parts' images, one part after the other, [n, K].
        method, score: as of ``confident_learning``.
    """
    starts = np.cumsum([0, *(len(images.dataset) for images in parts)])
    suspects = []

    def add(place: int, label: int, suggestion: int | str, value: Any, probability: Any) -> None:
        part = int(np.searchsorted(starts, place, "right")) - 1
        index = int(place - starts[part])
        name = parts[part].name(index)
        found = Suspect(part, index, name, label, suggestion, float(value), float(probability))
        suspects.append(found)

    labels = len(probabilities)
    if parts[0].has_several:
        labels = probabilities.size
        for label in range(probabilities.shape[1]):
            own = np.concatenate([images.has_class(label) for images in parts])
            both = binary(np.asarray(probabilities[:, label]))
            scores = quality(own, both, score)
            for place in np.flatnonzero(label_errors(own, both, method)).tolist():
                problem = SUPERFLUOUS if own[place] else MISSING
                add(place, label, problem, scores[place], both[place, 1 - own[place]])
    else:
        own = np.concatenate([every_label(images.dataset.labels) for images in parts])
        scores = quality(own, probabilities, score)
        others = suggested(own, probabilities)
        for place in np.flatnonzero(label_errors(own, probabilities, method)).tolist():
            other = int(others[place])
            add(place, int(own[place]), other, scores[place], probabilities[place, other])
    suspects.sort(key=lambda suspect: (suspect.score, suspect.name, suspect.label))
    return Found(parts, parts[0].dataset.classes, suspects, labels)
