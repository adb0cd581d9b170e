"""Reads the folder of a run that has ended.

The folder may be anybody's, so nothing in its files is trusted.
"""

import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import get_config
from errors import Allowance, InputError, Unreadable, open_file, reading
from loading.files import Paths
from loading.tables import csv_rows
from settings.configuration import Configuration
from settings.plain import is_list, parsed_json, whole_file
from settings.registry import tasks
from settings.tasks import answers_of
from training.curves import Points, points
from training.predictions import (
    CONFUSION,
    MULTILABEL_COLUMNS,
    SINGLE_LABEL_COLUMNS,
    file_name,
)
from training.probing.records import CURVES
from training.report.pixels import PixelTable, read_confusion, read_pixel_table
from training.report.tables import class_number, lines_of
from training.results import MOST_CLASSES, is_text, read_result

ADVICE = "; is it a run's folder?"
SPLITS = ("train", "val", "ema")
# Bytes of the largest classes.json.
_LARGEST = 64 << 20
# Curves that every run has, besides those of its task.
SPEED = {"images_per_s": "images per second", "data_wait": "waiting for data (share of the time)"}


class PredictionTable(NamedTuple):
    """The content of predictions.csv, in the dataset's order.

    In a table of several classes per image, "the worst class" of an image is the one whose
    probability is farthest from the truth.

    Attributes:
        images: names.
        digest: of the images' names, and with several classes of their labels. Tables of the same
            images have the same one.
        right: [n] bool; with several classes, whether all of them are right.
        label: [n] classes; with several, the worst class.
        predicted: [n] classes; with several, whether the image has the worst class.
        probability: [n], of the predicted class or the worst one.
    """

    images: Paths
    digest: bytes
    right: np.ndarray
    label: np.ndarray
    predicted: np.ndarray
    probability: np.ndarray


class FinishedRun(NamedTuple):
    """A run that has ended, or the state of one that trains after its last evaluation.

    Attributes:
        folder: the run's.
        config: its configuration.
        evaluated: the last evaluation by split: "val" of the weights, and "ema" of the averaged
            weights. That of a run that has ended is in result.json.
        classes: names; empty if they aren't known.
        predictions: by split; empty without REPORT, or for another kind of task.
        pixel_tables: the same of a task with a class for each pixel.
        confusion: of such a task the pixels of each class by their answer, [K, K]; None: unknown.
        curves: points by split and key.
        labels: the keys of curves, with the labels of their axes.
    """

    folder: Path
    config: Configuration
    evaluated: dict[str, dict[str, Any]]
    classes: list[str]
    predictions: dict[str, PredictionTable]
    pixel_tables: dict[str, PixelTable]
    confusion: np.ndarray | None
    curves: dict[str, dict[str, Points]]
    labels: dict[str, str]

    @property
    def multilabel(self) -> bool:
        """Returns whether an image may have several classes."""
        return answers_of(self.config.TASK) == "sigmoid"

    def name_of(self, label: int) -> str:
        """Returns the name of a class, or its number if the name isn't known."""
        return self.classes[label] if label < len(self.classes) else str(label)

    @property
    def result(self) -> dict[str, Any]:
        """Returns the evaluation of the weights: the content of result.json, if the run has ended."""
        return self.evaluated["val"]


def read_run(folder: Path, evaluated: dict[str, dict[str, Any]] | None = None) -> FinishedRun:
    """Reads the folder of a run.

    Args:
        evaluated: the last evaluation, by split, of a run that still trains; None: the run has
            ended, and result.json has it.

    Raises:
        InputError: it isn't a run's folder, the run hasn't ended, or a file has content that no run
            writes.
    """
    if evaluated is None:
        if not (folder / "result.json").exists():
            raise InputError(
                f"{folder}: no result.json; it isn't a run's folder, or the run hasn't finished"
            )
        result = read_result(folder, ADVICE)
        evaluated = {"val": result}
        if "ema" in result:
            evaluated["ema"] = result["ema"]
    config = get_config(folder / "config.yaml")
    classes: list[str] = []
    if (folder / "classes.json").exists():
        with reading(folder / "classes.json", "names of classes", ADVICE):
            classes = parsed_json(whole_file(folder / "classes.json", _LARGEST))
            if not is_list(classes, is_text, high=MOST_CLASSES):
                raise Unreadable("expected a list of names")
    predictions = {}
    pixel_tables = {}
    of_pixels = answers_of(config.TASK) == "pixels"
    for split, evaluation in evaluated.items():
        file = folder / file_name(split)
        if file.exists() and of_pixels:
            pixel_tables[split] = read_pixel_table(file)
            _check_same_size(file, len(pixel_tables[split].images), evaluation)
        elif file.exists():
            predictions[split] = read_predictions(file)
            _check_same_evaluation(file, predictions[split], evaluation)
    confusion = None
    if of_pixels and (folder / CONFUSION).exists():
        confusion = _confusion(folder / CONFUSION, evaluated["val"])
    task: Any = tasks.load(config.TASK)[0]
    labels: dict[str, str] = {**task.curves, **CURVES, **SPEED}
    file = folder / "metrics.jsonl"
    curves = points(file, SPLITS, tuple(labels)) if file.exists() else {}
    if file.exists() and not curves:
        raise InputError(f"{file}: isn't a record of a run; move it away")
    return FinishedRun(
        folder, config, evaluated, classes, predictions, pixel_tables, confusion, curves, labels
    )


