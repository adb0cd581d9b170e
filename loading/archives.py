"""The readers of archives: CIFAR-10 and CIFAR-100, MNIST and Fashion-MNIST.

Nothing in a file is run: CIFAR's pickles are read as data. No more of a compressed file is unpacked
than a file of its size may take in memory (``errors.Allowance``).
"""

import gzip
import io
import math
import os
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import Allowance, InputError, Unreadable, open_file, reading
from loading.files import TarBytes, contents
from loading.sources import Arrays, Decoded, Split
from settings.registry import datasets
from weights.unpickle import DataUnpickler

FASHION = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]


class _CifarLayout(NamedTuple):
    """Where an archive of CIFAR has its images and labels.

    Attributes:
        archive: the file's name.
        folder: in the archive.
        train, val: names of the members that hold images.
        label_key: of the labels in a member.
        meta: the member that holds the class names.
        names_key: of the class names in it.
    """

    archive: str
    folder: str
    train: list[str]
    val: list[str]
    label_key: str
    meta: str
    names_key: str


_CIFAR10 = _CifarLayout(
    archive="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    train=[f"data_batch_{number}" for number in range(1, 6)],
    val=["test_batch"],
    label_key="labels",
    meta="batches.meta",
    names_key="label_names",
)
_CIFAR100 = _CifarLayout(
    archive="cifar-100-python.tar.gz",
    folder="cifar-100-python",
    train=["train"],
    val=["test"],
    label_key="fine_labels",
    meta="meta",
    names_key="fine_label_names",
)
# Bytes of a member; CIFAR-100's training images have 155 million.
_LARGEST_MEMBER = 1 << 28
# Bytes that are unpacked at a time.
_CHUNK = 1 << 20


@datasets.register("cifar10", holds="`cifar-10-python.tar.gz`, or its unpacked folder")
def cifar10(split: Split, *, data_path: str) -> Arrays:
    """Reads CIFAR-10.

    Raises:
        InputError: a file is missing or isn't what it should be; also of the readers below.
    """
    return _cifar("cifar10", _CIFAR10, Path(data_path), split.mode)


@datasets.register("cifar100", holds="`cifar-100-python.tar.gz`, or its unpacked folder")
def cifar100(split: Split, *, data_path: str) -> Arrays:
    """Reads CIFAR-100."""
    return _cifar("cifar100", _CIFAR100, Path(data_path), split.mode)


@datasets.register("mnist", holds="the four `*-ubyte` files, gzipped or not")
def mnist(split: Split, *, data_path: str) -> Arrays:
    """Reads MNIST."""
    return _mnist(Path(data_path), split.mode, [str(digit) for digit in range(10)])


@datasets.register("fashion_mnist", holds="the four `*-ubyte` files, gzipped or not")
def fashion_mnist(split: Split, *, data_path: str) -> Arrays:
    """Reads Fashion-MNIST."""
    return _mnist(Path(data_path), split.mode, FASHION)


def _cifar(dataset: str, layout: _CifarLayout, root: Path, mode: str) -> Arrays:
    archive = root / layout.archive
    folder = root / layout.folder
    image_members = layout.train if mode == "train" else layout.val
    members = [*image_members, layout.meta]

    def read() -> Decoded:
        contents_of: dict[str, Any] = {}
        with reading(
            archive, f"{dataset}'s archive", f"; DATASET {dataset} needs it under -data_path"
        ):
            for name, data in _members(root, layout, members):
                if name in contents_of:
                    raise Unreadable(f"it contains {name} twice")
                content = DataUnpickler(io.BytesIO(data), len(data)).load()
                if name == layout.meta:
                    contents_of[name] = _list_of(str, content[layout.names_key], layout.names_key)
                else:
                    labels = _list_of(int, content[layout.label_key], layout.label_key)
                    contents_of[name] = (content["data"].read(), labels)
            if missing := [name for name in members if name not in contents_of]:
                raise Unreadable(f"it lacks {layout.folder}/{missing[0]}")
            batches = [contents_of.pop(name) for name in image_members]
            labels = np.array([label for _, some in batches for label in some], np.int64)
            pixels = np.concatenate([some for some, _ in batches])
            # Frees the members before the pixels are copied once more.
            del batches
            pixels = pixels.reshape(-1, 3, 32, 32)
            if pixels.dtype != np.uint8 or len(pixels) != len(labels):
                raise Unreadable(
                    f"it contains {len(pixels)} images of {pixels.dtype} and {len(labels)} labels"
                )
            images = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
            return images, labels, contents_of[layout.meta]

    files = [folder / name for name in members] if folder.is_dir() else [archive]
    return Arrays(files, read)


