"""A cache of decoded images (DATA.CACHE).

Each image is decoded once, and the files of the cache are mapped into the memory of all processes.

``<name>-<hash>.npy`` has the pixels. ``<name>-<hash>.npz`` has each image's CRC-32, the labels and
the class names. The hash is of the sources' paths, sizes and times of modification, and of all else
that the pixels depend on. So other sources, or changed ones, get other files, and old files may be
removed at any time. A source that is replaced by a file of the same size and time of modification
has another inode or time of change. All sources are then read and compared with their checksum, so
a data set that was copied isn't decoded again.

A start reads no pixels if the file of pixels has the same inode, size and times as when it was last
checked. Otherwise all images are compared with their CRC-32. In addition, each image is compared as
it is read, because a failing disk changes the content without these.
"""

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from errors import InputError, RunError, Unreadable, open_file, reading
from loading.files import npz
from loading.label_sets import LabelSets
from loading.transforms.bands import UNITS
from utils import writing_whole

Labels = Sequence[int] | np.ndarray | LabelSets
# images of one shape, labels, class names
Decoded = tuple[Iterable[np.ndarray], Labels, Sequence[str]]


class MappedImages:
    """Images in a .npy file, [n, H, W] or [n, H, W, C], of a type in UNITS.

    To another process the file's name is sent, not the pixels.

    Args:
        crcs: the CRC-32 of each image's pixels, [n].
    """

    def __init__(self, file: Path, crcs: np.ndarray) -> None:
        # This raises an error if the file is a pipe, for which NumPy would wait.
        open_file(file).close()
        self.file = file
        self.pixels = np.lib.format.open_memmap(file, mode="r")
        self.crcs = crcs
        pixels = self.pixels
        if pixels.dtype not in UNITS or 0 in pixels.shape[1:] or pixels.ndim not in (3, 4):
            raise Unreadable(
                f"it contains {pixels.dtype} of the shape {list(pixels.shape)}, which aren't images"
            )

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns an image; raises RunError if it has changed since it was written."""
        if not self.is_whole(index):
            raise RunError(
                f"{self.file}: its image {index} has changed (check the disk);"
                " remove the file, so that the next start decodes the images again"
            )
        return self.pixels[index]

    def is_whole(self, index: int) -> bool:
        """Returns whether an image's pixels are those that were written."""
        return zlib.crc32(self.pixels[index].data) == self.crcs[index]

    def __reduce__(self) -> tuple:
        return MappedImages, (self.file, self.crcs)


class Sources:
    """The files that a cache is made from, as they are at the start.

    Args:
        files: returns their paths.
        settings: all else that the pixels depend on.

    Attributes:
        name: a hash of the paths, sizes and times of modification, and of ``settings``. It is part
            of the cache's name.
        state: a hash of the inodes and of the times of change, which no program can set. A copy of
            the files has another.

    Raises:
        InputError: a file can't be read.
    """

    def __init__(self, files: Callable[[], Iterable[str | Path]], *settings: str | bytes) -> None:
        self.files = files
        name = hashlib.sha256()
        state = hashlib.sha256()
        for file in files():
            with _readable(file):
                status = os.stat(file)
            entry = f"{os.path.abspath(file)}\0{status.st_size}\0{status.st_mtime_ns}\n"
            name.update(entry.encode(errors="surrogateescape"))
            state.update(b"%d %d\n" % (status.st_ino, status.st_ctime_ns))
        for setting in settings:
            name.update(setting.encode() if isinstance(setting, str) else setting)
        self.name = name.hexdigest()[:16]
        self.state = np.frombuffer(state.digest(), np.uint8)

    def checksum(self) -> np.ndarray:
        """Returns a checksum of the files' content, as uint8 [32]."""
        content = hashlib.sha256()
        for file in self.files():
            with _readable(file), open_file(file) as opened:
                while data := opened.read(1 << 20):
                    content.update(data)
        return np.frombuffer(content.digest(), np.uint8)


@contextlib.contextmanager
def _readable(file: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, Unreadable) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{file}: can't be read ({reason}); repair or remove it") from None


