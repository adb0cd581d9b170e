"""The comparison of what all ranks of a run must have in common: settings, data and loaded weights.

Ranks that a launcher started read their own files. On another machine these may be stale,
incomplete or renamed, and nothing would fail: the ranks would train from different weights, or on
other labels. Images are compared by their names relative to the data's folder. Absolute paths and
times of change don't count: the data may lie in different places.
"""

import functools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from datasets import ArrayDataset, ImageDataset, ShardDataset
from errors import InputError, printable
from loading.cache import MappedImages
from loading.files import Paths
from loading.label_sets import LabelSets
from settings.options import Configuration, leaves
from training.versions import versions
from utils import all_gather, world_size

# Every setting has to be the same, also those that change no result: ranks that report, evaluate or
# save at other steps wait for each other in vain. But where data lie, and what loads them, may
# differ from machine to machine. So may the places of files with weights, which are compared when
# they are loaded, and what a machine does by itself.
_MAY_DIFFER = (
    "BASE",
    "SAVE",
    "OUTPUT",
    "TAG",
    "TRACKERS",
    "NGPUS",
    "TUNE_CPU",
    "DIST.TIMEOUT",
    "DIST.INIT_TIMEOUT",
    "DIST.MAX_RESTART",
    "DATA.DATA_PATH",
    "DATA.CACHE",
    "DATA.NUM_WORKERS",
    "DATA.PREFETCH",
    "MODEL.PRETRAINED",
    "MODEL.PRETRAINED_ADAPTER",
    "TRAIN.TEACHER_MODEL",
    "TRAIN.TEACHER_PATH",
)
# Settings that may follow from the data. They are compared after the data, whose difference says
# more.
_FROM_DATA = ("MODEL.NUM_CLASSES",)
# The number of blocks into which items are divided, again and again, to find the first that
# differs.
_BLOCKS = 256
_LONGEST_NAME = 80  # characters of an item's name in a message

Names = Paths | np.ndarray | None


class _Items(NamedTuple):
    """A sequence of things that ranks compare, such as a dataset's images.

    Attributes:
        what: their name in a message.
        count: how many there are.
        content: (first, last) -> the content of these items, to be hashed.
        shown: an item's number -> the item in a message.
    """

    what: str
    count: int
    content: Callable[[int, int], list[Any]]
    shown: Callable[[int], str]

    def digest(self, first: int, last: int) -> bytes:
        """Returns a hash of the items from ``first`` to before ``last``."""
        hashed = blake2b(digest_size=16)
        for part in self.content(first, last):
            hashed.update(part)
        return hashed.digest()


def check_same(
    config: Configuration, train: ImageDataset | None = None, val: ImageDataset | None = None
) -> None:
    """Raises InputError, on every rank, where ranks have different versions, configurations or
    data.

    Configurations may differ though the command is the same: a run's folder, which a machine may
    not see, decides, too.
    """
    if world_size() == 1:
        return
    _check_versions(
        all_gather({name: version for name, version in versions().items() if name != "python"})
    )
    own = {key: value for key, value in leaves(config) if key not in _MAY_DIFFER}
    items: list[_Items] = []
    if train:
        items += _items_of(train, "training")
    if val:
        items += _items_of(val, "validation")
    told = all_gather((own, [(each.count, each.digest(0, each.count)) for each in items]))
    settings = [theirs for theirs, _ in told]
    _check_settings(
        [{key: value for key, value in each.items() if key not in _FROM_DATA} for each in settings]
    )
    for place, each in enumerate(items):
        shares = [theirs[place] for _, theirs in told]
        if set(shares) != {shares[0]}:
            raise InputError(_difference(each, shares))
    _check_settings(settings)


def check_teacher(config: Configuration) -> None:
    """Raises InputError, on every rank, where the teacher has other settings on another rank."""
    own = {
        f"the teacher's {key}": value
        for key, value in leaves(config)
        if key.startswith(("MODEL.", "DATA.IMAGE")) and key not in _MAY_DIFFER
    }
    _check_settings(all_gather(own))


def check_loaded(key: str, file: object, checksums: Mapping[str, int | str]) -> None:
    """Raises InputError, on every rank, where ranks have loaded different values.

    Args:
        key: the configuration's key that names the file.
        file: what was loaded on this rank, for the message.
        checksums: of what was loaded, by name; {}: nothing was loaded.
    """
    digest = blake2b(repr(sorted(checksums.items())).encode(), digest_size=16).digest()
    told = all_gather((str(file), digest))
    digests = [theirs for _, theirs in told]
    if set(digests) == {digest}:
        return
    gathered = all_gather(checksums)
    other = next(place for place, theirs in enumerate(digests) if theirs != digests[0])
    ours = gathered[0]
    theirs = gathered[other]
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    raise InputError(
        f"{_others(digests)} loaded other values than rank 0 ({key}): {printable(names[0])} is the first of"
        f" {len(names)} that differ; rank {other} read {told[other][0]}, rank 0 read {told[0][0]};"
        " give every rank the same file"
    )


def _check_versions(told: list[dict[str, str]]) -> None:
    """Raises InputError where a rank has another Paddle, NumPy or toolkit.

    They compute otherwise, and one NumPy can't read what another one has pickled.
    """
    for place, theirs in enumerate(told):
        for name, version in told[0].items():
            if theirs[name] != version:
                raise InputError(
                    f"rank {place} has {name} {theirs[name]}, rank 0 has {version}; install the same on every machine"
                )


