"""Arrays in a file that are described first, and read one by one when their values are needed."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

import numpy as np

from errors import Unreadable

NUMPY_CODES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
STORAGES = {
    "torch.HalfStorage": "<f2", "torch.FloatStorage": "<f4", "torch.DoubleStorage": "<f8",
    "torch.CharStorage": "|i1", "torch.ShortStorage": "<i2", "torch.IntStorage": "<i4",
    "torch.LongStorage": "<i8", "torch.ByteStorage": "|u1", "torch.BoolStorage": "|b1",
    "torch.BFloat16Storage": "bfloat16", "torch.storage.UntypedStorage": "|u1",
}  # fmt: skip
TORCH_DTYPES = {
    "torch.float16": "<f2", "torch.float32": "<f4", "torch.float64": "<f8", "torch.int8": "|i1",
    "torch.int16": "<i2", "torch.int32": "<i4", "torch.int64": "<i8", "torch.uint8": "|u1",
    "torch.uint16": "<u2", "torch.uint32": "<u4", "torch.uint64": "<u8", "torch.bool": "|b1",
    "torch.bfloat16": "bfloat16",
}  # fmt: skip


def item_size(dtype: str) -> int:
    """Returns the size of a number in bytes; ``dtype`` is NumPy's code, or "bfloat16"."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def is_count(value: Any) -> bool:
    """Returns whether a value from a file is valid as a number of elements or bytes."""
    return type(value) is int and 0 <= value < 1 << 48


def sizes(value: Any) -> tuple[int, ...]:
    """Returns a file's shape or strides, once they are checked.

    Raises:
        Unreadable: it isn't a tuple of up to 32 sizes.
    """
    if type(value) is not tuple or len(value) > 32 or not all(map(is_count, value)):
        raise Unreadable("it contains an array whose shape or strides aren't a tuple of sizes")
    return value


def contiguous(shape: tuple[int, ...], fortran: bool = False) -> tuple[int, ...]:
    """Returns the strides, in elements, of an array without gaps."""
    inner = shape if fortran else shape[::-1]
    strides = tuple(math.prod(inner[:axis]) for axis in range(len(inner)))
    return strides if fortran else strides[::-1]


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Returns float32 values that are rounded to bfloat16: to the nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def native(array: np.ndarray, is_bfloat16: bool = False) -> np.ndarray:
    """Returns floats as float32, other numbers in this machine's byte order, contiguous.

    At most one copy is made.

    Args:
        is_bfloat16: the array holds the 16 bits of each number.
    """
    if is_bfloat16:
        bits = array.astype(np.uint32, order="C")
        bits <<= 16
        return bits.view(np.float32)
    # A float64 beyond float32's range becomes infinite here, and is refused as such later.
    with np.errstate(over="ignore"):
        dtype = np.float32 if array.dtype.kind == "f" else array.dtype.newbyteorder("=")
        return array.astype(dtype, order="C", copy=False)


