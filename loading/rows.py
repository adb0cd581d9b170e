"""Images in the rows of tables: Parquet, and Arrow files of Hugging Face's datasets.

The files stay as they are. An image is read from its place when a sample needs it, so the order of
samples is exact for every number of ranks, and only names and labels are in memory.
"""

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from errors import Allowance, InputError, RunError, Unreadable, install, printable, reading
from loading.files import Paths, contents, opened_descriptor
from loading.label_sets import LabelSets, take_labels
from loading.parquet_pages import KEPT, Chunk, value_at, values_per_read
from loading.table_columns import IMAGE_NAMES, Feature, plain_name

# The place of an image that its table only names.
IN_A_FILE = -1
# Bytes that a row takes in memory, besides its image's name.
BYTES_PER_ROW = 200
# Bytes of an image's path in its name.
_SHOWN = 200


class RowImage(NamedTuple):
    """The image of a row.

    Attributes:
        name: for messages.
        file: the table's path, or the image's own.
        place: IN_A_FILE, the row in ``chunk``, or the place of the image's first byte in the table.
        length: bytes; in a chunk unknown.
        chunk: the column's part that holds it, in Parquet.
    """

    name: str
    file: str
    place: int
    length: int
    chunk: Chunk | None

    def read(self, most: int) -> bytes:
        """Returns the bytes of the image's file.

        Args:
            most: bytes that it may have.

        Raises:
            RunError: the table has been changed.
            Unreadable: the file has more bytes, or isn't there.
            OSError: the table can't be opened or read.
        """
        if self.place == IN_A_FILE:
            return contents(self.file, most)
        if self.chunk is not None:
            found = value_at(self.chunk, self.place)
            if found is None:
                raise Unreadable("its row is empty")
            data = found
        elif self.length > most:
            raise Unreadable(f"it has {self.length} bytes, at most {most} are allowed")
        else:
            data = os.pread(opened_descriptor(self.file).descriptor, self.length, self.place)
            if len(data) < self.length:
                raise RunError(f"{self.name}: the table ends early; restore {self.file}")
        if len(data) > most:
            raise Unreadable(f"it has {len(data)} bytes, at most {most} are allowed")
        return data


class Rows:
    """The images of tables, with the methods of ``loading.shards.Shards``.

    Any number of threads and forked processes may read at once.

    Args:
        root: the folder that ``names`` are relative to.
        tables: the paths of the tables.
        names: of the images, [n] bytes: the table, the row, and the image's own path if it has one.
        shard: the number of each image's table, or of its chunk, [n].
        places: as of ``RowImage``, [n].
        lengths: bytes of each image; of its row group where it is in a chunk, [n].
        chunks: the images' column of each row group; None: images lie in the tables as they are.
        paths: of the images that are IN_A_FILE, [n]; of others any. None: there are none.
        labels: one of each image, [n], or a set of each. None: they have no labels.
        classes: names, or none where they aren't known.

    Attributes:
        note: a line for the log about what was read, or "".
    """

    def __init__(
        self,
        root: str,
        tables: Sequence[str],
        names: np.ndarray,
        shard: np.ndarray,
        places: np.ndarray,
        lengths: np.ndarray,
        chunks: Sequence[Chunk] | None = None,
        paths: Paths | None = None,
        labels: np.ndarray | LabelSets | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.tables = tables
        self.names = names
        self.shard = shard
        self.places = places
        self.lengths = lengths
        self.chunks = chunks
        self.paths = paths
        self.labels = labels
        self.classes = list(classes)
        self.note = ""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def files(self) -> list[str]:
        """Returns the paths of all files that images are read from."""
        outside = np.flatnonzero(self.places == IN_A_FILE).tolist()
        return [*self.tables, *(self.image(index).file for index in outside)]

    def at_places(self, places: np.ndarray) -> "Rows":
        """Returns the images at ``places`` [k]."""
        subset = copy.copy(self)
        for name in ("names", "shard", "places", "lengths"):
            setattr(subset, name, getattr(self, name)[places])
        if self.paths is not None:
            paths = self.paths
            subset.paths = Paths(paths.path_bytes(place) for place in places.tolist())
        subset.labels = take_labels(self.labels, places)
        return subset

    def columns(self) -> dict[str, np.ndarray]:
        """Returns the further columns by name: there are none."""
        return {}

    def where(self) -> bytes:
        """Returns bytes that differ for other images of the same files."""
        return self.shard.tobytes() + self.places.tobytes()

    def images_per_read(self) -> int:
        """Returns how many images are unpacked to read one at random."""
        if self.chunks is None or not (self.places != IN_A_FILE).any():
            return 1
        with reading(self.chunks[0].file, "a Parquet table"):
            return values_per_read(self.chunks[0])

    def row_groups_at_once(self) -> int:
        """Returns how many row groups a process keeps unpacked, at most 16."""
        largest = max((chunk.size for chunk in self.chunks or ()), default=1)
        return min(16, max(1, KEPT // max(1, largest)))

    def name(self, index: int, column: str | None = None) -> str:
        """Returns the name of an image in messages."""
        name = os.path.join(self.root, os.fsdecode(self.names[index]))
        return name if name.isprintable() else printable(name, len(name))

    def image(self, index: int) -> RowImage:
        """Returns where an image is."""
        place = int(self.places[index])
        chunk = None
        if place == IN_A_FILE and self.paths is not None:
            file = os.fsdecode(self.paths.path_bytes(index))
        elif self.chunks is not None:
            chunk = self.chunks[int(self.shard[index])]
            file = chunk.file
        else:
            file = self.tables[int(self.shard[index])]
        return RowImage(self.name(index), file, place, int(self.lengths[index]), chunk)

    def read(self, index: int, most: int, column: str | None = None) -> bytes:
        """Returns the bytes of an image's file; ``most`` and errors are as of ``RowImage.read``."""
        return self.image(index).read(most)


def row_names(
    table: str, first: int, count: int, paths: Iterable[bytes], allowance: Allowance
) -> list[bytes]:
    """Returns the names of a table's rows.

    Args:
        table: its path, relative to the dataset's folder.
        first: the number of the first row.
        count: of rows.
        paths: the paths of the images, or nothing where none are known.
        allowance: of the table.
    """
    before = os.fsencode(table)
    names = [b"%b/%d" % (before, row) for row in range(first, first + count)]
    for place, path in enumerate(paths):
        # All names take as many bytes as the longest one.
        if shown := path[-_SHOWN:].translate(None, b"\0\n").lstrip(b"/"):
            names[place] += b"/" + shown
    allowance.take(sum(map(len, names)))
    return names


def image_candidates(
    features: Mapping[str, Feature], structures: Sequence[str], texts: Sequence[str]
) -> list[str]:
    """Returns the columns that may hold images.

    Args:
        features: the columns that are described.
        structures: the columns that hold files' bytes.
        texts: the columns of texts, which may be paths.
    """
    described = [
        name
        for name in (*structures, *texts)
        if name in features and features[name].kind == "Image"
    ]
    named = [name for name in texts if plain_name(name) in IMAGE_NAMES]
    return described or list(structures) or named


def pyarrow_for(dataset: str) -> ModuleType:
    """Returns pyarrow; raises InputError if it isn't installed."""
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"DATASET {dataset} needs pyarrow; {install('parquet')}") from None
    return pyarrow
