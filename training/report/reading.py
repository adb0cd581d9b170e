"""A run's folder, read back: what it left behind is a stranger's, for a comparison."""

import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from config import get_config
from configs.plain import Form, Rule, check_form, is_list, is_real, is_whole, parsed_json, whole_file
from configs.registry import tasks
from errors import Allowance, InputError, Unreadable, open_file, reading
from loading.files import Paths
from loading.tables import csv_rows
from options import Configuration
from training import predictions
from training.curves import Points, points
from training.predictions import ONE, SEVERAL

ADVICE = "; is it a run's folder?"
SPLITS = ("train", "val", "ema")
_LARGEST = 64 << 20  # bytes of result.json
_LINE = 1 << 20  # bytes of a line of predictions.csv
_CLASSES = 1 << 20  # that a table of predictions may tell of
FIGURES = {  # what an evaluation tells, in this order
    "acc1": "accuracy, top 1 (%)", "acc5": "accuracy, top 5 (%)", "mean_class_acc": "accuracy, mean of the classes (%)",
    "mAP": "mean average precision (%)", "f1_micro": "F1, micro (%)", "f1_macro": "F1, macro (%)",
    "f1_micro_at_half": "F1, micro, all thresholds 0.5 (%)", "f1_macro_at_half": "F1, macro, all thresholds 0.5 (%)",
    "loss": "loss",
}  # fmt: skip
SPEED = {"images_per_s": "images per second", "data_wait": "waiting for data (share of the time)"}


def _is_table(value: Any) -> bool:
    shares = type(value) is dict and all(own is None or is_real(own) for own in value.values())
    return shares and all(type(name) is str for name in value)


def _is_record(value: Any) -> bool:
    return (
        type(value) is dict
        and is_whole(value.get("epoch"))
        and _is_name(value.get("checkpoint", ""))
        and all(is_real(value[key]) for key in FIGURES if key in value)
    )


def _is_name(value: Any) -> bool:
    """Whether it is a text that a table can take: JSON's may hold half a character."""
    return type(value) is str and not any("\ud800" <= letter <= "\udfff" for letter in value)


_TABLE = Rule("numbers by name", _is_table)
_DICTIONARY = Rule("a dictionary", lambda value: type(value) is dict)
_FORM: Form = {
    **dict.fromkeys(FIGURES, Rule("a number", is_real)),
    "num_samples": Rule("a number from 1 on", lambda value: is_whole(value, 1)),
    "best": Rule("an evaluation with its epoch", _is_record),
    "ended": Rule("a text", lambda value: type(value) is str),
    "class_acc": _TABLE, "class_ap": _TABLE, "class_f1": _TABLE,
    "thresholds": Rule("a list of numbers", lambda value: is_list(value, is_real, high=_CLASSES)),
    "versions": _DICTIONARY, "environment": _DICTIONARY, "ema": _DICTIONARY,
}  # fmt: skip


class Told(NamedTuple):
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


class Finished(NamedTuple):
    """A run that is over.

    Attributes:
        evaluated: the last evaluation by split, from result.json: of the weights, and of the averaged ones.
        classes: names; empty: none are known.
        told: predictions by split; none of a run without REPORT, or of another kind of task.
        curves: points by split and key, and the keys with their labels.
    """

    folder: Path
    config: Configuration
    evaluated: dict[str, dict[str, Any]]
    classes: list[str]
    told: dict[str, Told]
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


def read_run(folder: Path) -> Finished:
    """Returns what a run left in its folder.

    Raises:
        InputError: it is no run's, the run isn't over, or one of its files says something that no run writes.
    """
    if not (folder / "result.json").exists():
        raise InputError(f"{folder}: holds no result.json: it is no run's folder, or the run isn't over")
    with reading(folder / "result.json", "a run's result", ADVICE):
        result = parsed_json(whole_file(folder / "result.json", _LARGEST))
        check_form(result, _FORM, ("loss", "num_samples"))
        check_form(result.get("ema", {}), _FORM, ("loss", "num_samples") if "ema" in result else (), "ema.")
    config = get_config(folder / "config.yaml")
    classes: list[str] = []
    if (folder / "classes.json").exists():
        with reading(folder / "classes.json", "names of classes", ADVICE):
            classes = parsed_json(whole_file(folder / "classes.json", _LARGEST))
            if not is_list(classes, _is_name, high=_CLASSES):
                raise Unreadable("expected a list of names")
    evaluated = {"val": result} | ({"ema": result["ema"]} if "ema" in result else {})
    told = {}
    for split, evaluation in evaluated.items():
        if (file := folder / predictions.file_of(split)).exists():
            told[split] = read_predictions(file)
            _check_same(file, told[split], evaluation)
    kind: Any = tasks.load(config.TASK)[0]
    labels: dict[str, str] = {**kind.curves, **SPEED}
    file = folder / "metrics.jsonl"
    curves = points(file, SPLITS, tuple(labels)) if file.exists() else {}
    if file.exists() and not curves:
        raise InputError(f"{file}: holds no record of a run; move it away")
    return Finished(folder, config, evaluated, classes, told, curves, labels)


def _check_same(file: Path, told: Told, evaluation: dict[str, Any]) -> None:
    """Raises InputError where a table and result.json are of different evaluations: a run went on without REPORT."""
    count, share = len(told.right), 100 * float(told.right.mean())
    if count != evaluation["num_samples"] or abs(share - evaluation.get("acc1", share)) > 1e-3:
        expected = f"{evaluation['num_samples']}, {evaluation.get('acc1')}"
        found = f"{file}: its samples and accuracy are {count}, {share}"
        raise InputError(f"{found}, those of result.json {expected}: another evaluation's; move the file away")


def read_predictions(file: Path) -> Told:
    """Returns what ``training.predictions.write`` wrote.

    Raises:
        InputError: it is something else.
    """
    with reading(file, "a run's predictions", "; move it away"), open_file(file) as lines:
        allowance = Allowance(os.fstat(lines.fileno()).st_size)
        table = csv_rows(_lines(lines, allowance))
        head = tuple(next(table, ()))
        if head[: len(ONE)] != ONE and head != SEVERAL:
            raise Unreadable(f"its first line isn't {','.join(ONE)}, nor {','.join(SEVERAL)}")
        numbers, shares, digest = array("i"), array("d"), hashlib.sha256()
        images = Paths(_rows(table, head, numbers, shares, digest))
        if not len(images):
            raise Unreadable("it holds no sample")
        label, predicted, right = np.frombuffer(numbers, np.int32).reshape(-1, 3).T
        return Told(images, digest.digest(), right > 0, label, predicted, np.frombuffer(shares, np.float64))


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
        if head == SEVERAL:
            numbers.extend((_number(rest[0]), rest[0] in truth.split(), truth == told))
            digest.update(f"{truth}\0".encode())
        else:
            numbers.extend((_number(truth), _number(told), truth == told))
        shares.append(_share(rest[-1] if head == SEVERAL else rest[0]))
        digest.update(f"{name}\0".encode())
        yield name.encode()


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 8 and int(text) < _CLASSES):
        raise Unreadable(f"{text[:20]!a} is no class's number")
    return int(text)


def _share(text: str) -> float:
    value = float(text) if len(text) < 30 else -1.0
    if not 0 <= value <= 1:
        raise Unreadable(f"{text[:20]!a} is no probability")
    return value
