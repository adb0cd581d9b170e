"""Reads and writes the weight files of torch, timm, Paddle and Google; no code from a file is run.

The content decides what a file is, not its ending. Its arrays are described first, and read one by
one when they are needed, so that a file is opened rather than loaded. It isn't mapped, as a mapped
file that is shortened ends the process. Only ``archives``, ``arrays``, ``unpickle``, ``plain`` and
this file touch what a file says. All of them count what they hold (``errors.Allowance``).
"""

import contextlib
import json
import math
import os
import pickle
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from errors import Allowance, InputError, Unreadable, open_file, printable, reading
from settings.plain import (
    Rule,
    check_form,
    is_list,
    is_name,
    is_whole,
    optional,
    parsed_json,
    whole_file,
)
from utils import writing_whole
from weights.archives import read_zip
from weights.arrays import Array, LazyArray, Span, contiguous, item_size, sizes
from weights.hub import INDEX, LONGEST_CONFIG, beside, find_weights, read_config
from weights.unpickle import DataUnpickler, Script

# Where a checkpoint keeps its weights: timm's order (load_state_dict, the average first), then
# others' names.
WRAPPERS = (
    "state_dict_ema",
    "model_ema",
    "state_dict",
    "model",
    "model_state_dict",
    "model_state",
    "module",
    "net",
)
WRAPPERS += ("teacher",)
# Prefixes of names, in any order: those of DataParallel, and usual names of the attribute in which
# a module, such as Lightning's, holds the model. "model." before a number isn't one: PaddleViT's
# VOLO has its stages there.
_WRAPPED = re.compile(r"^((module|model|net|backbone)\.)+(?!\d)")
# Parts of names, at any depth: those of torch.compile, FSDP, activation checkpoints and Fabric.
_INNER = re.compile(
    r"(?:(?<=\.)|^)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)

# what a .safetensors file of this toolkit tells of itself: a description, in JSON
METADATA = "paddle_vit_toolkit"
SAFETENSORS_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bfloat16", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
LONGEST_NAME = 256  # characters of a tensor's
# torch.serialization, before 1.6
TORCH_MAGIC = 0x1950A86A20F9469CFC6C
TORCH_PROTOCOL = 1001
_PART = re.compile(r"-\d{5}-of-(\d{5})\.(safetensors|bin)$")  # of weights in several files
_MOST_PARTS = 1000
ARRAY = 1000  # bytes that an array takes at most besides its numbers

Content = dict[str, Any]  # arrays, and whatever else a checkpoint holds


@dataclass(frozen=True)
class WeightFile:
    """The weights of a file.

    Attributes:
        path: the file.
        arrays: by the file's names, without a checkpoint's wrapper and the prefix ``module.``;
            floats are float32. Of ``open_weights`` they are ``LazyArray``, which raise InputError
            where values can't be read or aren't finite.
        layout: "torch" (a Linear's weight is [out, in]), "paddle" ([in, out]) or "jax" (Google's
            npz).
        config: what ``read_config`` returns.
        notes: what was chosen or left out, to be shown.
        opened: the files that are read, by their paths, each with its state when it was opened.
    """

    path: Path
    arrays: dict[str, Any]
    layout: str
    config: dict[str, Any]
    notes: list[str]
    opened: dict[Path, tuple[BufferedIOBase, os.stat_result]] = field(default_factory=dict)

    def check_unchanged(self) -> None:
        """Raises InputError if a file was written to since it was opened."""
        for file, (stream, before) in self.opened.items():
            now = os.fstat(stream.fileno())
            times = [
                (state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in (before, now)
            ]
            # Its time of change is set, too, where another file takes its name. What is open stays
            # as it was.
            kept = now.st_nlink == before.st_nlink
            if times[0] != times[1] and (kept or times[0][:2] != times[1][:2]):
                raise InputError(
                    f"{file}: it was changed while it was read; load it again when nobody writes it"
                )


def read_weights(path: str | Path) -> WeightFile:
    """Reads a weight file of any kind, with all of its values.

    Raises:
        InputError: as ``open_weights``, or its arrays' reading.
    """
    with open_weights(path) as stored:
        arrays = {name: np.asarray(array) for name, array in stored.arrays.items()}
        return replace(stored, arrays=arrays)


@contextlib.contextmanager
def open_weights(path: str | Path) -> Iterator[WeightFile]:
    """Opens a weight file of any kind. Its arrays are read where their values are needed, within
    the context.

    Arrays that have to be unpacked first (compressed .npz, text in pickles of Python 2) are read
    once, and kept.

    Raises:
        InputError: there is no file, or it is of another kind, damaged, or names something that
            isn't data. Or it would take memory out of proportion to its size.
    """
    index = find_weights(path)
    arrays: dict[str, Any] = {}
    layouts: set[str] = set()
    notes: list[str] = []
    files = files_of(path)
    streams: dict[Path, tuple[BufferedIOBase, os.stat_result]] = {}
    with contextlib.ExitStack() as opened:
        for file in files:
            with reading(file, "weights"):
                stream = opened.enter_context(open_file(file))
                streams[file] = stream, os.fstat(stream.fileno())
                allowance = Allowance(streams[file][1].st_size)
                content, layout = _reader(stream.peek(512)[:512])(stream, allowance)
                entries, told = _weights(content)
                _claim(entries, layout, allowance)
                for name, entry in entries.items():
                    if name in arrays:
                        other = f"which another of the {len(files)} files holds, too"
                        raise Unreadable(f"it holds {printable(name)}, {other}")
                    arrays[name] = _lazy(file, name, entry, allowance)
            layouts.add(layout)
            notes += told
        if len(layouts) > 1:
            raise InputError(
                f"{index}: its files have different layouts ({', '.join(sorted(layouts))}), expected one"
            )
        yield WeightFile(index, arrays, layouts.pop(), read_config(path), notes, streams)


def _lazy(file: Path, name: str, entry: Array, allowance: Allowance, what: str = "weights") -> Any:
    """Returns an array of a file to be read later, each time with the checks of a stranger's file.

    Args:
        what: the file should be; of "weights", all numbers have to be finite.
    """

    def read() -> np.ndarray:
        with reading(file, what):
            allowance.resume()
            array = _read_entry(entry, allowance)
            if what == "weights":
                _check_finite(name, array)
            return array

    return read() if entry.is_packed else LazyArray(entry.shape, entry.native_dtype, read)


def files_of(path: str | Path) -> list[Path]:
    """Returns the files that hold weights: a single one, or those that an index names.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: there is no file; an index can't be read, or names a file that isn't beside it;
            the file is one part of several.
    """
    file = find_weights(path)
    part = _PART.search(file.name)
    if part and int(part[1]) > 1:
        raise InputError(
            f"{file} is one of {int(part[1])} files of the weights; give their folder, with its {INDEX}"
        )
    if not file.name.endswith(INDEX):
        return [file]
    with reading(file, "an index of weights"):
        content = parsed_json(whole_file(file, LONGEST_CONFIG))
        check_form(content, _INDEX, tuple(_INDEX))
        names = sorted(set(content["weight_map"].values()))
    found = [beside(path, name) for name in names]
    for name, own in zip(names, found, strict=True):
        if own is None or not os.path.isfile(own):
            raise InputError(
                f"{file}: {printable(name)}, which it names, isn't beside it; copy it there"
            )
    return [own for own in found if own]


@contextlib.contextmanager
def open_arrays(file: Path) -> Iterator[dict[str, Any]]:
    """Opens a .safetensors file. Its arrays are read where their values are needed, within the
    context; NaN are let be, floats are float32.

    Raises:
        InputError: it can't be read, or would take memory out of proportion to its size.
    """
    with contextlib.ExitStack() as opened:
        with reading(file, "tensors"):
            stream = opened.enter_context(open_file(file))
            allowance = Allowance(os.fstat(stream.fileno()).st_size)
            entries = _read_safetensors(stream, allowance)[0]
            _claim(entries, "torch", allowance)
        yield {
            name: _lazy(file, name, entry, allowance, "tensors") for name, entry in entries.items()
        }


def read_arrays(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and arrays of a .safetensors file, one read after the other; NaN are let be,
    floats are float32.

    Raises:
        InputError: it can't be read, or would take memory out of proportion to its size.
    """
    with open_arrays(file) as arrays:
        for name, array in arrays.items():
            yield name, np.asarray(array)


def read_metadata(file: Path) -> dict[str, str]:
    """Returns the texts that a .safetensors file holds beside its tensors; {} for a file of another
    kind.

    Raises:
        InputError: it can't be read.
    """
    if file.name.endswith(INDEX):
        return {}
    with reading(file, "weights"), open_file(file) as stream:
        if _reader(stream.peek(512)[:512]) is not _read_safetensors:
            return {}
        header, _ = _header(stream, Allowance(os.fstat(stream.fileno()).st_size))
        metadata = header.get("__metadata__") or {}
        return {name: text for name, text in metadata.items() if type(text) is str}


def write_weights(
    path: Path, arrays: dict[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays as they are, whole or not at all; the ending tells the kind: .safetensors,
    .pdparams or .npz.

    A .pdparams file is a pickle of a dictionary of NumPy arrays, which ``paddle.load`` reads.

    Args:
        metadata: texts beside the tensors, which .safetensors alone holds.

    Raises:
        InputError: another ending.
    """
    if path.suffix not in (".safetensors", ".pdparams", ".npz"):
        raise InputError(
            f"{path}: the ending tells what to write; expected .safetensors, .pdparams or .npz"
        )
    with writing_whole(path, "wb") as file:
        if path.suffix == ".safetensors":
            write_safetensors(file, arrays, metadata)
            return
        ordered: dict[str, Any] = {
            name: np.asarray(array, order="C") for name, array in arrays.items()
        }
        if path.suffix == ".pdparams":
            pickle.dump(ordered, file, protocol=4)
        else:
            np.savez(file, **ordered)


class Writable(Protocol):
    def write(self, data: Any, /) -> Any: ...


def write_safetensors(
    file: Writable, arrays: dict[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes what ``safetensors.numpy.save`` returns, array by array: that holds all of them twice
    more.
    """
    dtypes = {
        np.dtype(code): name for name, code in SAFETENSORS_DTYPES.items() if code != "bfloat16"
    }
    # so that all lie aligned
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
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


def _reader(head: bytes) -> Callable[[BufferedIOBase, Allowance], tuple[Content, str]]:
    if head[:2] == b"PK":
        return read_zip
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
    raise Unreadable(
        f"{found}; expected safetensors, torch's .pth or .bin, Paddle's .pdparams, or .npz"
    )


def _read_safetensors(file: BufferedIOBase, allowance: Allowance) -> tuple[dict[str, Array], str]:
    size = allowance.size
    header, start = _header(file, allowance)
    form = (header.pop("__metadata__", None) or {}).get("format")
    for name, entry in header.items():
        check_form(entry, _ENTRY, tuple(_ENTRY), f"{printable(name, 60)}.")
    content = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = SAFETENSORS_DTYPES[entry["dtype"]]
        shape = sizes(tuple(entry["shape"]))
        begin, after = entry["data_offsets"]
        if begin != end or after - begin != math.prod(shape) * item_size(dtype):
            raise Unreadable(
                f"its tensors overlap, leave gaps, or have other sizes than they claim ({printable(name)})"
            )
        content[name] = Array(
            dtype, shape, contiguous(shape), Span(file, start + begin, after - begin)
        )
        end = after
    if start + end != size:
        raise Unreadable(f"its tensors end at byte {start + end}, the file at {size}")
    return content, "paddle" if form == "pd" else "torch"  # "pd" is PaddleNLP's mark


def _header(file: BufferedIOBase, allowance: Allowance) -> tuple[dict[str, Any], int]:
    """Returns (the header of a .safetensors file, where its tensors begin)."""
    (length,) = struct.unpack("<Q", file.read(8))
    if 8 + length > allowance.size:
        raise Unreadable(
            f"its safetensors header claims {length} bytes, the file has {allowance.size}"
        )
    allowance.take(length)
    text = file.read(length)
    if len(text) != length:
        raise Unreadable("it ends early")
    header = parsed_json(text, allowance)
    check_form(header, _HEADER)
    return header, 8 + length


_OFFSETS = Rule("two places, the first one first", lambda value: is_list(value, is_whole, 2, 2))
_ENTRY = {
    "dtype": Rule(
        f"one of {', '.join(SAFETENSORS_DTYPES)}",
        lambda v: type(v) is str and v in SAFETENSORS_DTYPES,
    ),
    "shape": Rule("a list of sizes", lambda value: is_list(value, is_whole, 0, 32)),
    "data_offsets": _OFFSETS,
}
_INDEX = {
    "weight_map": Rule(
        f"tensors and the file of each, of at most {_MOST_PARTS}, beside the index",
        lambda value: type(value) is dict
        and 0 < len(set(map(str, value.values()))) <= _MOST_PARTS
        and all(
            is_name(name) and re.fullmatch(r"\w[\w.-]*\.(safetensors|bin)", name)
            for name in value.values()
        ),
    )
}
_HEADER = {"__metadata__": optional(Rule("a dictionary", lambda value: type(value) is dict))}


def _read_pickle(file: BufferedIOBase, allowance: Allowance) -> tuple[Content, str]:
    first = DataUnpickler(file, allowance.size, allowance=allowance).load()
    if first == TORCH_MAGIC:
        return _read_torch_legacy(file, allowance), "torch"
    return first, "paddle"


def _read_torch_legacy(file: BufferedIOBase, allowance: Allowance) -> Content:
    """Reads torch's format before 1.6: pickles of two constants, the machine, the object and its
    storages' keys; then each storage, its length before it.
    """
    size = allowance.size
    protocol, machine = (DataUnpickler(file, size, allowance=allowance).load() for _ in range(2))
    if protocol != TORCH_PROTOCOL or machine.get("little_endian") is not True:
        raise Unreadable("it was written by an unknown torch, or on a big-endian machine")
    spans: dict[str, Span] = {}

    def storage(key: str, length: int) -> Span:
        if spans.setdefault(key, Span(file, 0, length)).length != length:
            raise Unreadable(f"its storage {printable(key)} has two lengths")
        return spans[key]

    content = DataUnpickler(file, size, storage, allowance).load()
    keys = DataUnpickler(file, size, allowance=allowance).load()
    if (
        type(keys) is not list
        or not all(type(key) is str for key in keys)
        or sorted(keys) != sorted(spans)
    ):
        raise Unreadable("its storages aren't those that its tensors need")
    start = file.tell()
    for key in keys:
        file.seek(start)
        (count,) = struct.unpack("<q", file.read(8))
        span = spans[key]
        span.offset = start + 8
        start = start + 8 + span.length
        if span.length not in (count, 2 * count, 4 * count, 8 * count) or start > size:
            raise Unreadable(
                f"it ends early, or its storage {printable(key)} has another length than its tensors say"
            )
    return content


# ------------------------------------------------------- what the weights are


def _weights(content: Any) -> tuple[dict[str, Array], list[str]]:
    """Returns the arrays of a checkpoint by their clean names, and what there is to tell."""
    notes = []
    if type(content) is Script:
        content = _flat(content)
    for _ in range(3):  # one inside the other
        held = [
            key
            for key in WRAPPERS
            if type(content) is dict and type(content.get(key)) is dict and content[key]
        ]
        if not held:
            break
        if len(held) > 1:
            notes.append(f"its {held[0]} was taken (it holds {', '.join(held)})")
        content = content[held[0]]
    if type(content) is not dict:
        raise Unreadable("it holds no dictionary of arrays")
    found = {}
    others = []
    for name, value in content.items():
        if type(value) is tuple and len(value) == 2:  # Paddle's (parameter's name, array)
            value = value[1]
        clean = _WRAPPED.sub("", _INNER.sub("", name[: LONGEST_NAME + 1]))
        if not isinstance(value, Array):
            others.append(name)
        elif not is_name(name, LONGEST_NAME):
            raise Unreadable(
                f"it holds an array under the name {printable(name)}, which can't be printed in a line"
            )
        elif clean in found:
            raise Unreadable(f"it holds {printable(clean)} twice, with a prefix and without")
        else:
            found[clean] = value
    # Paddle's own names
    others = [name for name in others if name != "StructuredToParameterName@@"]
    told = printable(", ".join(name[:LONGEST_NAME] for name in others[:40]))
    if not found:
        raise Unreadable(f"it holds no arrays, but {told or 'nothing'}")
    if others:
        notes.append(f"left out, being no arrays: {told}")
    return found, notes


def _flat(program: Script) -> Content:
    """Returns the arrays of a TorchScript program by their full names; of a module with several
    names the first.
    """
    found: Content = {}
    seen = {id(program)}
    left = [("", program)]
    while left:
        prefix, module = left.pop()
        for name, value in module.items():
            if isinstance(value, Array):
                found[prefix + name] = value
            elif type(value) is Script and id(value) not in seen and len(prefix) <= LONGEST_NAME:
                seen.add(id(value))
                left.append((f"{prefix}{name}.", value))
    return found


def _claim(entries: dict[str, Array], layout: str, allowance: Allowance) -> None:
    """Raises Unreadable where all of what was described, together, is out of proportion."""
    for entry in entries.values():
        # which Paddle has no type for: its bfloat16, by way of NumPy
        if layout == "paddle" and entry.dtype == "<u2":
            entry.dtype = "bfloat16"
    allowance.take(sum(entry.num_bytes() + ARRAY for entry in entries.values()))


def _read_entry(entry: Array, allowance: Allowance) -> np.ndarray:
    passing = entry.passing()
    allowance.take(passing)
    array = entry.read()
    allowance.take(-passing)
    return array


def _check_finite(name: str, array: np.ndarray) -> None:
    bad = array.size - np.count_nonzero(np.isfinite(array)) if array.dtype.kind == "f" else 0
    if bad:
        raise Unreadable(
            f"{bad} of the {array.size} values of {printable(name)} are NaN or infinite; take other weights"
        )
