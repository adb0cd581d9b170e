"""Readers of lists and tables of images that have any number of classes each.

Folders can't say it: a file of one name in two class folders may be one image of two classes, or
two images.
"""

import csv
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from errors import InputError, Unreadable, open_file, printable, reading
from loading.class_names import check_name, each_once, names_beside
from loading.files import Paths, text_lines, utf8_text
from loading.label_sets import LabelSets
from loading.layout import IMAGE_SUFFIXES
from loading.sources import MOST_CLASSES, Files, Split, missing_files, missing_list, take_lines
from settings.registry import datasets

_SET = 8  # bytes that the end of an image's labels takes
_LABEL = 4  # bytes of each of them
_LONGEST_PATH = 4096  # bytes that Linux takes
_ADVICE = "; DATASET {} needs it under -data_path"


class _Read:
    """What a reader has read so far, within its file's allowance of memory."""

    def __init__(self, lines: Any) -> None:
        self.labels = array("i")
        self.ends = array("q", [0])
        self.folders = array("q")
        self.allowance = take_lines(lines, _SET)

    def add(self, path: bytes, labels: Sequence[int]) -> bytes:
        """Takes an image in; returns its path."""
        if b"\0" in path:
            raise Unreadable("it holds a path with a NUL character")
        self.allowance.left -= _LABEL * len(labels)
        if self.allowance.left < 0:
            # which raises; asking it each time would take longer than the rest
            self.allowance.take(0)
        self.labels.extend(labels)
        self.ends.append(len(self.labels))
        self.folders.append(hash(path[: path.rfind(b"/") + 1]))
        return path

    def files(self, file: Path, paths: Paths, classes: Sequence[str]) -> Files:
        """Returns the images; raises InputError where some aren't there, or none has a class."""
        if not len(paths):
            raise InputError(f"{file}: it names no image")
        if missing := missing_files(file.parent, paths, self.folders, self.allowance):
            raise InputError(f"{file}: {missing}")
        if not self.labels:
            raise InputError(f"{file}: none of its {len(paths)} images has a class")
        return Files(file.parent, paths, LabelSets(self.labels, self.ends), classes)


def _numbered(lines: Any) -> Iterator[tuple[int, bytes]]:
    """Yields a text's lines that aren't empty, without their ends, with their numbers."""
    for number, line in enumerate(text_lines(lines), 1):
        if line := line.rstrip(b"\r\n"):
            yield number, line


# --------------------------------------------------------------------- lists


@datasets.register(
    "multilabel_list",
    holds="`train_list.txt` and `val_list.txt`: on each line a path, a TAB and labels (`3,17`, or none);"
    " `classes.txt`, if there is one: a name a line",
    task="multilabel",
    val="val_list.txt",
)
def multilabel_list(split: Split, *, data_path: str) -> Files:
    """Reads ``<mode>_list.txt`` of images that have any number of classes.

    Raises:
        InputError: the list or files are missing, a line is wrong (which), a label is outside the
            range.
    """
    root = Path(data_path)
    file = root / f"{split.mode}_list.txt"
    if not os.path.lexists(file):
        raise InputError(missing_list(file, "multilabel_list"))
    classes = names_beside(root)
    limit = len(classes) or (MOST_CLASSES if split.num_classes == "auto" else split.num_classes)
    with reading(file, "a list", _ADVICE.format("multilabel_list")), open_file(file) as lines:
        read = _Read(lines)
        return read.files(file, Paths(_list_paths(file, lines, limit, read)), classes)


def _list_paths(file: Path, lines: Any, limit: int, read: _Read) -> Iterator[bytes]:
    all_have_both = True
    for number, line in _numbered(lines):
        path, tab, field = line.rpartition(b"\t")
        if (
            tab
            and field.isdigit()
            and len(field) <= 18
            and int(field) < limit
            and (path := path.strip())
        ):
            all_have_both = False
            yield read.add(path, (int(field),))  # one label: most lines of most lists
            continue
        words = [word.strip() for word in field.split(b",")] if field.strip() else []
        last_field = words if tab else line.split(b" ")[-1].split(b",")
        repeats = len(set(last_field)) < len(last_field) or (not tab and len(last_field) > 1)
        if repeats and set(last_field) <= {b"0", b"1"}:
            raise InputError(_told_vectors(f"{file}, line {number}", file, len(last_field)))
        all_have_both = all_have_both and sorted(words) == [b"0", b"1"]
        if not (tab and path.strip()) or not all(word.isdigit() for word in words):
            found = printable(os.fsdecode(line[:200]))
            expected = "a path, a TAB, then labels such as 3,17 (or nothing: no class)"
            raise InputError(f"{file}, line {number}: expected {expected}; found '{found}'")
        labels = [int(word) if len(word) <= 18 else limit for word in words]
        if labels and max(labels) >= limit:
            found = printable(words[labels.index(max(labels))].decode(), 30)
            raise InputError(f"{file}, line {number}: label {found} is outside 0..{limit - 1}")
        if len(set(labels)) != len(labels):
            raise InputError(f"{file}, line {number}: it has a label twice")
        yield read.add(path.strip(), labels)
    # Lines that all say 0,1 or 1,0 are such vectors, too: as numbers, they would give every image
    # both classes.
    if all_have_both and len(read.ends) > 1:
        raise InputError(_told_vectors(f"{file}, each line", file, 2))


