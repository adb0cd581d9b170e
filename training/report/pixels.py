"""The part of a report that is of a class for each pixel (TASK segmentation)."""

import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import Allowance, Unreadable, open_file, reading
from loading.files import Paths
from loading.tables import csv_rows
from training.pages import page
from training.pixel_metrics import metrics_of
from training.predictions import PIXEL_COLUMNS
from training.report.statistics import Confusions
from training.report.tables import class_number, lines_of

# The most pixels that a pair of classes may have in an image, and in a confusion matrix.
_MOST_PIXELS = 1 << 53
# Rows of the tables of classes and of pictures.
_MOST_CLASSES = 1000
_MOST_PICTURES = 24
# Letters of a number in a table.
_LONGEST_NUMBER = 30


class PixelTable(NamedTuple):
    """The content of the predictions.csv of an evaluation of pixels, in the dataset's order.

    Attributes:
        images: names.
        digest: of the images' names. Tables of the same images have the same one.
        pixel_acc, mean_iou: [n] float64, in percent.
        label, predicted: [n], the class that is taken most for another one, and that one; -1: none
            is.
        pixels: [n], of how many pixels.
    """

    images: Paths
    digest: bytes
    pixel_acc: np.ndarray
    mean_iou: np.ndarray
    label: np.ndarray
    predicted: np.ndarray
    pixels: np.ndarray

    def worst(self, most: int) -> np.ndarray:
        """Returns the places of the images of the lowest mIoU, the worst first.

        Images without a wrong pixel aren't among them.
        """
        wrong = np.flatnonzero(self.pixels > 0)
        return wrong[np.argsort(self.mean_iou[wrong], kind="stable")][:most]


def read_pixel_table(file: Path) -> PixelTable:
    """Reads a table of pixels that ``training.predictions.write`` wrote.

    Raises:
        InputError: the file has other content.
    """
    with reading(file, "a run's predictions", "; move it away"), open_file(file) as lines:
        allowance = Allowance(os.fstat(lines.fileno()).st_size)
        table = csv_rows(lines_of(lines, allowance))
        head = tuple(next(table, ()))
        if head[: len(PIXEL_COLUMNS)] != PIXEL_COLUMNS:
            raise Unreadable(f"its first line has to be {','.join(PIXEL_COLUMNS)}")
        shares = array("d")
        numbers = array("q")
        digest = hashlib.sha256()
        images = Paths(_rows(table, head, shares, numbers, digest))
        if not len(images):
            raise Unreadable("it contains no samples")
        pixel_acc, mean_iou = np.frombuffer(shares, np.float64).reshape(-1, 2).T
        label, predicted, pixels = np.frombuffer(numbers, np.int64).reshape(-1, 3).T
        return PixelTable(images, digest.digest(), pixel_acc, mean_iou, label, predicted, pixels)


def _rows(
    table: Iterator[list[str]], head: tuple[str, ...], shares: array, numbers: array, digest: Any
) -> Iterator[bytes]:
    """Yields the name of the image of each row.

    Appends its two percentages to ``shares``, and its other numbers to ``numbers``.
    """
    for row in table:
        if len(row) != len(head):
            raise Unreadable(f"a row has {len(row)} columns, the first line has {len(head)}")
        name, pixel_acc, mean_iou, label, predicted, pixels, *_ = row
        shares.extend((_percent(pixel_acc), _percent(mean_iou)))
        count = _count(pixels)
        if count:
            numbers.extend((class_number(label), class_number(predicted), count))
        else:
            numbers.extend((-1, -1, 0))
        digest.update(f"{name}\0".encode())
        yield name.encode()


def _percent(text: str) -> float:
    value = float(text) if len(text) < _LONGEST_NUMBER else -1.0
    if not 0 <= value <= 100:
        raise Unreadable(f"{text[:20]!a} isn't a percentage")
    return value


def _count(text: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) < _LONGEST_NUMBER
    if not is_number or int(text) >= _MOST_PIXELS:
        raise Unreadable(f"{text[:20]!a} isn't a number of pixels")
    return int(text)


