"""Reads and writes the weight files of torch, timm, Paddle and Google; no code from a file is run.

A file's kind is decided by its content, not by its ending. Opening a file only describes its
arrays; each is read when its values are needed. Files aren't memory-mapped, because a mapped file
that another program shortens ends the process. The contents of files are parsed in this module,
``archives``, ``arrays``, ``unpickle`` and ``settings.plain`` alone. All of them count the memory
that they take (``errors.Allowance``).
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
from weights.sums import check_sum
from weights.unpickle import DataUnpickler, Script

# The keys under which checkpoints keep their weights. The order of the first ones is that of timm's
# load_state_dict, which prefers the averaged weights.
WRAPPERS = (
    "state_dict_ema",
    "model_ema",
    "state_dict",
    "model",
    "model_state_dict",
    "model_state",
    "module",
    "net",
    "teacher",
)
# The parts of a checkpoint of self-distillation. They are read together, each name behind its part's.
_PARTS = ("student", "teacher", "dino_loss", "ibot_loss")
# Prefixes of names, in any order: that of DataParallel, and the attributes in which other modules,
# such as Lightning's, usually hold the model. "model." before a number isn't a prefix: PaddleViT's
# VOLO has its stages there.
_WRAPPED = re.compile(r"^((module|model|net|backbone)\.)+(?!\d)")
# Names of wrappers inside the model: those of torch.compile, FSDP, activation checkpoints and
# Fabric.
_INNER = re.compile(
    r"(?:(?<=\.)|^)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)

# The entry of a .safetensors file's metadata with this toolkit's description of the model, in JSON.
METADATA = "paddle_vit_toolkit"
SAFETENSORS_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bfloat16", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
    "BOOL": "|b1",
}  # fmt: skip
LONGEST_NAME = 256  # characters of a tensor's name
# The first two pickles of a file by torch.save before PyTorch 1.6.
TORCH_MAGIC = 0x1950A86A20F9469CFC6C
TORCH_PROTOCOL = 1001
# The names of weights that are split into several files.
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.(safetensors|bin)$")
_MOST_FILES = 1000
# The bytes that the description of an array takes at most.
ARRAY = 1000

# The arrays of a checkpoint, and whatever else it holds.
Content = dict[str, Any]


@dataclass(frozen=True)
class WeightFile:
    """The weights of a file.

    Attributes:
        path: the file.
        arrays: by the file's names, without a checkpoint's wrapper and the prefix ``module.``.
            Floats are float32. ``open_weights`` gives instances of ``LazyArray``. Reading one of
            them raises InputError if its values can't be read, or aren't finite.
        layout: "torch" (a Linear's weight is [out, in]), "paddle" ([in, out]) or "jax" (Google's
            npz).
        config: what ``read_config`` returns.
        notes: what was chosen or left out, to be shown.
        opened: the open files by path, each with its status when it was opened.
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
            is_written = (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns)
            # ctime also changes if another file takes this one's name, which removes a link to it.
            # The open file is unchanged then.
            is_renamed = before.st_nlink != now.st_nlink
            if is_written or (before.st_ctime_ns != now.st_ctime_ns and not is_renamed):
                raise InputError(
                    f"{file}: it changed while it was read; load it again once it is written"
                    " completely"
                )


def read_weights(path: str | Path) -> WeightFile:
    """Reads a weight file of any kind with all of its values.

    Raises:
        InputError: as ``open_weights``, and where a value can't be read or isn't finite.
    """
    with open_weights(path) as stored:
        arrays = {name: np.asarray(array) for name, array in stored.arrays.items()}
        return replace(stored, arrays=arrays)


