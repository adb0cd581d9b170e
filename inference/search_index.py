"""An index of images in one file, to which images are added and from which they are removed.

FILE.index holds the images' features, their paths, and how the features were made. It is one file,
so a change is whole or absent: FILE.index is written again beside the old one, and replaces it. It
begins with a line of JSON. Then come four arrays: the features, where each path ends, a checksum of
each path, and the paths one after the other. ``inference.search`` searches it as it does the
features of tools/features.py.

The file is this toolkit's own format, not FAISS's. FAISS's reader is C++ for files that one trusts,
and an index may come from somebody else. ``inference.approximate`` gives the features to FAISS.
"""

import fnmatch
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import InputError, Unreadable, open_file, printable, reading
from inference.feature_store import FORM, LARGEST_ROW, FeatureExtractor, StoredFeatures
from inference.name_index import Names, checksum
from launch.files import writing_whole
from loading.files import Paths
from settings.plain import Form, Rule, check_form, is_whole, parsed_json

SUFFIX = ".index"
_KIND = "index of images, 1"
# The bytes of the first line, which is written last.
_HEAD = 1 << 16
# How the features were made, of the record of ``feature_store``.
_MADE = ("checkpoint", "sha256", "cfg", "options", "layer", "pool", "norm", "oriented")
_FORM: Form = {
    "kind": Rule(f"{_KIND!r}", lambda value: value == _KIND),
    "rows": Rule("a number of images from 1 on", lambda value: is_whole(value, 1)),
    "width": Rule("a number of features from 1 on", lambda value: is_whole(value, 1, 1 << 32)),
    "letters": Rule("a number of bytes", is_whole),
    **{name: FORM[name] for name in _MADE},
}

# Some images' features [B, D], and their absolute paths.
Block = tuple[np.ndarray, Sequence[str]]


class Added(NamedTuple):
    """The result of ``add_images``.

    Attributes:
        added: how many images were added.
        known: how many were in the index already, or given twice.
        errors: those of images that can't be read, and weren't added.
    """

    added: int
    known: int
    errors: list[str]


def open_index(file: Path) -> tuple[StoredFeatures, Names]:
    """Returns the features of an index, memory-mapped, and the images' paths.

    Raises:
        InputError: it can't be read, or isn't an index.
    """
    with reading(file, "an index of images"), open_file(file) as stream:
        line = stream.read(_HEAD)
        if not line.startswith(b'{"kind"') or not line.endswith(b"\n"):
            raise Unreadable("it isn't an index of tools/search.py -index")
        head = parsed_json(line)
        check_form(head, _FORM, tuple(_FORM))
        rows = head["rows"]
        width = head["width"]
        letters = head["letters"]
        ends = _aligned(_HEAD + 4 * rows * width)
        size = os.fstat(stream.fileno()).st_size
        if size != ends + 12 * rows + letters:
            raise Unreadable(
                f"it has {size} bytes, which doesn't match {rows} images of {width} features"
            )
        values = np.memmap(stream, "<f4", "r", _HEAD, (rows, width))
        names = Names(
            file=file,
            folder="/",
            ends=np.memmap(stream, "<u8", "r", ends, (rows,)),
            sums=np.memmap(stream, "<u4", "r", ends + 8 * rows, (rows,)),
            letters=np.memmap(stream, "u1", "r", ends + 12 * rows, (letters,)),
        )
    made = {name: head[name] for name in _MADE} | {"offset": _HEAD, "shape": [rows, width]}
    return StoredFeatures(file, values, made, file), names


def add_images(
    file: Path,
    images: Paths,
    features: Callable[[dict[str, Any] | None], FeatureExtractor],
    workers: int = 2,
    tell: Callable[[int], Any] = int,
) -> Added:
    """Adds the images that an index doesn't have yet. Without a file, it makes one.

    An image is known by its absolute path. If a file has changed since it was added, its features
    stay: remove it first. The index is copied, whatever is added, so add many images at once.

    Args:
        features: returns what computes the features, for the index's ``made``; None: a new one.
        tell: called with the number of images of each batch that is done.

    Raises:
        InputError: the weights are others than those of the index, the features are maps, or none
            of the images can be read.
    """
    check_suffix(file)
    stored = names = None
    if os.path.lexists(file):
        stored, names = open_index(file)
    new = _unknown(images, names)
    known = len(images) - len(new)
    if not new:
        return Added(0, known, [])
    extractor = features(None if stored is None else stored.made)
    if stored is not None and extractor.made["sha256"] != stored.made["sha256"]:
        raise InputError(
            f"{printable(str(extractor.weights))} doesn't have the weights of the features of"
            f" {file}"
            " (its SHA-256 differs); pass those weights by -checkpoint, or make another index"
        )
    errors: list[str] = []

    def blocks() -> Iterator[Block]:
        if stored is not None and names is not None:
            yield from _kept(stored, names, np.ones(len(stored.values), np.bool_))
        for rows in extractor.rows(Paths(new), workers):
            if rows.values.ndim != 2:
                raise InputError(
                    "-pool is map, but a search needs pooled features: use avg or token"
                )
            errors.extend(error for error in rows.errors if error)
            readable = [place for place, error in enumerate(rows.errors) if not error]
            yield rows.values[readable], [os.path.abspath(rows.names[place]) for place in readable]
            tell(len(rows.names))

    _write(file, extractor.made if stored is None else stored.made, blocks())
    return Added(len(new) - len(errors), known, errors)