def read_confusion(file: Path) -> np.ndarray:
    """Reads a matrix that ``training.predictions.write_confusion`` wrote: [K, K] int64.

    Raises:
        InputError: the file has other content.
    """
    with reading(file, "a run's confusions", "; move it away"), open_file(file) as lines:
        allowance = Allowance(os.fstat(lines.fileno()).st_size)
        table = csv_rows(lines_of(lines, allowance))
        head = next(table, [])
        classes = len(head) - 1
        if classes < 1 or head[0] != "label":
            raise Unreadable("its first line has to be label and the class names")
        allowance.take(8 * classes * classes)
        matrix = np.zeros((classes, classes), np.int64)
        count = 0
        for row in table:
            if len(row) != len(head) or count == classes:
                raise Unreadable(f"expected {classes} rows of {len(head)} columns")
            matrix[count] = [_count(cell) for cell in row[1:]]
            count += 1
        if count < classes:
            raise Unreadable(f"it has {count} rows, expected {classes}")
        return matrix


def pairs_of(matrix: np.ndarray) -> Confusions:
    """Returns the pairs of a confusion matrix [K, K] that occur."""
    label, predicted = np.nonzero(matrix)
    return Confusions(label, predicted, matrix[label, predicted])


def confused_most(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which other class each class is taken for most, and the percentage of its pixels: [K]
    each. Of equal ones it is the first; the percentage is 0 if there is none.
    """
    others = matrix.copy()
    np.fill_diagonal(others, 0)
    shares = 100 * others.max(1) / np.maximum(matrix.sum(1), 1)
    return others.argmax(1), shares


def classes(run: Any, matrix: np.ndarray) -> str:
    """Returns a table of the classes, the lowest IoU first, with what each is taken for most.

    Args:
        run: ``run_files.FinishedRun``.
        matrix: the run's confusion matrix [K, K].
    """
    metrics = metrics_of(matrix, list(map(str, range(len(matrix)))))
    ious = list(metrics["class_iou"].values())
    accuracies = list(metrics["class_acc"].values())
    boundaries = list(run.result.get("class_boundary_iou", {}).values())
    if len(boundaries) != len(ious):
        boundaries = []
    others, shares = confused_most(matrix)
    totals = matrix.sum(1)
    # A class that neither a mask nor an answer has comes last.
    order = sorted(range(len(ious)), key=lambda label: (ious[label] is None, ious[label]))
    heads = ["class, the lowest IoU first", "IoU (%)", "accuracy (%)"]
    if boundaries:
        heads.append("boundary IoU (%)")
    rows = []
    for label in order[:_MOST_CLASSES]:
        row = [run.name_of(label), _text(ious[label]), _text(accuracies[label])]
        if boundaries:
            row.append(_text(boundaries[label]))
        taken_for = ""
        if shares[label]:
            taken_for = f"{run.name_of(int(others[label]))}: {shares[label]:.2f} %"
        rows.append([*row, f"{totals[label]:,}", taken_for])
    content = page.table([*heads, "pixels", "confused most often with"], rows)
    if len(ious) > _MOST_CLASSES:
        content += page.paragraph(f"and {len(ious) - _MOST_CLASSES:,} more")
    return page.section("Classes", page.scroll_box(content))


def pictures(run: Any, table: PixelTable) -> str:
    """Returns a table of the pictures of the lowest mIoU.

    Args:
        run: ``run_files.FinishedRun``.
    """
    rows = []
    for place in table.worst(_MOST_PICTURES).tolist():
        pair = (run.name_of(int(each[place])) for each in (table.label, table.predicted))
        taken = f"{' for '.join(pair)}: {table.pixels[place]:,} pixels"
        shares = (_text(float(each[place])) for each in (table.mean_iou, table.pixel_acc))
        rows.append([table.images[place], *shares, taken])
    heads = ["picture, the lowest mIoU first", "mIoU (%)", "pixel accuracy (%)"]
    found = page.table([*heads, "confused most often"], rows)
    return page.scroll_box(found) or page.paragraph("All pixels are right.")


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
