"""Reads samples from tar shards in any order, by an index.

The shards have WebDataset's layout (github.com/webdataset/webdataset). A sample is two members of
``<mode>-*.tar`` whose names are equal up to the first dot. One is the image. The other is ``.cls``,
its label as an ASCII integer, or ``.labels``, any number of labels with commas between. If no sample
has one of these, the images have no labels. Masks are further members, such as ``.mask.png`` of the
column "mask". Those of classes hold the class indices, whatever the packed files held. Columns of
numbers are in the index alone, as the names of classes are.

WebDataset itself streams shards, so that its epochs end where a rank's shards end. With the index
``<mode>.index.npz`` the order of samples is exact for every number of ranks, and a run resumes as it
does with files.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from errors import Allowance, InputError, RunError, Unreadable, open_file, printable, reading
from loading.class_names import UNPRINTABLE
from loading.files import TarBytes, npz, opened_descriptor
from loading.label_sets import LabelSets, take_labels
from loading.layout import IMAGE_SUFFIXES, is_leftover
from loading.mask_tables import index_table
from loading.sources import COLUMN_NAME, MOST_CLASSES, OWN_COLUMNS, Masks, Split
from settings.registry import datasets
from utils import writing_whole

# NumPy's arrays by name.
Arrays = dict[str, Any]

# Versions of the index, for images with one label, with sets of labels and without labels. With masks
# they are 10 more, with columns of numbers 20 more, and where masks are of classes 40 more.
_FORMAT = 1
_FORMAT_OF_SETS = 2
_FORMAT_WITHOUT_LABELS = 3
_WITH_MASKS = 10
_WITH_NUMBERS = 20
_WITH_CLASSES = 40
# Bytes of tar's header, which stands before a member's content.
_HEADER = 512
# Bytes of a .cls, and of a .labels.
_LONGEST_LABEL = 64
_LONGEST_LABELS = 1 << 16
_LABEL = re.compile(rb"(?:%b)?\s*(-?\d{1,18})\s*" % codecs.BOM_UTF8)
_LABELS = re.compile(rb"\s*((?:\d{1,18}(?:,\d{1,18})*)?)\s*")
_MASK = re.compile(rf"({COLUMN_NAME.pattern})\.png")
# The arrays of an index: NumPy's kind of dtype, and the number of dimensions.
_KINDS = {
    "format": ("i", 0), "classes": ("U", 1), "shards": ("S", 1), "sizes": ("i", 1),
    "names": ("S", 1), "headers": ("u", 1), "shard": ("i", 1), "offsets": ("i", 1),
    "lengths": ("i", 1), "labels": ("i", 1),
}  # fmt: skip
# Those of its masks, and where the members of each column are: "mask.offsets" and so on.
_KINDS_OF_MASKS = {"columns": ("U", 1), "ignored": ("i", 1), "dtypes": ("U", 1)}
# The number of classes of each column of masks; 0: any index may stand there.
_KINDS_OF_CLASSES = {"limits": ("i", 1)}
_PLACES = {"headers": ("u", 1), "offsets": ("i", 1), "lengths": ("i", 1)}
# The names of its columns of numbers. The column "boxes" is the array "numbers/boxes".
_KINDS_OF_NUMBERS = {"numbers": ("U", 1)}
# Threads that read headers. They are slower than one if nothing waits for the disk, and faster if
# all do.
_THREADS = 8


class Shards:
    """Images in tar files, read by an index.

    Any number of threads and forked processes may read at once.

    Args:
        root: the shards' folder.
        index: arrays by name.

            - For each of n images: ``names`` of its member, ``shard`` (its number), ``offsets`` and
              ``lengths`` in the shard (bytes), ``headers`` (the CRC-32 of its tar header), and
              ``labels``. If images have sets of labels, ``counts`` says how many each has. If they
              have no labels, ``labels`` is missing.
            - For each shard: its name in ``shards``, and ``sizes`` (bytes).
            - ``classes``: names, or none where they aren't known.
            - If there are masks, for each of their columns: its name in ``columns``, and what
              ``Masks`` says of it in ``ignored`` and ``dtypes``. ``mask.offsets``, ``mask.lengths``
              and ``mask.headers`` are where the members of the column "mask" are.
            - If masks are of a known number of classes: that of each column, or 0, in ``limits``.
            - If there are columns of numbers: their names in ``numbers``. ``numbers/boxes`` [n, ...]
              are those of the column "boxes".
    """

    def __init__(self, root: Path, index: Arrays) -> None:
        self.files = [str(root / os.fsdecode(name)) for name in index["shards"]]
        self.names = index["names"]
        self.shard = index["shard"]
        self.headers = index["headers"]
        self.offsets = index["offsets"]
        self.lengths = index["lengths"]
        self.labels = _labels(index)
        self.classes = index["classes"].tolist()
        # (ignored, dtype, table) of each column of masks, and where its members are.
        self.kinds_of_masks: dict[str, tuple] = {}
        if "columns" in index:
            ignored = index["ignored"].tolist()
            dtypes = index["dtypes"].tolist()
            # An index that was just made lacks them where no column is of classes.
            limits = index.get("limits", np.zeros(len(ignored), int)).tolist()
            tables = [
                index_table({index: index for index in (*range(limit), each)}) if limit else None
                for limit, each in zip(limits, ignored, strict=True)
            ]
            kinds = zip(ignored, dtypes, tables, strict=True)
            self.kinds_of_masks = dict(zip(index["columns"].tolist(), kinds, strict=True))
        self.places_of_masks = {
            f"{column}.{field}": index[f"{column}.{field}"]
            for column in self.kinds_of_masks
            for field in _PLACES
        }
        self.numbers = {
            column: index[f"numbers/{column}"]
            for column in index.get("numbers", np.array([])).tolist()
        }

    def at_places(self, places: np.ndarray) -> "Shards":
        """Returns the images at ``places`` [k]."""
        subset = copy.copy(self)
        for name in ("names", "shard", "headers", "offsets", "lengths"):
            setattr(subset, name, getattr(self, name)[places])
        subset.labels = take_labels(self.labels, places)
        subset.places_of_masks = {
            field: values[places] for field, values in self.places_of_masks.items()
        }
        subset.numbers = {column: values[places] for column, values in self.numbers.items()}
        return subset

    def columns(self) -> dict[str, Masks | np.ndarray]:
        """Returns the further columns by name. The paths of masks are the images' names."""
        names: Any = self.names
        masks = {name: Masks(names, *kind) for name, kind in self.kinds_of_masks.items()}
        return masks | self.numbers

    def where(self) -> bytes:
        """Returns bytes that differ for other images of the same files."""
        return self.shard.tobytes() + self.offsets.tobytes()

    def name(self, index: int, column: str | None = None) -> str:
        """Returns the shard and the member of an image, or of its mask in ``column``."""
        member = os.fsdecode(self.names[index])
        if column is not None:
            folder, base = os.path.split(member)
            member = os.path.join(folder, f"{base.partition('.')[0]}.{column}.png")
        name = f"{self.files[self.shard[index]]}: {member}"
        return name if name.isprintable() else printable(name, len(name))

    def read(self, index: int, most: int, column: str | None = None) -> bytes:
        """Returns the bytes of an image's file.

        Args:
            most: bytes that it may have.
            column: that of a mask, which is returned in place of the image.

        Raises:
            RunError: the shard isn't the one that the index was made from.
            Unreadable: the file has more bytes.
            OSError: the shard can't be opened or read.
        """
        if column is None:
            headers = self.headers
            offsets = self.offsets
            lengths = self.lengths
        else:
            headers = self.places_of_masks[f"{column}.headers"]
            offsets = self.places_of_masks[f"{column}.offsets"]
            lengths = self.places_of_masks[f"{column}.lengths"]
        length = _HEADER + int(lengths[index])
        if length > _HEADER + most:
            raise Unreadable(f"it has {length - _HEADER} bytes, at most {most} are allowed")
        # pread, and not seek and read, because forked workers share a descriptor's position.
        shard = opened_descriptor(self.files[self.shard[index]])
        data = os.pread(shard.descriptor, length, int(offsets[index]) - _HEADER)
        if len(data) == length and zlib.crc32(data[:_HEADER]) == headers[index]:
            return data[_HEADER:]
        problem = "found another header"
        if len(data) < length:
            problem = f"the shard ends {length - len(data)} bytes early"
        raise RunError(
            f"{self.name(index, column)}: not where the index says ({problem});"
            " restore the shard (sha256sum -c SHA256SUMS shows which one is damaged)"
        )