def cached_images(
    folder: Path, name: str, sources: Sources, decode: Callable[[], Decoded]
) -> tuple[MappedImages, np.ndarray, list[str]]:
    """Returns (images, labels [n], class names) from the cache.

    They are decoded and written first if they aren't in the cache, or are damaged, or were made
    from other sources. Several processes may do this at once: each writes whole files under names
    of its own, and renames them.

    Args:
        decode: returns the images, labels and class names.

    Raises:
        InputError: an image can't be read, the images have several shapes, or the folder can't be
            written.
    """
    pixels = folder / f"{name}.npy"
    rest = folder / f"{name}.npz"
    damage = "doesn't exist yet"
    if rest.exists():
        try:
            with reading(rest, "a cache"):
                return _read(pixels, rest, sources)
        except InputError as error:
            damage = f"can't be used ({error})"
    print(f"cache: {pixels} {damage}: decoding", flush=True)
    # The checksum is taken before the images are decoded. So if a source changes meanwhile, the
    # next start finds that.
    checksum = sources.checksum()
    images, labels, classes = decode()
    missing_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with writing_whole(pixels, "wb") as file:
            crcs = _write(file, images, len(labels))
        labels = np.asarray(labels, np.int64)
        _write_rest(rest, _state(pixels), sources.state, checksum, crcs, labels, classes)
        with reading(rest, "a cache"):
            return _read(pixels, rest, sources)
    except OSError as error:
        _remove(missing_folders)
        raise InputError(
            f"DATA.CACHE {folder}: can't be written ({error.strerror}); choose another folder, or None"
        ) from None
    except RunError as error:
        _remove(missing_folders)
        raise InputError(str(error)) from None


def _remove(folders: list[Path]) -> None:
    """Removes folders that were made for the cache and are empty."""
    for folder in folders:
        # Another process may have put something there.
        with contextlib.suppress(OSError):
            folder.rmdir()


def _read(pixels: Path, rest: Path, sources: Sources) -> tuple[MappedImages, np.ndarray, list[str]]:
    """Returns (images, labels [n], class names) from the files of a cache.

    Raises:
        Unreadable: they aren't those of ``sources``, or not what was written.
    """
    forms = {"state": ("i", 1), "sources": ("u", 1), "checksum": ("u", 1)}
    stored = npz(rest, forms | {"crcs": ("u", 1), "labels": ("i", 1), "classes": ("U", 1)})
    checksum = stored["checksum"]
    are_same = np.array_equal(sources.state, stored["sources"])
    if not are_same and not np.array_equal(sources.checksum(), checksum):
        raise Unreadable("its source files have changed")
    crcs = stored["crcs"]
    labels = stored["labels"]
    classes = stored["classes"].tolist()
    state = _state(pixels)
    images = MappedImages(pixels, crcs)
    count = len(images.pixels)
    unchanged = state == stored["state"].tolist()
    same_count = len(labels) == len(crcs) == count
    if not same_count or not (unchanged or all(map(images.is_whole, range(count)))):
        raise Unreadable("its content has changed")
    # The pixels or their sources were copied, for example, and have been compared above.
    if not (unchanged and are_same):
        # If the folder can't be written, the next start compares them again.
        with contextlib.suppress(OSError):
            _write_rest(rest, state, sources.state, checksum, crcs, labels, classes)
    return images, labels, classes


def _state(file: Path) -> list[int]:
    """Returns a file's inode, size, and times of modification and change.

    They change with its content. No program can set the last of them.
    """
    status = os.stat(file)
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _write_rest(
    rest: Path,
    state: list[int],
    sources: np.ndarray,
    checksum: np.ndarray,
    crcs: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
) -> None:
    """Writes all of a cache but its pixels."""
    with writing_whole(rest, "wb") as file:
        np.savez(
            file,
            state=np.array(state, np.int64),
            sources=sources,
            checksum=checksum,
            crcs=crcs,
            labels=labels,
            classes=np.array(classes, np.str_),
        )


def _write(file: IO[bytes], images: Iterable[np.ndarray], count: int) -> np.ndarray:
    """Writes a .npy file of ``count`` images, one by one, and returns the CRC-32 of each, [count]."""
    crcs = np.zeros(count, np.uint32)
    shape = None
    dtype = None
    for place, image in enumerate(images):
        if shape is None:
            shape = image.shape
            dtype = image.dtype
            header = {
                "descr": np.lib.format.dtype_to_descr(image.dtype),
                "fortran_order": False,
                "shape": (count, *shape),
            }
            np.lib.format.write_array_header_1_0(file, header)
        if image.dtype != dtype:
            raise InputError(
                f"DATA.CACHE needs images of one type, but found {image.dtype} after {dtype}; set it to None"
            )
        if image.shape != shape:
            raise InputError(
                f"DATA.CACHE needs images of one size, but found {_size(image.shape)} after {_size(shape)};"
                " make them of one size, or set it to None"
            )
        content = image.tobytes()
        crcs[place] = zlib.crc32(content)
        file.write(content)
    return crcs


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(str(side) for side in (shape[1], shape[0]))
