"""Reads and writes the weight files of torch, timm, Paddle and Google; no code from a file is run.

The content decides what a file is, not its ending. Safetensors and torch's, Paddle's and NumPy's arrays are read one by
one, so a file is never in memory twice. Only ``arrays``, ``unpickle`` and this file touch what a file says.
"""

import io
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from errors import InputError, Unreadable, reading, shown
from utils import written_whole
from weights.arrays import Array, Span, contiguous, item_size, native, sizes
from weights.hub import find_weights, read_config
from weights.unpickle import DataUnpickler

# Where a checkpoint keeps its weights: timm's order (load_state_dict, the average first), then others' names.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict", "module", "net", "teacher")
PREFIXES = ("_orig_mod.", "module.", "_orig_mod.")  # of torch.compile and DataParallel, in either order (as timm)

SAFETENSORS_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bfloat16", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
LONGEST_HEADER = 100_000_000  # bytes; the safetensors library's limit
TORCH_MAGIC, TORCH_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # torch.serialization, before 1.6
LARGEST_GROWTH, FREE_GROWTH = 20, 16 << 20  # what a file of n bytes may take: 20 n + 16 MiB

Content = dict[str, Any]  # arrays, and whatever else a checkpoint holds


@dataclass(frozen=True)
class WeightFile:
    """The weights of a file.

    Attributes:
        path: the file that was read.
        arrays: by the file's names, without a checkpoint's wrapper and the prefix ``module.``; floats are float32.
        layout: "torch" (a Linear's weight is [out, in]), "paddle" ([in, out]) or "jax" (Google's npz).
        config: what ``read_config`` returns.
        notes: what was chosen or left out, to be shown.
    """

    path: Path
    arrays: dict[str, np.ndarray]
    layout: str
    config: dict[str, Any]
    notes: list[str]


def read_weights(path: str | Path) -> WeightFile:
    """Reads a weight file of any kind.

    Raises:
        InputError: there is none; it is of another kind, damaged, or names something that isn't data; it would take
            memory out of proportion to its size; a value is NaN or infinite.
    """
    file = find_weights(path)
    with reading(file, "weights"), open(file, "rb") as stream:
        size = file.stat().st_size
        content, layout = _reader(stream.peek(512)[:512])(stream, size)
        entries, notes = _weights(content)
        _check_growth(sum(entry.cost() for entry in entries.values() if type(entry) is Array), size)
        arrays = {name: _finite(name, _read(entry, layout)) for name, entry in entries.items()}
    return WeightFile(file, arrays, layout, read_config(path), notes)