def _members(root: Path, layout: _CifarLayout, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of members, from the unpacked folder if it exists."""
    folder = root / layout.folder
    if folder.is_dir():
        yield from ((name, contents(folder / name, _LARGEST_MEMBER)) for name in names)
        return
    wanted = {f"{layout.folder}/{name}": name for name in names}
    archive = root / layout.archive
    with open_file(archive) as packed, gzip.GzipFile(fileobj=packed) as unpacked:
        file: Any = TarBytes(unpacked, Allowance(os.fstat(packed.fileno()).st_size))
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.size < 0:
                    raise Unreadable("a header gives its member a negative size")
                if member.name not in wanted:
                    continue
                if not member.isreg() or member.issparse() or member.size > _LARGEST_MEMBER:
                    what = f"isn't a file, or has {member.size} bytes (at most {_LARGEST_MEMBER} are allowed)"
                    raise Unreadable(f"its {wanted[member.name]} {what}")
                file.seek(member.offset_data)
                yield wanted[member.name], file.content(member.size)


def _list_of(kind: type, values: Any, key: str) -> list[Any]:
    """Returns a list of names or of whole numbers; raises Unreadable where it is something else."""
    # Lists of lists would be unfolded by NumPy, however many there are.
    if type(values) is not list or any(type(value) is not kind for value in values):
        raise Unreadable(
            f"its {key} aren't a list of {'names' if kind is str else 'whole numbers'}"
        )
    return values


def _mnist(root: Path, mode: str, classes: list[str]) -> Arrays:
    prefix = "train" if mode == "train" else "t10k"
    names = [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]

    def read() -> Decoded:
        images = _idx(root, names[0], 3)
        labels = _idx(root, names[1], 1)
        if len(images) != len(labels):
            raise InputError(f"{root}: {len(images)} {mode} images, but {len(labels)} labels")
        return images, labels, classes

    return Arrays([_idx_file(root, name) for name in names], read)


def _idx_file(root: Path, name: str) -> Path:
    return root / name if (root / name).is_file() else root / f"{name}.gz"


def _idx(root: Path, name: str, dimensions: int) -> np.ndarray:
    """Reads an IDX file of unsigned bytes (LeCun's format), gzipped or not."""
    path = _idx_file(root, name)
    with (
        reading(path, "an IDX file", "; MNIST's files are needed under -data_path"),
        open_file(path) as packed,
    ):
        file = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
        head = file.read(4 + 4 * dimensions)
        if head[:4] != bytes([0, 0, 8, dimensions]) or len(head) != 4 + 4 * dimensions:
            raise Unreadable(f"it is not an IDX file of {dimensions}-dimensional bytes")
        shape = struct.unpack(f">{dimensions}I", head[4:])
        count = math.prod(shape)
        Allowance(os.fstat(packed.fileno()).st_size).take(count)
        values = np.empty(count, np.uint8)
        filled = 0
        # gzip makes a copy of what it reads, so a chunk is read at a time.
        while length := file.readinto(values[filled : filled + _CHUNK].data):
            filled += length
        if filled != count or file.read(1) or (count and 0 in shape[1:]):
            raise Unreadable(
                f"it is not an IDX file, or truncated: its header has the shape {list(shape)}"
            )
        return values.reshape(shape)
