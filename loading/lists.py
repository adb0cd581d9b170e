"""Reads text lists of images: lists and tables of a dataset. Errors name the file and the line.

A dataset format that is a text file is read with these in any file below ``loading/``:

    labels = array("q")

    def paths(lines: TextList) -> Iterator[bytes]:
        for number, line in lines:
            path, tab, label = line.partition(b"\\t")
            if not (path and tab and label.isdigit()):
                raise InputError(lines.unexpected(number, "a path, a TAB and a label", line))
            labels.append(int(label))
            yield lines.add_path(number, path)

    with open_list(root / f"{split.mode}.tsv", "my_format") as lines:
        files = Paths(paths(lines))
        lines.check_files(files)

A list is read as bytes, because a path may hold bytes that aren't UTF-8. Lists are written by
others, so each reader counts the memory that it is about to hold (``errors.Allowance``).
"""

import contextlib
import csv
import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from errors import Allowance, InputError, open_file, printable, reading
from loading.files import Paths, count_lines, text_lines, why_missing
from loading.layout import describe_folder

# Bytes that a line takes besides its own: its label, its end, the hash of its folder.
BYTES_PER_LINE = 32
# Bytes that a run of images of one folder takes, and again each folder, while files are looked up.
_BYTES_PER_RUN = 32
_RUNS_AT_ONCE = 1 << 12
# After so many folders that aren't there, no further ones are listed.
_MOST_MISSING_FOLDERS = 10_000


class TextList:
    """The lines of a text file that lists images.

    An iteration yields (number, line): the lines that aren't empty, as bytes without their ends,
    with their numbers in the file, from 1.

    Args:
        file: the list's path; what its lines name is relative to its folder.
        opened: the same, opened to read bytes.
        bytes_per_line: that a line takes besides BYTES_PER_LINE.

    Attributes:
        allowance: the memory that reading the list may still take.

    Raises:
        Unreadable: there are so many lines that their memory would be out of proportion.
    """

    def __init__(self, file: Path, opened: Any, bytes_per_line: int = 0) -> None:
        self.file = file
        self.allowance = line_allowance(opened, bytes_per_line)
        self._opened = opened
        self._folders = array("q")

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return numbered_lines(self._opened)

    def add_path(self, number: int, path: bytes) -> bytes:
        """Returns the path of the next image, and remembers its folder for ``check_files``.

        Raises:
            InputError: no file can have this path.
        """
        if b"\0" in path:
            raise InputError(self.problem(number, "its path contains a NUL character"))
        self._folders.append(hash(path[: path.rfind(b"/") + 1]))
        return path

    def check_files(self, paths: Paths, root: Path | None = None) -> None:
        """Raises InputError where files are missing: how many, and which is the first.

        Args:
            paths: all that ``add_path`` returned, in their order.
            root: the folder that they are relative to; None: the list's.
        """
        root = self.file.parent if root is None else root
        missing = missing_files(root, paths, self._folders, self.allowance)
        if missing:
            raise InputError(f"{self.file}: {missing}")

    def problem(self, number: int, text: str) -> str:
        """Returns an error's message about a line."""
        return f"{self.file}, line {number}: {text}"

    def unexpected(self, number: int, expected: str, line: bytes) -> str:
        """Returns an error's message about a line of another form, which it quotes."""
        quoted = printable(os.fsdecode(line[:200]))
        return self.problem(number, f"expected {expected}; found '{quoted}'")

    def label_outside(self, number: int, label: bytes, limit: int) -> str:
        """Returns an error's message about a label that isn't below ``limit``."""
        return self.problem(
            number, f"label {printable(label.decode(), 30)} is outside 0..{limit - 1}"
        )


@contextlib.contextmanager
def open_list(
    file: Path, dataset: str, what: str = "a list", bytes_per_line: int = 0
) -> Iterator[TextList]:
    """Opens a dataset's list for a ``with`` statement, within which it is read.

    Args:
        dataset: its name, for messages.
        what: what the file is: "a list", "a table".
        bytes_per_line: as of ``TextList``.

    Raises:
        InputError: the file is missing. Whatever goes wrong while it is read becomes one, too.
    """
    needs = f"DATASET {dataset} needs it under -data_path"
    if not os.path.lexists(file):
        folders = "images" if dataset == "images_list" else "folder"
        raise InputError(_missing_list(file, needs, folders))
    with reading(file, what, f"; {needs}"), open_file(file) as opened:
        yield TextList(file, opened, bytes_per_line)


