"""Samples in tar shards, in WebDataset's layout (github.com/webdataset/webdataset), read at random
by an index.

A sample is two members of ``<mode>-*.tar`` that share their name up to its first dot. One is the
image. The other is ``.cls``, its label as an ASCII integer, or ``.labels``, any number of labels
with commas between. The library streams shards, so that its epochs end where a rank's shards end.
The index ``<mode>.index.npz`` makes an order of samples exact for every number of ranks. It also
lets a run resume as it does with files.
"""

import codecs
import copy
import functools
import itertools
import os
import re
import tarfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from errors import Allowance, InputError, RunError, Unreadable, open_file, printable, reading
from loading.class_names import UNPRINTABLE
from loading.files import TarBytes, npz
from loading.label_sets import LabelSets, take_labels
from loading.layout import IMAGE_SUFFIXES, is_leftover
from loading.sources import MOST_CLASSES, Split
from settings.registry import datasets
from utils import writing_whole

Arrays = dict[str, Any]  # NumPy's

# of the index
_FORMAT = 1
_FORMAT_OF_SETS = 2
_HEADER = 512  # bytes of tar's header, which stands before a member's own
_OPEN = 256  # shards that a process holds open; the usual limit is 1,024 files
_LONGEST_LABEL = 64  # bytes of a .cls
_LONGEST_LABELS = 1 << 16  # bytes of a .labels
_LABEL = re.compile(rb"(?:%b)?\s*(-?\d{1,18})\s*" % codecs.BOM_UTF8)
_LABELS = re.compile(rb"\s*((?:\d{1,18}(?:,\d{1,18})*)?)\s*")
_KINDS = {"format": ("i", 0), "classes": ("U", 1), "shards": ("S", 1), "sizes": ("i", 1), "names": ("S", 1)} | {
    "headers": ("u", 1), **dict.fromkeys(("shard", "offsets", "lengths", "labels"), ("i", 1))
}  # fmt: skip
# that read headers: slower than one where nothing waits for the disk, faster where all do
_THREADS = 8


class Shards:
    """Images by their place in tar files. Any number of threads and forked processes may read at
    once.

    Args:
        root: the shards' folder.
        index: arrays by name. For each image: its member's name (``names`` [n]), its ``shard``, its
            ``offsets`` and ``lengths`` there (bytes), the CRC-32 of its tar header (``headers``),
            its ``labels``, one or ``counts`` of them. For each shard: its name (``shards`` [k]) and
            its ``sizes`` (bytes). And the names of the ``classes`` (none: they aren't known).
    """

    def __init__(self, root: Path, index: Arrays) -> None:
        self.files = [str(root / os.fsdecode(name)) for name in index["shards"]]
        self.names = index["names"]
        self.shard = index["shard"]
        self.headers = index["headers"]
        self.offsets = index["offsets"]
        self.lengths = index["lengths"]
        self.labels, self.classes = _labels(index), index["classes"].tolist()

    def at_places(self, places: np.ndarray) -> "Shards":
        """Returns these of the images."""
        part = copy.copy(self)
        for name in ("names", "shard", "headers", "offsets", "lengths"):
            setattr(part, name, getattr(self, name)[places])
        part.labels = take_labels(self.labels, places)
        return part

    def where(self) -> bytes:
        """Returns what tells these images from others of the same files."""
        return self.shard.tobytes() + self.offsets.tobytes()

    def name(self, index: int) -> str:
        """Returns the shard and the member of an image."""
        name = f"{self.files[self.shard[index]]}: {os.fsdecode(self.names[index])}"
        return name if name.isprintable() else printable(name, len(name))

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
        shard = _open_shard(self.files[self.shard[index]])
        data = os.pread(shard.descriptor, length, int(self.offsets[index]) - _HEADER)
        if len(data) == length and zlib.crc32(data[:_HEADER]) == self.headers[index]:
            return data[_HEADER:]
        found = (
            f"the shard ends {length - len(data)} bytes early"
            if len(data) < length
            else "another header is there"
        )
        raise RunError(
            f"{self.name(index)}: not where the index says ({found}); restore the shard (sha256sum -c SHA256SUMS tells"
            " which is damaged)"
        )


def _labels(index: Arrays) -> np.ndarray | LabelSets:
    """The label of each image, or where there are ``counts`` so many."""
    if "counts" not in index:
        return index["labels"]
    return LabelSets(index["labels"], np.concatenate([[0], np.cumsum(index["counts"])]))


