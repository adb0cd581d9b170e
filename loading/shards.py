"""Samples in tar shards, in WebDataset's layout (github.com/webdataset/webdataset), read at random by an index.

A sample is two members of ``<mode>-*.tar`` that share their name up to its first dot: an image, and ``.cls``, its label
as an ASCII integer. The library streams shards, so that its epochs end where a rank's shards do; by the index
``<mode>.index.npz`` an order of samples is exact for every number of ranks, and goes on after a resume, as with files.
"""

import copy
import functools
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from configs.registry import datasets
from errors import Allowance, InputError, RunError, Unreadable, opened, reading, shown
from loading.files import TarBytes, npz
from loading.sources import IMAGE_SUFFIXES, MOST_CLASSES, UNPRINTABLE, Split
from utils import written_whole

Arrays = dict[str, Any]  # NumPy's

_FORMAT = 1  # of the index
_HEADER = 512  # bytes of tar's header, which stands before a member's own
_OPEN = 256  # shards that a process holds open; the usual limit is 1,024 files
_LONGEST_LABEL = 64  # bytes of a .cls
_LABEL = re.compile(rb"(?:\xef\xbb\xbf)?\s*(-?\d{1,18})\s*")
_KINDS = {"format": ("i", 0), "classes": ("U", 1), "shards": ("S", 1), "sizes": ("i", 1), "names": ("S", 1)} | {
    "headers": ("u", 1), **dict.fromkeys(("shard", "offsets", "lengths", "labels"), ("i", 1))
}  # fmt: skip
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

    def chosen(self, places: np.ndarray) -> "Shards":
        """Returns these of the images."""
        part = copy.copy(self)
        for name in ("names", "shard", "headers", "offsets", "lengths", "labels"):
            setattr(part, name, getattr(self, name)[places])
        return part

    def name(self, index: int) -> str:
        """Returns the shard and the member of an image."""
        name = f"{self.files[self.shard[index]]}: {os.fsdecode(self.names[index])}"
        return name if name.isprintable() else shown(name, len(name))

    def read(self, index: int, most: int) -> bytes:
        """Returns an image's file, which may have ``most`` bytes.

        Raises:
            RunError: the shard isn't what the index was made of.
            Unreadable: there are more.
            OSError: the shard can't be opened or read.
        """
        length = _HEADER + int(self.lengths[index])
        if length > _HEADER + most:
            raise Unreadable(f"it has {length - _HEADER} bytes, up to {most} are read")
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
    return _Opened(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))  # a pipe would block


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
        with reading(path, "an index", "; restore it, or remove it: it is made anew"):
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
    index = npz(path, _KINDS)
    if index.pop("format") != _FORMAT:
        raise Unreadable("it is of another format")
    places = {len(index[name]) for name in ("names", "shard", "headers", "offsets", "lengths", "labels")}
    if len(places) != 1 or len(index["shards"]) != len(index["sizes"]):
        raise Unreadable("its arrays differ in length")
    shard, offsets, lengths = index["shard"], index["offsets"], index["lengths"]
    if ((shard < 0) | (shard >= len(index["sizes"]))).any():
        raise Unreadable("it places an image in a shard that it doesn't name")
    sizes = index["sizes"][shard]
    if ((offsets < _HEADER) | (lengths < 0) | (lengths > sizes) | (offsets > sizes - lengths)).any():
        raise Unreadable("it places an image outside of its shard")
    if index["labels"].max(initial=0) >= MOST_CLASSES:
        raise Unreadable(f"it holds the label {index['labels'].max()}, expected 0..{MOST_CLASSES - 1}")
    if bad := [name for name in index["classes"].tolist() if UNPRINTABLE.search(name)]:
        raise Unreadable(f"the name of its class '{shown(bad[0])}' can't be printed")
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
    with reading(file, "an uncompressed tar shard", "; restore it"), opened(file) as raw:
        for member in _plain_members(raw):
            folder, base = os.path.split(member.name)
            stem, _, suffix = base.partition(".")
            key, start = os.path.join(folder, stem), member.offset_data
            if suffix.lower() == "cls":
                if key in labels:
                    raise Unreadable(f"{key} has two labels")
                labels[key] = _label(raw.fileno(), member)
            elif f".{suffix.lower()}" in IMAGE_SUFFIXES:
                if key in images:
                    raise Unreadable(f"{key} has two images")
                header = zlib.crc32(os.pread(raw.fileno(), _HEADER, start - _HEADER))
                images[key] = (os.fsencode(member.name), start, member.size, header)
        alone = sorted(images.keys() ^ labels.keys())
        if alone:
            has, lacks = ("an image", ".cls, its label") if alone[0] in images else ("a label", "image")
            raise Unreadable(f"{alone[0]} has {has} but no {lacks}; {len(alone)} samples are like that")
        names, offsets, lengths, headers = zip(*images.values(), strict=True) if images else ((), (), (), ())
        return {
            "names": np.array(names, np.bytes_),
            "offsets": np.array(offsets, np.int64),
            "lengths": np.array(lengths, np.int64),
            "headers": np.array(headers, np.uint32),
            "labels": np.array([labels[key] for key in images], np.int64),
        }


def _plain_members(raw: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yields the files of a tar file; raises Unreadable for what isn't whole, or isn't where its header is."""
    size = os.fstat(raw.fileno()).st_size
    bounded: Any = TarBytes(raw, Allowance(size))
    with tarfile.open(fileobj=bounded, mode="r:") as tar:
        kept: Any = tar
        for member in tar:
            kept.members.clear()  # it would keep them all
            if not 0 <= member.size <= size - member.offset_data:
                raise Unreadable(f"damaged or cut short at byte {member.offset}")
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise Unreadable(f"its {member.name} is a link, a device or sparse; pack plain files")
            yield member
        # A header that is no header ends the iteration, as the blocks of zeros do that end a whole tar file.
        if os.pread(raw.fileno(), 2 * _HEADER, tar.offset) != bytes(2 * _HEADER):
            raise Unreadable(f"damaged or cut short at byte {tar.offset}")


def _label(descriptor: int, member: tarfile.TarInfo) -> int:
    text = os.pread(descriptor, _LONGEST_LABEL, member.offset_data)[: member.size]
    found = _LABEL.fullmatch(text)
    if not found or member.size > _LONGEST_LABEL or int(found[1]) >= MOST_CLASSES:
        wanted = f"expected a number from 0 to {MOST_CLASSES - 1}"
        raise Unreadable(f"its {member.name} is '{shown(text.decode('latin-1'))}', {wanted}")
    return int(found[1])


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
