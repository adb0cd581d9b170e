"""Reads pickles as data: nothing that a file names is imported, called or built.

Python's own pickle module imports and calls whatever a file names. This reader builds text,
numbers, lists, tuples and dictionaries by itself. A global of the file is only a label. It is
looked up in a closed table (``ADMITTED``) of functions of this module. These describe arrays, or
return a placeholder for plain data that isn't needed. As arrays are described and not read, a
checkpoint's other tensors, such as its optimizer's, cost nothing. The opcodes are those of
CPython's pickletools, protocols 2 to 5.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

from errors import Allowance, Unreadable, printable
from weights.arrays import (
    NUMPY_CODES,
    STORAGES,
    TORCH_DTYPES,
    Array,
    Span,
    contiguous,
    is_count,
    item_size,
    sizes,
)

# The bytes that an opcode and a call take at most. ViT-B with its optimizer has 20,000 opcodes and
# 3,000 calls.
OPCODE = 160
CALL = 2000
# In bytes. A longer text is an array's content, as protocol 2 stores it, and stays in the file.
LONGEST_TEXT = 1 << 16

# Returns the place of a torch storage in the file, by its key and its size in bytes.
StoragePlaces = Callable[[str, int], Span]


@dataclass(frozen=True)
class _Name:
    """A global that the file names."""

    label: str


class _Blank:
    """A placeholder for plain data that isn't needed."""

    __slots__ = ()


class Script(dict[str, Any]):
    """The attributes of a module in a TorchScript program. Its code isn't read."""


@dataclass
class _DType:
    """A NumPy dtype: its code, such as "f4", and its byte order."""

    code: str
    order: str = "|"


@dataclass
class _Storage:
    """A storage of torch's: the dtype of its elements, and where they are."""

    dtype: str
    data: Span