def _labels(index: Arrays) -> np.ndarray | LabelSets | None:
    """Returns the label of each image, or with ``counts`` its set of labels; None without labels."""
    if "counts" not in index:
        return index.get("labels")
    return LabelSets(index["labels"], np.concatenate([[0], np.cumsum(index["counts"])]))


@datasets.register(
    "shards",
    holds="`train-*.tar` and `val-*.tar` in WebDataset's layout (images, and `.cls` or `.labels` if they have labels),"
    " uncompressed",
    task="any",
    columns="labels *",
    val="val-*.tar",
)
def shards(split: Split, *, data_path: str) -> Shards:
    """Returns the images in ``<mode>-*.tar`` by their index.

    If the index is missing, it is made, for which every tar header is read.

    Raises:
        InputError: there are no shards, the index is damaged or was made from other shards, or,
            without an index, a shard is damaged.
    """
    # A name may be that of another file by now.
    opened_descriptor.cache_clear()
    root = Path(data_path)
    mode = split.mode
    files = _shard_files(root, mode)
    path = root / f"{mode}.index.npz"
    if path.exists():
        with reading(path, "an index", "; restore it, or remove it so that it is recreated"):
            index = _read_index(path)
            _check_files(path, index, files)
            return Shards(root, index)
    print(
        f"{path} is missing: reading the headers of {len(files)} shards; class names aren't known",
        flush=True,
    )
    with ThreadPoolExecutor(_THREADS) as pool:
        scanned = list(pool.map(functools.partial(scan_shard, skip=split.skip), files))
    index = make_index(files, scanned, classes=[])
    if not len(index["names"]):
        raise InputError(f"{files[0]}: no image in any of {len(files)} shards")
    try:
        write_index(path, index)
    except OSError as error:
        print(
            f"{path}: can't be written ({error.strerror}); the next start reads the headers again",
            flush=True,
        )
    return Shards(root, index)


