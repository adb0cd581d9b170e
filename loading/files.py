"""Reads files of unknown origin within limits of memory and time: text, paths, tar and .npz files.

Only regular files are read, and no more of them than the caller allows.
"""

import codecs
import functools
import io
import itertools
import math
import os
import re
import unicodedata
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from errors import Allowance, Unreadable, open_file, printable

# Bytes of a header in a tar file, such as a member's long name.
_LARGEST_HEADER = 1 << 16
# Bytes of a line of text. A table's header of 30,000 classes has fewer.
LONGEST_LINE = 1 << 19
# Files that a process holds open. The usual limit is 1,024.
_OPEN = 256
# Bytes of a text that are read at a time. A line of one byte takes fifty in memory.
_BLOCK = 1 << 16
# The compressions that NumPy writes.
_NPZ_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def contents(path: str | Path, most: int) -> bytes:
    """Returns a regular file's bytes; raises Unreadable where there are more than ``most``."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise Unreadable(f"it has {size} bytes, at most {most} are allowed")
        return file.read(most + 1)[:most]


class _Opened:
    """A file descriptor, which is closed once it is neither in use nor one of those used last."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    # An argument, because at Python's end the module may be gone before.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)


@functools.lru_cache(_OPEN)
def opened_descriptor(file: str) -> _Opened:
    """Opens a file that is read at many places; it stays open as long as few others are opened."""
    # O_NONBLOCK, because to open a pipe would block.
    return _Opened(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# For text that was written on a Chinese Windows.
_TO_UTF8 = "iconv -f GB18030 -t UTF-8 OLD > NEW"


def refuse_utf16(start: bytes, nuls: bool = False) -> None:
    """Raises Unreadable where a text begins as UTF-16 does.

    Args:
        start: the text's first bytes, 4 or more.
        nuls: the text may have NULs of its own, so only the byte order mark counts.
    """
    alternate = b"\0\0" in (start[:4:2], start[1:4:2])
    if start[:2] in _UTF16_MARKS or (alternate and not nuls):
        raise Unreadable("it is UTF-16; save it as UTF-8")


def utf8_text(data: bytes) -> str:
    """Returns a text file's content; raises Unreadable where it isn't UTF-8."""
    refuse_utf16(data)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(data.count(b"\n", 0, error.start) + 1) from None


def not_utf8(line: int) -> Unreadable:
    """Returns the error about a line of a text that isn't UTF-8."""
    return Unreadable(f"its line {line} isn't UTF-8; save it as UTF-8 (from GBK: {_TO_UTF8})")


def count_lines(file: Any) -> int:
    """Returns how many lines a file has, and goes back to its beginning.

    So the memory that they will take is known before any line is kept.
    """
    count = 0
    last = b"\n"
    while block := file.read(_BLOCK):
        count += block.count(b"\n")
        last = block[-1:]
    file.seek(0)
    return count + (last != b"\n")


def text_lines(file: Any, longest: int = LONGEST_LINE, end: bytes = b"\n") -> Iterator[bytes]:
    """Yields a text's lines without their ends, and without a byte order mark.

    A carriage return at the end of a line stays. Only a block of the file is in memory.

    Args:
        file: opened to read bytes.
        longest: bytes that a line may have.
        end: of a line. A list of paths may have NULs.

    Raises:
        Unreadable: a line is longer, or the text is in UTF-16.
    """
    rest = b""
    count = 0
    while block := file.read(_BLOCK):
        if not count and not rest:
            refuse_utf16(block[:4], nuls=end == b"\0")
            block = block.removeprefix(codecs.BOM_UTF8)
        lines = (rest + block).split(end)
        for place, line in enumerate(lines if max(map(len, lines)) >= longest else (), count + 1):
            if len(line) >= longest:
                raise Unreadable(f"its line {place} has more than {longest} bytes")
        rest = lines.pop()
        count += len(lines)
        yield from lines
    if rest:
        yield rest


_WINDOWS_DISK = re.compile(r"[A-Za-z]:[\\/]")


def why_missing(root: str | Path, path: bytes) -> str:
    """Returns a probable reason why a file of a list is missing, which begins with "; ", or ""."""

    def exists(other: bytes) -> bool:
        return os.path.lexists(os.path.join(os.fsencode(root), other))

    if os.path.isdir(os.path.join(os.fsencode(root), path)):
        return "; it is a folder, expected a file"
    # A short name in GBK may also be valid UTF-8, so what is on the disk decides.
    gbk = path.decode("gb18030", "replace").encode()
    if not path.isascii() and (exists(gbk) or exists(gbk.replace(b"\\", b"/"))):
        return f"; the list is in GBK: {_TO_UTF8}"
    try:
        text = path.decode()
    except UnicodeDecodeError:
        return f"; the list isn't UTF-8 (from GBK: {_TO_UTF8})"
    if text[:1] in ('"', "'") and text[0] == text[-1]:
        return "; its paths are quoted: remove the quotes"
    if _WINDOWS_DISK.match(text):
        return (
            "; it is a Windows path: write paths relative to -data_path, with / between the folders"
        )
    if text.endswith((",", ";")):
        return f"; the list has '{text[-1]}' after the path: write only a space or a TAB"
    before, *label = path.rsplit(None, 1)
    if label and exists(before):
        return (
            f"; {printable(os.fsdecode(before))} exists:"
            " for lists of paths and one label pass -dataset=imagenet2012"
        )
    if "\\" in text:
        return "; it has the backslashes of Windows: write / in the list (sed -i 's|\\\\|/|g')"
    for form in ("NFC", "NFD"):
        if exists(unicodedata.normalize(form, text).encode()):
            return (
                f"; the name of the file has another Unicode form ({form}):"
                " write it that way in the list"
            )
    if not path.isascii() and exists(text.encode("gb18030")):
        return "; the name of the file on the disk is GBK: rename the files (convmv -f gbk -t utf8)"
    return ""


class Paths(Sequence[str]):
    """A sequence of paths, in one block of bytes.

    It takes a third of the memory of a list, and processes can share it.
    """

    def __init__(self, paths: Iterable[str | bytes]) -> None:
        block = io.BytesIO()
        ends = array("q", [0])
        size = 0
        write = block.write
        for path in paths:
            size += write(path if isinstance(path, bytes) else os.fsencode(path))
            ends.append(size)
        # Processes can share arrays. Neither of these is a copy.
        self._bytes = np.frombuffer(block.getvalue(), np.uint8)
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    # ``index`` is a number; nothing uses slices.
    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return os.fsdecode(self.path_bytes(index))

    def path_bytes(self, index: int) -> bytes:
        """Returns a path as the file system has it."""
        return self._bytes[self._ends[index] : self._ends[index + 1]].tobytes()

    def block(self, first: int, last: int) -> list[Any]:
        """Returns the bytes and the lengths of the paths from ``first`` to before ``last``."""
        ends = self._ends[first : last + 1]
        return [self._bytes[ends[0] : ends[-1]], np.diff(ends)]

    def below(self, root: str) -> "Paths":
        """Returns the paths; absolute ones that lie below ``root`` become relative to it."""
        # The first byte of each path. The 0 that is appended is that of an empty path at the end.
        first_bytes = np.append(self._bytes, np.uint8(0))[self._ends[:-1]]
        if not (first_bytes == ord("/")).any():
            return self
        prefix = os.path.join(os.fsencode(os.path.abspath(root)), b"")
        content = self._bytes.tobytes()
        ends = itertools.pairwise(self._ends.tolist())
        return Paths(content[begin:end].removeprefix(prefix) for begin, end in ends)


class TarBytes:
    """A file for tarfile that reads no more bytes than an allowance gives, and few at a time.

    It does so whatever a header claims. This bounds the time, too, because a member has 1 KiB at
    least, which takes 25 us. A clock would refuse shards of tiny images.
    """

    def __init__(self, file: Any, allowance: Allowance) -> None:
        self.file = file
        self.allowance = allowance
        self.tell = file.tell
        allowance.until = math.inf

    def seek(self, place: int) -> None:
        self.allowance.take(max(0, place - self.tell()))
        self.file.seek(place)

    def read(self, size: int) -> bytes:
        if size > _LARGEST_HEADER:
            raise Unreadable(
                f"it has a header of {size} bytes, at most {_LARGEST_HEADER} are allowed"
            )
        return self.content(size)

    def content(self, size: int) -> bytes:
        """Returns the next ``size`` bytes."""
        self.allowance.take(size)
        return self.file.read(size)


def npz(path: Path, wanted: Mapping[str, tuple[str, int | None]]) -> dict[str, np.ndarray]:
    """Returns arrays of a .npz file by name. Call this within ``errors.reading``.

    Args:
        wanted: (NumPy's kinds of dtype, number of dimensions) of each array. None: one dimension or
            more.

    Raises:
        Unreadable, Exception: an array is missing, is another one, or would take too much memory.
    """
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        allowance = Allowance(os.fstat(file.fileno()).st_size)
        return {
            name: _array(archive, name, kinds, dimensions, allowance)
            for name, (kinds, dimensions) in wanted.items()
        }


def _array(
    archive: zipfile.ZipFile,
    name: str,
    kinds: str,
    dimensions: int | None,
    allowance: Allowance,
) -> np.ndarray:
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise Unreadable(f"its {name} is missing") from None
    if info.compress_type not in _NPZ_COMPRESSIONS:
        raise Unreadable(f"its {name} has a compression that NumPy doesn't use")
    allowance.take(info.file_size)
    with archive.open(info) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise Unreadable(f"its {name} is of another version than NumPy writes")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        is_plain = not (dtype.hasobject or dtype.fields or fortran)
        has_dimensions = len(shape) > 0 if dimensions is None else len(shape) == dimensions
        if dtype.kind not in kinds or not has_dimensions or not is_plain:
            expected = "1 or more" if dimensions is None else dimensions
            raise Unreadable(
                f"its {name} are {len(shape)} dimensions of {dtype};"
                f" expected {expected} of kind {kinds}"
            )
        # At the end of the read, the archive's CRC is checked.
        count = math.prod(shape)
        data = file.read()
    if count * dtype.itemsize != len(data) or min(shape, default=0) < 0:
        raise Unreadable(f"its {name} have the shape {list(shape)}, which doesn't match their size")
    # np.frombuffer doesn't take an empty buffer.
    return np.frombuffer(data, dtype).reshape(shape) if data else np.zeros(shape, dtype)
