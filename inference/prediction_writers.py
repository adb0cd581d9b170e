"""Answers on paper: a table for people, CSV and JSON lines for programs; pictures are
``captions``'s.
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
from inference.predictor import Failure, Prediction
from loading.tables import csv_line
from utils import sync_directory

Answer = Prediction | Failure
COLUMNS = ("name", "rank", "output", "class", "probability", "error")  # of CSV
# columns of a terminal that a name has at least, and a class needs at most
_NAME = 24
_CLASS = 40
_LOOKED_AT = 10_000  # names, by which a table's width is chosen


class Writer(Protocol):
    """What takes answers, in the order of their images."""

    def write(self, answer: Answer) -> None:
        """Takes the next one."""


def reason(failure: Failure) -> str:
    """Returns why an image can't be read, without its name."""
    name = printable(" ".join(failure.name.split()), len(failure.name) * 12)
    return failure.error.removeprefix(f"{name}: ")


def as_json(answer: Answer) -> dict[str, Any]:
    """Returns an answer as JSON has it: ``name``, and ``predictions`` or ``error``."""
    if isinstance(answer, Failure):
        return {"name": answer.name, "error": reason(answer)}
    ranked = zip(answer.outputs, answer.classes, answer.probabilities, strict=True)
    return {
        "name": answer.name,
        "predictions": [
            {"output": output, "class": kind, "probability": share}
            for output, kind, share in ranked
        ],
    }


class JsonLines:
    """A line of JSON for each image (``as_json``). A name's bytes that are no UTF-8 are escaped as
    Python does it (\\udc80 to \\udcff): ``os.fsencode`` of what is read back is the name.
    """

    def __init__(self, file: IO[str] | io.TextIOBase) -> None:
        self.file = file

    def write(self, answer: Answer) -> None:
        line = json.dumps(as_json(answer), ensure_ascii=False)
        try:
            line.encode()
        except UnicodeEncodeError:
            line = json.dumps(as_json(answer))
        self.file.write(f"{line}\n")


class Csv:
    """A row for each class of each image (COLUMNS), the most probable first; of an image that can't
    be read, one row with its error. ``loading.tables`` says what the cells are. Bytes of names that
    aren't UTF-8 become escapes.
    """

    def __init__(self, file: IO[str] | io.TextIOBase) -> None:
        self.file = file
        file.write(",".join(COLUMNS) + "\n")

    def write(self, answer: Answer) -> None:
        name = answer.name
        empty = [None] * 4
        if isinstance(answer, Failure):
            self.file.write(csv_line(name, *empty, reason(answer)))
            return
        ranked = enumerate(
            zip(answer.outputs, answer.classes, answer.probabilities, strict=True), 1
        )
        rows = [
            csv_line(name, rank, output, kind, share, None)
            for rank, (output, kind, share) in ranked
        ]
        self.file.write("".join(rows) or csv_line(name, *empty, None))


class Table:
    """A line for each class of each image, aligned; a name that is too long shows its end.

    Args:
        names: of the images that follow.
        classes: of the model.
        width: columns of the terminal.
    """

    def __init__(
        self,
        file: IO[str] | io.TextIOBase,
        names: Iterable[str],
        classes: Iterable[str],
        width: int,
    ) -> None:
        longest = max((cells(printable(kind, len(kind))) for kind in classes), default=5)
        self.room = max(_NAME, width - min(longest, _CLASS) - len("  probability  "))
        self.name = min(
            self.room, max((cells(printable(name, len(name))) for name in names), default=5)
        )
        self.file, self.classes = file, max(_NAME, width - self.name - len("  probability  "))
        self.file.write(f"{pad('image', self.name)}  probability  class\n")

    def write(self, answer: Answer) -> None:
        name = pad(fitting(printable(answer.name, len(answer.name)), self.name), self.name)
        if isinstance(answer, Failure):
            self.file.write(f"{name}        error  {reason(answer)}\n")
            return
        for kind, share in zip(answer.classes, answer.probabilities, strict=True):
            told = printable(kind, len(kind))
            cut = told if cells(told) <= self.classes else fitting(told[::-1], self.classes)[::-1]
            self.file.write(f"{name}  {100 * share:9.2f} %  {cut}\n")
            name = " " * self.name
        if not answer.classes:
            self.file.write(f"{name}  {'-':>11}  none is above the threshold\n")


def cells(text: str) -> int:
    """Returns how many columns of a terminal a text takes: letters of East Asia take two, combining
    marks none.
    """
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(bool(unicodedata.combining(letter)) for letter in text)


def fitting(text: str, room: int) -> str:
    """Returns a text, or its end, in ``room`` columns."""
    if cells(text) <= room:
        return text
    text = text[-room:]
    while cells(text) > room - 3:
        text = text[1:]
    return f"...{text}"


def pad(text: str, room: int) -> str:
    """Returns a text with spaces behind it, in ``room`` columns."""
    return text + " " * (room - cells(text))


def text_writer(
    kind: str, file: IO[str] | io.TextIOBase, names: Any, classes: Iterable[str]
) -> Writer:
    """Returns what writes answers as ``kind``: table, csv or jsonl.

    Args:
        names: of the images, in their order; a sequence.
    """
    if kind == "table":
        looked_at = (names[place] for place in range(min(len(names), _LOOKED_AT)))
        return Table(file, looked_at, classes, shutil.get_terminal_size((100, 24)).columns)
    return Csv(file) if kind == "csv" else JsonLines(file)


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Turns what a disk does to a file that is written into one line; a pipe whose reader has gone
    stays an error.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"{what} isn't written ({error.strerror}); {remedy(error)}") from None


class Out(io.TextIOBase):
    """A file of text, in UTF-8 with escapes for what isn't; an error of its disk is one line.

    Args:
        file: takes bytes.
        what: is written.
    """

    def __init__(self, file: Any, what: str) -> None:
        super().__init__()
        self.file = file
        self.what = what

    def write(self, text: str) -> int:
        with writing(self.what):
            return self.file.write(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        with writing(self.what):
            self.file.flush()


@contextlib.contextmanager
def text_file(path: Path, temporary: Path) -> Iterator[Out]:
    """Opens a file that replaces ``path`` only when the body has ended well.

    Args:
        temporary: beside it; to be removed by the caller, who may outlive this process, where
            something went wrong.
    """
    with writing(str(path)):
        file = open(temporary, "xb")  # noqa: SIM115  (closed below: what the body raises isn't this file's)
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
    """Gives what is whole its name."""
    with writing(str(path)):
        os.replace(temporary, path)
        sync_directory(path.parent)


@contextlib.contextmanager
def standard_output(at_end: bool = False) -> Iterator[Out]:
    """Opens standard output. ``sys.stdout`` loses lines where its reader is gone; these are what
    was asked for.

    Args:
        at_end: what is written is kept in a file without a name, and handed on at the end.
            Otherwise a pager that waits for its reader would keep the other ranks waiting, too.

    Raises:
        BrokenPipeError: its reader has gone.
    """
    what = "standard output"
    out = open(1, "wb", closefd=False)  # noqa: SIM115  (closed below)
    try:
        if not at_end:
            yield Out(out, what)
        else:
            with tempfile.TemporaryFile() as kept:
                yield Out(kept, what)
                kept.seek(0)
                with writing(what):
                    shutil.copyfileobj(kept, out)
        with writing(what):
            out.flush()
    finally:
        with contextlib.suppress(OSError):  # which was reported already
            out.close()
