"""The common part of the readers of a run's tables."""

from collections.abc import Iterator
from typing import IO

from errors import Allowance, Unreadable
from training.results import MOST_CLASSES

# Bytes of the longest line of predictions.csv.
_LONGEST_LINE = 1 << 20


def lines_of(file: IO[bytes], allowance: Allowance) -> Iterator[str]:
    """Yields the lines of a table, and counts what they take."""
    while line := file.readline(_LONGEST_LINE):
        allowance.take(len(line) + 32)
        if len(line) == _LONGEST_LINE:
            raise Unreadable(f"it has a line of {_LONGEST_LINE} bytes or more")
        yield line.decode("utf-8")


def class_number(text: str) -> int:
    """Returns the number of a class that a cell holds."""
    if not (text.isascii() and text.isdigit() and len(text) <= 8 and int(text) < MOST_CLASSES):
        raise Unreadable(f"{text[:20]!a} isn't the number of a class")
    return int(text)
