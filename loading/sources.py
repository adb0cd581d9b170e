"""The readers of datasets: lists of files, folders of classes, and the archives of CIFAR, MNIST and Fashion-MNIST.

Nothing is downloaded, and nothing in a file is run: CIFAR's pickles are read as data. What a reader gives is one of
``Files``, ``Arrays``, ``shards.Shards`` and ``Drawn``.
"""

import functools
import gzip
import importlib.util
import io
import os
import re
import struct
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from configs.registry import datasets
from configs.signatures import Size
from errors import InputError, Unreadable, shown
from weights.unpickle import DataUnpickler

Decoded = tuple[np.ndarray, np.ndarray, list[str]]  # images, labels, class names

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
FASHION = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
# archive, folder in it, training members, validation members, key of the labels, member and key of the names
_CIFAR10 = (
    "cifar-10-python.tar.gz", "cifar-10-batches-py",
    [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"], "labels", "batches.meta", "label_names",
)  # fmt: skip
_CIFAR100 = (
    "cifar-100-python.tar.gz", "cifar-100-python", ["train"], ["test"], "fine_labels", "meta", "fine_label_names",
)  # fmt: skip
_LARGEST_MEMBER = 1 << 28  # bytes; CIFAR-100's training images are 155 million


class Split(NamedTuple):
    """What is to be read.

    Args:
        mode: "train" or "val".
        num_classes: labels are below it; "auto": they may be any.
    """

    mode: str
    num_classes: int | Literal["auto"] = "auto"


class Files(NamedTuple):
    """Images in files: their ``paths`` below ``root``, labels, class names (empty: none are known)."""

    root: Path
    paths: Sequence[str]
    labels: Sequence[int]
    classes: Sequence[str]


class Arrays(NamedTuple):
    """Decoded images: ``read()`` gives images [n, H, W] or [n, H, W, 3] uint8, labels [n] and class names. A cache of
    them serves as long as ``files`` stay as they are.
    """

    files: Sequence[Path]
    read: Callable[[], Decoded]


class Drawn(NamedTuple):
    """``count`` random images."""

    count: int


@datasets.register(
    "imagenet2012", holds="`train_list.txt` and `val_list.txt`: on each line a path (it may hold spaces), then a label"
)
def imagenet2012(split: Split, *, data_path: str) -> Files:
    """Reads PaddleViT's ``<mode>_list.txt``.

    Raises:
        InputError: the list or files are missing, a line is wrong (which), a label is outside the range.
    """
    root, num_classes = Path(data_path), split.num_classes
    file = root / f"{split.mode}_list.txt"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: can't be read ({error}); DATASET imagenet2012 needs it under -data_path") from None
    paths, labels = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        path, _, label = line.strip().rpartition(" ")
        if not path.strip() or not re.fullmatch(r"-?\d+", label):
            raise InputError(f"{file}, line {number}: expected a path, then a label; found '{line.strip()}'")
        if int(label) < 0 or (num_classes != "auto" and int(label) >= num_classes):
            raise InputError(
                f"{file}, line {number}: label {label} is outside 0..{'' if num_classes == 'auto' else num_classes - 1}"
            )
        paths.append(path.strip())
        labels.append(int(label))
    if not paths:
        raise InputError(f"{file}: the list is empty")
    _check_files(root, paths, file)
    return Files(root, paths, labels, [])


def _check_files(root: Path, paths: list[str], file: Path) -> None:
    # One listing per folder, not one stat per file: a second for ImageNet on a local disk, far less on a network's.
    folders = defaultdict(list)
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders[folder].append(name)
    missing, first = 0, None
    for folder, names in folders.items():
        try:
            present = set(os.listdir(root / folder))
        except OSError:
            present = set()
        absent = [name for name in names if name not in present]
        missing += len(absent)
        first = first or (absent and root / folder / absent[0])
    if missing:
        raise InputError(f"{file}: {missing} of {len(paths)} files are missing, the first is {first}")


@datasets.register("folder", holds="`train/<class>/**` and `val/<class>/**`")
def folder(split: Split, *, data_path: str) -> Files:
    """Reads class names, sorted, and images at any depth; the training folder's classes count.

    Raises:
        InputError: no class folders, one without images, or one that the training folder lacks.
    """
    root, mode = Path(data_path), split.mode

    def classes_of(folder: Path) -> list[str]:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []

    own, known = classes_of(root / mode), classes_of(root / "train")
    if not own:
        raise InputError(
            f"{root / mode}: no class folders; DATASET folder needs {mode}/<class>/<image> under -data_path"
        )
    if known and set(own) - set(known):
        raise InputError(f"{root / mode}: classes that train/ lacks: {', '.join(sorted(set(own) - set(known))[:3])}")
    classes = known or own
    places = {name: place for place, name in enumerate(classes)}  # of ImageNet-22k there are 21,841
    paths, labels = [], []
    for name in own:
        for folder, subfolders, files in os.walk(root / mode / name):
            subfolders.sort()
            images = sorted(file for file in files if file.lower().endswith(IMAGE_SUFFIXES))
            paths += [os.path.relpath(os.path.join(folder, file), root) for file in images]
            labels += [places[name]] * len(images)
    empty = sorted(set(own) - {classes[label] for label in set(labels)})
    if empty:
        raise InputError(
            f"{root / mode / empty[0]}: holds no image ({len(empty)} such classes);"
            f" images end in {' '.join(IMAGE_SUFFIXES)}"
        )
    return Files(root, paths, labels, classes)


@datasets.register("cifar10", holds="`cifar-10-python.tar.gz`, or its unpacked folder")
def cifar10(split: Split, *, data_path: str) -> Arrays:
    """CIFAR-10; raises InputError, as the archives below, for a file that is missing or not what its name says."""
    return _cifar("cifar10", _CIFAR10, Path(data_path), split.mode)


@datasets.register("cifar100", holds="`cifar-100-python.tar.gz`, or its unpacked folder")
def cifar100(split: Split, *, data_path: str) -> Arrays:
    """CIFAR-100."""
    return _cifar("cifar100", _CIFAR100, Path(data_path), split.mode)


@datasets.register("mnist", holds="the four `*-ubyte` files, gzipped or not")
def mnist(split: Split, *, data_path: str) -> Arrays:
    """MNIST."""
    return _mnist(Path(data_path), split.mode, [str(digit) for digit in range(10)])


@datasets.register("fashion_mnist", holds="the four `*-ubyte` files, gzipped or not")
def fashion_mnist(split: Split, *, data_path: str) -> Arrays:
    """Fashion-MNIST."""
    return _mnist(Path(data_path), split.mode, FASHION)


@datasets.register("digits", holds="nothing: scikit-learn brings them along")
def digits(split: Split) -> Arrays:
    """scikit-learn's handwritten digits."""
    return Arrays([_digits_file()], functools.partial(_digits, split.mode))


@datasets.register(
    "synthetic", holds="nothing: fixed random images are made, `DATA.SYNTHETIC_SIZE` of them, for measuring"
)
def synthetic(split: Split, *, synthetic_size: Size = 1024) -> Drawn:
    """Fixed random images.

    Args:
        synthetic_size: how many.
    """
    return Drawn(synthetic_size)


def _digits_file() -> Path:
    # The file that sklearn.datasets.load_digits reads: importing scikit-learn takes most of a second, and leaves
    # semaphores in /dev/shm when the process is killed.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("DATASET digits needs scikit-learn; pip install scikit-learn")
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


def _digits(mode: str) -> Decoded:
    """scikit-learn's 1,797 digits of 8 x 8 pixels; the split is fixed and stratified: of each class, every fifth image
    in the file's order is for validation (364 in all), the others (1,433) for training.
    """
    with gzip.open(_digits_file()) as file:
        table = np.loadtxt(file, delimiter=",")
    images, labels = np.round(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8), table[:, -1].astype(int)
    place = np.zeros(len(labels), int)  # of each image among those of its class
    for label in range(10):
        place[labels == label] = np.arange((labels == label).sum())
    chosen = (place % 5 == 0) == (mode == "val")
    return images[chosen], labels[chosen], [str(digit) for digit in range(10)]


def _cifar(dataset: str, layout: tuple, root: Path, mode: str) -> Arrays:
    archive, folder, train, val, label_key, meta, names_key = layout
    members = [*(train if mode == "train" else val), meta]
    unpacked = (root / folder).is_dir()

    def read() -> Decoded:
        images, labels, names = [], [], []
        try:
            for name, data in _members(root, archive, folder, members):
                content = DataUnpickler(io.BytesIO(data), len(data)).load()
                if name == meta:
                    names = _all_of(str, content[names_key], names_key)
                else:
                    images.append(content["data"].read())
                    labels += _all_of(int, content[label_key], label_key)
            pixels, classes = np.concatenate(images).reshape(-1, 3, 32, 32), np.array(labels, np.int64)
            if pixels.dtype != np.uint8 or len(pixels) != len(classes):
                raise ValueError(f"{len(pixels)} images of {pixels.dtype}, {len(classes)} labels")
        except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
            raise InputError(
                f"{root / archive}: can't be read ({error}); DATASET {dataset} needs it under -data_path"
            ) from None
        except Unreadable as error:
            raise InputError(f"{root / archive}: {error}") from None
        except Exception as error:  # whatever a damaged or hostile file leads to
            what = f"{type(error).__name__}: {shown(str(error))}"
            raise InputError(f"{root / archive}: not {dataset}'s layout ({what})") from None
        return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), classes, names

    return Arrays([root / folder / name for name in members] if unpacked else [root / archive], read)


def _members(root: Path, archive: str, folder: str, names: list[str]) -> Iterator[tuple[str, bytes]]:
    if (root / folder).is_dir():
        yield from ((name, (root / folder / name).read_bytes()) for name in names)
        return
    with tarfile.open(root / archive) as tar:
        for name in names:
            member = tar.getmember(f"{folder}/{name}")
            if not member.isreg() or member.size > _LARGEST_MEMBER:
                raise Unreadable(f"its {name} is no file, or has {member.size} bytes; {_LARGEST_MEMBER} are read")
            file: Any = tar.extractfile(member)  # None only where it is no file
            yield name, file.read()


def _all_of(kind: type, values: Any, key: str) -> list[Any]:  # NumPy would unfold lists of lists, however many
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
    file = _idx_file(root, name)
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file}: can't be read ({error}); MNIST's files are needed under -data_path") from None
    start = 4 + 4 * dimensions
    shape = struct.unpack_from(f">{dimensions}I", data, 4) if len(data) >= start else ()
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) - start != np.prod(shape, dtype=np.int64):
        raise InputError(f"{file}: not an IDX file of {dimensions}-dimensional bytes, or cut short ({len(data)} bytes)")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