def _shard_files(root: Path, mode: str) -> list[Path]:
    files = sorted(root.glob(f"{mode}-*.tar"))
    if not files:
        problem = f"{root}: no {mode}-*.tar; DATASET shards needs them under -data_path"
        if mode == "val" and any(root.glob("train-*.tar")):
            problem += "; without them, DATA.VAL_SPLIT splits the training images"
        if compressed := sorted(root.glob(f"{mode}-*.tar.*")):
            problem += f"; {compressed[0].name} is compressed: unpack it, because members are read in random order"
        raise InputError(problem)
    return files


def _read_index(path: Path) -> Arrays:
    """Returns the arrays of an index; raises Unreadable where they can't be right."""
    version = int(npz(path, {"format": _KINDS["format"]})["format"])
    limits: Arrays = {}
    if version > _WITH_CLASSES:
        version -= _WITH_CLASSES
        limits = npz(path, _KINDS_OF_CLASSES)
    numbers: Arrays = {}
    if version > _WITH_NUMBERS:
        version -= _WITH_NUMBERS
        numbers = npz(path, _KINDS_OF_NUMBERS)
    masks: Arrays = {}
    if version > _WITH_MASKS:
        version -= _WITH_MASKS
        masks = _masks_in(path, limits)
    _check_names([*masks.get("columns", ()), *numbers.get("numbers", ())])
    places_of_masks = {
        f"{column}.{field}": kind
        for column in masks.get("columns", ())
        for field, kind in _PLACES.items()
    }
    # Numbers of any kind and shape.
    arrays_of_numbers = {
        f"numbers/{column}": ("biuf", None) for column in numbers.get("numbers", ())
    }
    kinds: dict[str, Any] = _KINDS | places_of_masks | arrays_of_numbers
    by_image = ["names", "shard", "headers", "offsets", "lengths"]
    by_image += [*places_of_masks, *arrays_of_numbers]
    if version == _FORMAT:
        by_image.append("labels")
    elif version == _FORMAT_OF_SETS:
        by_image.append("counts")
        kinds["counts"] = ("i", 1)
    elif version == _FORMAT_WITHOUT_LABELS:
        del kinds["labels"]
    else:
        raise Unreadable("it has another format")
    index = npz(path, kinds) | masks | numbers
    del index["format"]
    counts_of_images = {len(index[name]) for name in by_image}
    if len(counts_of_images) != 1 or len(index["shards"]) != len(index["sizes"]):
        raise Unreadable("its arrays differ in length")
    shard = index["shard"]
    if ((shard < 0) | (shard >= len(index["sizes"]))).any():
        raise Unreadable("it places an image in a shard that it doesn't list")
    sizes = index["sizes"][shard]
    for prefix in ("", *(f"{column}." for column in masks.get("columns", ()))):
        offsets = index[f"{prefix}offsets"]
        lengths = index[f"{prefix}lengths"]
        is_outside = (offsets < _HEADER) | (offsets > sizes - lengths)
        if (is_outside | (lengths < 0) | (lengths > sizes)).any():
            raise Unreadable("it places an image outside of its shard")
    labels = index.get("labels", np.zeros(0, int))
    if "counts" in index:
        counts = index["counts"]
        total = len(labels)
        if ((counts < 0) | (counts > total)).any() or counts.sum() != total:
            raise Unreadable("the number of its labels doesn't match its counts")
        if labels.min(initial=0) < 0:
            raise Unreadable("it contains a label below 0")
    if labels.max(initial=0) >= MOST_CLASSES:
        raise Unreadable(f"it contains the label {labels.max()}, expected 0..{MOST_CLASSES - 1}")
    if bad := [name for name in index["classes"].tolist() if UNPRINTABLE.search(name)]:
        raise Unreadable(f"the name of its class '{printable(bad[0])}' can't be printed")
    return index