@contextlib.contextmanager
def open_weights(path: str | Path) -> Iterator[WeightFile]:
    """Opens a weight file of any kind; its arrays are read within the context, on demand.

    Arrays that have to be unpacked (compressed .npz, text in pickles of Python 2) are read once and
    kept.

    Raises:
        InputError: there is no such file; it is of another kind, damaged, or refers to something
            that isn't data; or it would take memory out of proportion to its size.
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
                check_sum(file)
                stream = opened.enter_context(open_file(file))
                streams[file] = stream, os.fstat(stream.fileno())
                allowance = Allowance(streams[file][1].st_size)
                read = _reader(stream.peek(512)[:512])
                content, layout = read(stream, allowance)
                entries, file_notes = _weights(content)
                _take_memory(entries, layout, allowance)
                for name, entry in entries.items():
                    if name in arrays:
                        other = f"which occurs in another of the {len(files)} files as well"
                        raise Unreadable(f"it contains {printable(name)}, {other}")
                    arrays[name] = _lazy(file, name, entry, allowance)
            layouts.add(layout)
            notes += file_notes
        if len(layouts) > 1:
            kinds = ", ".join(sorted(layouts))
            raise InputError(f"{index}: its files have different layouts ({kinds}), expected one")
        yield WeightFile(index, arrays, layouts.pop(), read_config(path), notes, streams)


def _lazy(file: Path, name: str, entry: Array, allowance: Allowance, what: str = "weights") -> Any:
    """Returns an array of a file that is read later, with the checks of an untrusted file.

    Args:
        what: names the file's kind in errors. All values of "weights" have to be finite.
    """

    def read() -> np.ndarray:
        with reading(file, what):
            allowance.resume()
            array = _read_entry(entry, allowance)
            if what == "weights":
                _check_finite(name, array)
            return array

    if entry.is_packed:
        return read()
    return LazyArray(entry.shape, entry.native_dtype, read)


def files_of(path: str | Path) -> list[Path]:
    """Returns the files that hold weights: a single file, or those that an index names.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: there is no such file; an index can't be read, or names a file that isn't next
            to it; or the file is one of several.
    """
    file = find_weights(path)
    split = _SPLIT.search(file.name)
    if split and int(split[1]) > 1:
        raise InputError(
            f"{file} is one of {int(split[1])} files of the weights; pass their folder, with its"
            f" {INDEX}"
        )
    if not file.name.endswith(INDEX):
        return [file]
    with reading(file, "an index of weights"):
        content = parsed_json(whole_file(file, LONGEST_CONFIG))
        check_form(content, _INDEX, tuple(_INDEX))
        names = sorted(set(content["weight_map"].values()))
    files = []
    for name in names:
        part = beside(path, name)
        if part is None or not os.path.isfile(part):
            raise InputError(
                f"{file}: {printable(name)}, which it lists, isn't next to it; copy it there"
            )
        files.append(part)
    return files


@contextlib.contextmanager
def open_arrays(file: Path) -> Iterator[dict[str, Any]]:
    """Opens a .safetensors file; its arrays are read within the context, on demand.

    Floats are float32; NaN and infinite values are accepted.

    Raises:
        InputError: it can't be read, or would take memory out of proportion to its size.
    """
    with contextlib.ExitStack() as opened:
        with reading(file, "tensors"):
            stream = opened.enter_context(open_file(file))
            allowance = Allowance(os.fstat(stream.fileno()).st_size)
            entries, _ = _read_safetensors(stream, allowance)
            _take_memory(entries, "torch", allowance)
        yield {
            name: _lazy(file, name, entry, allowance, "tensors") for name, entry in entries.items()
        }


def read_arrays(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and arrays of a .safetensors file, reading one at a time.

    Floats are float32; NaN and infinite values are accepted.

    Raises:
        InputError: it can't be read, or would take memory out of proportion to its size.
    """
    with open_arrays(file) as arrays:
        for name, array in arrays.items():
            yield name, np.asarray(array)


def read_metadata(file: Path) -> dict[str, str]:
    """Returns the metadata of a .safetensors file; {} for a file of another kind.

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
    """Writes arrays to a .safetensors, .pdparams or .npz file, whole or not at all.

    A .pdparams file is a pickle of a dictionary of NumPy arrays, which ``paddle.load`` reads.

    Args:
        metadata: texts to store beside the tensors, in .safetensors alone.

    Raises:
        InputError: another ending.
    """
    if path.suffix not in (".safetensors", ".pdparams", ".npz"):
        raise InputError(f"{path}: unknown file ending; expected .safetensors, .pdparams or .npz")
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
    """Anything that bytes can be written to."""

    def write(self, data: Any, /) -> Any: ...


def write_safetensors(
    file: Writable, arrays: dict[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays in the safetensors format, one at a time.

    The bytes are those of ``safetensors.numpy.save``, which takes memory for two copies of all
    arrays.
    """
    dtypes = {
        np.dtype(code): name for name, code in SAFETENSORS_DTYPES.items() if code != "bfloat16"
    }
    # Larger numbers first, so that every array is aligned.
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


# The kinds of files