class _Opened:
    """A descriptor that is closed when it is neither among the last used nor being read from."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@functools.lru_cache(_OPEN)
def _open_shard(file: str) -> _Opened:
    return _Opened(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))  # a pipe would block


@datasets.register(
    "shards",
    holds="`train-*.tar` and `val-*.tar` in WebDataset's layout (images and `.cls`, or `.labels`), uncompressed",
    task="any",
    val="val-*.tar",
)
def shards(split: Split, *, data_path: str) -> Shards:
    """Returns the shards ``<mode>-*.tar``, by their index; a missing one is made, which reads every
    tar header.

    Raises:
        InputError: there are none, an index that is damaged or of other shards, or, without an
            index, a shard that is.
    """
    _open_shard.cache_clear()  # a name may be another file's by now
    root = Path(data_path)
    mode = split.mode
    files = _shard_files(root, mode)
    path = root / f"{mode}.index.npz"
    if path.exists():
        with reading(path, "an index", "; restore it, or remove it: it is made anew"):
            index = _read_index(path)
            _check_files(path, index, files)
            return Shards(root, index)
    print(
        f"{path} is missing: reading the headers of {len(files)} shards; class names aren't known",
        flush=True,
    )
    with ThreadPoolExecutor(_THREADS) as pool:
        index = make_index(
            files, list(pool.map(functools.partial(scan_shard, skip=split.skip), files)), []
        )
    if not len(index["labels"]):
        raise InputError(f"{files[0]}: no image and label in any of {len(files)} shards")
    try:
        write_index(path, index)
    except OSError as error:
        print(
            f"{path}: not kept ({error.strerror}); the next start reads the headers again",
            flush=True,
        )
    return Shards(root, index)


def _shard_files(root: Path, mode: str) -> list[Path]:
    files = sorted(root.glob(f"{mode}-*.tar"))
    if not files:
        packed = sorted(root.glob(f"{mode}-*.tar.*"))
        found = (
            f"; {packed[0].name} is compressed: unpack it, members are read at random"
            if packed
            else ""
        )
        raise InputError(
            f"{root}: no {mode}-*.tar; DATASET shards needs them under -data_path{found}"
        )
    return files


def _read_index(path: Path) -> Arrays:
    several = npz(path, {"format": _KINDS["format"]})["format"] == _FORMAT_OF_SETS
    index = npz(path, _KINDS | ({"counts": ("i", 1)} if several else {}))
    if index.pop("format") not in (_FORMAT, _FORMAT_OF_SETS):
        raise Unreadable("it is of another format")
    by_image = (
        "names",
        "shard",
        "headers",
        "offsets",
        "lengths",
        "counts" if several else "labels",
    )
    places = {len(index[name]) for name in by_image}
    if len(places) != 1 or len(index["shards"]) != len(index["sizes"]):
        raise Unreadable("its arrays differ in length")
    shard = index["shard"]
    offsets = index["offsets"]
    lengths = index["lengths"]
    if ((shard < 0) | (shard >= len(index["sizes"]))).any():
        raise Unreadable("it places an image in a shard that it doesn't name")
    sizes = index["sizes"][shard]
    if (
        (offsets < _HEADER) | (lengths < 0) | (lengths > sizes) | (offsets > sizes - lengths)
    ).any():
        raise Unreadable("it places an image outside of its shard")
    counts = index.get("counts", np.zeros(0, int))
    total = len(index["labels"])
    if several and (((counts < 0) | (counts > total)).any() or counts.sum() != total):
        raise Unreadable("its labels aren't as many as its counts")
    if several and index["labels"].min(initial=0) < 0:
        raise Unreadable("it holds a label below 0")
    if index["labels"].max(initial=0) >= MOST_CLASSES:
        raise Unreadable(
            f"it holds the label {index['labels'].max()}, expected 0..{MOST_CLASSES - 1}"
        )
    if bad := [name for name in index["classes"].tolist() if UNPRINTABLE.search(name)]:
        raise Unreadable(f"the name of its class '{printable(bad[0])}' can't be printed")
    return index


def _check_files(path: Path, index: Arrays, files: list[Path]) -> None:
    indexed = dict(zip(map(os.fsdecode, index["shards"]), index["sizes"].tolist(), strict=True))
    found = {file.name: file.stat().st_size for file in files}
    for name in sorted(indexed.keys() | found.keys()):
        if indexed.get(name) != found.get(name):
            own, theirs = (
                f"has {sizes[name]} bytes" if name in sizes else "is absent"
                for sizes in (found, indexed)
            )
            raise InputError(
                f"{path.parent / name} {own}, in {path.name} it {theirs}; restore it (sha256sum -c SHA256SUMS"
                f" tells what is damaged), or remove {path.name}: it is made anew of what is there"
            )


def scan_shard(file: Path, skip: Callable[[list[str]], Any] = lambda _: None) -> Arrays:
    """Returns the samples of a shard, ``names``, ``offsets``, ``lengths``, ``headers``, ``labels``
    (of ``.labels``, so many as ``counts`` says for each), from tar headers.

    Args:
        skip: takes the names of members that aren't data, which are left out.

    Raises:
        InputError: it can't be read, is compressed, damaged or cut short, or holds an image or a
            label alone.
    """
    images: dict[str, tuple] = {}
    labels: dict[str, array] = {}
    kinds: set[str] = set()
    with reading(file, "an uncompressed tar shard", "; restore it"), open_file(file) as raw:
        for member in _plain_members(raw):
            if any(map(is_leftover, member.name.split("/"))):
                skip([f"{file}: {member.name}"])
                continue
            folder, base = os.path.split(member.name)
            stem, _, suffix = base.partition(".")
            key = os.path.join(folder, stem)
            start = member.offset_data
            if (kind := suffix.lower()) in ("cls", "labels"):
                if key in labels or kinds - {kind}:
                    raise Unreadable(
                        f"{key} has two labels" if key in labels else "it holds .cls and .labels"
                    )
                kinds.add(kind)
                labels[key] = _labels_in(raw.fileno(), member, kind == "labels")
            elif f".{suffix.lower()}" in IMAGE_SUFFIXES:
                # an array beside an image is something else
                if suffix.lower() == "npy" and key in images:
                    continue
                if key in images and not images[key][0].lower().endswith(b".npy"):
                    raise Unreadable(f"{key} has two images")
                header = zlib.crc32(os.pread(raw.fileno(), _HEADER, start - _HEADER))
                images[key] = (os.fsencode(member.name), start, member.size, header)
        alone = sorted(images.keys() ^ labels.keys())
        if alone:
            has, lacks = (
                ("an image", ".cls, its label") if alone[0] in images else ("a label", "image")
            )
            raise Unreadable(
                f"{alone[0]} has {has} but no {lacks}; {len(alone)} samples are like that"
            )
        names, offsets, lengths, headers = (
            zip(*images.values(), strict=True) if images else ((), (), (), ())
        )
        return {
            "names": np.array(names, np.bytes_),
            "offsets": np.array(offsets, np.int64),
            "lengths": np.array(lengths, np.int64),
            "headers": np.array(headers, np.uint32),
            "labels": np.fromiter(
                itertools.chain.from_iterable(labels[key] for key in images), np.int64
            ),
            **(
                {"counts": np.array([len(labels[key]) for key in images], np.int64)}
                if "labels" in kinds
                else {}
            ),
        }


def _plain_members(raw: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yields the files of a tar file; raises Unreadable for what isn't whole, or isn't where its
    header is.
    """
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
                raise Unreadable(
                    f"its {member.name} is a link, a device or sparse; pack plain files"
                )
            yield member
        # A header that is no header ends the iteration, as the blocks of zeros do that end a whole
        # tar file.
        if os.pread(raw.fileno(), 2 * _HEADER, tar.offset) != bytes(2 * _HEADER):
            raise Unreadable(f"damaged or cut short at byte {tar.offset}")


