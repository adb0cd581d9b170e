"""The reader of Parquet tables, as Hugging Face's Hub has them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import Allowance, InputError, Unreadable, open_file, printable, reading
from loading.files import Paths, opened_descriptor, utf8_text
from loading.label_sets import LabelSets
from loading.label_spaces import some_of
from loading.layout import describe_folder
from loading.parquet_pages import ByteValues, Chunk, Page, forget_pages, pages
from loading.rows import BYTES_PER_ROW, IN_A_FILE, Rows, image_candidates, pyarrow_for, row_names
from loading.sources import Split
from loading.table_columns import (
    Cells,
    Feature,
    TextCells,
    cells_of_columns,
    chosen_column,
    features_of,
    label_candidates,
    label_columns,
    labels_of,
    named_classes,
)
from settings.plain import parsed_json
from settings.registry import datasets

# The names of parts, by mode. Test images validate where there are no others.
PARTS = {"train": ("train",), "val": ("validation", "val", "valid")}
TEST = "test"
TEST_NOTE = "the test images validate, because there are no validation images"
# Folders below the dataset's that hold the tables, as on the Hub.
_FOLDERS = (".", "data", "default")
_BYTES_PER_LABEL = 32
# The time that reading a row's path and labels may take.
_SECONDS_PER_ROW = 20e-6
_ADVICE = "; download it again, or write it with datasets or pandas"


class _Leaf(NamedTuple):
    """A column of values.

    Attributes:
        number: its place among the columns.
        kind: the physical type of its values.
        is_text: whether they are texts, and not bytes.
        definition, repetition: the highest levels.
    """

    number: int
    kind: str
    is_text: bool
    definition: int
    repetition: int


class _Table(NamedTuple):
    """A table's footer.

    Attributes:
        file: its path.
        groups: pyarrow's metadata, which describes the row groups.
        leaves: the columns of values by their path, such as "image.bytes".
        features: as ``features_of`` returns them.
        allowance: the memory that reading the table may still take.
    """

    file: str
    groups: Any
    leaves: dict[str, _Leaf]
    features: dict[str, Feature]
    allowance: Allowance

    def columns(self) -> list[str]:
        """Returns the names of the columns, each once."""
        return list(dict.fromkeys(path.partition(".")[0] for path in self.leaves))

    def leaves_of(self, column: str) -> dict[str, _Leaf]:
        """Returns the columns of values within a column, by their paths in it."""
        return {
            path.removeprefix(column).removeprefix("."): leaf
            for path, leaf in self.leaves.items()
            if path == column or path.startswith(f"{column}.")
        }

    def chunks(self, leaf: _Leaf) -> Iterator[Chunk]:
        """Yields a column's part of each row group that has rows."""
        for number in range(self.groups.num_row_groups):
            group = self.groups.row_group(number)
            if not group.num_rows:
                continue
            part = group.column(leaf.number)
            starts = [part.data_page_offset]
            if part.dictionary_page_offset:
                starts.append(part.dictionary_page_offset)
            yield Chunk(
                file=self.file,
                start=min(starts),
                size=part.total_compressed_size,
                count=part.num_values,
                codec=part.compression,
                kind=leaf.kind,
                definition=leaf.definition,
                repetition=leaf.repetition,
            )


@datasets.register(
    "parquet",
    holds="`train-*.parquet` and `validation-*.parquet` (else `test-*`), there or in `data/`",
    task="any",
    columns="labels",
    val="validation-*.parquet val-*.parquet valid-*.parquet validation.parquet val.parquet valid.parquet"
    " validation/*.parquet val/*.parquet data/validation-*.parquet data/val-*.parquet data/valid-*.parquet",
    files=".parquet",
)
def parquet(
    split: Split,
    *,
    data_path: str,
    image_column: str,
    label_column: str | Sequence[str] | None,
    label_separator: str | None,
) -> Rows:
    """Reads the tables of a part. Images stay in their files.

    Raises:
        InputError: there are no tables, one is damaged, a column isn't known, or a label is outside
            the range.
    """
    pyarrow_for("parquet")
    forget_pages()
    opened_descriptor.cache_clear()
    root = Path(data_path)
    files = _files(root, split)
    folder = root if root.is_dir() else root.parent
    tables = _tables(files)
    if not tables:
        raise InputError(f"{files[0]}: it has no rows{_ADVICE}")
    first = tables[0]
    with reading(first.file, "a Parquet table"):
        image, label = _chosen(first, image_column, label_column)
    parts = []
    for table in tables:
        with reading(table.file, "a Parquet table", _ADVICE):
            parts.append(_images(table, folder, image))
    labels = None
    classes: list[str] = []
    if label:
        cells = _cells(tables, label, label_separator)
        training = cells
        names = _named_classes(tables, label)
        # Without the classes' names, the training labels decide what the labels mean.
        if split.mode == "val" and cells.texts is not None and not names:
            train_tables = _tables(_files_of(root, ("train",)))
            training = _cells(train_tables or tables, label, label_separator)
        with reading(first.file, "a Parquet table"):
            labels, classes = labels_of(
                cells, training, names, split.label_limit(names), split.mode
            )
    images = _joined(folder, tables, parts, labels, classes)
    if files == _files_of(root, (TEST,)):
        images.note = TEST_NOTE
    return images


