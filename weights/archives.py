"""Reads zip archives of arrays: torch's .pth and NumPy's .npz.

Whatever an archive's directory says is checked before memory is taken for it.
"""

import io
import math
import re
import struct
import zipfile
from dataclasses import dataclass, field
from io import BufferedIOBase
from typing import Any

import numpy as np

from errors import Allowance, Unreadable, printable
from weights.arrays import NUMPY_CODES, Array, Span, contiguous, item_size, sizes
from weights.unpickle import DataUnpickler

# zipfile takes up to this many bytes of memory for a byte of an archive's directory.
ENTRY = 25
# Bytes that are unpacked at a time.
PIECE = 1 << 20
# The header of a .npy file of version 1.0 or 2.0. Python 2 wrote an L behind numbers.
_NPY = re.compile(
    rb"\{ ?'descr': (.+?), 'fortran_order': (True|False), 'shape': \(((?:\d+L?, ?)*(?:\d+L?)?)\),? ?\}\s*"
)
LONGEST_HEADER = 10_000  # bytes, as in NumPy


class _CountedFile:
    """A file of which each read takes ``factor`` times its size from an allowance.

    It is for a library that takes more memory than the bytes that it reads.
    """

    def __init__(self, file: BufferedIOBase, allowance: Allowance, factor: int) -> None:
        self.file = file
        self.allowance = allowance
        self.factor = factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def read(self, count: int = -1) -> bytes:
        self.allowance.take(self.factor * max(0, count))
        return self.file.read(count)


@dataclass(eq=False, slots=True)
class Member(Span):
    """A member of an archive, read later; ``offset`` and ``length`` count its unpacked bytes."""

    archive: zipfile.ZipFile = field(kw_only=True)
    info: zipfile.ZipInfo = field(kw_only=True)
    allowance: Allowance = field(kw_only=True)

    @property
    def is_packed(self) -> bool:
        return self.info.compress_type != zipfile.ZIP_STORED

    def read(self, start: int, count: int) -> np.ndarray:
        data = np.empty(count, np.uint8)
        begin = self.offset + start
        end = self.offset + start + count
        place = 0
        # zipfile compares the checksum at the member's end, so it is read to there.
        with self.archive.open(self.info) as stream:
            while piece := stream.read(PIECE):
                self.allowance.take(0)
                first = max(begin, place)
                last = min(end, place + len(piece))
                if first < last:
                    unpacked = np.frombuffer(piece, np.uint8)
                    data[first - begin : last - begin] = unpacked[first - place : last - place]
                place += len(piece)
        if place < end:
            raise Unreadable("it is truncated")
        return data


def read_zip(file: BufferedIOBase, allowance: Allowance) -> tuple[Any, str]:
    """Returns the descriptions of an archive's arrays, and their layout.

    Raises:
        Unreadable: the archive is neither torch's nor NumPy's, or takes too much memory.
        Exception: the archive is damaged.
    """
    counted: Any = _CountedFile(file, allowance, ENTRY)
    archive = zipfile.ZipFile(counted)
    # Only the directory is counted so. Members count what they unpack.
    counted.factor = 0
    members = {info.filename: info for info in archive.infolist()}
    if len(members) != len(archive.infolist()):
        raise Unreadable("its archive has the same name twice")
    roots = [name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl")]
    if len(roots) == 1:
        return _read_torch(file, allowance, archive, members, roots[0]), "torch"
    if members and all(name.endswith(".npy") for name in members):
        arrays = {
            name.removesuffix(".npy"): _npy(archive, info, allowance)
            for name, info in members.items()
        }
        return arrays, "jax"
    raise Unreadable("it is a zip archive with neither torch's data.pkl nor .npy arrays")


def _read_torch(
    file: BufferedIOBase,
    allowance: Allowance,
    archive: zipfile.ZipFile,
    members: dict[str, zipfile.ZipInfo],
    root: str,
) -> Any:
    order = members.get(root + "byteorder")
    if order and (order.file_size > 16 or _content(archive, order, allowance) != b"little"):
        raise Unreadable("it was written on a big-endian machine, which isn't supported")
    spans: dict[str, Span] = {}

    def storage(key: str, length: int) -> Span:
        if key not in spans:
            spans[key] = _stored_span(file, members[f"{root}data/{key}"])
        if spans[key].length != length:
            raise Unreadable(
                f"its storage {printable(key)} has {spans[key].length} bytes instead of {length}"
            )
        return spans[key]

    program = _content(archive, members[root + "data.pkl"], allowance)
    return DataUnpickler(io.BytesIO(program), len(program), storage, allowance).load()


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, allowance: Allowance) -> Member:
    """Returns the description of a whole member of an archive."""
    # zipfile limits how much deflate unpacks at a time, but not bzip2 and LZMA.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Unreadable(
            f"{printable(info.filename)} has a compression that neither torch nor NumPy uses"
        )
    file: Any = archive.fp
    return Member(file, 0, info.file_size, archive=archive, info=info, allowance=allowance)


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, allowance: Allowance) -> bytes:
    allowance.take(2 * info.file_size)
    return _member(archive, info, allowance).read(0, info.file_size).tobytes()


def _stored_span(file: BufferedIOBase, info: zipfile.ZipInfo) -> Span:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise Unreadable("its tensors are compressed or encrypted, unlike torch's files")
    file.seek(info.header_offset)
    # The member's header ends with the lengths of its name and its extra field, which follow.
    header = file.read(30)
    start = info.header_offset + 30 + sum(struct.unpack("<2H", header[26:]))
    return Span(file, start, info.file_size, crc=info.CRC)


def _npy(archive: zipfile.ZipFile, info: zipfile.ZipInfo, allowance: Allowance) -> Array:
    """Returns the description of the array in a .npy member.

    NumPy's own reader isn't used, because it has Python parse the header and accepts any dtype.
    """
    name = printable(info.filename)
    member = _member(archive, info, allowance)
    allowance.take(3000)
    with archive.open(info) as stream:
        head = stream.read(12)
        # The header's length takes 2 bytes in version 1.0 and 4 in version 2.0.
        width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(head[:8], 0)
        start = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
        if not width or start > LONGEST_HEADER:
            raise Unreadable(
                f"{name} isn't an .npy array of version 1.0 or 2.0, or has a header of {start}"
                " bytes"
            )
        header = _NPY.fullmatch((head + stream.read(start - 12))[8 + width : start])
    if not header:
        raise Unreadable(f"{name} has a header unlike those of NumPy")
    # JAX's bfloat16 arrays are saved as V2.
    descr = header[1].decode("latin-1").strip("'")
    if descr[1:] not in NUMPY_CODES and descr != "|V2":
        raise Unreadable(f"{name} has the dtype {printable(descr)}; expected numbers")
    dtype = "bfloat16" if descr == "|V2" else descr
    shape = sizes(tuple(int(size) for size in re.findall(rb"\d+", header[3])))
    length = math.prod(shape) * item_size(dtype)
    if start + length != info.file_size:
        raise Unreadable(f"{name} has the shape {list(shape)}, which doesn't match its size")
    member.offset = start
    member.length = length
    return Array(dtype, shape, contiguous(shape, header[2] == b"True"), member)