def _reader(head: bytes) -> Callable[[BufferedIOBase, Allowance], tuple[Content, str]]:
    """Returns the function that reads files whose first bytes are ``head``."""
    if head[:2] == b"PK":
        return read_zip
    if head[8:9] == b"{":
        return _read_safetensors
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return _read_pickle
    text = head.lstrip().lower()
    if not head:
        problem = "it is empty"
    elif text.startswith(b"version https://git-lfs"):
        problem = "it is a Git LFS pointer, not the weights; run git lfs pull"
    elif text.startswith((b"<!doctype html", b"<html")):
        problem = "it is an HTML page, not the weights; download the file itself"
    else:
        problem = f"it isn't a weight file (it starts with {head[:8]!r})"
    raise Unreadable(
        f"{problem}; expected safetensors, torch's .pth or .bin, Paddle's .pdparams, or .npz"
    )


def _read_safetensors(file: BufferedIOBase, allowance: Allowance) -> tuple[dict[str, Array], str]:
    size = allowance.size
    header, start = _header(file, allowance)
    metadata = header.pop("__metadata__", None) or {}
    # PaddleNLP marks its files, whose Linear weights are [in, out].
    layout = "paddle" if metadata.get("format") == "pd" else "torch"
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
                "its tensors overlap, leave gaps, or don't have the sizes that the header lists"
                f" ({printable(name)})"
            )
        span = Span(file, start + begin, after - begin)
        content[name] = Array(dtype, shape, contiguous(shape), span)
        end = after
    if start + end != size:
        raise Unreadable(f"its tensors end at byte {start + end}, but the file has {size} bytes")
    return content, layout


def _header(file: BufferedIOBase, allowance: Allowance) -> tuple[dict[str, Any], int]:
    """Returns the header of a .safetensors file, and the offset at which its tensors begin."""
    (length,) = struct.unpack("<Q", file.read(8))
    if 8 + length > allowance.size:
        raise Unreadable(
            f"its safetensors header announces {length} bytes, the file has {allowance.size}"
        )
    allowance.take(length)
    text = file.read(length)
    if len(text) != length:
        raise Unreadable("it is truncated")
    header = parsed_json(text, allowance)
    check_form(header, _HEADER)
    return header, 8 + length


def _is_dtype(value: Any) -> bool:
    return type(value) is str and value in SAFETENSORS_DTYPES


def _is_weight_map(value: Any) -> bool:
    if type(value) is not dict or not 0 < len(set(map(str, value.values()))) <= _MOST_FILES:
        return False
    return all(
        is_name(name) and re.fullmatch(r"\w[\w.-]*\.(safetensors|bin)", name)
        for name in value.values()
    )


_ENTRY = {
    "dtype": Rule(f"one of {', '.join(SAFETENSORS_DTYPES)}", _is_dtype),
    "shape": Rule("a list of sizes", lambda value: is_list(value, is_whole, 0, 32)),
    "data_offsets": Rule(
        "two places, the first one first", lambda value: is_list(value, is_whole, 2, 2)
    ),
}
_INDEX = {
    "weight_map": Rule(
        f"tensors and the file of each, of at most {_MOST_FILES}, beside the index", _is_weight_map
    )
}
_HEADER = {"__metadata__": optional(Rule("a dictionary", lambda value: type(value) is dict))}


def _read_pickle(file: BufferedIOBase, allowance: Allowance) -> tuple[Content, str]:
    first = DataUnpickler(file, allowance.size, allowance=allowance).load()
    if first == TORCH_MAGIC:
        return _read_torch_legacy(file, allowance), "torch"
    return first, "paddle"


def _read_torch_legacy(file: BufferedIOBase, allowance: Allowance) -> Content:
    """Reads a file that PyTorch wrote before its release 1.6, behind its first pickle.

    Pickles follow of the protocol, the machine, the object and the keys of its storages; then comes
    each storage, with its length before it.
    """
    size = allowance.size
    protocol = DataUnpickler(file, size, allowance=allowance).load()
    machine = DataUnpickler(file, size, allowance=allowance).load()
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
        raise Unreadable("its storages don't match its tensors")
    start = file.tell()
    for key in keys:
        file.seek(start)
        (count,) = struct.unpack("<q", file.read(8))
        span = spans[key]
        span.offset = start + 8
        start = start + 8 + span.length
        # The file counts elements, whose size may be 1, 2, 4 or 8 bytes.
        if span.length not in (count, 2 * count, 4 * count, 8 * count) or start > size:
            raise Unreadable(
                f"it is truncated, or its storage {printable(key)} has another length than its"
                " tensors say"
            )
    return content


