"""Decoded images in a file that processes map into memory: decoded once, on the first run, and
shared by all.

``<name>-<hash>.npy`` holds the pixels, ``<name>-<hash>.npz`` each image's CRC-32, the labels and
the class names. The hash is of what they were made from. So other sources, or changed ones, get
other files. Old files may be removed at any time. A source that is replaced by a file of the same
size and time of modification has another inode or time of change. Then all sources are read and
compared with their checksum: a copied data set isn't decoded again.

A start reads no pixels while the file of pixels is as it was last checked: the same inode, size and
times of change. Otherwise all of them are compared with their CRC-32. What changes the content
without these, such as a decaying disk, is found as the image is read: each one is compared then,
too.
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
    """Images [n, H, W] or [n, H, W, C] of UNITS in a .npy file, which goes to other processes by
    its name.

    Args:
        crcs: the CRC-32 of each image's pixels, [n].
    """

    def __init__(self, file: Path, crcs: np.ndarray) -> None:
        open_file(file).close()  # NumPy would wait for a pipe
        self.file, self.pixels = file, np.lib.format.open_memmap(file, mode="r")
        self.crcs = crcs
        pixels = self.pixels
        if pixels.dtype not in UNITS or 0 in pixels.shape[1:] or pixels.ndim not in (3, 4):
            raise Unreadable(
                f"it holds {pixels.dtype} of the shape {list(pixels.shape)}, which are no images"
            )

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns an image; raises RunError where it isn't what was written."""
        if not self.is_whole(index):
            raise RunError(
                f"{self.file}: its image {index} isn't what was written (check the disk); remove the file, and the"
                " next start decodes the images again"
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
        parts: what else the pixels depend on.

    Attributes:
        name: a hash of the paths, sizes and times of modification, and of ``parts``: a part of the
            cache's name.
        state: a hash of the inodes and the times of change, which no program can set. Copies differ
            in them, too.

    Raises:
        InputError: a file can't be read.
    """

    def __init__(self, files: Callable[[], Iterable[str | Path]], *parts: str | bytes) -> None:
        self.files = files
        name = hashlib.sha256()
        state = hashlib.sha256()
        for file in files():
            with _readable(file):
                found = os.stat(file)
            place = f"{os.path.abspath(file)}\0{found.st_size}\0{found.st_mtime_ns}\n"
            name.update(place.encode(errors="surrogateescape"))
            state.update(b"%d %d\n" % (found.st_ino, found.st_ctime_ns))
        for part in parts:
            name.update(part.encode() if isinstance(part, str) else part)
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
    """Returns (images, labels [n], class names) from the cache. They are decoded and written if
    they aren't in it, are damaged, or were made from other sources.

    Several processes may do so at once: each writes all of it, under a name of its own, then
    renames.

    Raises:
        InputError: an image that can't be read; images of several shapes; a folder that can't be
            written.
    """
    pixels = folder / f"{name}.npy"
    rest = folder / f"{name}.npz"
    damage = "isn't there yet"
    if rest.exists():
        try:
            with reading(rest, "a cache"):
                return _read(pixels, rest, sources)
        except InputError as error:
            damage = f"can't be used ({error})"
    print(f"cache: {pixels} {damage}: decoding", flush=True)
    # Before they are decoded: a source that changes meanwhile is found by the next start.
    checksum = sources.checksum()
    images, labels, classes = decode()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with writing_whole(pixels, "wb") as file:
            crcs = _write(file, images, len(labels))
        _write_rest(
            rest,
            _state(pixels),
            sources.state,
            checksum,
            crcs,
            np.asarray(labels, np.int64),
            classes,
        )
        with reading(rest, "a cache"):
            return _read(pixels, rest, sources)
    except OSError as error:
        _remove(made)
        raise InputError(
            f"DATA.CACHE {folder}: can't be written ({error.strerror}); choose another folder, or None"
        ) from None
    except RunError as error:
        _remove(made)
        raise InputError(str(error)) from None


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # another process has put something there
            folder.rmdir()


def _read(pixels: Path, rest: Path, sources: Sources) -> tuple[MappedImages, np.ndarray, list[str]]:
    forms = {"state": ("i", 1), "sources": ("u", 1), "checksum": ("u", 1)}
    found = npz(rest, forms | {"crcs": ("u", 1), "labels": ("i", 1), "classes": ("U", 1)})
    checksum = found["checksum"]
    are_same = np.array_equal(sources.state, found["sources"])
    if not are_same and not np.array_equal(sources.checksum(), checksum):
        raise Unreadable("its source files have changed")
    crcs = found["crcs"]
    labels = found["labels"]
    classes = found["classes"].tolist()
    state = _state(pixels)
    images = MappedImages(pixels, crcs)
    count = len(images.pixels)
    unchanged = state == found["state"].tolist()
    if {len(labels), len(crcs)} != {count} or not (
        unchanged or all(map(images.is_whole, range(count)))
    ):
        raise Unreadable("not what was written")
    if not (unchanged and are_same):  # it or its sources were copied or touched, say
        # Where the folder can't be written, the next start compares again.
        with contextlib.suppress(OSError):
            _write_rest(rest, state, sources.state, checksum, crcs, labels, classes)
    return images, labels, classes


def _state(file: Path) -> list[int]:
    """Returns what changes with a file's content: no program can set the last of them, its time of
    change.
    """
    found = os.stat(file)
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _write_rest(
    rest: Path,
    state: list[int],
    sources: np.ndarray,
    checksum: np.ndarray,
    crcs: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
) -> None:
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
                f"DATA.CACHE holds images of one type: found {image.dtype} after {dtype}; set it to None"
            )
        if image.shape != shape:
            raise InputError(
                f"DATA.CACHE holds images of one size: found {_size(image.shape)} after {_size(shape)}; make them of"
                " one size, or set it to None"
            )
        content = image.tobytes()
        crcs[place] = zlib.crc32(content)
        file.write(content)
    return crcs


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(str(side) for side in (shape[1], shape[0]))