def _masks_in(path: Path, limits: Arrays) -> Arrays:
    """Returns the arrays of an index that say which columns of masks there are.

    Args:
        limits: the array of this name, if the index has it.
    """
    masks = npz(path, _KINDS_OF_MASKS) | limits
    if len({len(each) for each in masks.values()}) > 1:
        raise Unreadable("its arrays of columns differ in length")
    masks.setdefault("limits", np.zeros(len(masks["columns"]), int))
    rows = zip(*(masks[name].tolist() for name in ("ignored", "dtypes", "limits")), strict=True)
    for ignored, dtype, limit in rows:
        most = {"uint8": 255, "int32": 65535}.get(dtype, -1)
        if not 0 <= ignored <= most:
            raise Unreadable(
                f"it contains masks of {printable(dtype)}, in which {ignored} is ignored"
            )
        if not 0 <= limit <= most:
            raise Unreadable(f"it contains masks of {dtype}, which are of {limit} classes")
    return masks


def _check_names(columns: Sequence[str]) -> None:
    """Raises Unreadable where columns have no such names, or two have the same."""
    if bad := [name for name in columns if not COLUMN_NAME.fullmatch(name)]:
        raise Unreadable(f"its column '{printable(bad[0])}' has no such name")
    if len(set(columns)) < len(columns):
        raise Unreadable("two of its columns have the same name")


def _check_files(path: Path, index: Arrays, files: list[Path]) -> None:
    """Raises InputError where the shards aren't those of the index, by name and size."""
    indexed = dict(zip(map(os.fsdecode, index["shards"]), index["sizes"].tolist(), strict=True))
    present = {file.name: file.stat().st_size for file in files}

    def state(sizes: dict[str, int], name: str) -> str:
        return f"has {sizes[name]} bytes" if name in sizes else "is absent"

    for name in sorted(indexed.keys() | present.keys()):
        if indexed.get(name) != present.get(name):
            raise InputError(
                f"{path.parent / name} {state(present, name)}, in {path.name} it"
                f" {state(indexed, name)}; restore it (sha256sum -c SHA256SUMS shows what is"
                f" damaged), or remove {path.name} so that it is recreated from the shards"
            )