# The weights in a checkpoint


def _weights(content: Any) -> tuple[dict[str, Array], list[str]]:
    """Returns the arrays of a checkpoint by their names without prefixes, and notes for the user."""
    notes = []
    if type(content) is Script:
        content = _flat(content)
    # A wrapper may hold another one, as in {"model": {"state_dict": ...}}.
    for _ in range(3):
        held = [key for key in WRAPPERS if _holds(content, key)]
        if _holds(content, "student") and _holds(content, "teacher"):
            content = _joined_parts(content)
            break
        if not held:
            break
        if len(held) > 1:
            notes.append(f"its {held[0]} was used (it contains {', '.join(held)})")
        content = content[held[0]]
    if type(content) is not dict:
        raise Unreadable("it contains no dictionary of arrays")
    arrays = {}
    others = []
    for name, value in content.items():
        # Paddle pickles a tensor as (the parameter's name, its array).
        if type(value) is tuple and len(value) == 2:
            value = value[1]
        clean = _WRAPPED.sub("", _INNER.sub("", name[: LONGEST_NAME + 1]))
        if not isinstance(value, Array):
            others.append(name)
        elif not is_name(name, LONGEST_NAME):
            raise Unreadable(
                f"it contains an array under the name {printable(name)}, which has unprintable"
                " characters"
            )
        elif clean in arrays:
            raise Unreadable(f"it contains {printable(clean)} twice, with a prefix and without")
        else:
            arrays[clean] = value
    # Paddle's own table of parameters' names needs no mention.
    others = [name for name in others if name != "StructuredToParameterName@@"]
    listed = printable(", ".join(name[:LONGEST_NAME] for name in others[:40]))
    if not arrays:
        raise Unreadable(f"it contains no arrays, but {listed or 'nothing'}")
    if others:
        notes.append(f"ignored, because they aren't arrays: {listed}")
    return arrays, notes


def _holds(content: Any, key: str) -> bool:
    """Returns whether a checkpoint holds a dictionary under a key, and something in it."""
    return type(content) is dict and type(content.get(key)) is dict and bool(content[key])


def _joined_parts(content: Content) -> Content:
    """Returns what the parts of a checkpoint of self-distillation hold, as "teacher.NAME" and so on."""
    return {
        # A name that is too long stays so, and is refused later.
        f"{part}.{name[: LONGEST_NAME + 1]}": value
        for part in _PARTS
        if _holds(content, part)
        for name, value in content[part].items()
    }


def _flat(program: Script) -> Content:
    """Returns the arrays of a TorchScript program by their dotted names.

    A module that the program has under several names is listed under the first one.
    """
    arrays: Content = {}
    seen = {id(program)}
    waiting = [("", program)]
    while waiting:
        prefix, module = waiting.pop()
        for name, value in module.items():
            if isinstance(value, Array):
                arrays[prefix + name] = value
            elif type(value) is Script and id(value) not in seen and len(prefix) <= LONGEST_NAME:
                seen.add(id(value))
                waiting.append((f"{prefix}{name}.", value))
    return arrays


def _take_memory(entries: dict[str, Array], layout: str, allowance: Allowance) -> None:
    """Raises Unreadable if all arrays together are out of proportion to the file's size."""
    if layout == "paddle":
        # Paddle has no uint16 tensors. NumPy's uint16 arrays are what it makes of bfloat16.
        for entry in entries.values():
            if entry.dtype == "<u2":
                entry.dtype = "bfloat16"
    allowance.take(sum(entry.num_bytes() + ARRAY for entry in entries.values()))


def _read_entry(entry: Array, allowance: Allowance) -> np.ndarray:
    temporary = entry.temporary_bytes()
    allowance.take(temporary)
    array = entry.read()
    allowance.take(-temporary)
    return array


def _check_finite(name: str, array: np.ndarray) -> None:
    if array.dtype.kind != "f":
        return
    bad = array.size - np.count_nonzero(np.isfinite(array))
    if bad:
        raise Unreadable(
            f"{bad} of the {array.size} values of {printable(name)} are NaN or infinite; use"
            " other weights"
        )