def _check_settings(told: list[dict[str, Any]]) -> None:
    ours = told[0]
    for place, theirs in enumerate(told):
        # Those that both have come first: another architecture has other keys of its own.
        for key in sorted(ours | theirs, key=lambda key: not (key in ours and key in theirs)):
            if ours.get(key) != theirs.get(key):
                raise InputError(
                    f"rank {place} has {key} {theirs.get(key)}, rank 0 has {ours.get(key)}; give every rank the same"
                    " flags, and weights and an -output that all machines see"
                )


def _others(told: Sequence[Any]) -> str:
    """Returns the ranks whose entry isn't that of rank 0, in words: "rank 1" or "ranks 2, 3"."""
    others = [str(place) for place, each in enumerate(told) if each != told[0]]
    return f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(others)}"


def _difference(items: _Items, told: Sequence[tuple[int, bytes]]) -> str:
    """Returns which ranks have other items than rank 0, and the first item that differs.

    It gathers from all ranks, so every rank has to call it.
    """
    counts = [count for count, _ in told]
    first = _first_difference(items, min(counts))
    shown = all_gather(items.shown(first) if first < items.count else "missing")
    differs = shown if set(shown) != {shown[0]} else told
    other = next(place for place, each in enumerate(differs) if each != differs[0])
    line = f"{items.what} differ between rank 0 and {_others(told)}: "
    if counts[other] != counts[0]:
        line += f"rank {other} has {counts[other]}, rank 0 has {counts[0]}; "
    if differs is shown:
        line += f"number {first} is {shown[other]} on rank {other}, {shown[0]} on rank 0"
    else:
        line += "names and labels are the same, pixels aren't"
    return f"{line}; give every rank the same data"


def _first_difference(items: _Items, count: int) -> int:
    """Returns the number of the first of ``count`` items that differs between ranks; ``count`` if
    none does.

    Each turn compares up to 256 blocks, and the next turn divides the first block that differs:
    three for ImageNet.
    """
    first, last = 0, count
    while first < last:
        size = -(-(last - first) // _BLOCKS)
        blocks = [(begin, min(begin + size, last)) for begin in range(first, last, size)]
        told = all_gather([items.digest(*block) for block in blocks])
        differing = [
            block
            for block, *digests in zip(blocks, *told, strict=True)
            if set(digests) != {digests[0]}
        ]
        if not differing:
            return count
        first, last = differing[0]
        if size == 1:
            break
    return first


def _items_of(dataset: ImageDataset, split: str) -> Iterator[_Items]:
    """Yields the sequences of a dataset that have to be the same on all ranks."""
    yield _listed(f"the {split} classes", dataset.classes)
    if dataset.compared is not None:
        yield _listed("the outputs of DATA.CLASSES", dataset.compared.tolist())
    names = dataset.relative_names()
    yield _Items(
        what=f"the {split} images",
        count=len(dataset),
        content=functools.partial(_content, dataset, names),
        shown=functools.partial(_shown, dataset, names),
    )


def _listed(what: str, values: list[Any]) -> _Items:
    def content(first: int, last: int) -> list[Any]:
        return [repr(values[first:last]).encode()]

    return _Items(what, len(values), content, lambda index: _quoted(str(values[index])))


def _content(dataset: ImageDataset, names: Names, first: int, last: int) -> list[Any]:
    """Returns the labels of images, and their names or, of images without names, their pixels: to
    be hashed.
    """
    labels = dataset.labels
    pixels = _pixels(dataset)
    parts: list[Any] = []
    if isinstance(labels, LabelSets):
        ends = labels.ends[first : last + 1]
        parts += [labels.labels[ends[0] : ends[-1]], np.diff(ends)]
    else:
        parts.append(labels[first:last])
    if isinstance(names, Paths):
        parts += names.block(first, last)
    elif names is not None:
        parts.append(b"\0".join(names[first:last].tolist()))
        if isinstance(dataset, ShardDataset):
            parts.append(dataset.shards.lengths[first:last])
    if isinstance(pixels, MappedImages):
        # An image that isn't of its CRC-32 is an error when it is read.
        parts.append(pixels.crcs[first:last])
    elif pixels is not None and names is None:
        parts.append(pixels[first:last])
    return [part if isinstance(part, bytes) else np.ascontiguousarray(part) for part in parts]


def _shown(dataset: ImageDataset, names: Names, index: int) -> str:
    labels = dataset.labels
    told = labels.of(index).tolist() if isinstance(labels, LabelSets) else labels[index]
    if names is not None:
        size = (
            f" and {dataset.shards.lengths[index]} bytes"
            if isinstance(dataset, ShardDataset)
            else ""
        )
        return f"{_quoted(os.fsdecode(names[index]))} of label {told}{size}"
    if (pixels := _pixels(dataset)) is not None:
        return f"of label {told} (CRC-32 of its pixels {zlib.crc32(np.ascontiguousarray(pixels[index]).data):08x})"
    return f"of label {told}"


def _pixels(dataset: ImageDataset) -> np.ndarray | MappedImages | None:
    return dataset.images if isinstance(dataset, ArrayDataset) else None


def _quoted(name: str) -> str:
    return f"'{printable(name, _LONGEST_NAME)}'"
