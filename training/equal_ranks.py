"""Compares what all ranks of a run must have in common: settings, data and loaded weights.

Ranks that a launcher started read their own files. On another machine these may be stale,
incomplete or renamed, and nothing would fail: the ranks would train from different weights, or on
other labels. Images are compared by their names relative to the data's folder. Absolute paths and
times of modification don't count, because the data may lie in different places.
"""

import functools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from paddle import nn

from datasets import ArrayDataset, ImageDataset, ShardDataset
from errors import InputError, printable
from loading.cache import MappedImages
from loading.files import Paths
from loading.label_sets import UNKNOWN, LabelSets
from loading.shards import Shards
from settings.configuration import Configuration, leaves
from training.checkpoint.description import check_normalisation
from training.versions import versions
from utils import all_gather, world_size
from weights import LoadReport, load_weights
from weights.layout import Target

# Keys that may differ between ranks. All others have to be the same, even those that change no
# result: ranks that report, evaluate or save at other steps would wait for each other. The
# place of the data and what loads them may differ from machine to machine, and so may a machine's
# own affairs. The files of weights are compared when they are loaded.
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
    "METHOD.TOKENIZER",
    "METHOD.TOKENIZER_PATH",
    "METHOD.TEACHER",
    "METHOD.TEACHER_PATH",
    "METHOD.LARGE_TEACHER",
    "METHOD.LARGE_TEACHER_PATH",
    "METHOD.UNLABELLED",
)
# Settings that may follow from the data. They are compared after the data, because a difference of
# the data says more.
_FROM_DATA = ("MODEL.NUM_CLASSES",)
# The number of blocks into which items are divided again and again to find the first difference.
_BLOCKS = 256
# The most characters of an item's name in a message.
_LONGEST_NAME = 80

Names = Paths | np.ndarray | None


class _Items(NamedTuple):
    """A sequence that ranks compare, such as a dataset's images.

    Attributes:
        what: its name in a message.
        count: the number of items.
        content: (first, last) -> the content of these items, to be hashed.
        shown: an item's number -> the item in a message.
    """

    what: str
    count: int
    content: Callable[[int, int], list[Any]]
    shown: Callable[[int], str]

    def digest(self, first: int, last: int) -> bytes:
        """Returns a hash of the items from ``first`` to before ``last``."""
        digest = blake2b(digest_size=16)
        for data in self.content(first, last):
            digest.update(data)
        return digest.digest()


def check_same(
    config: Configuration, train: ImageDataset | None = None, val: ImageDataset | None = None
) -> None:
    """Raises InputError, on every rank, if ranks have different versions, settings or data.

    Settings may differ though the command is the same, because they also depend on a run's folder,
    which a machine may not see.
    """
    if world_size() == 1:
        return
    _check_versions(
        all_gather({name: version for name, version in versions().items() if name != "python"})
    )
    settings = {key: value for key, value in leaves(config) if key not in _MAY_DIFFER}
    sequences: list[_Items] = []
    if train:
        sequences += _items_of(train, "training")
    if val:
        sequences += _items_of(val, "validation")
    digests = [(items.count, items.digest(0, items.count)) for items in sequences]
    gathered = all_gather((settings, digests))
    settings_by_rank = [each for each, _ in gathered]
    before_data = [
        {key: value for key, value in each.items() if key not in _FROM_DATA}
        for each in settings_by_rank
    ]
    _check_settings(before_data)
    for place, items in enumerate(sequences):
        digest_by_rank = [each[place] for _, each in gathered]
        if set(digest_by_rank) != {digest_by_rank[0]}:
            raise InputError(_difference(items, digest_by_rank))
    _check_settings(settings_by_rank)


def check_images(dataset: ImageDataset, split: str) -> None:
    """Raises InputError, on every rank, if ranks have other images of a further dataset.

    Args:
        split: what the message calls them, as in "the unlabelled images".
    """
    if world_size() == 1:
        return
    for items in _items_of(dataset, split):
        digest_by_rank = all_gather((items.count, items.digest(0, items.count)))
        if set(digest_by_rank) != {digest_by_rank[0]}:
            raise InputError(_difference(items, digest_by_rank))


def check_teacher(config: Configuration, name: str = "teacher") -> None:
    """Raises InputError, on every rank, if the teacher has other settings on another rank.

    Args:
        name: what the message calls it.
    """
    settings = {
        f"the {name}'s {key}": value
        for key, value in leaves(config)
        if key.startswith(("MODEL.", "METHOD.", "DATA.IMAGE")) and key not in _MAY_DIFFER
    }
    _check_settings(all_gather(settings))


