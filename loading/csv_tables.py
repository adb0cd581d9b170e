"""The reader of CSV tables, one row for each image, whose columns may have any names."""

import contextlib
import csv
import itertools
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from errors import InputError, Unreadable, printable, reading
from loading.class_names import each_once, names_beside
from loading.files import Paths, utf8_text
from loading.layout import IMAGE_SUFFIXES, describe_folder, is_leftover
from loading.lists import TextList, open_list
from loading.sources import Files, Split
from loading.table_columns import (
    AUTO,
    IMAGE_NAMES,
    LABEL_NAMES,
    Cells,
    TextCells,
    cells_of_columns,
    chosen_column,
    label_columns,
    labels_of,
    plain_name,
)
from settings.registry import datasets

# The names of tables and folders, and the values of a split column, by mode.
_PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "dev")}
_SUFFIXES = (".csv", ".tsv")
# The table in a folder of images, as datasets' "imagefolder" has it.
_METADATA = "metadata.csv"
_SEPARATORS = (",", ";", "\t")
# Rows that are read to recognise the column of paths.
_ROWS = 10
# What a row's label takes.
_BYTES_PER_ROW = 16
_BITS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}

# A row's number in the file, and its cells.
Row = tuple[int, list[str]]


class _Keys(NamedTuple):
    """The values of the keys that choose columns."""

    image: str
    label: str | Sequence[str] | None
    separator: str | None
    split: str | None


class _Table(NamedTuple):
    """What a table says of the images of a mode.

    Attributes:
        paths: of the images, [n].
        cells: of their labels; None for images without labels.
        names: of the columns of labels.
        has_split: whether a column says which images are for training.
    """

    paths: Paths
    cells: Cells | None
    names: list[str]
    has_split: bool


@datasets.register(
    "csv",
    holds="`train.csv` and `val.csv`, or `train/metadata.csv` and `val/metadata.csv`, or one table",
    task="any",
    columns="labels",
    val="val.csv val.tsv valid.csv valid.tsv validation.csv validation.tsv dev.csv dev.tsv"
    " val/metadata.csv valid/metadata.csv validation/metadata.csv dev/metadata.csv",
    files=".csv .tsv",
)
def csv_tables(
    split: Split,
    *,
    data_path: str,
    image_column: str,
    label_column: str | Sequence[str] | None,
    label_separator: str | None,
    split_column: str | None = "auto",
) -> Files:
    """Reads a table of images. Paths are relative to the folder of the table.

    Args:
        split_column: DATASET csv: the column that says which images are for training (train) and
            which for validation (val). auto: the column "split", if there is one. None: there is
            none.

    Raises:
        InputError: the table or files are missing, a column isn't known, or a row is wrong (which).
    """
    keys = _Keys(image_column, label_column, label_separator, split_column)
    root = Path(data_path)
    file = _file_of(root, split.mode)
    train = _file_of(root, "train")
    own_file = file is not None
    file = file or train or _only_file(root, split.mode)
    # A check opens each file anyway.
    table = _read(file, keys, split.mode, check_files=split.problems is None)
    if not own_file and not table.has_split:
        _check_one_part(file, split, is_training=file == train)
    with reading(file, "a table"):
        if not len(table.paths):
            part = "training" if split.mode == "train" else "validation"
            problem = f"no row is an image for {part}"
            if table.has_split:
                problem += f"; expected {' or '.join(_PARTS[split.mode])} in its split column"
            raise Unreadable(problem)
        if table.cells is None:
            return Files(file.parent, table.paths, None, [])
        training = table
        # The training table decides what the labels of the validation images mean.
        if split.mode == "val" and (table.has_split or train is not None):
            training = _read(train or file, keys, "train")
        if training.cells is None or not len(training.cells.values):
            training = table
        names = names_beside(file.parent)
        if len(table.names) > 1:
            names = table.names
        labels, classes = labels_of(
            table.cells, training.cells or table.cells, names, split.label_limit(names), split.mode
        )
    return Files(file.parent, table.paths, labels, classes)


class TableLayout(NamedTuple):
    """What a table is, by its header and first rows.

    Attributes:
        file: its path; of several, that of the training images.
        is_multilabel: whether every cell but a row's path is 0 or 1, in a table for multilabel_csv.
        has_split: whether a column "split" says which images are for training.
    """

    file: Path
    is_multilabel: bool
    has_split: bool


