"""The predictions of each sample of an evaluation, and their table, predictions.csv.

They are kept on the device, and gathered after an evaluation.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle

from datasets import ImageDataset
from loading.tables import csv_line
from training.run import Run
from training.worst_pictures import FILE as WORST
from training.worst_pictures import Answer, WorstPictures, draw_answers
from utils import all_gather, rank, writing_whole

# The table of the model's weights. That of the averaged weights is predictions_ema.csv.
FILE = "predictions.csv"
SINGLE_LABEL_COLUMNS = ("image", "label", "predicted", "probability")
MULTILABEL_COLUMNS = ("image", "labels", "predicted", "worst", "worst_probability")
PIXEL_COLUMNS = ("image", "pixel_acc", "mIoU", "label", "predicted", "pixels")
# The confusion matrix of an evaluation that counts pixels.
CONFUSION = "confusion.csv"


def file_name(split: str, file: str = FILE) -> str:
    """Returns the name of a table of a split, "val" or "ema"."""
    return file if split == "val" else file.replace(".", f"_{split}.")


class Predictions:
    """This rank's predictions in an evaluation, in the order of its loader.

    They are kept as tensors, so that no batch waits for the device. A sample takes 20 bytes, or
    K / 4 + 16 bytes in a multi-label evaluation of K classes.

    Attributes:
        confusion: of all ranks' pixels, [K, K] int64: rows are classes, columns answers; None: they
            weren't counted.
        worst: this rank's pictures whose pixels were answered worst; None: there are none.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.confusion: np.ndarray | None = None
        self.worst: WorstPictures | None = None

    def add(self, **columns: Any) -> None:
        """Adds a batch: tensors or arrays [B, ...] by name, with the same names at each call."""
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values)

    def gather(self) -> dict[str, np.ndarray]:
        """Returns the predictions of all ranks by name, each sample once, in the dataset's order.

        Every rank has to call it. The result is empty if ``add`` was never called.
        """
        own_columns = {name: _join(values) for name, values in self.columns.items()}
        ranks_columns = all_gather(own_columns)
        gathered = {}
        # Rank 0 has the first sample of every evaluation, so it has every column.
        for name, first in ranks_columns[0].items():
            count = sum(len(columns.get(name, ())) for columns in ranks_columns)
            gathered[name] = np.empty((count, *first.shape[1:]), first.dtype)
            # Rank r of R has every R-th sample from the r-th on (``EvalBatchSampler``).
            for r, columns in enumerate(ranks_columns):
                if name in columns:
                    gathered[name][r :: len(ranks_columns)] = columns[name]
        return gathered


def _join(values: list[Any]) -> np.ndarray:
    if isinstance(values[0], paddle.Tensor):
        return paddle.concat(values).numpy()
    return np.concatenate(values)


class Gathered(NamedTuple):
    """The predictions of all ranks in the evaluation of a split, as ``write_split`` writes them.

    Attributes:
        columns: as ``Predictions.gather`` returns them.
        confusion: of pixels, [K, K]; None: they weren't counted.
        answers: the pictures whose pixels were answered worst, the worst first.
        column: the dataset's column of masks; "": there are no answers.
    """

    columns: dict[str, np.ndarray]
    confusion: np.ndarray | None
    answers: list[Answer]
    column: str


def gather_splits(predictions_by_split: Mapping[str, Predictions]) -> dict[str, Gathered]:
    """Returns the predictions of all ranks by split. Every rank has to call it."""
    gathered = {}
    for split, predictions in predictions_by_split.items():
        answers: list[Answer] = []
        column = ""
        columns = predictions.gather()
        if predictions.worst is not None:
            answers = predictions.worst.gather()
            column = predictions.worst.column
        gathered[split] = Gathered(columns, predictions.confusion, answers, column)
    return gathered


def write_tables(
    run: Run, dataset: ImageDataset, predictions_by_split: Mapping[str, Predictions]
) -> None:
    """Writes the table of each split into the run's folder.

    Every rank has to call it. A failure to write is logged, and doesn't end the run.

    Args:
        dataset: the dataset that was evaluated.
    """
    gathered = gather_splits(predictions_by_split)
    if rank() == 0:
        root = run.config.DATA.DATA_PATH
        for split, predictions in gathered.items():
            write_split(run.directory, split, predictions, dataset, root, run.logging_failure)