def check_network(network: nn.Layer) -> None:
    """Raises InputError, on every rank, if ranks have built other networks."""
    if world_size() == 1:
        return
    layout = {}
    for name, tensor in network.named_parameters():
        kind = "frozen" if tensor.stop_gradient else "trained"
        layout[f"the network's {name}"] = f"{kind}, {list(tensor.shape)}"
    _check_settings(all_gather(layout))


def check_loaded(key: str, file: object, checksums: Mapping[str, int | str]) -> None:
    """Raises InputError, on every rank, if ranks have loaded different values.

    Args:
        key: the configuration's key that names the file.
        file: what was loaded on this rank, for the message.
        checksums: by name, of the values that were loaded; {}: nothing was loaded.
    """
    digest = blake2b(repr(sorted(checksums.items())).encode(), digest_size=16).digest()
    gathered = all_gather((str(file), digest))
    digests = [each for _, each in gathered]
    if set(digests) == {digest}:
        return
    checksums_by_rank = all_gather(checksums)
    other = next(place for place, each in enumerate(digests) if each != digests[0])
    of_rank_0 = checksums_by_rank[0]
    of_other = checksums_by_rank[other]
    names = [name for name in of_rank_0 | of_other if of_rank_0.get(name) != of_other.get(name)]
    raise InputError(
        f"{_others(digests)} loaded different values than rank 0 ({key}): {printable(names[0])} is"
        f" the first of {len(names)} that differ; rank {other} read {gathered[other][0]},"
        f" rank 0 read {gathered[0][0]}; all ranks need the same file"
    )


def load_equal(
    network: Target, config: Configuration, name: str, key: str, path: str
) -> LoadReport:
    """Loads the weights of a network that the training reads and doesn't change.

    Every rank has to call it.

    Args:
        config: the network's own.
        name: what messages call the network.
        key: the key that names the weights.
        path: the weights.

    Raises:
        InputError: the weights can't be read or don't fit, or were trained on images that were
            normalised otherwise, or ranks have other settings or weights.
    """
    check_teacher(config, name)
    check_normalisation(config, key, path)
    allow = None
    if config.MODEL.NUM_CLASSES == 0:
        # The model has no classifier, so the file's is left out.
        allow = [f"{layer}.*" for layer in network.classifier_names()]
    try:
        report = load_weights(network, path, allow=allow, checksums=world_size() > 1)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    check_loaded(key, report.file, report.checksums)
    return report


def _check_versions(by_rank: list[dict[str, str]]) -> None:
    """Raises InputError if a rank has another Paddle, NumPy or toolkit, or other operators.

    They compute otherwise, and one NumPy can't read what another one has pickled.
    """
    for place, of_rank in enumerate(by_rank):
        for name, version in by_rank[0].items():
            if of_rank[name] != version:
                advice = "install the same on every machine"
                if name == "operators":
                    # They may have been compiled while the ranks started.
                    advice = "run make ops on every machine, then start again"
                raise InputError(
                    f"rank {place} has {name} {of_rank[name]}, rank 0 has {version}; {advice}"
                )


def _check_settings(by_rank: list[dict[str, Any]]) -> None:
    """Raises InputError if a rank has another value of a key than rank 0."""
    of_rank_0 = by_rank[0]
    for place, of_rank in enumerate(by_rank):
        # Keys that both have come first: another architecture has other keys of its own.
        keys = sorted(
            of_rank_0 | of_rank, key=lambda key: not (key in of_rank_0 and key in of_rank)
        )
        for key in keys:
            if of_rank_0.get(key) != of_rank.get(key):
                raise InputError(
                    f"rank {place} has {key} {of_rank.get(key)}, rank 0 has {of_rank_0.get(key)};"
                    " start every rank with the same flags, and with weights and an -output that"
                    " all"
                    " machines share"
                )


def _others(by_rank: Sequence[Any]) -> str:
    """Returns the ranks whose entry isn't that of rank 0, in words: "rank 1" or "ranks 2, 3"."""
    others = [str(place) for place, each in enumerate(by_rank) if each != by_rank[0]]
    return f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(others)}"