class DataUnpickler:
    """Builds the data that a pickle describes.

    Args:
        file: is at the pickle's first byte. ``load`` leaves it behind the last one.
        end: the size of the file in bytes.
        storage: finds torch's storages; None: the pickle may not have any.
        allowance: limits the memory; None: one in proportion to ``end``.
    """

    def __init__(
        self,
        file: BufferedIOBase,
        end: int,
        storage: StoragePlaces | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        self.file = file
        self.end = end
        self.storage = storage
        self.allowance = allowance or Allowance(end)
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Returns the pickle's object.

        It consists of dictionaries with text keys (others are dropped), lists (also for sets),
        tuples, texts, numbers, ``Array`` and placeholders.

        Raises:
            Unreadable: the pickle names a global that isn't admitted, uses an opcode that arrays
                don't need, or takes too much memory.
            Exception: the pickle is damaged.
        """
        while (opcode := self._take(1)) != b".":
            self.allowance.take(CALL if opcode in _CALLS else OPCODE)
            if opcode in _SKIPPED:
                self._take(_SKIPPED[opcode])
            elif opcode in _FIXED:
                self.stack.append(_FIXED[opcode])
            elif opcode in _NEW:
                self.stack.append(_NEW[opcode]())
            elif opcode in _NUMBERS:
                self.stack.append(self._number(_NUMBERS[opcode]))
            elif opcode in _TEXTS:
                self.stack.append(self._text(*_TEXTS[opcode]))
            elif opcode in _BYTES:
                self.stack.append(self._span(self._number(_BYTES[opcode])))
            elif opcode in _TUPLES:
                self.stack[-_TUPLES[opcode] :] = [tuple(self.stack[-_TUPLES[opcode] :])]
            elif opcode in _PUTS:
                self.memo[self._number(_PUTS[opcode])] = self.stack[-1]
            elif opcode in _GETS:
                self.stack.append(self.memo[self._number(_GETS[opcode])])
            elif opcode in _ACTIONS:
                _ACTIONS[opcode](self)
            else:
                raise Unreadable(f"its pickle uses the opcode {opcode!r}, which isn't allowed")
        return self.stack.pop()

    def _take(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) != count:
            raise Unreadable("it is truncated")
        return data

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _span(self, length: int) -> Span:
        offset = self.file.tell()
        if length > self.end - offset:
            raise Unreadable(
                f"it is truncated: expected {length} more bytes, found {self.end - offset}"
            )
        self.file.seek(length, 1)
        return Span(self.file, offset, length)

    def _text(self, form: str, encoding: str) -> str | Span:
        length = self._number(form)
        if length <= LONGEST_TEXT:
            self.allowance.take(4 * length)
            return self._take(length).decode(encoding, "surrogatepass")
        span = self._span(length)
        span.is_text = encoding == "utf-8"
        return span

    def _long(self) -> None:
        self.stack.append(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    def _mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def _mark_to_tuple(self) -> None:
        items = self._since_mark()
        self.stack.append(tuple(items))

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is list:
            self.stack[-1].extend(items)
        elif type(self.stack[-1]) is not _Blank:
            raise Unreadable("its pickle appends to an object that isn't a list")

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # Only text keys can name weights. Hashing other keys could take forever.
        if type(target) is dict:
            target.update(
                (key, value)
                for key, value in zip(items[::2], items[1::2], strict=True)
                if type(key) is str
            )
        elif type(target) is not _Blank:
            raise Unreadable("its pickle sets items of an object that isn't a dictionary")

    def _global(self) -> None:
        module = self.file.readline(256).rstrip(b"\n")
        name = self.file.readline(256).rstrip(b"\n")
        self._name(module.decode(), name.decode())

    def _stack_global(self) -> None:
        name = self.stack.pop()
        module = self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise Unreadable("its pickle names a global by an object that isn't text")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        label = f"{_RENAMED.get(module, module)}.{name}"
        if label not in ADMITTED and not label.startswith(_SCRIPTED):
            wanted = printable(f"{module}.{name}")
            raise Unreadable(f"it asks to load {wanted}; only arrays and plain containers are read")
        self.stack.append(_Name(label))

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        self.stack.append(_describe(function, arguments))

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Array:
            _fill_array(target, state)
        elif type(target) is _DType:
            _fill_dtype(target, state)
        elif type(target) is Script and type(state) is dict:
            target.update(state)
        # The state of a dictionary or a placeholder would be its attributes, which aren't needed.
        elif type(target) not in (dict, _Blank):
            raise Unreadable("its pickle sets the state of an object without one")

    def _persistent(self) -> None:
        problem = "its pickle refers to an external object that isn't the storage of a tensor"
        name = self.stack.pop()
        is_tuple = type(name) is tuple and len(name) in (5, 6) and name[5:] in ((), (None,))
        if self.storage is None or not is_tuple:
            raise Unreadable(problem)
        kind, storage_type, key, _, count = name[:5]
        dtype = STORAGES.get(storage_type.label) if type(storage_type) is _Name else None
        if kind != "storage" or dtype is None or type(key) is not str or not is_count(count):
            raise Unreadable(problem)
        self.stack.append(_Storage(dtype, self.storage(key, count * item_size(dtype))))


# PROTO and FRAME, with the size of their arguments.
_SKIPPED = {b"\x80": 1, b"\x95": 8}
# The opcodes that call a name, or set the state of what a call returned.
_CALLS = b"R\x81bQ"
# The values of opcodes without arguments.
_FIXED = {b"N": None, b"\x88": True, b"\x89": False, b")": ()}
# The types of empty containers. The last opcode is EMPTY_SET. A set becomes a list, because hashing
# its elements could take forever.
_NEW = {b"]": list, b"}": dict, b"\x8f": list}
# By opcode, the form of a number, and of the length of a text or of bytes, as of ``struct``.
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_TEXTS = {
    b"\x8c": ("<B", "utf-8"), b"X": ("<I", "utf-8"), b"\x8d": ("<Q", "utf-8"),
    # Python 2's strings, and short bytes, which may be a key.
    b"U": ("<B", "latin-1"), b"T": ("<I", "latin-1"), b"C": ("<B", "latin-1"),
}  # fmt: skip
_BYTES = {b"B": "<I", b"\x8e": "<Q", b"\x96": "<Q"}
# The sizes of tuples.
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
# The form of a place in the memo.
_PUTS = {b"q": "<B", b"r": "<I"}
_GETS = {b"h": "<B", b"j": "<I"}
_ACTIONS: dict[bytes, Callable[[DataUnpickler], Any]] = {
    b"(": DataUnpickler._mark,
    b"t": DataUnpickler._mark_to_tuple,
    b"\x91": DataUnpickler._mark_to_tuple,  # FROZENSET
    b"0": lambda machine: machine.stack.pop(),
    b"1": DataUnpickler._since_mark,
    b"a": lambda machine: machine._extend([machine.stack.pop()]),
    b"e": lambda machine: machine._extend(machine._since_mark()),
    b"\x90": lambda machine: machine._extend(machine._since_mark()),  # ADDITEMS
    b"s": lambda machine: machine._set_items([machine.stack.pop(-2), machine.stack.pop()]),
    b"u": lambda machine: machine._set_items(machine._since_mark()),
    # MEMOIZE
    b"\x94": lambda machine: machine.memo.__setitem__(len(machine.memo), machine.stack[-1]),
    b"\x8a": DataUnpickler._long,
    b"c": DataUnpickler._global,
    b"\x93": DataUnpickler._stack_global,
    b"R": DataUnpickler._reduce,
    b"\x81": DataUnpickler._reduce,  # NEWOBJ
    b"b": DataUnpickler._build,
    b"Q": DataUnpickler._persistent,
}

# The functions that stand for calls of admitted names

# The prefix of the classes of a TorchScript program.
_SCRIPTED = "__torch__."


def _describe(function: Any, arguments: Any) -> Any:
    """Returns the stand-in for a call of a name in the file."""
    if type(function) is _Name and function.label.startswith(_SCRIPTED):
        # It is a module, or a member of an enumeration, whose arguments are a value.
        return Script()
    if type(function) is not _Name or type(arguments) is not tuple:
        raise Unreadable("its pickle calls an object that isn't an allowed name")
    describe = ADMITTED[function.label]
    if describe is None:
        raise Unreadable(f"its pickle calls {function.label}, which isn't allowed")
    return describe(*arguments)


def _fill_array(array: Array, state: Any) -> None:
    _, shape, dtype, fortran, data = state
    if type(dtype) is not _DType or dtype.code not in NUMPY_CODES:
        raise Unreadable(
            f"it contains an array of dtype {printable(getattr(dtype, 'code', 'unknown'))};"
            " expected numbers"
        )
    if type(data) not in (Span, str):
        raise Unreadable("it contains an array without content")
    array.__init__(dtype.order + dtype.code, shape, contiguous(sizes(shape), fortran is True), data)
    # The length of a text's content isn't known before it is read.
    if type(data) is not Span or data.is_text:
        return
    if array.extent() * item_size(array.dtype) != data.length:
        raise Unreadable(f"it contains an array of shape {list(shape)} with {data.length} bytes")


def _fill_dtype(dtype: _DType, state: Any) -> None:
    order = state[1] if type(state) is tuple else None
    if type(order) is not str or order not in ("<", ">", "|", "="):
        raise Unreadable("it contains a dtype without a byte order")
    dtype.order = order


def _dtype(code: Any, *_: Any) -> _DType:
    if type(code) is not str:
        raise Unreadable("it contains a dtype without a name")
    return _DType(code)


def _array_from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Array:
    array = Array()
    _fill_array(array, (1, shape, dtype, order == "F", data))
    return array


def _tensor(
    storage: Any, first: Any, shape: Any, strides: Any, *_: Any, dtype: str | None = None
) -> Array:
    if type(storage) is not _Storage:
        raise Unreadable("it contains a tensor without a storage")
    return Array(dtype or storage.dtype, shape, strides, storage.data, first)


def _typed_tensor(
    storage: Any, first: Any, shape: Any, strides: Any, _: Any, hooks: Any, dtype: Any, *more: Any
) -> Array:
    code = TORCH_DTYPES.get(dtype.label) if type(dtype) is _Name else None
    if code is None:
        raise Unreadable("it contains a tensor of an unsupported dtype")
    return _tensor(storage, first, shape, strides, dtype=code)


def _dictionary(*arguments: Any) -> dict[str, Any]:
    if any(type(argument) not in (_Name, type(None)) for argument in arguments):
        raise Unreadable("it contains a dictionary that is built from something else")
    # The pickle sets its items later.
    return {}


def _first(first: Any = "", *_: Any) -> Any:
    """Returns the first argument."""
    # The argument isn't copied: a list that is copied again and again would fill the memory.
    return first


def _encode(text: Any, encoding: Any) -> Any:
    """Returns a text whose Latin-1 encoding protocol 2 means; ``Array`` takes it as its content."""
    if encoding not in ("latin1", "latin-1"):
        raise Unreadable("it contains bytes in an encoding other than Latin-1")
    return text


def _from_type(function: Any, _: Any, arguments: Any, state: Any) -> Any:
    """Returns what ``function`` returns. The type of the tensor, and its state, aren't needed."""
    return _describe(function, arguments)


def _blank(*_: Any) -> _Blank:
    return _Blank()


_RENAMED = {
    "__builtin__": "builtins",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
    # Python 3.13's
    "pathlib._local": "pathlib",
}
_SCRIPT_LISTS = (
    "build_intlist",
    "build_doublelist",
    "build_boollist",
    "build_tensorlist",
    "restore_type_tag",
)
_PLAIN_DATA = (
    "argparse.Namespace", "yacs.config.CfgNode", "collections.Counter", "datetime.datetime",
    "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib.WindowsPath",
    "pathlib.PureWindowsPath", "numpy._core.multiarray.scalar", "torch.Size", "torch.device",
    "torch.serialization._get_layout", "omegaconf.base.ContainerMetadata",
    "omegaconf.base.Metadata", "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig", "omegaconf.nodes.AnyNode", "builtins.set",
    "builtins.frozenset", "builtins.complex", "builtins.bytearray",
    *(f"torch.jit._pickle.{name}" for name in _SCRIPT_LISTS),
)  # fmt: skip
_LABELS = (
    "numpy.ndarray", "torch.Tensor", "torch.nn.parameter.Parameter", "typing.Any", "builtins.dict",
    "builtins.list", "builtins.int", "builtins.long", "builtins.float", "builtins.str",
    "builtins.bool", *STORAGES, *TORCH_DTYPES,
)  # fmt: skip
# The names that a file may use. A call of a name returns what the function here returns. Names with
# None may not be called.
ADMITTED: dict[str, Callable[..., Any] | None] = {
    **dict.fromkeys(_LABELS),
    **dict.fromkeys(_PLAIN_DATA, _blank),
    "collections.OrderedDict": _dictionary,
    "collections.defaultdict": _dictionary,
    # (name, array), as Paddle pickles a tensor.
    "builtins.tuple": _first,
    # In protocol 2, empty bytes.
    "builtins.bytes": _first,
    "_codecs.encode": _encode,
    "numpy.dtype": _dtype,
    # The pickle sets the array's state later.
    "numpy._core.multiarray._reconstruct": lambda *_: Array(),
    "numpy._core.numeric._frombuffer": _array_from_buffer,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _from_type,
}