def _told_vectors(where: str, file: Path, classes: int) -> str:
    """Returns the error about a list with a 0 or 1 for each class, as PaddleClas has it: how to
    make a table of it.
    """
    table = f"{file.name.removesuffix('_list.txt')}.csv"
    join = r"s/[ \t]*\([01,]*\)\r*$/,\1/"
    return (
        f"{where}: found 0 or 1 for each of {classes} classes, as in PaddleClas's lists, expected the classes' numbers;"
        f" make a table of it for -dataset=multilabel_csv:"
        f" (echo image,$(seq -s, 0 {classes - 1}); sed '{join}' {file.name}) > {table}"
    )


# -------------------------------------------------------------------- tables


@datasets.register(
    "multilabel_csv",
    holds="`train.csv` and `val.csv`: a header of class names behind the path's, then a path and 0 or 1 for each class",
    task="multilabel",
    val="val.csv",
)
def multilabel_csv(split: Split, *, data_path: str) -> Files:
    """Reads ``<mode>.csv``; the training table's classes count, in its order.

    Raises:
        InputError: the table or files are missing, a line is wrong (which), its classes aren't the
            training table's.
    """
    root = Path(data_path)
    file = root / f"{split.mode}.csv"
    if not os.path.lexists(file):
        raise InputError(missing_list(file, "multilabel_csv"))
    with reading(file, "a table", _ADVICE.format("multilabel_csv")), open_file(file) as lines:
        read = _Read(lines)
        numbered = _numbered(lines)
        classes = own = _header(numbered)
        if split.mode != "train" and (root / "train.csv").is_file():
            classes = _training_classes(root / "train.csv")
            if others := sorted(set(own) ^ set(classes)):
                raise Unreadable(
                    f"its classes aren't those of train.csv: {', '.join(others[:3])} ({len(others)})"
                )
        places = {name: place for place, name in enumerate(classes)}
        return read.files(
            file, Paths(_rows(file, numbered, [places[name] for name in own], read)), classes
        )


def _training_classes(file: Path) -> list[str]:
    with reading(file, "a table"), open_file(file) as lines:
        return _header(_numbered(lines))


_SEPARATORS = ((b";", "semicolons"), (b"\t", "TABs"))


def _header(lines: Iterator[tuple[int, bytes]]) -> list[str]:
    _, line = next(lines, (1, b""))
    first, *names = _fields(utf8_text(line))
    if not names:
        other = next(
            (f"; it has {what} in place of commas" for mark, what in _SEPARATORS if mark in line),
            "",
        )
        raise Unreadable(f"its header names no class; expected image,cat,dog and so on{other}")
    if {name.strip() for name in names} <= {"0", "1"} and first.strip().lower().endswith(
        IMAGE_SUFFIXES
    ):
        raise Unreadable(
            "its first line is an image's, not a header; expected image,cat,dog and so on above it"
        )
    return each_once(
        [check_name(name.strip(), f"header's field {place}") for place, name in enumerate(names, 2)]
    )


def _rows(
    file: Path, lines: Iterator[tuple[int, bytes]], places: list[int], read: _Read
) -> Iterator[bytes]:
    commas = b"," * (len(places) - 1)
    for number, line in lines:
        name, _, cells = line.partition(b",")
        digits = cells[::2]
        are_digits = (
            cells[1::2] == commas
            and len(digits) == len(places)
            and not digits.translate(None, b"01")
        )
        is_plain = (
            len(name) <= _LONGEST_PATH and name.isascii() and b'"' not in name and b"\r" not in name
        )
        # Most rows of most tables. Python's reader of CSV takes three times as long, and is for all
        # others.
        if are_digits and is_plain and (name := name.strip()):
            yield read.add(name, [places[place] for place in _ones(digits)])
            continue
        path, *values = _fields(os.fsdecode(line))
        wrong = set(values) - {"0", "1"}
        if wrong or len(values) != len(places) or not path.strip():
            found = (
                f"'{printable(min(wrong), 30)}'"
                if wrong
                else f"{len(values)} values"
                if path.strip()
                else "no path"
            )
            raise InputError(
                f"{file}, line {number}: expected a path, then 0 or 1 for each of {len(places)} classes; found {found}"
            )
        yield read.add(
            os.fsencode(path.strip()),
            [place for place, value in zip(places, values, strict=True) if value == "1"],
        )


def _ones(digits: bytes) -> Iterator[int]:
    """Yields the places of 1 among zeros and ones."""
    place = digits.find(b"1")
    while place >= 0:
        yield place
        place = digits.find(b"1", place + 1)


def _fields(line: str) -> list[str]:
    """The fields of one line, quoted or not; a quoted line's end is in none of them."""
    return next(csv.reader([line], strict=True), [""]) or [""]