def _labels_in(descriptor: int, member: tarfile.TarInfo, several: bool) -> array:
    """The label of a .cls, or those of a .labels."""
    most, form = (_LONGEST_LABELS, _LABELS) if several else (_LONGEST_LABEL, _LABEL)
    text = os.pread(descriptor, most, member.offset_data)[: member.size]
    found = form.fullmatch(text) if member.size <= most else None
    labels = list(map(int, filter(None, found[1].split(b",")))) if found else [MOST_CLASSES]
    if max(labels, default=0) >= MOST_CLASSES or len(set(labels)) < len(labels):
        wanted = f"expected {'different numbers' if several else 'a number'} from 0 to {MOST_CLASSES - 1}"
        raise Unreadable(
            f"its {member.name} is '{printable(text[:200].decode('latin-1'))}', {wanted}"
        )
    return array("i" if several else "q", labels)


def make_index(files: Sequence[Path], parts: Sequence[Arrays], classes: Sequence[str]) -> Arrays:
    """Returns the index of ``files``, of which ``parts`` are what ``scan_shard`` tells; the samples
    are in the order of their names, whichever shard holds them.
    """
    filled = [part for part in parts if len(part["names"])] or parts[:1]
    if len({"counts" in part for part in filled}) > 1:
        raise InputError(
            f"{files[0].parent}: some shards hold .cls, others .labels; pack them anew"
        )
    samples = {field: np.concatenate([part[field] for part in filled]) for field in filled[0]}
    samples["shard"] = np.repeat(
        np.arange(len(parts), dtype=np.int32), [len(part["names"]) for part in parts]
    )
    order = np.argsort(samples["names"], kind="stable")
    labels = _labels(samples)
    ordered = {field: values[order] for field, values in samples.items() if field != "labels"}
    ordered["labels"] = (
        labels.at_places(order).labels if isinstance(labels, LabelSets) else labels[order]
    )
    return ordered | {
        "shards": np.array([os.fsencode(file.name) for file in files]),
        "sizes": np.array([file.stat().st_size for file in files]),
        "classes": np.array(classes, np.str_),
    }


def write_index(path: Path, index: Arrays) -> None:
    """Writes an index, whole or not at all."""
    with writing_whole(path, "wb") as file:
        np.savez(file, format=np.array(_FORMAT_OF_SETS if "counts" in index else _FORMAT), **index)