def scan_shard(file: Path, skip: Callable[[list[str]], Any] = lambda _: None) -> Arrays:
    """Returns the samples of a shard, as the arrays of an index that are by image but for ``shard``.

    Of an image only the tar header is read.

    Args:
        skip: is called with the names of members that aren't data, which are left out.

    Raises:
        InputError: the shard can't be read, is compressed, damaged or cut short, or has a label
            without an image, or labels for some of its images alone.
    """
    images: dict[str, tuple] = {}
    labels: dict[str, array] = {}
    # The places of masks, by column and sample.
    masks: dict[str, dict[str, tuple]] = {}
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
            kind = suffix.lower()
            if kind in ("cls", "labels"):
                if key in labels:
                    raise Unreadable(f"{key} has two labels")
                if kinds - {kind}:
                    raise Unreadable("it contains .cls and .labels")
                kinds.add(kind)
                labels[key] = _labels_in(raw.fileno(), member, kind == "labels")
            elif f".{kind}" in IMAGE_SUFFIXES:
                # An array beside an image is something else than the image.
                if kind == "npy" and key in images:
                    continue
                if key in images and not images[key][0].lower().endswith(b".npy"):
                    raise Unreadable(f"{key} has two images")
                header = zlib.crc32(os.pread(raw.fileno(), _HEADER, start - _HEADER))
                images[key] = (os.fsencode(member.name), start, member.size, header)
            elif (match := _MASK.fullmatch(kind)) and match[1] not in OWN_COLUMNS:
                header = zlib.crc32(os.pread(raw.fileno(), _HEADER, start - _HEADER))
                masks.setdefault(match[1], {})[key] = (header, start, member.size)
        if labels and (alone := sorted(images.keys() ^ labels.keys())):
            what = "a label but no image"
            if alone[0] in images:
                what = "an image but no .cls, its label"
            raise Unreadable(f"{alone[0]} has {what} (samples like this: {len(alone)})")
        columns = zip(*images.values(), strict=True) if images else ((), (), (), ())
        names, offsets, lengths, headers = columns
        samples = {
            "names": np.array(names, np.bytes_),
            "offsets": np.array(offsets, np.int64),
            "lengths": np.array(lengths, np.int64),
            "headers": np.array(headers, np.uint32),
        }
        if labels:
            samples["labels"] = np.fromiter(
                itertools.chain.from_iterable(labels[key] for key in images), np.int64
            )
        if "labels" in kinds:
            samples["counts"] = np.array([len(labels[key]) for key in images], np.int64)
        return samples | _places_of_masks(masks, list(images))


def _places_of_masks(masks: dict[str, dict[str, tuple]], keys: list[str]) -> Arrays:
    """Returns where the masks of a shard's samples are, as in an index.

    A column that some samples lack is left out: its members may be something else.
    """
    arrays: Arrays = {}
    for column, places in masks.items():
        if keys and places.keys() >= set(keys):
            rows = np.array([places[key] for key in keys], np.int64)
            for field, values in zip(_PLACES, rows.T, strict=True):
                arrays[f"{column}.{field}"] = values.astype(
                    np.uint32 if field == "headers" else np.int64
                )
    return arrays


