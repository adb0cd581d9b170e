"""The readers of lists and tables of images that have any number of classes each.

Folders of classes can't express this: a file of one name in two of them may be one image of two
classes, or two images.
"""

import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from errors import InputError, Unreadable, open_file, printable, reading
from loading.class_names import check_name, each_once, names_beside
from loading.files import Paths, utf8_text
from loading.label_sets import LabelSets
from loading.layout import IMAGE_SUFFIXES
from loading.lists import TextList, csv_fields, numbered_lines, open_list
from loading.sources import Files, Split
from settings.registry import datasets

_BYTES_PER_END = 8  # that the end of an image's labels takes
_BYTES_PER_LABEL = 4
_LONGEST_PATH = 4096  # bytes that Linux takes


class _ImageSets:
    """The images of a list and their label sets, collected line by line."""

    def __init__(self, lines: TextList) -> None:
        self.lines = lines
        self.labels = array("i")
        self.ends = array("q", [0])

    def add(self, number: int, path: bytes, labels: Sequence[int]) -> bytes:
        """Adds an image with its labels; returns its path."""
        path = self.lines.add_path(number, path)
        allowance = self.lines.allowance
        allowance.left -= _BYTES_PER_LABEL * len(labels)
        if allowance.left < 0:
            # This raises the error. Calling it for each line would take longer than the rest.
            allowance.take(0)
        self.labels.extend(labels)
        self.ends.append(len(self.labels))
        return path

    def to_files(self, paths: Paths, classes: Sequence[str]) -> Files:
        """Returns the images; raises InputError where some aren't there, or none has a class."""
        file = self.lines.file
        if not len(paths):
            raise InputError(f"{file}: it lists no images")
        self.lines.check_files(paths)
        if not self.labels:
            raise InputError(f"{file}: none of its {len(paths)} images has a class")
        return Files(file.parent, paths, LabelSets(self.labels, self.ends), classes)


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
    classes = names_beside(root)
    file = root / f"{split.mode}_list.txt"
    with open_list(file, "multilabel_list", bytes_per_line=_BYTES_PER_END) as lines:
        images = _ImageSets(lines)
        return images.to_files(Paths(_list_paths(images, split.label_limit(classes))), classes)


def _list_paths(images: _ImageSets, limit: int) -> Iterator[bytes]:
    """Yields a list's paths, and adds them with their labels to ``images``."""
    lines = images.lines
    all_have_both = True
    for number, line in lines:
        path, tab, field = line.rpartition(b"\t")
        path = path.strip()
        # Most lines of most lists have one label, for which this is much faster.
        if tab and path and field.isdigit() and len(field) <= 18 and int(field) < limit:
            all_have_both = False
            yield images.add(number, path, (int(field),))
            continue
        words = [word.strip() for word in field.split(b",")] if field.strip() else []
        last_field = words if tab else line.split(b" ")[-1].split(b",")
        repeats = len(set(last_field)) < len(last_field) or (not tab and len(last_field) > 1)
        if repeats and set(last_field) <= {b"0", b"1"}:
            place = f"{lines.file}, line {number}"
            raise InputError(_is_vectors(place, lines.file, len(last_field)))
        all_have_both = all_have_both and sorted(words) == [b"0", b"1"]
        if not (tab and path) or not all(word.isdigit() for word in words):
            expected = "a path, a TAB, then labels such as 3,17 (or nothing: no class)"
            raise InputError(lines.unexpected(number, expected, line))
        # A number of more digits is outside any range, and slow to convert.
        labels = [int(word) if len(word) <= 18 else limit for word in words]
        if labels and max(labels) >= limit:
            largest = words[labels.index(max(labels))]
            raise InputError(lines.label_outside(number, largest, limit))
        if len(set(labels)) != len(labels):
            raise InputError(lines.problem(number, "it has a label twice"))
        yield images.add(number, path, labels)
    # Lines that all say 0,1 or 1,0 are such vectors, too: as numbers, they would give every image
    # both classes.
    if all_have_both and len(images.ends) > 1:
        raise InputError(_is_vectors(f"{lines.file}, each line", lines.file, 2))


