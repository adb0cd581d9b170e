"""Writes predictions as a table for people, or as CSV or JSON lines for programs.

``captions`` draws them as pictures.
"""

import contextlib
import io
import json
import os
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from errors import RunError, printable, remedy
from inference.maps import Areas
from inference.predictor import Failure, Prediction
from loading.tables import csv_line
from loading.transforms.video import frame_of
from utils import sync_directory

Outcome = Prediction | Areas | Failure
# The columns of CSV.
COLUMNS = ("name", "rank", "output", "class", "probability", "error")
# Further ones, if it is asked which images are of something else.
REJECTION_COLUMNS = ("unknown", "score")
# A further one, if there are frames of videos.
TIME = "time"
# Those of the areas of classes.
AREA_COLUMNS = ("name", "rank", "output", "class", "percent", "error")
# The columns of a terminal that a table gives to a name at least, and to a class at most.
_NAME = 24
_CLASS = 40
# The number of names that decide how wide a table's column of names is.
_SAMPLED_NAMES = 10_000


class Writer(Protocol):
    """Writes predictions in the order of their images."""

    def write(self, outcome: Outcome) -> None:
        """Writes the prediction of the next image, or its failure."""


def reason(failure: Failure) -> str:
    """Returns the error of an image without the image's name."""
    name = printable(" ".join(failure.name.split()), len(failure.name) * 12)
    return failure.error.removeprefix(f"{name}: ")


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Returns the object of a line of JSON: ``name``, and ``predictions``, ``areas`` or ``error``.
    A frame of a video has its ``time``, too.
    """
    frame = frame_of(outcome.name)
    named: dict[str, Any] = {"name": outcome.name}
    if frame:
        named[TIME] = frame[1]
    if isinstance(outcome, Failure):
        return named | {"error": reason(outcome)}
    if isinstance(outcome, Areas):
        shares = zip(outcome.outputs, outcome.classes, outcome.percents, strict=True)
        found = [
            {"output": output, "class": label, "percent": percent}
            for output, label, percent in shares
        ]
        return named | {"areas": found}
    ranked = zip(outcome.outputs, outcome.classes, outcome.probabilities, strict=True)
    predictions = [
        {"output": output, "class": label, "probability": probability}
        for output, label, probability in ranked
    ]
    answer = named | {"predictions": predictions}
    if outcome.unknown is not None:
        answer |= {"unknown": outcome.unknown, "score": outcome.score}
    return answer


class JsonLines:
    """Writes a line of JSON for each image (``as_json``).

    Bytes of a name that aren't UTF-8 become Python's surrogate escapes (\\udc80 to \\udcff), so
    that ``os.fsencode`` of the parsed text gives the name.
    """

    def __init__(self, file: IO[str] | io.TextIOBase) -> None:
        self.file = file

    def write(self, outcome: Outcome) -> None:
        line = json.dumps(as_json(outcome), ensure_ascii=False)
        try:
            line.encode()
        except UnicodeEncodeError:
            line = json.dumps(as_json(outcome))
        self.file.write(f"{line}\n")


class Csv:
    """Writes a row for each class of each image, the most probable or largest one first.

    An image that can't be read has one row with its error. ``loading.tables`` documents the cells.
    Bytes of names that aren't UTF-8 become escapes.

    Args:
        columns: COLUMNS or AREA_COLUMNS.
        rejects: whether rows have REJECTION_COLUMNS, too.
        timed: whether rows have the column TIME, too: the seconds of a frame of a video.
    """

    def __init__(
        self,
        file: IO[str] | io.TextIOBase,
        columns: tuple[str, ...] = COLUMNS,
        rejects: bool = False,
        timed: bool = False,
    ) -> None:
        self.file = file
        self.rejects = rejects
        self.timed = timed
        if rejects:
            columns += REJECTION_COLUMNS
        if timed:
            columns += (TIME,)
        file.write(",".join(columns) + "\n")

    def write(self, outcome: Outcome) -> None:
        name = outcome.name
        empty = [None] * 4
        others: tuple[Any, ...] = (None, None) if self.rejects else ()
        if self.rejects and isinstance(outcome, Prediction):
            others = (str(outcome.unknown).lower(), outcome.score)
        if self.timed:
            frame = frame_of(name)
            others += (frame[1] if frame else None,)
        if isinstance(outcome, Failure):
            self.file.write(csv_line(name, *empty, reason(outcome), *others))
            return
        ranked = zip(outcome.outputs, outcome.classes, _values(outcome), strict=True)
        rows = [
            csv_line(name, rank, output, label, value, None, *others)
            for rank, (output, label, value) in enumerate(ranked, 1)
        ]
        # An image without a class above the threshold has one row, too.
        self.file.write("".join(rows) or csv_line(name, *empty, None, *others))


def _values(outcome: Prediction | Areas) -> list[float]:
    """Returns the probabilities or percentages of an image's classes."""
    return outcome.percents if isinstance(outcome, Areas) else outcome.probabilities