def _plain_members(raw: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yields the members of a tar file that are files.

    Raises:
        Unreadable: the tar file is truncated, or a member's content doesn't follow its header.
    """
    size = os.fstat(raw.fileno()).st_size
    bounded: Any = TarBytes(raw, Allowance(size))
    with tarfile.open(fileobj=bounded, mode="r:") as tar:
        kept: Any = tar
        for member in tar:
            # Otherwise tarfile keeps all members in memory.
            kept.members.clear()
            if not 0 <= member.size <= size - member.offset_data:
                raise Unreadable(f"damaged or truncated at byte {member.offset}")
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise Unreadable(
                    f"its {member.name} is a link, a device or a sparse file; pack plain files"
                )
            yield member
        # The iteration ends at the blocks of zeros that end a tar file, but also at a damaged
        # header.
        if os.pread(raw.fileno(), 2 * _HEADER, tar.offset) != bytes(2 * _HEADER):
            raise Unreadable(f"damaged or truncated at byte {tar.offset}")


def _labels_in(descriptor: int, member: tarfile.TarInfo, several: bool) -> array:
    """Returns the label in a .cls, or with ``several`` those in a .labels."""
    most = _LONGEST_LABELS if several else _LONGEST_LABEL
    form = _LABELS if several else _LABEL
    text = os.pread(descriptor, most, member.offset_data)[: member.size]
    match = form.fullmatch(text) if member.size <= most else None
    # A text of another form is refused as a label outside the range is.
    labels = [MOST_CLASSES]
    if match:
        labels = [int(word) for word in match[1].split(b",") if word]
    if max(labels, default=0) >= MOST_CLASSES or len(set(labels)) < len(labels):
        quoted = printable(text[:200].decode("latin-1"))
        wanted = "different numbers" if several else "a number"
        raise Unreadable(
            f"its {member.name} is '{quoted}', expected {wanted} from 0 to {MOST_CLASSES - 1}"
        )
    return array("i" if several else "q", labels)


def make_index(
    files: Sequence[Path],
    scanned: Sequence[Arrays],
    classes: Sequence[str],
    columns: Mapping[str, Masks | np.ndarray] = {},
) -> Arrays:
    """Returns the index of shards, with the samples in the order of their names.

    Args:
        files: the shards.
        scanned: what ``scan_shard`` returned for each.
        classes: names, or none where they aren't known.
        columns: what is known of further columns, by name. Numbers are in the order of the
            samples' names.
    """
    filled = [samples for samples in scanned if len(samples["names"])] or scanned[:1]
    if len(kinds := {_kind(samples) for samples in filled}) > 1:
        first, second, *_ = sorted(kinds)
        raise InputError(
            f"{files[0].parent}: some shards hold {first}, others {second}; pack them again"
        )
    # A column of masks that a shard lacks is left out.
    fields = [field for field in filled[0] if all(field in samples for samples in filled)]
    samples = {field: np.concatenate([some[field] for some in filled]) for field in fields}
    masks = [field.partition(".")[0] for field in fields if field.endswith(".headers")]
    described: Arrays = {}
    if masks:
        kinds: Any = [columns.get(column, Masks(())) for column in masks]
        described = {
            "columns": np.array(masks, np.str_),
            "ignored": np.array([kind.ignored for kind in kinds], np.int64),
            "dtypes": np.array([kind.dtype for kind in kinds], np.str_),
        }
        limits = np.array([kind.classes for kind in kinds], np.int64)
        if limits.any():
            described["limits"] = limits
    numbers = {name: column for name, column in columns.items() if not isinstance(column, Masks)}
    if numbers:
        described["numbers"] = np.array(list(numbers), np.str_)
    for name, column in numbers.items():
        described[f"numbers/{name}"] = np.ascontiguousarray(column)
    shard_numbers = np.arange(len(scanned), dtype=np.int32)
    samples["shard"] = np.repeat(shard_numbers, [len(some["names"]) for some in scanned])
    order = np.argsort(samples["names"], kind="stable")
    labels = _labels(samples)
    ordered = {field: values[order] for field, values in samples.items() if field != "labels"}
    if isinstance(labels, LabelSets):
        ordered["labels"] = labels.at_places(order).labels
    elif labels is not None:
        ordered["labels"] = labels[order]
    return (
        ordered
        | described
        | {
            "shards": np.array([os.fsencode(file.name) for file in files]),
            "sizes": np.array([file.stat().st_size for file in files]),
            "classes": np.array(classes, np.str_),
        }
    )


def _kind(samples: Arrays) -> str:
    """Describes the labels of a shard's images, in words."""
    if "counts" in samples:
        return ".labels"
    return ".cls" if "labels" in samples else "images without labels"


def write_index(path: Path, index: Arrays) -> None:
    """Writes an index, whole or not at all."""
    version = _FORMAT_WITHOUT_LABELS
    if "labels" in index:
        version = _FORMAT_OF_SETS if "counts" in index else _FORMAT
    if "columns" in index:
        version += _WITH_MASKS
    if "numbers" in index:
        version += _WITH_NUMBERS
    if "limits" in index:
        version += _WITH_CLASSES
    with writing_whole(path, "wb") as file:
        np.savez(file, format=np.array(version), **index)