def _difference(items: _Items, by_rank: Sequence[tuple[int, bytes]]) -> str:
    """Returns a line that says which ranks have other items than rank 0, and the first of them.

    It gathers from all ranks, so every rank has to call it.

    Args:
        by_rank: (number of items, hash of all of them) of each rank.
    """
    counts = [count for count, _ in by_rank]
    first = _first_difference(items, min(counts))
    shown = all_gather(items.shown(first) if first < items.count else "missing")
    shown_differs = set(shown) != {shown[0]}
    entries = shown if shown_differs else by_rank
    other = next(place for place, each in enumerate(entries) if each != entries[0])
    line = f"{items.what} differ between rank 0 and {_others(by_rank)}: "
    if counts[other] != counts[0]:
        line += f"rank {other} has {counts[other]}, rank 0 has {counts[0]}; "
    if shown_differs:
        line += f"number {first} is {shown[other]} on rank {other}, {shown[0]} on rank 0"
    else:
        line += "names and labels are the same, but not the pixels"
    return f"{line}; all ranks need the same data"


def _first_difference(items: _Items, count: int) -> int:
    """Returns the number of the first item that differs between ranks; ``count`` if none does.

    Each turn compares up to 256 blocks, and the next one divides the first block that differs.
    ImageNet takes three turns.
    """
    first = 0
    last = count
    while first < last:
        size = -(-(last - first) // _BLOCKS)
        blocks = [(begin, min(begin + size, last)) for begin in range(first, last, size)]
        digests_by_rank = all_gather([items.digest(*block) for block in blocks])
        differing = [
            block
            for block, *digests in zip(blocks, *digests_by_rank, strict=True)
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
    """Returns the labels and the names of images, to be hashed.

    Of images without names it returns their pixels.
    """
    labels = dataset.labels
    pixels = _pixels(dataset)
    content: list[Any] = []
    if isinstance(labels, LabelSets):
        ends = labels.ends[first : last + 1]
        content += [labels.labels[ends[0] : ends[-1]], np.diff(ends)]
    else:
        content.append(labels[first:last])
    if isinstance(names, Paths):
        content += names.block(first, last)
    elif names is not None:
        content.append(b"\0".join(names[first:last].tolist()))
        if isinstance(dataset, ShardDataset):
            content.append(dataset.shards.lengths[first:last])
    if isinstance(pixels, MappedImages):
        # Their CRC-32 stand for them: an image of another one is an error when it is read.
        content.append(pixels.crcs[first:last])
    elif pixels is not None and names is None:
        content.append(pixels[first:last])
    content += _further_columns(dataset, first, last)
    return [each if isinstance(each, bytes) else np.ascontiguousarray(each) for each in content]


def _further_columns(dataset: ImageDataset, first: int, last: int) -> Iterator[Any]:
    """Yields what stands for the masks of images in a hash, and their numbers."""
    for column in dataset.needed_masks:
        paths = dataset.masks[column].paths
        if isinstance(dataset, ArrayDataset):
            yield dataset.cached_masks[column].crcs[first:last]
        elif isinstance(dataset, ShardDataset) and isinstance(dataset.shards, Shards):
            yield dataset.shards.places_of_masks[f"{column}.lengths"][first:last]
        elif isinstance(paths, Paths):
            yield from paths.block(first, last)
    for numbers in dataset.values.values():
        yield numbers[first:last]


def _shown(dataset: ImageDataset, names: Names, index: int) -> str:
    """Returns an image in a message: its name or a checksum of its pixels, and its label if it has
    one.
    """
    labels = dataset.labels
    label = labels.of(index).tolist() if isinstance(labels, LabelSets) else labels[index]
    has_label = isinstance(labels, LabelSets) or label != UNKNOWN
    if names is not None:
        shown = _quoted(os.fsdecode(names[index]))
        if has_label:
            shown += f" of label {label}"
        if isinstance(dataset, ShardDataset):
            before = "and" if has_label else "of"
            shown += f" {before} {dataset.shards.lengths[index]} bytes"
        return shown
    shown = f"of label {label}" if has_label else "an image"
    if (pixels := _pixels(dataset)) is not None:
        crc = zlib.crc32(np.ascontiguousarray(pixels[index]).data)
        shown += f" (CRC-32 of its pixels {crc:08x})"
    return shown


def _pixels(dataset: ImageDataset) -> np.ndarray | MappedImages | None:
    return dataset.images if isinstance(dataset, ArrayDataset) else None


def _quoted(name: str) -> str:
    return f"'{printable(name, _LONGEST_NAME)}'"
