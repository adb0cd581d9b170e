"""Samples in tar shards, in WebDataset's layout (github.com/webdataset/webdataset), read at random by an index.

A sample is two members of ``<mode>-*.tar`` that share their name up to its first dot: an image, and ``.cls``, its label
as an ASCII integer. The library streams shards, so that its epochs end where a rank's shards do; by the index
``<mode>.index.npz`` an order of samples is exact for every number of ranks, and goes on after a resume, as with files.
"""

import functools
import os
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from configs.registry import datasets
from errors import InputError, RunError
from loading.sources import IMAGE_SUFFIXES, Split
from utils import written_whole

Arrays = dict[str, Any]  # NumPy's

_FORMAT = 1  # of the index
_HEADER = 512  # bytes of tar's header, which stands before a member's own
_OPEN = 256  # shards that a process holds open; the usual limit is 1,024 files
_THREADS = 8  # that read headers: slower than one where nothing waits for the disk, faster where all do


class Shards:
    """Images by their place in tar files. Any number of threads and forked processes may read at once.

    Args:
        root: the shards' folder.
        index: for each image its member's name (``names`` [n]), the ``shard`` that it is in, its ``offsets`` and
            ``lengths`` there (bytes), the CRC-32 of its tar header (``headers``), ``labels``; the names of the
            ``shards`` [k] and their ``sizes`` (bytes); the names of the ``classes`` (none: they aren't known).
    """

    def __init__(self, root: Path, index: Arrays) -> None:
        self.files = [str(root / os.fsdecode(name)) for name in index["shards"]]
        self.names, self.shard, self.headers = index["names"], index["shard"], index["headers"]
        self.offsets, self.lengths = index["offsets"], index["lengths"]
        self.labels, self.classes = index["labels"], index["classes"].tolist()

    def name(self, index: int) -> str:
        """Returns the shard and the member of an image."""
        return f"{self.files[self.shard[index]]}: {os.fsdecode(self.names[index])}"

    def read(self, index: int) -> bytes:
        """Returns an image's file.

        Raises:
            RunError: the shard isn't what the index was made of.
            OSError: the shard can't be opened or read.
        """
        length = _HEADER + int(self.lengths[index])
        # Not seek and read: forked workers share a descriptor's position.
        shard = _opened(self.files[self.shard[index]])
        data = os.pread(shard.descriptor, length, int(self.offsets[index]) - _HEADER)
        if len(data) == length and zlib.crc32(data[:_HEADER]) == self.headers[index]:
            return data[_HEADER:]
        found = f"the shard ends {length - len(data)} bytes early" if len(data) < length else "another header is there"
        raise RunError(
            f"{self.name(index)}: not where the index says ({found}); restore the shard (sha256sum -c SHA256SUMS tells"
            " which is damaged)"
        )


