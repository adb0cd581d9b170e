"""The reader of folders that Hugging Face's ``datasets`` saved (``save_to_disk``).

Such a folder holds Arrow files, in which an image's bytes lie as they are. So their places are read
once, and each image is read from its place, without pyarrow and without memory for others.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import Allowance, InputError, Unreadable, open_file, printable, reading
from loading.files import Paths, opened_descriptor
from loading.layout import describe_folder
from loading.parquet import PARTS, TEST, TEST_NOTE
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
from settings.plain import parsed_json, whole_file
from settings.registry import datasets

_STATE = "state.json"
_ADVICE = "; save the dataset again with save_to_disk"
_LARGEST_JSON = 1 << 26
_BYTES_PER_LABEL = 32


class _Part(NamedTuple):
    """A saved dataset.

    Attributes:
        folder: its path.
        files: the paths of its Arrow files.
        features: as ``features_of`` returns them.
    """

    folder: Path
    files: list[Path]
    features: dict[str, Feature]


@datasets.register(
    "hf_dataset",
    holds="what `save_to_disk` of `datasets` wrote: `train/` and `validation/` (else `test/`), or one dataset",
    task="any",
    columns="labels",
    val="validation/state.json val/state.json valid/state.json",
)
def hf_dataset(
    split: Split,
    *,
    data_path: str,
    image_column: str,
    label_column: str | Sequence[str] | None,
    label_separator: str | None,
) -> Rows:
    """Reads a saved dataset. Images stay in their files.

    Raises:
        InputError: there is no such folder, a file is damaged, a column isn't known, or a label is
            outside the range.
    """
    pyarrow_for("hf_dataset")
    opened_descriptor.cache_clear()
    root = Path(data_path)
    part = _part_of(root, split)
    with reading(part.files[0], "an Arrow file", _ADVICE):
        schema = _Arrow(part.files[0]).schema
    with reading(part.files[0], "an Arrow file"):
        image, label = _chosen(part, schema, image_column, label_column)
    images, cells = _read(part, root, image, label, label_separator)
    if part.folder == root / TEST:
        images.note = TEST_NOTE
    if cells is None:
        return images
    names = named_classes(part.features, label)
    training = cells
    # Without the classes' names, the training labels decide what the labels mean.
    train = root / PARTS["train"][0]
    has_names = bool(names) or cells.texts is None
    if split.mode == "val" and not has_names and (train / _STATE).exists():
        training = _read(_part(train), root, image, label, label_separator)[1] or cells
    with reading(part.folder, "a saved dataset"):
        labels, classes = labels_of(cells, training, names, split.label_limit(names), split.mode)
    images.labels = labels
    images.classes = classes
    return images


def _part_of(root: Path, split: Split) -> _Part:
    """Returns the dataset of a mode; raises InputError if there is none."""
    if (root / _STATE).exists():
        # An evaluation takes all images, a check takes them for training images.
        is_check = split.problems is not None
        wanted = "train" if split.alone or is_check else "val"
        if split.mode != wanted:
            raise InputError(
                f"{root}: no validation images; DATA.VAL_SPLIT 0.1 takes a tenth of the images, or"
                " save a DatasetDict of train and validation"
            )
        return _part(root)
    for name in PARTS[split.mode]:
        if (root / name / _STATE).exists():
            return _part(root / name)
    if split.mode == "val" and (root / TEST / _STATE).exists():
        return _part(root / TEST)
    problem = (
        f"{root}: no {PARTS[split.mode][0]}/{_STATE}; DATASET hf_dataset needs a folder that"
        f" save_to_disk wrote; it holds {describe_folder(root)}"
    )
    if split.mode == "val":
        problem += "; without them, DATA.VAL_SPLIT splits the training images"
    raise InputError(problem)


def count_training_rows(root: Path) -> int | None:
    """Returns the number of rows of the training part, as its description has it; None if it doesn't.

    Raises:
        InputError: as of ``hf_dataset``.
    """
    folder = _part_of(root, Split("train", alone=True)).folder
    info = folder / "dataset_info.json"
    splits = _json(info).get("splits") if info.exists() else None
    split = splits.get(folder.name) if isinstance(splits, dict) else None
    count = split.get("num_examples") if isinstance(split, dict) else None
    return count if type(count) is int and count >= 0 else None


def _part(folder: Path) -> _Part:
    state = _json(folder / _STATE)
    listed = state.get("_data_files")
    entries = listed if type(listed) is list else []
    names = [entry.get("filename") if type(entry) is dict else None for entry in entries]
    with reading(folder / _STATE, "the state of a saved dataset", _ADVICE):
        if not names or not all(
            type(name) is str and os.path.basename(name) == name for name in names
        ):
            raise Unreadable("it names no files next to it")
        # Old versions of datasets kept a list of chosen rows in files of its own.
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise Unreadable(
                "it is a selection of rows; call flatten_indices() before save_to_disk"
            )
    info = folder / "dataset_info.json"
    described: Any = _json(info) if info.exists() else {}
    with reading(info, "the description of a saved dataset", _ADVICE):
        features = features_of(described.get("features"))
    return _Part(folder, [folder / str(name) for name in names], features)


def _json(file: Path) -> dict[str, Any]:
    with reading(file, "a description in JSON", _ADVICE):
        content = parsed_json(whole_file(file, _LARGEST_JSON))
        if type(content) is not dict:
            raise Unreadable("it isn't a dictionary")
        return content


# ----------------------------------------------------------------- Arrow


class _Arrow:
    """An Arrow file, mapped into memory.

    Attributes:
        schema: pyarrow's schema of its columns.
        allowance: the memory that reading the file may still take.
    """

    def __init__(self, file: Path) -> None:
        import pyarrow
        from pyarrow import ipc

        # This raises an error if the file is a pipe, for which pyarrow would wait.
        with open_file(file) as opened:
            self.size = os.fstat(opened.fileno()).st_size
        self.allowance = Allowance(self.size)
        self._map = pyarrow.memory_map(str(file)).read_buffer(self.size)
        self._messages = ipc.MessageReader.open_stream(pyarrow.BufferReader(self._map))
        self.schema = ipc.read_schema(self._messages.read_next_message())

    def batches(self) -> Iterator[Any]:
        """Yields pyarrow's record batches.

        Raises:
            Unreadable: they are compressed, or of another kind than datasets writes.
        """
        from pyarrow import ipc

        for message in self._messages:
            if message.type != "record batch":
                raise Unreadable(f"it holds a {message.type}, expected record batches")
            if _is_compressed(message.metadata.to_pybytes()):
                raise Unreadable("its record batches are compressed")
            yield ipc.read_record_batch(message, self.schema)

    def place(self, buffer: Any) -> int:
        """Returns the place in the file at which a buffer of a batch begins."""
        place = buffer.address - self._map.address
        if not 0 <= place <= self.size - buffer.size:
            raise Unreadable("its values aren't in the file")
        return place


def _is_compressed(metadata: bytes) -> bool:
    """Returns whether a message's record batch is compressed; pyarrow doesn't say so before it has
    unpacked it.

    Args:
        metadata: a flatbuffer of Arrow's table Message. Its header is the table RecordBatch, whose
            fourth field is there if it is compressed.
    """

    def field(table: int, number: int) -> int:
        """Returns the place of a table's field; 0 if it isn't there."""
        places = table - struct.unpack_from("<i", metadata, table)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", metadata, places)[0]:
            return 0
        offset = struct.unpack_from("<H", metadata, places + 4 + 2 * number)[0]
        return table + offset if offset else 0

    message = struct.unpack_from("<I", metadata, 0)[0]
    header = field(message, 2)
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return field(batch, 3) != 0


def _chosen(
    part: _Part, schema: Any, image_column: str, label_column: str | Sequence[str] | None
) -> tuple[str, list[str]]:
    """Returns (the column of the images, the columns of the labels)."""
    from pyarrow import types

    structures = []
    texts = []
    for column in schema:
        kind = column.type
        if types.is_struct(kind):
            fields = {
                kind.field(number).name: kind.field(number).type
                for number in range(kind.num_fields)
            }
            kind = fields.get("bytes", kind)
        if types.is_binary(kind) or types.is_large_binary(kind):
            structures.append(column.name)
        elif _is_text(kind):
            texts.append(column.name)
    candidates = image_candidates(part.features, structures, texts)
    image = chosen_column("IMAGE_COLUMN", image_column, candidates, schema.names)
    if image not in (*structures, *texts):
        raise Unreadable(f"its column '{printable(image, 60)}' holds neither images nor paths")
    others = label_candidates(part.features, schema.names)
    return image, label_columns(label_column, others, schema.names, image)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind)


class _Column:
    """The cells of a label column, collected batch by batch."""

    def __init__(self, name: str, separator: str | None, allowance: Allowance) -> None:
        self.name = name
        self._separator = separator
        self.allowance = allowance
        self._texts: TextCells | None = None
        self._values: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []

    def add(self, array: Any, first_row: int) -> None:
        """Adds an array of pyarrow's; raises Unreadable where its values aren't labels.

        Args:
            first_row: the number of the array's first row in its file.
        """
        from pyarrow import types

        if _is_list(array.type):
            # A null is a row without labels.
            self._counts.append(array.value_lengths().fill_null(0).to_numpy())
            array = array.flatten()
        elif array.null_count and (self._separator is None or not _is_text(array.type)):
            row = first_row + int(_validity(array).argmin())
            raise Unreadable(f"row {row} has no label")
        self.allowance.take(_BYTES_PER_LABEL * len(array))
        if _is_text(array.type):
            if self._texts is None:
                self._texts = TextCells(None if self._counts else self._separator, self.allowance)
            for text in array.to_pylist():
                self._texts.add(text or "")
        elif types.is_integer(array.type) or types.is_boolean(array.type):
            if array.null_count:
                raise Unreadable(f"a list of its column '{printable(self.name, 60)}' has a null")
            self._values.append(array.to_numpy(zero_copy_only=False).astype(np.int64))
        else:
            raise Unreadable(
                f"its column '{printable(self.name, 60)}' holds {printable(str(array.type), 60)},"
                " expected whole numbers, texts, or lists of them"
            )

    def cells(self) -> Cells:
        if self._texts is not None:
            cells = self._texts.cells()
        else:
            cells = Cells(np.concatenate([np.zeros(0, np.int64), *self._values]))
        if not self._counts:
            return cells
        counts = np.concatenate(self._counts)
        return cells._replace(ends=np.concatenate([[0], np.cumsum(counts)]))


class _Places(NamedTuple):
    """The images of a batch.

    Attributes:
        places, lengths: as of ``Rows``, [n].
        paths: the images' own paths, [n]; b"" where there is none.
    """

    places: np.ndarray
    lengths: np.ndarray
    paths: list[bytes]


def _read(
    part: _Part, root: Path, image: str, label: Sequence[str], separator: str | None
) -> tuple[Rows, Cells | None]:
    """Returns the images of a dataset, without labels, and the cells of their labels.

    Raises:
        InputError: a file is damaged.
    """
    names: list[bytes] = []
    found: list[_Places] = []
    counts = []
    columns: list[_Column] = []
    schema = None
    for file in part.files:
        with reading(file, "an Arrow file", _ADVICE):
            arrow = _Arrow(file)
            schema = schema or arrow.schema
            if not arrow.schema.equals(schema):
                raise Unreadable(f"its columns aren't those of {part.files[0].name}")
            columns = columns or [_Column(name, separator, arrow.allowance) for name in label]
            shown = os.path.relpath(file, root)
            rows = 0
            for column in columns:
                column.allowance = arrow.allowance
            for batch in arrow.batches():
                arrow.allowance.take(BYTES_PER_ROW * batch.num_rows)
                images = _images(arrow, _checked(batch, image), rows)
                for column in columns:
                    column.add(_checked(batch, column.name), rows)
                names += row_names(shown, rows, len(images.places), images.paths, arrow.allowance)
                rows += len(images.places)
                found.append(images)
            counts.append(rows)
    if not names:
        raise InputError(f"{part.folder}: it has no rows")
    places = np.concatenate([images.places for images in found])
    paths = [path for images in found for path in images.paths]
    outside = None
    if (places == IN_A_FILE).any():
        # Relative to the folder of the table.
        base = os.fsencode(part.folder)
        outside = Paths(os.path.join(base, path) for path in paths)
    rows = Rows(
        root=str(root),
        tables=[str(file) for file in part.files],
        names=np.array(names),
        shard=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        places=places,
        lengths=np.concatenate([images.lengths for images in found]),
        paths=outside,
    )
    if not columns:
        return rows, None
    with reading(part.folder, "a saved dataset", _ADVICE):
        if len(columns) == 1:
            return rows, columns[0].cells()
        several = {column.name: column.cells() for column in columns}
        for name, cells in several.items():
            if cells.texts is not None or cells.ends is not None:
                raise Unreadable(f"its column '{printable(name, 60)}' doesn't hold 0 and 1")
        return rows, cells_of_columns({name: cells.values for name, cells in several.items()})


def _checked(batch: Any, name: str) -> Any:
    """Returns a column of a batch, whose offsets pyarrow has checked."""
    column = batch.column(name)
    column.validate(full=True)
    return column


def _images(arrow: _Arrow, column: Any, first_row: int) -> _Places:
    """Returns where the images of a batch's column are.

    Args:
        first_row: the number of the batch's first row in its file.
    """
    from pyarrow import types

    count = len(column)
    is_there = _validity(column)
    paths = [b""] * count
    content = column
    if types.is_struct(column.type):
        fields = [column.type.field(number).name for number in range(column.type.num_fields)]
        content = column.field("bytes")
        if "path" in fields:
            path = column.field("path")
            paths = [os.fsencode(text or "") for text in path.to_pylist()]
    if _is_text(content.type):
        paths = [os.fsencode(text or "") for text in content.to_pylist()]
        places = np.full(count, IN_A_FILE, np.int64)
        lengths = np.zeros(count, np.int64)
    else:
        _, offsets, data = content.buffers()
        kind = np.int64 if types.is_large_binary(content.type) else np.int32
        ends = np.frombuffer(offsets, kind)[content.offset : content.offset + count + 1]
        lengths = np.diff(ends.astype(np.int64))
        places = ends[:-1].astype(np.int64)
        # Without any bytes there is no such buffer, or one elsewhere.
        if data is not None and data.size:
            places += arrow.place(data)
        is_there = is_there & _validity(content)
        places[~is_there] = IN_A_FILE
    missing = [row for row in np.flatnonzero(places == IN_A_FILE).tolist() if not paths[row]]
    if missing:
        raise Unreadable(f"row {first_row + missing[0]} has neither an image nor a path")
    return _Places(places, lengths, paths)


def _validity(array: Any) -> np.ndarray:
    """Returns which entries of an array of pyarrow's aren't null, [n] bool."""
    bits = array.buffers()[0]
    if bits is None:
        return np.ones(len(array), bool)
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").astype(bool)
    return flags[array.offset : array.offset + len(array)]
