"""The readers of archives: CIFAR's, MNIST's and Fashion-MNIST's.

Nothing in a file is run: CIFAR's pickles are read as data. Of what is compressed no more is
unpacked than a file of its size may take (``errors.Allowance``).
"""

import gzip
import io
import math
import os
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
# archive, folder in it, training members, validation members, key of the labels, member and key of
# the names
_CIFAR10 = (
    "cifar-10-python.tar.gz", "cifar-10-batches-py",
    [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"], "labels", "batches.meta", "label_names",
)  # fmt: skip
_CIFAR100 = (
    "cifar-100-python.tar.gz", "cifar-100-python", ["train"], ["test"], "fine_labels", "meta", "fine_label_names",
)  # fmt: skip
_LARGEST_MEMBER = 1 << 28  # bytes; CIFAR-100's training images are 155 million
_CHUNK = 1 << 20  # bytes that are unpacked at once


@datasets.register("cifar10", holds="`cifar-10-python.tar.gz`, or its unpacked folder")
def cifar10(split: Split, *, data_path: str) -> Arrays:
    """Reads CIFAR-10. Like the archives below, raises InputError for a file that is missing or
    something else.
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


def _cifar(dataset: str, layout: tuple, root: Path, mode: str) -> Arrays:
    archive, folder, train, val, label_key, meta, names_key = layout
    members = [*(train if mode == "train" else val), meta]
    unpacked = (root / folder).is_dir()

    def read() -> Decoded:
        found: dict[str, Any] = {}
        with reading(
            root / archive, f"{dataset}'s archive", f"; DATASET {dataset} needs it under -data_path"
        ):
            for name, data in _members(root, archive, folder, members):
                if name in found:
                    raise Unreadable(f"it holds {name} twice")
                content = DataUnpickler(io.BytesIO(data), len(data)).load()
                if name == meta:
                    found[name] = _all_of(str, content[names_key], names_key)
                else:
                    found[name] = (
                        content["data"].read(),
                        _all_of(int, content[label_key], label_key),
                    )
            if missing := [name for name in members if name not in found]:
                raise Unreadable(f"it lacks {folder}/{missing[0]}")
            names = found[meta]
            parts = [found.pop(name) for name in members[:-1]]
            labels = np.array([label for _, own in parts for label in own], np.int64)
            pixels = np.concatenate([own for own, _ in parts])
            del parts
            pixels = pixels.reshape(-1, 3, 32, 32)
            if pixels.dtype != np.uint8 or len(pixels) != len(labels):
                raise Unreadable(
                    f"it holds {len(pixels)} images of {pixels.dtype}, {len(labels)} labels"
                )
            return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels, names

    return Arrays(
        [root / folder / name for name in members] if unpacked else [root / archive], read
    )


def _members(
    root: Path, archive: str, folder: str, names: list[str]
) -> Iterator[tuple[str, bytes]]:
    if (root / folder).is_dir():
        yield from ((name, contents(root / folder / name, _LARGEST_MEMBER)) for name in names)
        return
    wanted = {f"{folder}/{name}": name for name in names}
    with open_file(root / archive) as packed, gzip.GzipFile(fileobj=packed) as unpacked:
        file: Any = TarBytes(unpacked, Allowance(os.fstat(packed.fileno()).st_size))
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.size < 0:
                    raise Unreadable("a header gives its member a negative size")
                if member.name not in wanted:
                    continue
                if not member.isreg() or member.issparse() or member.size > _LARGEST_MEMBER:
                    what = f"is no file, or has {member.size} bytes; {_LARGEST_MEMBER} are read"
                    raise Unreadable(f"its {wanted[member.name]} {what}")
                file.seek(member.offset_data)
                yield wanted[member.name], file.content(member.size)


# NumPy would unfold lists of lists, however many
def _all_of(kind: type, values: Any, key: str) -> list[Any]:
    if type(values) is not list or any(type(value) is not kind for value in values):
        raise Unreadable(f"its {key} are no list of {'names' if kind is str else 'whole numbers'}")
    return values


def _mnist(root: Path, mode: str, classes: list[str]) -> Arrays:
    prefix = "train" if mode == "train" else "t10k"
    names = [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]

    def read() -> Decoded:
        images, labels = _idx(root, names[0], 3), _idx(root, names[1], 1)
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
        held = 0
        Allowance(os.fstat(packed.fileno()).st_size).take(count)
        values = np.empty(count, np.uint8)
        # of more, gzip makes a copy
        while part := file.readinto(values[held : held + _CHUNK].data):
            held += part
        if held != count or file.read(1) or (count and 0 in shape[1:]):
            raise Unreadable(
                f"it is not an IDX file, or cut short: it claims the shape {list(shape)}"
            )
        return values.reshape(shape)