class _Opened:
    """A descriptor that is closed when it is neither among the last used nor being read from."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@functools.lru_cache(_OPEN)
def _opened(file: str) -> _Opened:
    return _Opened(os.open(file, os.O_RDONLY))


@datasets.register(
    "shards", holds="`train-*.tar` and `val-*.tar` in WebDataset's layout (images and `.cls`), uncompressed"
)
def shards(split: Split, *, data_path: str) -> Shards:
    """Returns the shards ``<mode>-*.tar``, by their index; a missing one is made, which reads every tar header.

    Raises:
        InputError: there are none, an index that is damaged or of other shards, or, without an index, a shard that is.
    """
    _opened.cache_clear()  # a name may be another file's by now
    root, mode = Path(data_path), split.mode
    files, path = _shard_files(root, mode), root / f"{mode}.index.npz"
    if path.exists():
        index = _read_index(path)
        _check_files(path, index, files)
        return Shards(root, index)
    print(f"{path} is missing: reading the headers of {len(files)} shards; class names aren't known", flush=True)
    with ThreadPoolExecutor(_THREADS) as pool:
        index = make_index(files, list(pool.map(scan_shard, files)), [])
    if not len(index["labels"]):
        raise InputError(f"{files[0]}: no image and label in any of {len(files)} shards")
    try:
        write_index(path, index)
    except OSError as error:
        print(f"{path}: not kept ({error.strerror}); the next start reads the headers again", flush=True)
    return Shards(root, index)


def _shard_files(root: Path, mode: str) -> list[Path]:
    files = sorted(root.glob(f"{mode}-*.tar"))
    if not files:
        packed = sorted(root.glob(f"{mode}-*.tar.*"))
        found = f"; {packed[0].name} is compressed: unpack it, members are read at random" if packed else ""
        raise InputError(f"{root}: no {mode}-*.tar; DATASET shards needs them under -data_path{found}")
    return files


def _read_index(path: Path) -> Arrays:
    try:
        with np.load(path) as file:
            index = dict(file)  # the archive's own CRC of each array is checked
        if index.pop("format") != _FORMAT:
            raise ValueError("of another format")
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path}: not a whole index ({error}); restore it, or remove it: it is made anew") from None
    return index


def _check_files(path: Path, index: Arrays, files: list[Path]) -> None:
    indexed = dict(zip(map(os.fsdecode, index["shards"]), index["sizes"].tolist(), strict=True))
    found = {file.name: file.stat().st_size for file in files}
    for name in sorted(indexed.keys() | found.keys()):
        if indexed.get(name) != found.get(name):
            own, theirs = (f"has {sizes[name]} bytes" if name in sizes else "is absent" for sizes in (found, indexed))
            raise InputError(
                f"{path.parent / name} {own}, in {path.name} it {theirs}; restore it (sha256sum -c SHA256SUMS"
                f" tells what is damaged), or remove {path.name}: it is made anew of what is there"
            )


def scan_shard(file: Path) -> Arrays:
    """Returns the samples of a shard, ``names``, ``offsets``, ``lengths``, ``headers``, ``labels``, from tar headers.

    Raises:
        InputError: it can't be read, is compressed, damaged or cut short, or holds an image or a label alone.
    """
    images: dict[str, tuple] = {}
    labels: dict[str, int] = {}
    try:
        with open(file, "rb") as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            for member in tar:
                folder, base = os.path.split(member.name)
                stem, _, suffix = base.partition(".")
                key, start = os.path.join(folder, stem), member.offset_data
                if suffix.lower() == "cls":
                    labels[key] = int(os.pread(raw.fileno(), member.size, start))
                elif f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    if key in images:
                        raise ValueError(f"{key} has two images")
                    header = zlib.crc32(os.pread(raw.fileno(), _HEADER, start - _HEADER))
                    images[key] = (os.fsencode(member.name), start, member.size, header)
            # A header that is no header ends the iteration, as the blocks of zeros do that end a whole tar file.
            if os.pread(raw.fileno(), 2 * _HEADER, tar.offset) != bytes(2 * _HEADER):
                raise ValueError(f"damaged or cut short at byte {tar.offset}")
    except (OSError, ValueError, tarfile.TarError) as error:
        raise InputError(f"{file}: not readable as an uncompressed tar shard ({error}); restore it") from None
    alone = sorted(images.keys() ^ labels.keys())
    if alone:
        has, lacks = ("an image", ".cls, its label") if alone[0] in images else ("a label", "image")
        raise InputError(f"{file}: {alone[0]} has {has} but no {lacks}; {len(alone)} samples are like that")
    names, offsets, lengths, headers = zip(*images.values(), strict=True) if images else ((), (), (), ())
    return {
        "names": np.array(names, np.bytes_),
        "offsets": np.array(offsets, np.int64),
        "lengths": np.array(lengths, np.int64),
        "headers": np.array(headers, np.uint32),
        "labels": np.array([labels[key] for key in images], np.int64),
    }


def make_index(files: Sequence[Path], parts: Sequence[Arrays], classes: Sequence[str]) -> Arrays:
    """Returns the index of ``files``, of which ``parts`` are what ``scan_shard`` tells; the samples are in the order of
    their names, whichever shard holds them.
    """
    samples = {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}
    samples["shard"] = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part["names"]) for part in parts])
    order = np.argsort(samples["names"], kind="stable")
    return {field: values[order] for field, values in samples.items()} | {
        "shards": np.array([os.fsencode(file.name) for file in files]),
        "sizes": np.array([file.stat().st_size for file in files]),
        "classes": np.array(classes, np.str_),
    }


def write_index(path: Path, index: Arrays) -> None:
    """Writes an index, whole or not at all."""
    with written_whole(path, "wb") as file:
        np.savez(file, format=np.array(_FORMAT), **index)