class Table:
    """Writes an aligned line for each class of each image. Long names are cut at their beginning.

    Args:
        names: the names of the images, or of the first of them.
        classes: the names of the model's classes.
        width: the width of the terminal in columns.
        of_areas: whether areas are written, and not probabilities.
    """

    def __init__(
        self,
        file: IO[str] | io.TextIOBase,
        names: Iterable[str],
        classes: Iterable[str],
        width: int,
        of_areas: bool = False,
    ) -> None:
        longest_class = max((cells(printable(label, len(label))) for label in classes), default=5)
        longest_name = max((cells(printable(name, len(name))) for name in names), default=5)
        other_columns = width - len("  probability  ")
        self.file = file
        self.name_width = min(longest_name, max(_NAME, other_columns - min(longest_class, _CLASS)))
        self.class_width = max(_NAME, other_columns - self.name_width)
        head = "       area" if of_areas else "probability"
        self.file.write(f"{pad('image', self.name_width)}  {head}  class\n")

    def write(self, outcome: Outcome) -> None:
        name = fitting(printable(outcome.name, len(outcome.name)), self.name_width)
        name = pad(name, self.name_width)
        if isinstance(outcome, Failure):
            self.file.write(f"{name}        error  {reason(outcome)}\n")
            return
        if isinstance(outcome, Prediction) and outcome.unknown:
            self.file.write(f"{name}  {'unknown':>11}  none of the classes\n")
            return
        scale = 1 if isinstance(outcome, Areas) else 100
        for label, value in zip(outcome.classes, _values(outcome), strict=True):
            # Long classes are cut at their end.
            label = printable(label, len(label))
            if cells(label) > self.class_width:
                label = fitting(label[::-1], self.class_width)[::-1]
            self.file.write(f"{name}  {scale * value:9.2f} %  {label}\n")
            name = " " * self.name_width
        if not outcome.classes:
            self.file.write(f"{name}  {'-':>11}  none is above the threshold\n")


def cells(text: str) -> int:
    """Returns the width of a text in columns of a terminal.

    East Asian letters take two columns, combining marks none.
    """
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(bool(unicodedata.combining(letter)) for letter in text)


def fitting(text: str, room: int) -> str:
    """Returns a text if it fits into ``room`` columns, and otherwise "..." and its end."""
    if cells(text) <= room:
        return text
    text = text[-room:]
    while cells(text) > room - 3:
        text = text[1:]
    return f"...{text}"


def pad(text: str, room: int) -> str:
    """Returns a text that is filled up with spaces to ``room`` columns."""
    return text + " " * (room - cells(text))


def text_writer(
    kind: str,
    file: IO[str] | io.TextIOBase,
    names: Any,
    classes: Iterable[str],
    of_areas: bool = False,
    rejects: bool = False,
) -> Writer:
    """Returns the writer for a format: "table", "csv" or "jsonl".

    Args:
        names: the sequence of the images' names.
        classes: the names of the model's classes.
        of_areas: whether ``Areas`` are written, and not predictions.
        rejects: whether predictions say which images are of something else.
    """
    if kind == "csv":
        timed = any(frame_of(names[place]) for place in range(len(names)))
        return Csv(file, AREA_COLUMNS if of_areas else COLUMNS, rejects, timed)
    if kind == "jsonl":
        return JsonLines(file)
    sample = (names[place] for place in range(min(len(names), _SAMPLED_NAMES)))
    width = shutil.get_terminal_size((100, 24)).columns
    return Table(file, sample, classes, width, of_areas)


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Turns an OSError of writing ``what`` into RunError, which is one line.

    BrokenPipeError is passed on: the reader of a pipe has gone.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"{what} can't be written ({error.strerror}); {remedy(error)}") from None


class Out(io.TextIOBase):
    """A text file in UTF-8. Characters that can't be encoded become escapes, and an OSError becomes
    a RunError.

    Args:
        file: the binary file to write to.
        what: the file's name in errors.
    """

    def __init__(self, file: Any, what: str) -> None:
        super().__init__()
        self.file = file
        self.what = what

    def write(self, text: str) -> int:
        with writing(self.what):
            return self.file.write(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        # Python's finalizer calls it, too, after the file was closed. Python 3.13 reports its errors.
        if self.file.closed:
            return
        with writing(self.what):
            self.file.flush()


@contextlib.contextmanager
def text_file(path: Path, temporary: Path) -> Iterator[Out]:
    """Opens a text file that replaces ``path`` once the body of the context has succeeded.

    Args:
        temporary: the file's name until then, in the same folder. If something fails, the caller
            has to remove the file. The caller may be a process that lives longer than this one.
    """
    # Not a with statement: errors of the body aren't errors of this file.
    with writing(str(path)):
        file = open(temporary, "xb")  # noqa: SIM115
    try:
        yield Out(file, str(path))
        with writing(str(path)):
            file.flush()
            os.fsync(file.fileno())
    finally:
        with writing(str(path)):
            file.close()
    move_into_place(temporary, path)


def move_into_place(temporary: Path, path: Path) -> None:
    """Renames a file that is complete to its final name."""
    with writing(str(path)):
        os.replace(temporary, path)
        sync_directory(path.parent)


@contextlib.contextmanager
def standard_output(at_end: bool = False) -> Iterator[Out]:
    """Opens standard output for results.

    ``sys.stdout`` isn't used, because here it drops lines silently if its reader has gone.

    Args:
        at_end: the text is collected in an unnamed file, and written at the end. Otherwise a pager
            that waits for the user would keep the other ranks waiting, too.

    Raises:
        BrokenPipeError: the reader has gone.
    """
    what = "standard output"
    out = open(1, "wb", closefd=False)  # noqa: SIM115
    try:
        if at_end:
            with tempfile.TemporaryFile() as collected:
                yield Out(collected, what)
                collected.seek(0)
                with writing(what):
                    shutil.copyfileobj(collected, out)
        else:
            yield Out(out, what)
        with writing(what):
            out.flush()
    finally:
        # An error of the disk was reported by ``writing`` already.
        with contextlib.suppress(OSError):
            out.close()