def _missing_list(file: Path, needs: str, folders: str) -> str:
    """Returns the error's message about a list that isn't there.

    Args:
        folders: the dataset that reads the same images in folders.
    """
    advice = ""
    if (file.parent / "train").is_dir():
        advice = f"; for folders of images pass -dataset={folders}"
    elif file.name.startswith("val"):
        advice = "; without one, DATA.VAL_SPLIT splits the training images"
    contents = describe_folder(file.parent)
    return f"{file}: there is no such file; {needs}, which holds {contents}{advice}"


def numbered_lines(opened: Any) -> Iterator[tuple[int, bytes]]:
    """Yields (number, line without its end) for the lines of a file of bytes that aren't empty."""
    for number, line in enumerate(text_lines(opened), 1):
        if line := line.rstrip(b"\r\n"):
            yield number, line


def csv_fields(line: str) -> list[str]:
    """Returns the fields of one line of a CSV table, quoted or not.

    An empty line has one empty field.
    """
    return next(csv.reader([line], strict=True), [""]) or [""]


def line_allowance(opened: Any, more: int = 0) -> Allowance:
    """Returns the rest of a list's memory allowance after its lines.

    Args:
        opened: a file of bytes, at its beginning.
        more: bytes that each line takes besides BYTES_PER_LINE.

    Raises:
        Unreadable: there are so many lines that their memory would be out of proportion.
    """
    allowance = Allowance(os.fstat(opened.fileno()).st_size)
    # Each byte is read once, so the time is in proportion without a clock.
    allowance.until = math.inf
    allowance.take(allowance.size + (BYTES_PER_LINE + more) * count_lines(opened))
    return allowance


def missing_files(root: Path, paths: Paths, folders: array, allowance: Allowance) -> str:
    """Returns how many files are missing, the first of them and a probable reason; "" if none is.

    Each folder is listed once, in place of one stat for each file. This takes a second for ImageNet
    on a local disk. Over a network it takes far less than the stats do.

    Args:
        root: the folder that ``paths`` are relative to.
        folders: the hash of each path's folder, [n].
        allowance: of the list.

    Raises:
        Unreadable: the folders are so many that they are out of proportion.
    """
    hashes = np.frombuffer(folders, np.int64)
    # A run is a row of images of one folder. Runs of the same folder are grouped.
    begins = _changes(hashes)
    allowance.take(_BYTES_PER_RUN * len(begins))
    order = np.argsort(hashes[begins], kind="stable")
    groups = _changes(hashes[begins[order]])
    allowance.take(_BYTES_PER_RUN * len(groups))
    missing = 0
    missing_folders = 0
    first = len(paths)
    # The folders come in the order of their first image in the list.
    for group in np.argsort(order[groups]):
        end = groups[group + 1] if group + 1 < len(groups) else None
        runs = order[groups[group] : end]
        path = paths.path_bytes(int(begins[runs[0]]))
        folder = path[: path.rfind(b"/") + 1]
        try:
            present = set(os.listdir(os.path.join(os.fsencode(root), folder)))
        except OSError:
            present = set()
            missing_folders += 1
        for place in _places(begins, len(paths), runs):
            if paths.path_bytes(place)[len(folder) :] not in present:
                missing += 1
                first = min(first, place)
        if missing_folders == _MOST_MISSING_FOLDERS:
            break
    if not missing:
        return ""
    at_least = "at least " if missing_folders == _MOST_MISSING_FOLDERS else ""
    reason = why_missing(root, paths.path_bytes(first))
    return (
        f"{at_least}{missing} of {len(paths)} files are missing,"
        f" the first is {root / paths[first]}{reason}"
    )


def _changes(values: np.ndarray) -> np.ndarray:
    """Returns the places at which ``values`` differ from the one before, from 0 on."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def _places(begins: np.ndarray, count: int, runs: np.ndarray) -> Iterator[int]:
    """Yields the places of the images in some of the runs.

    Only a block of them becomes Python's numbers at a time, which take nine times as much memory.

    Args:
        begins: the place of each run's first image.
        count: images in all.
        runs: numbers of runs.
    """
    for start in range(0, len(runs), _RUNS_AT_ONCE):
        block = runs[start : start + _RUNS_AT_ONCE]
        ends = begins[np.minimum(block + 1, len(begins) - 1)]
        # The last run has no next one, and ends with the list.
        ends[block == len(begins) - 1] = count
        # A shuffled list has runs of one image.
        if (ends == begins[block] + 1).all():
            yield from begins[block].tolist()
            continue
        for begin, end in zip(begins[block].tolist(), ends.tolist(), strict=True):
            yield from range(begin, end)