def _check_same_size(file: Path, images: int, evaluation: dict[str, Any]) -> None:
    """Raises InputError if a table has another number of images than result.json."""
    if images != evaluation["num_samples"]:
        raise InputError(
            f"{file}: it has {images} samples, but result.json has {evaluation['num_samples']}: it is"
            " from another evaluation; move the file away"
        )


def _confusion(file: Path, result: dict[str, Any]) -> np.ndarray:
    """Returns the confusion matrix of the evaluation in result.json.

    Raises:
        InputError: it is another evaluation's.
    """
    matrix = read_confusion(file)
    accuracy = 100 * int(np.trace(matrix)) / max(1, int(matrix.sum()))
    if abs(accuracy - result.get("pixel_acc", accuracy)) > 1e-3:
        raise InputError(
            f"{file}: its pixel accuracy is {accuracy}, but in result.json it is {result['pixel_acc']}:"
            " it is from another evaluation; move the file away"
        )
    return matrix


def _check_same_evaluation(
    file: Path, predictions: PredictionTable, evaluation: dict[str, Any]
) -> None:
    """Raises InputError if predictions.csv and result.json are of different evaluations.

    This is so after a run was resumed without REPORT.
    """
    samples = len(predictions.right)
    accuracy = 100 * float(predictions.right.mean())
    expected_samples = evaluation["num_samples"]
    expected_accuracy = evaluation.get("acc1", accuracy)
    if samples != expected_samples or abs(accuracy - expected_accuracy) > 1e-3:
        raise InputError(
            f"{file}: its samples and accuracy are {samples} and {accuracy}, but in result.json"
            f" they are {expected_samples} and {evaluation.get('acc1')}: it is from another evaluation;"
            " move the file away"
        )


def read_predictions(file: Path) -> PredictionTable:
    """Reads a table that ``training.predictions.write`` wrote.

    Raises:
        InputError: the file has other content.
    """
    with reading(file, "a run's predictions", "; move it away"), open_file(file) as lines:
        allowance = Allowance(os.fstat(lines.fileno()).st_size)
        table = csv_rows(lines_of(lines, allowance))
        head = tuple(next(table, ()))
        single_label = head[: len(SINGLE_LABEL_COLUMNS)] == SINGLE_LABEL_COLUMNS
        if not single_label and head != MULTILABEL_COLUMNS:
            expected = f"{','.join(SINGLE_LABEL_COLUMNS)}, nor {','.join(MULTILABEL_COLUMNS)}"
            raise Unreadable(f"its first line has to be {expected}")
        # Arrays, and Paths for the names, hold tables of millions of images in little memory.
        numbers = array("i")
        probabilities = array("d")
        digest = hashlib.sha256()
        images = Paths(_rows(table, head, numbers, probabilities, digest))
        if not len(images):
            raise Unreadable("it contains no samples")
        label, predicted, right = np.frombuffer(numbers, np.int32).reshape(-1, 3).T
        return PredictionTable(
            images=images,
            digest=digest.digest(),
            right=right > 0,
            label=label,
            predicted=predicted,
            probability=np.frombuffer(probabilities, np.float64),
        )


def _rows(
    table: Iterator[list[str]],
    head: tuple[str, ...],
    numbers: array,
    probabilities: array,
    digest: Any,
) -> Iterator[bytes]:
    """Yields the name of the image of each row.

    Appends label, predicted class and whether it is right to ``numbers``, and the probability to
    ``probabilities``.
    """
    for row in table:
        if len(row) != len(head):
            raise Unreadable(f"a row has {len(row)} columns, the first line has {len(head)}")
        if head == MULTILABEL_COLUMNS:
            name, truth, predicted, worst, probability = row
            numbers.extend((class_number(worst), worst in truth.split(), truth == predicted))
            digest.update(f"{truth}\0".encode())
        else:
            name, truth, predicted, probability, *_ = row
            right = truth == predicted
            numbers.extend((class_number(truth), class_number(predicted), right))
        probabilities.append(_probability(probability))
        digest.update(f"{name}\0".encode())
        yield name.encode()


def _probability(text: str) -> float:
    value = float(text) if len(text) < 30 else -1.0
    if not 0 <= value <= 1:
        raise Unreadable(f"{text[:20]!a} isn't a probability")
    return value
