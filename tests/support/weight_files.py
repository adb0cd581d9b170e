"""Weight files assembled by hand: pickles, torch's and Paddle's files, safetensors, hostile ones."""

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weights.formats import write_weights

# of torch before 1.6: magic number, protocol
MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."


@dataclass(eq=False)
class Call:
    """The result of calling a global."""

    module: str
    name: str
    arguments: tuple = ()


@dataclass(eq=False)
class Named:
    """A global itself."""

    module: str
    name: str


@dataclass(eq=False)
class Built:
    """An object and the state that it gets."""

    target: Any
    state: Any


@dataclass(eq=False)
class Outside:
    """An object that is stored elsewhere, by its persistent id."""

    name: Any


@dataclass(eq=False)
class Raw:
    """Opcodes that are written as they are."""

    opcodes: bytes


def opcodes(value: Any) -> bytes:
    """Returns the opcodes that put ``value`` on the stack."""
    if isinstance(value, Raw):
        return value.opcodes
    if isinstance(value, Named):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, Call):
        return opcodes(Named(value.module, value.name)) + opcodes(value.arguments) + b"R"
    if isinstance(value, Built):
        return opcodes(value.target) + opcodes(value.state) + b"b"
    if isinstance(value, Outside):
        return opcodes(value.name) + b"Q"
    if isinstance(value, dict):
        return b"}(" + b"".join(opcodes(key) + opcodes(item) for key, item in value.items()) + b"u"
    if isinstance(value, (list, tuple)):
        start, end = (b"](", b"e") if isinstance(value, list) else (b"(", b"t")
        return start + b"".join(map(opcodes, value)) + end
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, bytes):
        return b"B" + struct.pack("<I", len(value)) + value
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    return b"\x8a\x10" + value.to_bytes(16, "little", signed=True)


def program(value: Any, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + opcodes(value) + b"."


class _Python2(pickle._Pickler):
    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_text(self, value: str | bytes) -> None:
        data = value.encode("latin-1") if isinstance(value, str) else value
        head = b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + struct.pack("<i", len(data))
        self.write(head + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_text


def python2(value: Any) -> bytes:
    """Returns a pickle as Python 2 wrote it in protocol 2. Text is SHORT_BINSTRING or BINSTRING."""
    _Python2(file := io.BytesIO(), 2).dump(value)
    return file.getvalue()


FLOATS = Named("torch", "FloatStorage")


def storage(key: Any, count: Any, kind: Any = FLOATS) -> Outside:
    return Outside(("storage", kind, key, "cpu", count))


def tensor(of: Any, shape: Any, strides: Any, first: Any = 0) -> Call:
    return Call("torch._utils", "_rebuild_tensor_v2", (of, first, shape, strides, False, None))


def numpy_array(
    shape: Any, data: Any, code: Any = "f4", order: Any = "<", fortran: Any = False
) -> Built:
    dtype = Built(
        Call("numpy", "dtype", (code, False, True)), (3, order, None, None, None, -1, -1, 0)
    )
    empty = Call("numpy.core.multiarray", "_reconstruct", (Named("numpy", "ndarray"), (0,), b"b"))
    return Built(empty, (1, shape, dtype, fortran, data))


def write_pickle(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None) -> Path:
    path.write_bytes(pickled)
    return path


def write_zip(
    path: Path,
    pickled: bytes,
    storages: dict[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
    return path


def write_legacy(
    path: Path, pickled: bytes, storages: dict[str, bytes] | None = None, keys: Any = None
) -> Path:
    """Writes torch's format before 1.6; storages hold four bytes per element."""
    machine = program({"little_endian": True})
    contents = [struct.pack("<q", len(data) // 4) + data for data in (storages or {}).values()]
    keys = list(storages or {}) if keys is None else keys
    path.write_bytes(MAGIC + machine + pickled + program(keys) + b"".join(contents))
    return path


WRITERS = {"zip": write_zip, "legacy": write_legacy, "pdparams": write_pickle}


class LittleMemory:
    """Asserts that its body never takes more than 64 MiB, which is enough for a small file."""

    def __enter__(self) -> None:
        tracemalloc.start()

    def __exit__(self, *_: Any) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20, peak


def made(path, arrays):
    write_weights(path, arrays)
    return path


def save_npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def safetensors(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ONE, TWO = (numpy_array((1,), np.float32([value]).tobytes()) for value in (1, 2))
