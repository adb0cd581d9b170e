"""The names of stored features' images, in a file that is searched without reading all of them.

FILE.names is made from the index of ``inference.feature_store`` (FILE.csv or FILE.jsonl), whose text
takes seconds to parse where it has millions of rows. It is a line of JSON, then three arrays: where
each name ends, a checksum of each path, and the names one after the other. An index that was
changed since then is read again.
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

LEAST = 100_000  # rows: of fewer, the index is read as fast
_KIND = "names of stored features, 1"
_PART = 1 << 16  # bytes of the index's beginning, and of its end, that are compared
_LONGEST_HEAD = 1 << 16  # bytes
_ANEW = "; remove it, and it is made anew"
_WIDTH = 8 + 4  # bytes of a row besides its name
_FORM: Form = {
    "kind": Rule(f"{_KIND!r}", lambda value: value == _KIND),
    "rows": Rule("a number of rows", is_whole),
    "letters": Rule("a number of bytes", is_whole),
    "size": Rule("a number of bytes", is_whole),
    "changed": Rule("a time in nanoseconds", lambda value: is_whole(value, high=1 << 63)),
    "sha256": Rule("a SHA-256", lambda value: is_name(value, 64)),
    "folder": Rule("a path", lambda value: type(value) is str and 0 < len(value) <= 4096),
}


class Names(NamedTuple):
    """The names of images, row by row.

    Attributes:
        file: what they are read from.
        folder: that relative ones count from.
        ends: where each name ends in ``letters`` [n].
        sums: a checksum of each image's absolute path [n].
        letters: the names in UTF-8 [bytes]; what isn't UTF-8 in a name has Python's surrogates.
    """

    file: Path
    folder: str
    ends: np.ndarray
    sums: np.ndarray
    letters: np.ndarray

    def name(self, row: int) -> str:
        """Returns a row's name, as a path.

        Raises:
            InputError: the file holds no name there.
        """
        with reading(self.file, "names of stored features", _ANEW):
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
        """Returns the rows of an image, of which ``path`` is the absolute path."""
        alike = np.flatnonzero(self.sums == _sum(path)).tolist()
        return {row for row in alike if os.path.abspath(self.name(row)) == path}


def open_names(stored: StoredFeatures, tell: Callable[[str], Any] = str) -> Names:
    """Returns the names of stored features; of many, from FILE.names, which is made where it isn't
    there, or is of another index.

    Args:
        tell: is called with a line where something takes time, or FILE.names can't be written.

    Raises:
        InputError: the index, or FILE.names, isn't what was written.
    """
    if len(stored.values) < LEAST:
        return _read(stored)
    file = stored.index.with_suffix(".names")
    with reading(stored.index, "an index of features"):
        of = _source(stored)
    if os.path.lexists(file) and (found := _open(file, of)):
        return found
    tell(f"{stored.index}: its {len(stored.values):,} names are read once, into {file.name}")
    names = _read(stored)
    try:
        with writing_whole(file, "wb") as written:
            head = json.dumps({"kind": _KIND, **of, "letters": len(names.letters)}).encode()
            written.write(head + b" " * (-len(head) % 8 + 7) + b"\n")
            for part in (names.ends, names.sums, names.letters):
                written.write(part.data)
    except OSError as error:
        tell(f"{file} isn't written ({error.strerror}); the next search reads all names again")
    return names


def _sum(path: str) -> int:
    return zlib.crc32(path.encode("utf-8", "surrogatepass"))


def _source(stored: StoredFeatures) -> dict[str, Any]:
    """What tells whether the index is the one whose names were read."""
    with open_file(stored.index) as file:
        found = os.fstat(file.fileno())
        parts = file.read(_PART)
        file.seek(max(0, found.st_size - _PART))
        parts += file.read(_PART)
    same = {"rows": len(stored.values), "size": found.st_size, "changed": found.st_mtime_ns}
    return same | {"sha256": hashlib.sha256(parts).hexdigest(), "folder": stored.made["folder"]}


def _open(file: Path, of: dict[str, Any]) -> Names | None:
    """The names in a file, mapped; None: they are of another index.

    Raises:
        InputError: nobody wrote the file so.
    """
    with reading(file, "names of stored features", _ANEW), open_file(file) as stream:
        line = stream.readline(_LONGEST_HEAD)
        head = parsed_json(line)
        check_form(head, _FORM, tuple(_FORM))
        rows = head["rows"]
        letters = head["letters"]
        size = os.fstat(stream.fileno()).st_size
        if size != len(line) + _WIDTH * rows + letters or len(line) % 8:
            raise Unreadable(
                f"it has {size} bytes, which aren't those of {rows} names of {letters} bytes"
            )
        if any(head[key] != value for key, value in of.items()):
            return None
        places = (len(line), len(line) + 8 * rows, len(line) + _WIDTH * rows)
        kinds = (("<u8", rows), ("<u4", rows), ("u1", letters))
        arrays = [
            np.memmap(stream, kind, "r", place, (count,))
            for place, (kind, count) in zip(places, kinds, strict=True)
        ]
    return Names(file, head["folder"], *arrays)


def _read(stored: StoredFeatures) -> Names:
    """The names in the index, as arrays."""
    folder = stored.made["folder"]
    letters = bytearray()
    ends = array("Q")
    sums = array("I")
    for name in stored.files():
        letters += name.encode("utf-8", "surrogatepass")
        ends.append(len(letters))
        path = os.path.join(folder, name)
        # Most paths are as abspath would leave them, which takes longer than all else here.
        plain = (
            path.startswith("/")
            and "/." not in path
            and "//" not in path
            and not path.endswith("/")
        )
        sums.append(_sum(path if plain else os.path.abspath(path)))
    arrays = (
        np.frombuffer(ends, "<u8"),
        np.frombuffer(sums, "<u4"),
        np.frombuffer(letters, np.uint8),
    )
    return Names(stored.index, folder, *arrays)
