"""Zip archives of arrays: torch's .pth and NumPy's .npz. What the archive's directory says is a
claim.
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

ENTRY = 25  # bytes that zipfile holds for one of an archive's directory, at most
PIECE = 1 << 20  # bytes that are unpacked at a time
# Of NumPy's versions 1.0 and 2.0; Python 2 wrote an L behind numbers.
_NPY = re.compile(
    rb"\{ ?'descr': (.+?), 'fortran_order': (True|False), 'shape': \(((?:\d+L?, ?)*(?:\d+L?)?)\),? ?\}\s*"
)
LONGEST_HEADER = 10_000  # bytes; NumPy's own limit


class _Counted:
    """A file whose reads are taken from an allowance ``factor`` times, for a library that unfolds
    what it reads.
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
    """A member of an archive that wasn't read yet; ``offset`` and ``length`` are within it."""

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
        # read to its end, where the checksum is compared
        with self.archive.open(self.info) as stream:
            while piece := stream.read(PIECE):
                self.allowance.take(0)
                first, last = max(begin, place), min(end, place + len(piece))
                if first < last:
                    data[first - begin : last - begin] = np.frombuffer(piece, np.uint8)[
                        first - place : last - place
                    ]
                place += len(piece)
        if place < end:
            raise Unreadable("it ends early")
        return data


def read_zip(file: BufferedIOBase, allowance: Allowance) -> tuple[Any, str]:
    """Returns what an archive holds, not yet read, and whose layout that is.

    Raises:
        Unreadable: it is neither torch's nor NumPy's, or takes too much.
        Exception: of other kinds, for damaged ones.
    """
    counted: Any = _Counted(file, allowance, ENTRY)
    archive = zipfile.ZipFile(counted)
    counted.factor = 0
    members = {info.filename: info for info in archive.infolist()}
    if len(members) != len(archive.infolist()):
        raise Unreadable("its archive has the same name twice")
    roots = [name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl")]
    if len(roots) == 1:
        return _read_torch(file, allowance, archive, members, roots[0]), "torch"
    if members and all(name.endswith(".npy") for name in members):
        return {
            name[: -len(".npy")]: _npy(archive, info, allowance) for name, info in members.items()
        }, "jax"
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
        raise Unreadable("it was written on a big-endian machine, which isn't read")
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
    """Describes a whole member. zipfile bounds what deflate unpacks, but not what bzip2 and LZMA
    do.
    """
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Unreadable(
            f"{printable(info.filename)} is compressed in a way that neither torch nor NumPy writes"
        )
    file: Any = archive.fp
    return Member(file, 0, info.file_size, archive=archive, info=info, allowance=allowance)


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, allowance: Allowance) -> bytes:
    allowance.take(2 * info.file_size)
    return _member(archive, info, allowance).read(0, info.file_size).tobytes()


def _stored_span(file: BufferedIOBase, info: zipfile.ZipInfo) -> Span:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise Unreadable("its tensors are compressed or encrypted, which torch doesn't write")
    file.seek(info.header_offset)
    # of the member; it ends with the lengths of the name and of the extra field after it
    header = file.read(30)
    start = info.header_offset + 30 + sum(struct.unpack("<2H", header[26:]))
    return Span(file, start, info.file_size, crc=info.CRC)


def _npy(archive: zipfile.ZipFile, info: zipfile.ZipInfo, allowance: Allowance) -> Array:
    """Describes a .npy member. NumPy's own reader has Python parse the header's text, and makes any
    dtype of it.
    """
    name = printable(info.filename)
    member = _member(archive, info, allowance)
    allowance.take(3000)
    with archive.open(info) as stream:
        head = stream.read(12)
        width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(head[:8], 0)
        start = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
        if not width or start > LONGEST_HEADER:
            raise Unreadable(
                f"{name} is no .npy array of version 1.0 or 2.0, or has a header of {start} bytes"
            )
        told = _NPY.fullmatch((head + stream.read(start - 12))[8 + width : start])
    if not told:
        raise Unreadable(f"{name} has a header that NumPy doesn't write")
    descr = told[1].decode("latin-1").strip("'")
    if descr[1:] not in NUMPY_CODES and descr != "|V2":  # V2: bfloat16, as JAX's arrays are saved
        raise Unreadable(f"{name} has the dtype {printable(descr)}; expected numbers")
    dtype = "bfloat16" if descr == "|V2" else descr
    shape = sizes(tuple(int(size) for size in re.findall(rb"\d+", told[3])))
    length = math.prod(shape) * item_size(dtype)
    if start + length != info.file_size:
        raise Unreadable(f"{name} claims the shape {list(shape)}, which isn't its size")
    member.offset = start
    member.length = length
    return Array(dtype, shape, contiguous(shape, told[2] == b"True"), member)