def _files(root: Path, split: Split) -> list[Path]:
    """Returns the tables of a part.

    Raises:
        InputError: there are none.
    """
    if root.is_file():
        _check_one_part(root, split)
        return [root]
    files = _files_of(root, PARTS[split.mode])
    if not files and split.mode == "val":
        files = _files_of(root, (TEST,))
    if not files and not _files_of(root, PARTS["train"]):
        files = sorted(file for folder in _FOLDERS for file in (root / folder).glob("*.parquet"))
        if files:
            _check_one_part(root, split)
    if not files:
        problem = (
            f"{root}: no {PARTS[split.mode][0]}-*.parquet, there or in data/; it holds"
            f" {describe_folder(root)}"
        )
        if split.mode == "val":
            problem += "; without them, DATA.VAL_SPLIT splits the training images"
        raise InputError(problem)
    return files


def _files_of(root: Path, parts: Sequence[str]) -> list[Path]:
    """Returns the tables of the first of ``parts`` that there is."""
    for part in parts:
        patterns = (f"{part}.parquet", f"{part}-*.parquet", f"{part}/*.parquet")
        for folder in _FOLDERS:
            files = [file for pattern in patterns for file in (root / folder).glob(pattern)]
            if files:
                return sorted(files)
    return []


def _check_one_part(path: Path, split: Split) -> None:
    """Raises InputError where tables of one part are read for the other part."""
    # An evaluation takes all images, a check takes them for training images.
    is_check = split.problems is not None
    wanted = "train" if split.alone or is_check else "val"
    if split.mode != wanted:
        raise InputError(
            f"{path}: no validation images; DATA.VAL_SPLIT 0.1 takes a tenth of the images, or give a"
            " folder of train-*.parquet and validation-*.parquet"
        )


def count_training_rows(root: Path) -> int:
    """Returns the number of rows of the training part, from the tables' footers.

    Raises:
        InputError: as of ``parquet``.
    """
    pyarrow_for("parquet")
    files = _files(root, Split("train", alone=True))
    return sum(_footer(file).groups.num_rows for file in files)


def _tables(files: Sequence[Path]) -> list[_Table]:
    """Returns the tables that have rows. One of several parts of a dataset may have none."""
    tables = [_footer(file) for file in files]
    return [table for table in tables if table.groups.num_rows]


def _footer(file: Path) -> _Table:
    """Reads a table's footer; raises InputError where it can't be read."""
    from pyarrow import parquet as pyarrow_parquet

    with reading(file, "a Parquet table", _ADVICE), open_file(file) as opened:
        allowance = Allowance(os.fstat(opened.fileno()).st_size)
        metadata = pyarrow_parquet.read_metadata(opened)
        leaves = {}
        for number in range(len(metadata.schema)):
            column = metadata.schema.column(number)
            if column.path in leaves:
                raise Unreadable(f"it has the column '{printable(column.path, 60)}' twice")
            leaves[column.path] = _Leaf(
                number=number,
                kind=column.physical_type,
                is_text=column.converted_type == "UTF8" or column.logical_type.type == "STRING",
                definition=column.max_definition_level,
                repetition=column.max_repetition_level,
            )
        described = (metadata.metadata or {}).get(b"huggingface", b"{}")
        content = parsed_json(described)
        info = content.get("info") if type(content) is dict else None
        features = features_of(info.get("features") if type(info) is dict else None)
        allowance.take(BYTES_PER_ROW * metadata.num_rows)
        allowance.until += _SECONDS_PER_ROW * metadata.num_rows
        return _Table(str(file), metadata, leaves, features, allowance)