def table_layout(root: Path) -> TableLayout | None:
    """Returns what the table of images in a folder is; None if the folder has none.

    A table whose name doesn't say which part it is of needs a column of images of a known name.

    Args:
        root: the folder, or the table itself.

    Raises:
        InputError: the table can't be read.
    """
    file = _file_of(root, "train") or _file_of(root, "val")
    is_named = file is not None
    if file is None:
        with contextlib.suppress(InputError):
            file = _only_file(root, "train")
    if file is None:
        return None
    with open_list(file, "csv", "a table", _BYTES_PER_ROW) as lines, reading(file, "a table"):
        rows = _rows(lines)
        _, header = next(rows, (0, []))
        columns = [column.strip() for column in header]
        first = list(itertools.islice(rows, _ROWS))
    if not is_named and not any(plain_name(column) in IMAGE_NAMES for column in columns):
        return None
    bits = {cell for _, cells in first for cell in cells[1:]}
    names_classes = len(columns) != 2 or plain_name(columns[-1]) not in LABEL_NAMES
    is_multilabel = file.name in ("train.csv", "val.csv") and bool(bits) and bits <= {"0", "1"}
    return TableLayout(
        file,
        is_multilabel=is_multilabel and names_classes,
        has_split=_split_column(AUTO, columns) is not None,
    )


def count_rows(file: Path) -> int:
    """Returns the number of rows of a table."""
    with open_list(file, "csv", "a table", _BYTES_PER_ROW) as lines:
        return max(0, sum(1 for _ in lines) - 1)


def _file_of(root: Path, mode: str) -> Path | None:
    """Returns the table of a mode by its name; None if there is none."""
    for part in _PARTS[mode]:
        names = [*(f"{part}{suffix}" for suffix in _SUFFIXES), os.path.join(part, _METADATA)]
        for name in names:
            if os.path.lexists(root / name):
                return root / name
    return None


def _only_file(root: Path, mode: str) -> Path:
    """Returns the only table of a folder, or ``root`` itself; raises InputError if there are none or
    several.
    """
    if not root.is_dir():
        return root
    files = [
        root / name
        for name in sorted(os.listdir(root))
        if name.lower().endswith(_SUFFIXES) and not is_leftover(name)
    ]
    if len(files) != 1:
        raise InputError(
            f"{root}: no {mode}.csv; DATASET csv needs train.csv and val.csv under -data_path, or"
            f" one table; it holds {describe_folder(root)}"
        )
    return files[0]


def _check_one_part(file: Path, split: Split, is_training: bool) -> None:
    """Raises InputError where a table of one part is read for the other part.

    Args:
        is_training: whether its name says that it is for training.
    """
    # An evaluation takes all images of a table, a check takes them for training images.
    is_check = split.problems is not None
    wanted = "train" if is_training or split.alone or is_check else "val"
    if split.mode != wanted:
        raise InputError(
            f"{file}: it says of no image that it is for validation; DATA.VAL_SPLIT 0.1 takes a tenth of"
            " them, DATA.SPLIT_COLUMN names a column of train and val, or add val.csv"
        )


# ----------------------------------------------------------------- rows