@dataclass(eq=False, slots=True)
class Span:
    """A range of bytes in an open file, which is read later.

    Attributes:
        is_text: the bytes are UTF-8 text. Its Latin-1 encoding is the content: so do pickles of
            protocol 2 store bytes.
        crc: the CRC-32 of the whole range; None: it has none.
    """

    file: BufferedIOBase
    offset: int
    length: int
    is_text: bool = False
    crc: int | None = None

    @property
    def is_packed(self) -> bool:
        """Returns whether reading does more than copy bytes."""
        return self.is_text

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns ``count`` bytes from ``start`` as uint8 [count]; a text is returned whole."""
        self.file.seek(self.offset + start)
        if self.is_text:
            return from_latin1(self.file.read(self.length).decode())
        data = np.empty(count, np.uint8)
        if self.file.readinto(data.data) != count:
            raise Unreadable("it is truncated")
        if self.crc is not None and count == self.length and zlib.crc32(data.data) != self.crc:
            raise Unreadable("its content doesn't match its checksum; copy it again")
        return data


def from_latin1(text: str) -> np.ndarray:
    """Returns the Latin-1 encoding of a text as uint8."""
    return np.frombuffer(bytearray(text.encode("latin-1")), np.uint8)


@dataclass(eq=False, slots=True)
class Array:
    """The description of an array in a file.

    Attributes:
        dtype: NumPy's code of its numbers, or "bfloat16".
        strides: by axis, in elements of ``data``.
        data: where the elements are; a text stands for its Latin-1 bytes.
        first: the element of ``data`` at which the array begins.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    data: Span | str = ""
    first: int = 0

    def __post_init__(self) -> None:
        if len(sizes(self.shape)) != len(sizes(self.strides)) or not is_count(self.first):
            raise Unreadable(
                "it contains an array whose shape, strides and offset are inconsistent"
            )
        # The length of a text's Latin-1 form isn't known before the text is read.
        if not isinstance(self.data, Span) or self.data.is_text:
            return
        if (self.first + self.extent()) * item_size(self.dtype) > self.data.length:
            raise Unreadable(
                f"it contains an array of shape {list(self.shape)} that reaches beyond its storage"
            )

    def extent(self) -> int:
        """Returns the number of elements of ``data`` from the first one used to the last one."""
        last = sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )
        return 1 + last if all(self.shape) else 0

    def num_bytes(self) -> int:
        """Returns the size in bytes of the array that ``read`` returns."""
        return math.prod(self.shape) * self.native_dtype.itemsize

    @property
    def native_dtype(self) -> np.dtype:
        """Returns the dtype of the array that ``read`` returns."""
        is_float = self.dtype == "bfloat16" or np.dtype(self.dtype).kind == "f"
        return np.dtype(np.float32) if is_float else np.dtype(self.dtype).newbyteorder("=")

    @property
    def is_packed(self) -> bool:
        """Returns whether reading does more than copy bytes of a file."""
        return not isinstance(self.data, Span) or self.data.is_packed

    def temporary_bytes(self) -> int:
        """Returns how many bytes reading takes at most besides the result."""
        size = max(self.extent(), math.prod(self.shape)) * item_size(self.dtype)
        if isinstance(self.data, Span) and self.data.is_text:
            size += 2 * self.data.length
        return size

    def read(self) -> np.ndarray:
        """Returns the array: floats as float32, integers and booleans as they are."""
        size = item_size(self.dtype)
        extent = self.extent()
        if isinstance(self.data, str):
            data = from_latin1(self.data)
        else:
            data = self.data.read(self.first * size, extent * size)
        if data.size != extent * size:
            raise Unreadable(
                f"it contains an array of shape {list(self.shape)} with {data.size} bytes"
            )
        is_bfloat16 = self.dtype == "bfloat16"
        flat = data.view("<u2" if is_bfloat16 else self.dtype)
        strided = np.lib.stride_tricks.as_strided(
            flat, self.shape, [stride * size for stride in self.strides]
        )
        return native(strided, is_bfloat16)


class LazyArray:
    """An array whose values are read each time they are needed, and never kept.

    So a model's weights can be handled as arrays while only one tensor at a time is in memory.
    Shape and dtype are known without reading. ``T``, ``transpose``, ``reshape`` and indexing return
    lazy arrays. NumPy's functions and all other attributes of an array read the values.

    Args:
        read: called to get the values.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], np.ndarray]
    ) -> None:
        # A stand-in of this shape and dtype that takes the memory of a single number.
        self._form = np.broadcast_to(np.zeros((), dtype), shape)
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        self.size = self._form.size
        self.itemsize = dtype.itemsize
        self.nbytes = self._form.nbytes
        self._read = read

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._read()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __getattr__(self, name: str) -> Any:
        # NumPy looks for its protocols, whose names begin so, before it calls ``__array__``.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def __len__(self) -> int:
        return len(self._form)

    def __getitem__(self, key: Any) -> Any:
        # A single number is read at once.
        if not np.ndim(self._form[key]):
            return np.asarray(self)[key]
        return self.changed(lambda array: array[key])

    def transpose(self, *axes: Any) -> "LazyArray":
        return self.changed(lambda array: array.transpose(*axes))

    def reshape(self, *shape: Any) -> "LazyArray":
        return self.changed(lambda array: array.reshape(*shape))

    @property
    def T(self) -> "LazyArray":
        return self.transpose()

    def changed(self, change: Callable[[np.ndarray], np.ndarray]) -> "LazyArray":
        """Returns ``change(array)`` as a lazy array."""
        form = change(self._form)
        return LazyArray(form.shape, form.dtype, lambda: change(self._read()))


def concatenated(arrays: Sequence[Any]) -> Any:
    """Returns arrays concatenated along the first axis; lazily if the first one is lazy."""
    first = arrays[0]
    rows = {array.shape[1:] for array in arrays}
    if not isinstance(first, LazyArray) or rows != {first.shape[1:]}:
        return np.concatenate(arrays)
    shape = (sum(len(array) for array in arrays), *first.shape[1:])
    return LazyArray(shape, first.dtype, lambda: np.concatenate(arrays))