def _chosen(
    table: _Table, image_column: str, label_column: str | Sequence[str] | None
) -> tuple[str, list[str]]:
    """Returns (the column of the images, the columns of the labels)."""
    columns = table.columns()
    structures = []
    texts = []
    for column in columns:
        leaves = table.leaves_of(column)
        flat = [path for path, leaf in leaves.items() if not leaf.repetition]
        if "bytes" in flat or ("" in flat and _holds_bytes(leaves[""])):
            structures.append(column)
        elif "" in flat and leaves[""].is_text:
            texts.append(column)
    candidates = image_candidates(table.features, structures, texts)
    image = chosen_column("IMAGE_COLUMN", image_column, candidates, columns)
    if image not in (*structures, *texts):
        raise Unreadable(f"its column '{printable(image, 60)}' holds neither images nor paths")
    others = label_candidates(table.features, columns)
    return image, label_columns(label_column, others, columns, image)


def _named_classes(tables: Sequence[_Table], columns: Sequence[str]) -> list[str]:
    """Returns the class names of the label columns; raises InputError where tables differ in them."""
    names = named_classes(tables[0].features, columns)
    for table in tables[1:]:
        others = named_classes(table.features, columns)
        with reading(table.file, "a Parquet table"):
            if others != names:
                raise Unreadable(
                    f"its classes are {some_of(others)}, those of {tables[0].file} are"
                    f" {some_of(names)}; write both with the same classes in the same order"
                )
    return names


def _holds_bytes(leaf: _Leaf) -> bool:
    return leaf.kind == "BYTE_ARRAY" and not leaf.is_text


class _Images(NamedTuple):
    """The images of a table.

    Attributes:
        names, paths: as of ``Rows``; no paths where the table holds the images.
        chunks: the images' column of each row group.
    """

    names: list[bytes]
    paths: list[bytes]
    chunks: list[Chunk]


def _images(table: _Table, folder: Path, column: str) -> _Images:
    """Returns the images of a table; of what it holds, only the paths are read."""
    leaves = table.leaves_of(column)
    leaf = leaves.get("bytes") or leaves.get("")
    if leaf is None or leaf.kind != "BYTE_ARRAY" or leaf.repetition:
        raise Unreadable(f"its column '{printable(column, 60)}' isn't that of the first table")
    chunks = list(table.chunks(leaf))
    shown = os.path.relpath(table.file, folder)
    path_leaf = leaves.get("path") or (leaf if leaf.is_text else None)
    paths: list[bytes] = []
    if path_leaf is not None:
        for chunk in table.chunks(path_leaf):
            for page in pages(chunk, table.allowance):
                paths += _texts(page)
                table.allowance.take(sum(map(len, paths[-len(page.places) :])))
    count = sum(chunk.count for chunk in chunks)
    if len(paths) not in (0, count) or count != table.groups.num_rows:
        raise Unreadable(f"its column '{printable(column, 60)}' has {count} rows")
    names = row_names(shown, 0, count, paths, table.allowance)
    # datasets' to_parquet leaves local images where they are, and writes no bytes of any.
    in_table = not leaf.is_text and (not any(paths) or _has_value(chunks, table.allowance))
    if in_table:
        return _Images(names, [], chunks)
    if not all(paths):
        raise InputError(f"{table.file}: row {paths.index(b'')} has no path")
    # Relative to the folder of the table.
    base = os.path.dirname(table.file)
    return _Images(names, [os.path.join(os.fsencode(base), path) for path in paths], chunks)


def _has_value(chunks: Sequence[Chunk], allowance: Allowance) -> bool:
    """Returns whether a column has a value in any row. Usually the first page has one."""
    return any((page.places >= 0).any() for chunk in chunks for page in pages(chunk, allowance))


def _texts(page: Page) -> list[bytes]:
    values = page.values
    if not isinstance(values, ByteValues):
        raise Unreadable("its paths aren't texts")
    return [values[place] if place >= 0 else b"" for place in page.places.tolist()]


def _cells(tables: Sequence[_Table], columns: Sequence[str], separator: str | None) -> Cells:
    """Returns the cells of the label columns of all tables."""
    if len(columns) == 1:
        return _cells_of(tables, columns[0], separator)
    numbers = {}
    for column in columns:
        cells = _cells_of(tables, column, None)
        if cells.texts is not None or cells.ends is not None:
            raise InputError(
                f"{tables[0].file}: its column '{printable(column, 60)}' doesn't hold 0 and 1"
            )
        numbers[column] = cells.values
    with reading(tables[0].file, "a Parquet table"):
        return cells_of_columns(numbers)