def _read(file: Path, keys: _Keys, mode: str, check_files: bool = False) -> _Table:
    """Reads the rows of a mode.

    Args:
        check_files: whether the images have to be there.

    Raises:
        InputError: as of ``csv_tables``.
    """
    opened = open_list(file, "csv", "a table", _BYTES_PER_ROW)
    with opened as lines, reading(file, "a table"):
        rows = _rows(lines)
        _, header = next(rows, (0, []))
        columns = _checked_header(header)
        first = list(itertools.islice(rows, _ROWS))
        split = _split_column(keys.split, columns)
        image = _image_column(keys.image, columns, first, file.parent)
        others = [column for column in columns if column not in (image, split)]
        candidates = [column for column in others if plain_name(column) in LABEL_NAMES]
        names = label_columns(keys.label, candidates, [image, *others], image)
        text_cells = TextCells(keys.separator, lines.allowance)
        numbers = {name: array("b") for name in names if len(names) > 1}
        places = [columns.index(name) for name in names]
        image_place = columns.index(image)
        split_place = None if split is None else columns.index(split)

        def paths() -> Iterator[bytes]:
            for number, cells in itertools.chain(first, rows):
                if len(cells) != len(columns):
                    raise Unreadable(
                        f"line {number}: expected {len(columns)} cells, as in the header; found"
                        f" {len(cells)}"
                    )
                if split_place is not None:
                    part = cells[split_place].strip().lower()
                    if part not in _PARTS[mode]:
                        continue
                path = cells[image_place].strip()
                if not path:
                    raise Unreadable(f"line {number}: its column '{printable(image, 60)}' is empty")
                try:
                    _add_labels(cells, places, numbers, text_cells)
                except Unreadable as error:
                    raise Unreadable(f"line {number}: {error}") from None
                yield lines.add_path(number, os.fsencode(path))

        found = Paths(paths())
        if check_files and len(found):
            lines.check_files(found)
        cells = None
        if numbers:
            cells = cells_of_columns({name: np.array(bits) for name, bits in numbers.items()})
        elif names:
            cells = text_cells.cells()
        return _Table(found, cells, names, split is not None)


def _add_labels(
    cells: list[str], places: list[int], numbers: dict[str, array], text_cells: TextCells
) -> None:
    """Adds a row's labels to ``numbers``, if there are several columns, or to ``text_cells``."""
    if not numbers:
        for place in places:
            text_cells.add(cells[place])
        return
    for (name, bits), place in zip(numbers.items(), places, strict=True):
        bit = _BITS.get(cells[place].strip())
        if bit is None:
            raise Unreadable(
                f"expected 0 or 1 in the column '{printable(name, 60)}'; found"
                f" '{printable(cells[place], 30)}'"
            )
        bits.append(bit)


def _rows(lines: TextList) -> Iterator[Row]:
    """Yields the rows of a table. Its header says which character is between the cells."""
    separator = ""
    numbered = iter(lines)
    # A text in quotes may have several lines, of which csv takes as many as it needs.
    further = (f"{os.fsdecode(line)}\n" for _, line in numbered)
    for number, line in numbered:
        if not separator:
            header = utf8_text(line)
            separator = max(_SEPARATORS, key=header.count)
        text = os.fsdecode(line)
        if '"' not in text:
            yield number, text.split(separator)
            continue
        row = itertools.chain([f"{text}\n"], further)
        try:
            cells = next(csv.reader(row, strict=True, delimiter=separator))
        except csv.Error as error:
            raise Unreadable(f"line {number}: {error}") from None
        yield number, cells


def _checked_header(header: list[str]) -> list[str]:
    columns = [column.strip() for column in header]
    if not columns:
        raise Unreadable("it is empty; expected a header such as image,label and a row an image")
    if any(column.lower().endswith(IMAGE_SUFFIXES) for column in columns):
        raise Unreadable(
            "its first line is an image, not a header; add a header such as image,label above it"
        )
    # Spreadsheets write columns without names, which nobody can choose.
    each_once([column for column in columns if column], "column")
    return columns


def _split_column(given: str | None, columns: list[str]) -> str | None:
    if given == AUTO:
        return next((column for column in columns if plain_name(column) == "split"), None)
    return given and chosen_column("SPLIT_COLUMN", given, (), columns)


def _image_column(given: str, columns: list[str], first: list[Row], root: Path) -> str:
    """Returns the column of paths: the only one of a known name, or the only one whose cells are
    files.

    Args:
        first: the first rows.
    """
    candidates = [column for column in columns if plain_name(column) in IMAGE_NAMES]
    if len(candidates) != 1:
        files = [
            column
            for place, column in enumerate(columns)
            if (candidates == [] or column in candidates) and _are_files(first, place, root)
        ]
        candidates = files or candidates
    return chosen_column("IMAGE_COLUMN", given, candidates, columns)


def _are_files(rows: list[Row], place: int, root: Path) -> bool:
    """Returns whether the cells of a column are paths of files."""
    cells = [cells[place].strip() for _, cells in rows if place < len(cells)]
    return bool(cells) and all(cell and os.path.isfile(root / cell) for cell in cells)
