"""A binary index of the images of stored features, which is searched without reading it all.

FILE.names is made from the index of ``inference.feature_store`` (FILE.csv or FILE.jsonl), which
takes seconds to parse if it has millions of rows. FILE.names consists of a line of JSON and three
arrays: where each name ends, a checksum of each path, and the names one after the other. If
FILE.csv has changed, FILE.names is made again.
"""

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import Unreadable, open_file, reading
from inference.feature_store import LARGEST_ROW, StoredFeatures
from settings.plain import Form, Rule, check_form, is_name, is_whole, parsed_json
from utils import writing_whole

# With fewer rows, reading FILE.csv is as fast, and no FILE.names is made.
LEAST = 100_000
_KIND = "names of stored features, 1"
# The bytes at the beginning and at the end of FILE.csv that identify it.
_COMPARED = 1 << 16
# The bytes of FILE.names' first line.
_LONGEST_HEAD = 1 << 16
_ADVICE = "; remove it so that it is recreated"
# The bytes of a row without its name: where the name ends, and the path's checksum.
_WIDTH = 8 + 4
_FORM: Form = {
    "kind": Rule(f"{_KIND!r}", lambda value: value == _KIND),
    "rows": Rule("a number of rows", is_whole),
    "letters": Rule("a number of bytes", is_whole),
    "size": Rule("a number of bytes", is_whole),
    "changed": Rule("a time in nanoseconds", lambda value: is_whole(value, high=1 << 63)),
    "sha256": Rule("a SHA-256", lambda value: is_name(value, 64)),
    # A name below it is never taken for a URL.
    "folder": Rule(
        "an absolute path",
        lambda value: type(value) is str and value.startswith("/") and len(value) <= 4096,
    ),
}


class Names(NamedTuple):
    """The names of images, row by row.

    Attributes:
        file: the file that they are read from.
        folder: the folder at which relative names start.
        ends: where each name ends in ``letters`` [n].
        sums: the CRC-32 of each image's absolute path [n].
        letters: the names in UTF-8 [bytes], with Python's surrogates for bytes that aren't UTF-8.
    """

    file: Path
    folder: str
    ends: np.ndarray
    sums: np.ndarray
    letters: np.ndarray

    def name(self, row: int) -> str:
        """Returns the path of a row's image.

        Raises:
            InputError: the file is damaged there.
        """
        with reading(self.file, "names of stored features", _ADVICE):
            first = int(self.ends[row - 1]) if row else 0
            end = int(self.ends[row])
            if not first <= end <= len(self.letters) or end - first > LARGEST_ROW:
                raise Unreadable(
                    f"the name of row {row} is at {first} to {end}, of {len(self.letters)} bytes"
                )
            return os.path.join(
                self.folder, self.letters[first:end].tobytes().decode("utf-8", "surrogatepass")
            )

    def rows_of(self, path: str) -> set[int]:
        """Returns the rows of the image with an absolute path."""
        # Other paths may have the same checksum.
        candidates = np.flatnonzero(self.sums == checksum(path)).tolist()
        return {row for row in candidates if os.path.abspath(self.name(row)) == path}


def open_names(stored: StoredFeatures, tell: Callable[[str], Any] = str) -> Names:
    """Returns the names of stored features.

    If they are many, they are read from FILE.names. It is made if it doesn't exist, or if FILE.csv
    was changed.

    Args:
        tell: called with a line if this takes time, or if FILE.names can't be written.

    Raises:
        InputError: FILE.csv or FILE.names is damaged.
    """
    if len(stored.values) < LEAST:
        return _read(stored)
    file = stored.index.with_suffix(".names")
    with reading(stored.index, "an index of features"):
        source = _source(stored)
    if os.path.lexists(file):
        names = _open(file, source)
        if names is not None:
            return names
    tell(f"{stored.index}: reading its {len(stored.values):,} names once, into {file.name}")
    names = _read(stored)
    try:
        with writing_whole(file, "wb") as stream:
            head = json.dumps({"kind": _KIND, **source, "letters": len(names.letters)}).encode()
            # The arrays begin at a multiple of 8 bytes.
            stream.write(head + b" " * (-len(head) % 8 + 7) + b"\n")
            for values in (names.ends, names.sums, names.letters):
                stream.write(values.data)
    except OSError as error:
        tell(f"{file} can't be written ({error.strerror}); the next search reads all names again")
    return names


def checksum(path: str) -> int:
    """Returns the checksum of an image's absolute path, as in ``Names.sums``."""
    return zlib.crc32(path.encode("utf-8", "surrogatepass"))


def _source(stored: StoredFeatures) -> dict[str, Any]:
    """Returns the identity of FILE.csv: its size, time of change, and a hash of both ends."""
    with open_file(stored.index) as file:
        status = os.fstat(file.fileno())
        ends = file.read(_COMPARED)
        file.seek(max(0, status.st_size - _COMPARED))
        ends += file.read(_COMPARED)
    return {
        "rows": len(stored.values),
        "size": status.st_size,
        "changed": status.st_mtime_ns,
        "sha256": hashlib.sha256(ends).hexdigest(),
        "folder": stored.made["folder"],
    }


def _open(file: Path, source: dict[str, Any]) -> Names | None:
    """Returns the names in FILE.names, memory-mapped; None if they are those of another FILE.csv.

    Raises:
        InputError: FILE.names is damaged.
    """
    with reading(file, "names of stored features", _ADVICE), open_file(file) as stream:
        line = stream.readline(_LONGEST_HEAD)
        head = parsed_json(line)
        check_form(head, _FORM, tuple(_FORM))
        rows = head["rows"]
        letters = head["letters"]
        size = os.fstat(stream.fileno()).st_size
        if size != len(line) + _WIDTH * rows + letters or len(line) % 8:
            raise Unreadable(
                f"it has {size} bytes, which doesn't match {rows} names of {letters} bytes"
            )
        if any(head[key] != value for key, value in source.items()):
            return None
        start = len(line)
        return Names(
            file=file,
            folder=head["folder"],
            ends=np.memmap(stream, "<u8", "r", start, (rows,)),
            sums=np.memmap(stream, "<u4", "r", start + 8 * rows, (rows,)),
            letters=np.memmap(stream, "u1", "r", start + _WIDTH * rows, (letters,)),
        )


def _read(stored: StoredFeatures) -> Names:
    """Reads all names from FILE.csv."""
    folder = stored.made["folder"]
    letters = bytearray()
    ends = array("Q")
    sums = array("I")
    for name in stored.files():
        letters += name.encode("utf-8", "surrogatepass")
        ends.append(len(letters))
        path = os.path.join(folder, name)
        # abspath takes longer than everything else here, and leaves most paths unchanged.
        is_rooted = path.startswith("/") and not path.endswith("/")
        if not is_rooted or "/." in path or "//" in path:
            path = os.path.abspath(path)
        sums.append(checksum(path))
    return Names(
        file=stored.index,
        folder=folder,
        ends=np.frombuffer(ends, "<u8"),
        sums=np.frombuffer(sums, "<u4"),
        letters=np.frombuffer(letters, np.uint8),
    )