def _cells_of(tables: Sequence[_Table], column: str, separator: str | None) -> Cells:
    """Returns the cells of one label column of all tables: a value each, or a list of values."""
    values: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    present: list[np.ndarray] = []
    first = _label_leaf(tables[0], column)
    is_list = bool(first.repetition)
    texts: TextCells | None = None
    if first.kind == "BYTE_ARRAY":
        texts = TextCells(None if is_list else separator, tables[0].allowance)
    for table in tables:
        leaf = _label_leaf(table, column)
        is_text = leaf.kind == "BYTE_ARRAY"
        if bool(leaf.repetition) != is_list or is_text != (texts is not None):
            raise InputError(
                f"{table.file}: its column '{printable(column, 60)}' has another type than in"
                f" {tables[0].file}"
            )
        with reading(table.file, "a Parquet table", _ADVICE):
            rows = 0
            for chunk in table.chunks(leaf):
                for page in pages(chunk, table.allowance):
                    table.allowance.take(_BYTES_PER_LABEL * len(page.places))
                    is_value = page.places >= 0
                    places = page.places[is_value]
                    if page.starts_row is not None:
                        starts.append(page.starts_row)
                        present.append(is_value)
                    elif not is_value.all() and (texts is None or separator is None):
                        row = rows + int(is_value.argmin())
                        raise InputError(f"{table.file}: row {row} has no label")
                    rows += len(is_value) if page.starts_row is None else page.starts_row.sum()
                    if texts is None:
                        values.append(np.asarray(page.values)[places])
                        continue
                    # A null is a text without labels, but no item of a list.
                    words = [utf8_text(text) for text in _texts(page)]
                    for word, has_value in zip(words, is_value.tolist(), strict=True):
                        if has_value or not is_list:
                            texts.add(word)
            if rows != table.groups.num_rows:
                raise Unreadable(f"its column '{printable(column, 60)}' has {rows} rows")
    if texts is not None:
        cells = texts.cells()
    else:
        cells = Cells(np.concatenate(values))
    if not is_list:
        return cells
    row_of = np.cumsum(np.concatenate(starts)) - 1
    rows = int(row_of[-1]) + 1
    counts = np.bincount(row_of[np.concatenate(present)], minlength=rows)
    return cells._replace(ends=np.concatenate([[0], np.cumsum(counts)]))


def _label_leaf(table: _Table, column: str) -> _Leaf:
    """Returns the values of a label column; raises InputError where they can't be labels."""
    leaves = list(table.leaves_of(column).values())
    if not leaves:
        problem = "is missing, unlike in the first table"
    elif len(leaves) > 1:
        problem = "holds structures"
    elif leaves[0].repetition > 1:
        problem = "holds lists of lists"
    elif leaves[0].kind not in ("BOOLEAN", "INT32", "INT64", "BYTE_ARRAY"):
        problem = f"holds values of {leaves[0].kind}"
    else:
        return leaves[0]
    raise InputError(
        f"{table.file}: its column '{printable(column, 60)}' {problem}; expected whole numbers,"
        " texts, or a list of them for each image"
    )


def _joined(
    folder: Path,
    tables: Sequence[_Table],
    parts: Sequence[_Images],
    labels: np.ndarray | LabelSets | None,
    classes: Sequence[str],
) -> Rows:
    """Returns the images of all tables."""
    chunks = [chunk for part in parts for chunk in part.chunks]
    counts = np.array([chunk.count for chunk in chunks])
    shard = np.repeat(np.arange(len(chunks), dtype=np.int32), counts)
    first_rows = np.cumsum(counts) - counts
    places = np.arange(len(shard)) - first_rows[shard]
    paths: list[bytes] = []
    for part in parts:
        if part.paths:
            places[len(paths) : len(paths) + len(part.paths)] = IN_A_FILE
        paths += part.paths or [b""] * len(part.names)
    return Rows(
        root=str(folder),
        tables=[table.file for table in tables],
        names=np.array([name for part in parts for name in part.names]),
        shard=shard,
        places=places,
        lengths=np.array([chunk.size for chunk in chunks])[shard],
        chunks=chunks,
        paths=Paths(paths) if any(paths) else None,
        labels=labels,
        classes=classes,
    )