def _is_vectors(place: str, file: Path, classes: int) -> str:
    """Returns the error about a list with 0 or 1 for each class, as PaddleClas has it.

    It gives a command that makes a table of the list.
    """
    table = f"{file.name.removesuffix('_list.txt')}.csv"
    join = r"s/[ \t]*\([01,]*\)\r*$/,\1/"
    return (
        f"{place}: found 0 or 1 for each of {classes} classes, as in PaddleClas's lists,"
        " expected class numbers;"
        " convert it to a table for -dataset=multilabel_csv:"
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
    """Reads ``<mode>.csv``. The classes are the training table's, in its order.

    Raises:
        InputError: the table or files are missing, a line is wrong (which), its classes aren't the
            training table's.
    """
    root = Path(data_path)
    file = root / f"{split.mode}.csv"
    train = root / "train.csv"
    with open_list(file, "multilabel_csv", "a table", _BYTES_PER_END) as lines:
        images = _ImageSets(lines)
        rows = iter(lines)
        columns = _header_classes(rows)
        classes = columns
        if split.mode != "train" and train.is_file():
            classes = _training_classes(train)
            if differing := sorted(set(columns) ^ set(classes)):
                first = ", ".join(differing[:3])
                raise Unreadable(
                    f"its classes aren't those of train.csv: {first} ({len(differing)})"
                )
        label_of = {name: label for label, name in enumerate(classes)}
        paths = Paths(_row_paths(rows, [label_of[name] for name in columns], images))
        return images.to_files(paths, classes)


def _training_classes(file: Path) -> list[str]:
    with reading(file, "a table"), open_file(file) as opened:
        return _header_classes(numbered_lines(opened))


def _header_classes(lines: Iterator[tuple[int, bytes]]) -> list[str]:
    """Returns the class names in a table's header, which is the first of ``lines``."""
    _, line = next(lines, (1, b""))
    first, *names = csv_fields(utf8_text(line))
    if not names:
        problem = "its header names no classes; expected image,cat,dog and so on"
        for separator, what in ((b";", "semicolons"), (b"\t", "TABs")):
            if separator in line:
                problem += f"; it has {what} instead of commas"
                break
        raise Unreadable(problem)
    is_image = first.strip().lower().endswith(IMAGE_SUFFIXES)
    if is_image and {name.strip() for name in names} <= {"0", "1"}:
        raise Unreadable(
            "its first line is an image, not a header; expected a header such as image,cat,dog"
            " above it"
        )
    return each_once(
        [check_name(name.strip(), f"header's field {place}") for place, name in enumerate(names, 2)]
    )


def _row_paths(
    lines: Iterator[tuple[int, bytes]], labels: list[int], images: _ImageSets
) -> Iterator[bytes]:
    """Yields a table's paths, and adds them with their labels to ``images``.

    Args:
        labels: of the columns behind the path's.
    """
    commas = b"," * (len(labels) - 1)
    for number, line in lines:
        name, _, cells = line.partition(b",")
        # Most rows of most tables are a plain path, then single digits with commas between.
        # Python's reader of CSV takes three times as long; it reads all other rows.
        digits = cells[::2]
        are_digits = (
            cells[1::2] == commas
            and len(digits) == len(labels)
            and not digits.translate(None, b"01")
        )
        is_plain = (
            len(name) <= _LONGEST_PATH and name.isascii() and b'"' not in name and b"\r" not in name
        )
        if are_digits and is_plain and (path := name.strip()):
            yield images.add(number, path, [labels[place] for place in _places_of_ones(digits)])
            continue
        text, *values = csv_fields(os.fsdecode(line))
        text = text.strip()
        unknown = set(values) - {"0", "1"}
        if unknown or len(values) != len(labels) or not text:
            if unknown:
                what = f"'{printable(min(unknown), 30)}'"
            elif text:
                what = f"{len(values)} values"
            else:
                what = "no path"
            expected = f"a path, then 0 or 1 for each of {len(labels)} classes"
            raise InputError(images.lines.problem(number, f"expected {expected}; found {what}"))
        chosen = [label for label, value in zip(labels, values, strict=True) if value == "1"]
        yield images.add(number, os.fsencode(text), chosen)


def _places_of_ones(digits: bytes) -> Iterator[int]:
    """Yields the places of 1 in a row of zeros and ones."""
    place = digits.find(b"1")
    while place >= 0:
        yield place
        place = digits.find(b"1", place + 1)