def remove_images(file: Path, removed: Sequence[str]) -> int:
    """Removes images from an index, and returns how many.

    Args:
        removed: paths of images, of folders with all below them, or patterns of whole paths.

    Raises:
        InputError: one of them matches no image, or none would be left. Nothing is changed then.
    """
    stored, names = open_index(file)
    wanted = [os.path.abspath(path) for path in removed]
    is_kept = np.ones(len(stored.values), np.bool_)
    matched = [False] * len(wanted)
    for row in range(len(is_kept)):
        name = names.name(row)
        for place, path in enumerate(wanted):
            is_below = name.startswith(path.rstrip("/") + "/")
            if name == path or is_below or fnmatch.fnmatchcase(name, path):
                is_kept[row] = False
                matched[place] = True
    if not all(matched):
        path = printable(removed[matched.index(False)])
        raise InputError(f"{file} has no image {path}; -list prints its images")
    if not is_kept.any():
        raise InputError(f"{file} would have no image left; remove the file itself instead")
    _write(file, stored.made, _kept(stored, names, is_kept))
    return int((~is_kept).sum())


def check_suffix(file: Path) -> None:
    """Raises InputError unless a file's name is that of an index."""
    if file.suffix != SUFFIX:
        raise InputError(f"{file}: an index needs the ending {SUFFIX}")


def _unknown(images: Paths, names: Names | None) -> list[str]:
    """Returns the images that an index doesn't have, each once, in their order."""
    paths = dict.fromkeys(os.path.abspath(image) for image in images)
    if names is not None:
        # Most paths have another checksum than all of the index's.
        sums = np.array([checksum(path) for path in paths], np.uint32)
        is_possible = np.isin(sums, names.sums)
        for path, possible in zip(list(paths), is_possible.tolist(), strict=True):
            if possible and names.rows_of(path):
                del paths[path]
    return list(paths)


def _kept(stored: StoredFeatures, names: Names, is_kept: np.ndarray) -> Iterator[Block]:
    """Yields the rows of an index that are kept."""
    first = 0
    for values in stored.blocks():
        rows = np.flatnonzero(is_kept[first : first + len(values)])
        yield values[rows], [names.name(first + row) for row in rows.tolist()]
        first += len(values)


def _write(file: Path, made: dict[str, Any], blocks: Iterable[Block]) -> None:
    """Writes an index, whole or not at all."""
    ends = array("Q")
    sums = array("I")
    letters = bytearray()
    width = 0
    with writing_whole(file, "wb") as stream:
        stream.write(b" " * _HEAD)
        for values, paths in blocks:
            width = values.shape[1]
            stream.write(np.ascontiguousarray(values, "<f4").data)
            for path in paths:
                name = path.encode("utf-8", "surrogatepass")
                if len(name) > LARGEST_ROW:
                    raise InputError(f"{printable(path)}: its path has {len(name)} bytes")
                letters += name
                ends.append(len(letters))
                sums.append(checksum(path))
        if not ends:
            raise InputError("none of the images can be read, so there is nothing to index")
        stream.seek(_aligned(_HEAD + 4 * len(ends) * width))
        for values in (np.array(ends, "<u8"), np.array(sums, "<u4"), np.frombuffer(letters, "u1")):
            stream.write(values.data)
        head = {"kind": _KIND, "rows": len(ends), "width": width, "letters": len(letters)}
        line = json.dumps(head | {name: made[name] for name in _MADE}).encode()
        if len(line) >= _HEAD:
            raise InputError(
                f"-o and the paths take {len(line)} bytes; an index has space for {_HEAD}"
            )
        stream.seek(0)
        stream.write(line.ljust(_HEAD - 1) + b"\n")


def _aligned(size: int) -> int:
    """Returns the first multiple of 8 that isn't below a number of bytes."""
    return -(-size // 8) * 8