def write_split(
    folder: Path,
    split: str,
    predictions: Gathered,
    dataset: ImageDataset,
    root: str,
    guard: Callable[[str], AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Writes the tables of a split, "val" or "ema", into a folder.

    Args:
        dataset: the dataset that was evaluated.
        root: the folder to which images' names are relative.
        guard: a context in which the file of a name is written.
    """
    if predictions.columns:
        name = file_name(split)
        with guard(name):
            write(folder / name, predictions.columns, dataset, root)
    if predictions.confusion is not None:
        name = file_name(split, CONFUSION)
        with guard(name):
            write_confusion(folder / name, predictions.confusion, dataset.classes)
    if predictions.answers:
        name = file_name(split, WORST)
        with guard(name):
            names = [name_of(dataset, answer.index, root) for answer in predictions.answers]
            draw_answers(folder / name, predictions.answers, names, dataset, predictions.column)


def write(file: Path, columns: Mapping[str, np.ndarray], dataset: ImageDataset, root: str) -> None:
    """Writes a table with a row for each sample, in the dataset's order.

    For one class per image, the columns are ``SINGLE_LABEL_COLUMNS``, then "class" and
    "predicted_class" if classes have names. For several, they are ``MULTILABEL_COLUMNS``. There,
    labels and predictions are class numbers with spaces between them, and the worst class is the
    one whose probability is farthest from the truth. For a class for each pixel, they are
    ``PIXEL_COLUMNS`` and the names: the pair of classes that is confused most, of ``pixels`` pixels.

    Args:
        columns: as ``Predictions.gather`` returns them.
        root: the folder to which images' names are relative.

    Raises:
        OSError: the file can't be written.
    """
    if "truth" in columns:
        head = MULTILABEL_COLUMNS
        rows = _multilabel_rows(columns)
    elif "pixel_acc" in columns:
        head = PIXEL_COLUMNS
        if dataset.classes:
            head = (*PIXEL_COLUMNS, "class", "predicted_class")
        rows = _pixel_rows(columns, dataset.classes)
    else:
        head = SINGLE_LABEL_COLUMNS
        if dataset.classes:
            head = (*SINGLE_LABEL_COLUMNS, "class", "predicted_class")
        rows = _single_label_rows(columns, dataset.classes)
    prefix = _prefix(root)
    with writing_whole(file) as table:
        table.write(",".join(head) + "\n")
        for index, row in enumerate(rows):
            table.write(csv_line(dataset.name(index).removeprefix(prefix), *row))


def _single_label_rows(
    columns: Mapping[str, np.ndarray], classes: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    numbers = (columns[name].tolist() for name in SINGLE_LABEL_COLUMNS[1:])
    for label, predicted, probability in zip(*numbers, strict=True):
        row = (label, predicted, round(probability, 6))
        if classes:
            row += _names((label, predicted), classes)
        yield row


def _names(numbers: Sequence[int], classes: Sequence[str]) -> tuple[Any, ...]:
    """Returns the names of classes. The model, or the data, may have more classes than names."""
    return tuple(classes[number] if number < len(classes) else number for number in numbers)


def _pixel_rows(
    columns: Mapping[str, np.ndarray], classes: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    numbers = (columns[name].tolist() for name in PIXEL_COLUMNS[1:])
    for pixel_acc, mean_iou, label, predicted, pixels in zip(*numbers, strict=True):
        row: tuple[Any, ...] = (label, predicted, pixels)
        if classes:
            row += _names((label, predicted), classes)
        if not pixels:
            # No class is taken for another one.
            row = ("", "", 0, "", "")[: len(row)]
        yield (round(pixel_acc, 4), round(mean_iou, 4), *row)


def write_confusion(file: Path, confusion: np.ndarray, classes: Sequence[str]) -> None:
    """Writes a confusion matrix [K, K]: a row for each class, a column for each answer.

    Raises:
        OSError: the file can't be written.
    """
    names = _names(range(len(confusion)), classes)
    with writing_whole(file) as table:
        table.write(csv_line("label", *names))
        for name, row in zip(names, confusion.tolist(), strict=True):
            table.write(csv_line(name, *row))


def _multilabel_rows(columns: Mapping[str, np.ndarray]) -> Iterator[tuple[Any, ...]]:
    for truth, predicted, worst, probability in zip(*columns.values(), strict=True):
        yield _numbers(truth), _numbers(predicted), worst, round(float(probability), 6)


def name_of(dataset: ImageDataset, index: int, root: str) -> str:
    """Returns the name of an image in a table."""
    return dataset.name(index).removeprefix(_prefix(root))


def _prefix(root: str) -> str:
    return f"{Path(root)}/"


def _numbers(packed: np.ndarray) -> str:
    """Returns the places of the bits that are set, with spaces between them."""
    return " ".join(map(str, np.flatnonzero(np.unpackbits(packed)).tolist()))
