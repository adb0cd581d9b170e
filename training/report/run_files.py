"""A run's folder, read back: what it left behind is a stranger's, for a comparison."""

import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from config import get_config
from errors import Allowance, InputError, Unreadable, open_file, reading
from loading.files import Paths
from loading.tables import csv_rows
from settings.options import Configuration
from settings.plain import is_list, parsed_json, whole_file
from settings.registry import tasks
from training import predictions
from training.curves import Points, points
from training.predictions import MULTILABEL_COLUMNS, SINGLE_LABEL_COLUMNS
from training.results import MOST_CLASSES, is_text, read_result

ADVICE = "; is it a run's folder?"
SPLITS = ("train", "val", "ema")
_LARGEST = 64 << 20  # bytes of classes.json
_LINE = 1 << 20  # bytes of a line of predictions.csv
SPEED = {"images_per_s": "images per second", "data_wait": "waiting for data (share of the time)"}


class PredictionTable(NamedTuple):
    """What is in a table of predictions, in the dataset's order.

    Attributes:
        images: their names.
        same: of tables of the same images it is the same; of several classes: with the same labels.
        right: [n] bool; of several classes: whether all of them are right.
        label, predicted: [n] classes; of several: the worst one, and whether the image has it.
        probability: [n] of the predicted class, or of the worst one.
    """

    images: Paths
    same: bytes
    right: np.ndarray
    label: np.ndarray
    predicted: np.ndarray
    probability: np.ndarray


class FinishedRun(NamedTuple):
    """A run that is over.

    Attributes:
        evaluated: the last evaluation by split, from result.json: of the weights, and of the
            averaged ones.
        classes: names; empty: none are known.
        told: predictions by split; none of a run without REPORT, or of another kind of task.
        curves: points by split and key, and the keys with their labels.
    """

    folder: Path
    config: Configuration
    evaluated: dict[str, dict[str, Any]]
    classes: list[str]
    told: dict[str, PredictionTable]
    curves: dict[str, dict[str, Points]]
    labels: dict[str, str]

    @property
    def several(self) -> bool:
        """Returns whether an image has several classes."""
        return self.config.TASK == "multilabel"

    def name_of(self, label: int) -> str:
        """Returns a class's name, or its number."""
        return self.classes[label] if label < len(self.classes) else str(label)

    @property
    def result(self) -> dict[str, Any]:
        """Returns the run's result.json."""
        return self.evaluated["val"]


def read_run(folder: Path) -> FinishedRun:
    """Returns what a run left in its folder.

    Raises:
        InputError: it is no run's, the run isn't over, or one of its files says something that no
            run writes.
    """
    if not (folder / "result.json").exists():
        raise InputError(
            f"{folder}: holds no result.json: it is no run's folder, or the run isn't over"
        )
    result = read_result(folder, ADVICE)
    config = get_config(folder / "config.yaml")
    classes: list[str] = []
    if (folder / "classes.json").exists():
        with reading(folder / "classes.json", "names of classes", ADVICE):
            classes = parsed_json(whole_file(folder / "classes.json", _LARGEST))
            if not is_list(classes, is_text, high=MOST_CLASSES):
                raise Unreadable("expected a list of names")
    evaluated = {"val": result} | ({"ema": result["ema"]} if "ema" in result else {})
    told = {}
    for split, evaluation in evaluated.items():
        if (file := folder / predictions.file_name(split)).exists():
            told[split] = read_predictions(file)
            _check_same(file, told[split], evaluation)
    kind: Any = tasks.load(config.TASK)[0]
    labels: dict[str, str] = {**kind.curves, **SPEED}
    file = folder / "metrics.jsonl"
    curves = points(file, SPLITS, tuple(labels)) if file.exists() else {}
    if file.exists() and not curves:
        raise InputError(f"{file}: holds no record of a run; move it away")
    return FinishedRun(folder, config, evaluated, classes, told, curves, labels)


def _check_same(file: Path, told: PredictionTable, evaluation: dict[str, Any]) -> None:
    """Raises InputError where a table and result.json are of different evaluations: a run went on
    without REPORT.
    """
    count = len(told.right)
    share = 100 * float(told.right.mean())
    if count != evaluation["num_samples"] or abs(share - evaluation.get("acc1", share)) > 1e-3:
        expected = f"{evaluation['num_samples']}, {evaluation.get('acc1')}"
        found = f"{file}: its samples and accuracy are {count}, {share}"
        raise InputError(
            f"{found}, those of result.json {expected}: another evaluation's; move the file away"
        )


def read_predictions(file: Path) -> PredictionTable:
    """Returns what ``training.predictions.write`` wrote.

    Raises:
        InputError: it is something else.
    """
    with reading(file, "a run's predictions", "; move it away"), open_file(file) as lines:
        allowance = Allowance(os.fstat(lines.fileno()).st_size)
        table = csv_rows(_lines(lines, allowance))
        head = tuple(next(table, ()))
        if head[: len(SINGLE_LABEL_COLUMNS)] != SINGLE_LABEL_COLUMNS and head != MULTILABEL_COLUMNS:
            expected = f"{','.join(SINGLE_LABEL_COLUMNS)}, nor {','.join(MULTILABEL_COLUMNS)}"
            raise Unreadable(f"its first line isn't {expected}")
        numbers = array("i")
        shares = array("d")
        digest = hashlib.sha256()
        images = Paths(_rows(table, head, numbers, shares, digest))
        if not len(images):
            raise Unreadable("it holds no sample")
        label, predicted, right = np.frombuffer(numbers, np.int32).reshape(-1, 3).T
        return PredictionTable(
            images, digest.digest(), right > 0, label, predicted, np.frombuffer(shares, np.float64)
        )


def _lines(file: IO[bytes], allowance: Allowance) -> Iterator[str]:
    while line := file.readline(_LINE):
        allowance.take(len(line) + 32)
        if len(line) == _LINE:
            raise Unreadable(f"it has a line of {_LINE} bytes or more")
        yield line.decode("utf-8")


def _rows(
    table: Iterator[list[str]], head: tuple[str, ...], numbers: array, shares: array, digest: Any
) -> Iterator[bytes]:
    """Yields the images' names; appends (label, predicted, right), and the probability."""
    for row in table:
        if len(row) != len(head):
            raise Unreadable(f"a row has {len(row)} columns, the first line has {len(head)}")
        name, truth, told, *rest = row
        if head == MULTILABEL_COLUMNS:
            numbers.extend((_number(rest[0]), rest[0] in truth.split(), truth == told))
            digest.update(f"{truth}\0".encode())
        else:
            numbers.extend((_number(truth), _number(told), truth == told))
        shares.append(_share(rest[-1] if head == MULTILABEL_COLUMNS else rest[0]))
        digest.update(f"{name}\0".encode())
        yield name.encode()


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 8 and int(text) < MOST_CLASSES):
        raise Unreadable(f"{text[:20]!a} is no class's number")
    return int(text)


def _share(text: str) -> float:
    value = float(text) if len(text) < 30 else -1.0
    if not 0 <= value <= 1:
        raise Unreadable(f"{text[:20]!a} is no probability")
    return value