def write_weights(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays as they are, whole or not at all; the ending tells the kind: .safetensors, .pdparams or .npz.

    A .pdparams file is a pickle of a dictionary of NumPy arrays, which ``paddle.load`` reads.

    Raises:
        InputError: another ending.
    """
    if path.suffix not in (".safetensors", ".pdparams", ".npz"):
        raise InputError(f"{path}: the ending tells what to write; expected .safetensors, .pdparams or .npz")
    with written_whole(path, "wb") as file:
        if path.suffix == ".safetensors":
            write_safetensors(file, arrays)
            return
        ordered: dict[str, Any] = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        if path.suffix == ".pdparams":
            pickle.dump(ordered, file, protocol=4)
        else:
            np.savez(file, **ordered)


class Writable(Protocol):
    def write(self, data: Any, /) -> Any: ...


def write_safetensors(file: Writable, arrays: dict[str, np.ndarray]) -> None:
    """Writes what ``safetensors.numpy.save`` returns, array by array: that holds all of them twice more."""
    dtypes = {np.dtype(code): name for name, code in SAFETENSORS_DTYPES.items() if code != "bfloat16"}
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))  # so that all lie aligned
    header, end = {}, 0
    for name, array in ordered:
        offsets = [end, end + array.nbytes]
        header[name] = {"dtype": dtypes[array.dtype], "shape": array.shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, array in ordered:
        file.write(np.ravel(array).data)


# ------------------------------------------------------------ kinds of files


def _reader(head: bytes) -> Callable[[BufferedIOBase, int], tuple[Content, str]]:
    if head[:2] == b"PK":
        return _read_zip
    if head[8:9] == b"{":
        return _read_safetensors
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return _read_pickle
    text = head.lstrip().lower()
    if not head:
        found = "it is empty"
    elif text.startswith(b"version https://git-lfs"):
        found = "it is a Git LFS pointer, not the weights; run git lfs pull"
    elif text.startswith((b"<!doctype html", b"<html")):
        found = "it is an HTML page, not the weights; download the file itself"
    else:
        found = f"it is no weight file (it starts with {head[:8]!r})"
    raise Unreadable(f"{found}; expected safetensors, torch's .pth or .bin, Paddle's .pdparams, or .npz")


def _read_safetensors(file: BufferedIOBase, size: int) -> tuple[Content, str]:
    (length,) = struct.unpack("<Q", file.read(8))
    start = 8 + length
    if start > size or length > LONGEST_HEADER:
        raise Unreadable(f"its safetensors header claims {length} bytes, the file has {size}")
    header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
    form = header.pop("__metadata__", {}).get("format")
    content, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in SAFETENSORS_DTYPES:
            raise Unreadable(f"{shown(name)} has the dtype {shown(entry['dtype'])}, which isn't read")
        dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], sizes(tuple(entry["shape"]))
        begin, after = entry["data_offsets"]
        if begin != end or after - begin != math.prod(shape) * item_size(dtype):
            raise Unreadable(f"its tensors overlap, leave gaps, or have other sizes than they claim ({shown(name)})")
        content[name] = Array(dtype, shape, contiguous(shape), Span(file, start + begin, after - begin))
        end = after
    if start + end != size:
        raise Unreadable(f"its tensors end at byte {start + end}, the file at {size}")
    return content, "paddle" if form == "pd" else "torch"  # "pd" is PaddleNLP's mark


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise Unreadable("its safetensors header has the same name twice")
    return entries


def _read_zip(file: BufferedIOBase, size: int) -> tuple[Content, str]:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        roots = [name[: -len("data.pkl")] for name in names if name.endswith("/data.pkl")]
        if len(roots) == 1:
            return _read_torch_zip(file, size, archive, roots[0]), "torch"
        if names and all(name.endswith(".npy") for name in names):
            _check_growth(sum(info.file_size for info in archive.infolist()), size)
            return {info.filename[: -len(".npy")]: _read_npy(archive, info) for info in archive.infolist()}, "jax"
    raise Unreadable("it is a zip archive with neither torch's data.pkl nor .npy arrays")


def _read_torch_zip(file: BufferedIOBase, size: int, archive: zipfile.ZipFile, root: str) -> Content:
    if root + "byteorder" in archive.namelist() and _member(archive, root + "byteorder", size) != b"little":
        raise Unreadable("it was written on a big-endian machine, which isn't read")
    spans: dict[str, Span] = {}

    def storage(key: str, length: int) -> Span:
        if key not in spans:
            spans[key] = _stored(file, archive.getinfo(f"{root}data/{key}"))
        if spans[key].length != length:
            raise Unreadable(f"its storage {shown(key)} has {spans[key].length} bytes instead of {length}")
        return spans[key]

    program = _member(archive, root + "data.pkl", size)
    return DataUnpickler(io.BytesIO(program), len(program), storage).load()


def _member(archive: zipfile.ZipFile, name: str, size: int) -> bytes:
    info = archive.getinfo(name)
    _check_growth(info.file_size, size)
    with archive.open(info) as stream:
        return stream.read(info.file_size)  # the count bounds what is decompressed


def _stored(file: BufferedIOBase, info: zipfile.ZipInfo) -> Span:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise Unreadable("its tensors are compressed or encrypted, which torch doesn't write")
    file.seek(info.header_offset)
    header = file.read(30)  # of the member; it ends with the lengths of the name and of the extra field after it
    start = info.header_offset + 30 + sum(struct.unpack("<2H", header[26:]))
    return Span(file, start, info.file_size, crc=info.CRC)


def _read_npy(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Unreadable(f"{shown(info.filename)} is compressed in a way that NumPy doesn't write")
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = readers[version](stream)
        if dtype.kind not in "fiub" and dtype != np.dtype("V2"):  # V2: bfloat16, as JAX's arrays are saved
            raise Unreadable(f"{shown(info.filename)} has the dtype {shown(str(dtype))}; expected numbers")
        length = math.prod(sizes(shape)) * dtype.itemsize
        if stream.tell() + length != info.file_size:
            raise Unreadable(f"{shown(info.filename)} claims the shape {list(shape)}, which isn't its size")
        array = np.frombuffer(bytearray(stream.read(length)), dtype).reshape(shape, order="F" if fortran else "C")
    array = np.asarray(array, order="C")
    return native(array.view("<u2"), is_bfloat16=True) if dtype.kind == "V" else native(array)


def _read_pickle(file: BufferedIOBase, size: int) -> tuple[Content, str]:
    first = DataUnpickler(file, size).load()
    if first == TORCH_MAGIC:
        return _read_torch_legacy(file, size), "torch"
    return first, "paddle"


def _read_torch_legacy(file: BufferedIOBase, size: int) -> Content:
    """Reads torch's format before 1.6: pickles of two constants, the machine, the object and its storages' keys; then
    each storage, its length before it.
    """
    protocol, machine = (DataUnpickler(file, size).load() for _ in range(2))
    if protocol != TORCH_PROTOCOL or machine.get("little_endian") is not True:
        raise Unreadable("it was written by an unknown torch, or on a big-endian machine")
    spans: dict[str, Span] = {}

    def storage(key: str, length: int) -> Span:
        if spans.setdefault(key, Span(file, 0, length)).length != length:
            raise Unreadable(f"its storage {shown(key)} has two lengths")
        return spans[key]

    content = DataUnpickler(file, size, storage).load()
    keys = DataUnpickler(file, size).load()
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(spans):
        raise Unreadable("its storages aren't those that its tensors need")
    start = file.tell()
    for key in keys:
        file.seek(start)
        (count,) = struct.unpack("<q", file.read(8))
        span = spans[key]
        span.offset, start = start + 8, start + 8 + span.length
        if span.length not in (count, 2 * count, 4 * count, 8 * count) or start > size:
            raise Unreadable(f"it ends early, or its storage {shown(key)} has another length than its tensors say")
    return content


# ------------------------------------------------------- what the weights are


def _weights(content: Any) -> tuple[dict[str, Array | np.ndarray], list[str]]:
    """Returns the arrays of a checkpoint by their clean names, and what there is to tell."""
    notes = []
    for _ in range(3):  # one inside the other
        held = [key for key in WRAPPERS if type(content) is dict and type(content.get(key)) is dict and content[key]]
        if not held:
            break
        if len(held) > 1:
            notes.append(f"its {held[0]} was taken (it holds {', '.join(held)})")
        content = content[held[0]]
    if type(content) is not dict:
        raise Unreadable("it holds no dictionary of arrays")
    found, others = {}, []
    for name, value in content.items():
        if type(value) is tuple and len(value) == 2:  # Paddle's (parameter's name, array)
            value = value[1]
        clean = name
        if name.startswith(PREFIXES):
            for prefix in PREFIXES:
                clean = clean.removeprefix(prefix)
        if not isinstance(value, (Array, np.ndarray)):
            others.append(name)
        elif not name.isprintable():
            raise Unreadable(f"it holds an array under the name {shown(name)}, which can't be printed")
        elif clean in found:
            raise Unreadable(f"it holds {shown(clean)} twice, with a prefix and without")
        else:
            found[clean] = value
    others = [name for name in others if name != "StructuredToParameterName@@"]  # Paddle's own names
    if not found:
        raise Unreadable(f"it holds no arrays, but {shown(', '.join(others)) or 'nothing'}")
    if others:
        notes.append(f"left out, being no arrays: {shown(', '.join(others))}")
    return found, notes


def _check_growth(wanted: int, size: int) -> None:
    if wanted > LARGEST_GROWTH * size + FREE_GROWTH:
        raise Unreadable(f"its content would take {wanted} bytes, out of proportion to the file's {size}")


def _read(entry: Array | np.ndarray, layout: str) -> np.ndarray:
    if not isinstance(entry, Array):
        return entry
    if layout == "paddle" and entry.dtype == "<u2":  # which Paddle has no type for: its bfloat16, saved by way of NumPy
        entry.dtype = "bfloat16"
    return entry.read()


def _finite(name: str, array: np.ndarray) -> np.ndarray:
    bad = array.size - np.count_nonzero(np.isfinite(array))
    if bad:
        raise Unreadable(f"{bad} of the {array.size} values of {shown(name)} are NaN or infinite; take other weights")
    return array
