"""Reads the pages of a Parquet file's columns, each within limits of memory.

pyarrow reads a whole row group for one image, and allocates what a page says of itself. Here a page
is found by its header, and is unpacked only if its size is in proportion. The format is that of
github.com/apache/parquet-format; the values of a page are stored plainly or by a dictionary, as
pyarrow, datasets, Spark, DuckDB and Polars write them.
"""

import collections
import functools
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from errors import Allowance, Unreadable
from loading.files import opened_descriptor

# The kinds of pages.
_DATA = 0
_DICTIONARY = 2
_DATA_V2 = 3
# The encodings of values, by their numbers. The two of dictionaries are the same.
_PLAIN = 0
_RUNS = 3
_BY_DICTIONARY = (2, 8)
# The types of values that are numbers.
_NUMBERS = {"INT32": np.dtype("<i4"), "INT64": np.dtype("<i8")}
# Bytes of a page's header. Statistics may be part of it.
_HEADERS = (512, 1 << 20)
# Structures within a page's header are nested so deep.
_DEPTH = 4
# Bytes of unpacked pages that a process keeps.
KEPT = 128 << 20
# Bytes that a header takes in memory, and the places of a value.
_BYTES_PER_HEADER = 500
_BYTES_PER_VALUE = 24
_LENGTH = struct.Struct("<I")

Levels = np.ndarray | None


class Chunk(NamedTuple):
    """The values of a column in one row group.

    Attributes:
        file: its path.
        start: the place of the first page in the file.
        size: bytes of all pages, compressed.
        count: values, with those that are null.
        codec: the compression, as Parquet names it.
        kind: the physical type of the values.
        definition, repetition: the highest levels of the column.
    """

    file: str
    start: int
    size: int
    count: int
    codec: str
    kind: str
    definition: int
    repetition: int


class _Header(NamedTuple):
    """The header of a page.

    Attributes:
        kind: one of the kinds above.
        place: of the content in the file.
        size: bytes of the content.
        unpacked: bytes of the content without its compression.
        count: values.
        encoding: of the values.
        levels: bytes of the repetition and of the definition levels, in a page of version 2.
        is_packed: whether the values are compressed.
    """

    kind: int
    place: int
    size: int
    unpacked: int
    count: int
    encoding: int
    levels: tuple[int, int] = (0, 0)
    is_packed: bool = True


class ByteValues(Sequence[bytes]):
    """Texts or bytes in one block.

    Args:
        block: holds all of them.
        starts, ends: the places of each, [n].
    """

    def __init__(self, block: bytes, starts: np.ndarray, ends: np.ndarray) -> None:
        self.block = block
        self.starts = starts
        self.ends = ends

    def __len__(self) -> int:
        return len(self.starts)

    # ``index`` is a number; nothing uses slices.
    def __getitem__(self, index: Any) -> Any:
        return self.block[self.starts[index] : self.ends[index]]


class Page(NamedTuple):
    """The values of a page.

    Attributes:
        places: of each entry's value in ``values``, [n]; -1 for an entry that is null.
        starts_row: whether an entry begins a row, [n]; None: each does.
        values: the different values, or all of them.
    """

    places: np.ndarray
    starts_row: Levels
    values: ByteValues | np.ndarray


# ----------------------------------------------------------------- pages


def pages(chunk: Chunk, allowance: Allowance) -> Iterator[Page]:
    """Yields the pages of a chunk.

    Args:
        allowance: of the table, whose time counts.

    Raises:
        Unreadable: the chunk is damaged, a page would take memory out of proportion, or reading
            takes too long.
    """
    dictionary, headers = _headers(chunk)
    for header in headers:
        allowance.take(0)
        yield _page(chunk, header, dictionary)


def value_at(chunk: Chunk, row: int) -> bytes | None:
    """Returns the text or the bytes in a row of a chunk without repeated values; None for null.

    The last pages are kept, so that neighbours are read once.

    Raises:
        OSError: the file can't be read.
        Unreadable: as of ``pages``.
    """
    dictionary, headers = _headers(chunk)
    first = 0
    for header in headers:
        if row < first + header.count:
            page = _kept_page(chunk, header, dictionary)
            place = int(page.places[row - first])
            return page.values[place] if place >= 0 else None
        first += header.count
    raise Unreadable(f"a row group has {first} values, expected {chunk.count}")


def values_per_read(chunk: Chunk) -> int:
    """Returns how many values are unpacked for one at random: those of the largest page.

    Raises:
        OSError: the file can't be read.
        Unreadable: as of ``pages``.
    """
    dictionary, headers = _headers(chunk)
    counts = [header.count for header in headers if header.encoding == _PLAIN]
    return max([dictionary.count if dictionary else 0, *counts])


@functools.lru_cache(4096)
def _headers(chunk: Chunk) -> tuple[_Header | None, list[_Header]]:
    """Returns the headers of (the page of the dictionary or None, the pages of values)."""
    dictionary = None
    headers: list[_Header] = []
    place = chunk.start
    end = chunk.start + chunk.size
    count = 0
    # A page may have no values.
    allowance = Allowance(chunk.size)
    while count < chunk.count:
        allowance.take(_BYTES_PER_HEADER)
        header = _header_at(chunk.file, place)
        place = header.place + header.size
        if header.size < 0 or header.unpacked < 0 or header.count < 0 or place > end:
            raise Unreadable("a page reaches beyond its row group")
        if header.kind == _DICTIONARY:
            dictionary = header
        elif header.kind in (_DATA, _DATA_V2):
            headers.append(header)
            count += header.count
    if count > chunk.count:
        raise Unreadable(f"a row group has {count} values, expected {chunk.count}")
    return dictionary, headers


def _header_at(file: str, place: int) -> _Header:
    opened = opened_descriptor(file)
    for most in _HEADERS:
        data = os.pread(opened.descriptor, most, place)
        try:
            fields, end = _struct(data, 0, _DEPTH)
            break
        except IndexError:
            # It is longer, or the file ends in it.
            continue
    else:
        raise Unreadable(f"it has no page at byte {place}; it is damaged or truncated")
    kind = int(fields[1])
    detail = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, 0), {})
    second = kind == _DATA_V2
    return _Header(
        kind=kind,
        place=place + end,
        size=fields[3],
        unpacked=fields[2],
        count=detail.get(1, 0),
        encoding=detail.get(4 if second else 2, _PLAIN),
        levels=(detail.get(6, 0), detail.get(5, 0)) if second else (0, 0),
        is_packed=detail.get(7, True) if second else True,
    )


class _Kept:
    """What a process keeps of a chunk.

    Attributes:
        dictionary: its values; None: it has no dictionary.
        pages: the pages that were read, by their places.
        size: bytes that these take.
    """

    def __init__(self, dictionary: ByteValues | np.ndarray | None, size: int) -> None:
        self.dictionary = dictionary
        self.pages: dict[int, Page] = {}
        self.size = size


# By (file, place in it): the chunks that were read last. Pages are dropped with their dictionary,
# whose values they refer to.
_kept: collections.OrderedDict[tuple[str, int], _Kept] = collections.OrderedDict()
_lock = threading.Lock()


def _kept_page(chunk: Chunk, header: _Header, dictionary: _Header | None) -> Page:
    """Returns a page, from those that are kept if it is among them."""
    key = (chunk.file, chunk.start)
    with _lock:
        kept = _kept.get(key)
        if kept is not None and header.place in kept.pages:
            _kept.move_to_end(key)
            return kept.pages[header.place]
        if kept is None:
            values = None
            size = 0
            if dictionary is not None:
                values = _dictionary_values(chunk, dictionary)
                size = dictionary.unpacked + _BYTES_PER_VALUE * dictionary.count
            kept = _Kept(values, size)
        page = _page(chunk, header, dictionary, kept.dictionary)
        size = header.unpacked + _BYTES_PER_VALUE * header.count
        _kept[key] = kept
        _kept.move_to_end(key)
        while len(_kept) > 1 and sum(each.size for each in _kept.values()) + size > KEPT:
            _kept.popitem(last=False)
        # One chunk may have more pages than are kept.
        if kept.size + size > KEPT:
            _kept[key] = kept = _Kept(kept.dictionary, 0)
        kept.pages[header.place] = page
        kept.size += size
        return page


def forget_pages() -> None:
    """Forgets what is kept: a name may be that of another file by now."""
    with _lock:
        _kept.clear()
    _headers.cache_clear()


def _page(
    chunk: Chunk,
    header: _Header,
    dictionary: _Header | None,
    shared: ByteValues | np.ndarray | None = None,
) -> Page:
    """Returns the values of a page.

    Args:
        shared: the values of the dictionary, if they have been read.
    """
    levels, content = _content(chunk, header)
    if header.kind == _DATA:
        place = 0
        parts = []
        for most in (chunk.repetition, chunk.definition):
            length = 0
            if most:
                (length,) = _LENGTH.unpack_from(content, place)
                place += _LENGTH.size
            parts.append(content[place : place + length])
            place += length
        levels = (parts[0], parts[1])
        content = content[place:]
    count = header.count
    repetition = _levels(levels[0], chunk.repetition, count)
    definition = _levels(levels[1], chunk.definition, count)
    is_present = np.ones(count, bool)
    # Neither a null nor an empty row has a value.
    if definition is not None:
        is_present = definition == chunk.definition
    present = int(is_present.sum())
    places = np.full(count, -1, np.int64)
    if header.encoding in _BY_DICTIONARY:
        if shared is None:
            if dictionary is None:
                raise Unreadable("a row group lacks its dictionary")
            shared = _dictionary_values(chunk, dictionary)
        values = shared
        found = _runs(content[1:], content[0], present) if present else np.zeros(0, np.int64)
        if found.max(initial=-1) >= len(values):
            raise Unreadable("a page names a value that its dictionary lacks")
        places[is_present] = found
    else:
        values = _values(chunk.kind, content, present, header.encoding)
        places[is_present] = np.arange(present)
    starts_row = None if repetition is None else repetition == 0
    return Page(places, starts_row, values)


def _dictionary_values(chunk: Chunk, header: _Header) -> ByteValues | np.ndarray:
    _, content = _content(chunk, header)
    return _values(chunk.kind, content, header.count, _PLAIN)


def _content(chunk: Chunk, header: _Header) -> tuple[tuple[bytes, bytes], bytes]:
    """Returns (the levels of a page of version 2, the values or all that the page holds)."""
    allowance = Allowance(header.size)
    allowance.take(header.unpacked + _BYTES_PER_VALUE * header.count)
    opened = opened_descriptor(chunk.file)
    data = os.pread(opened.descriptor, header.size, header.place)
    if len(data) < header.size:
        raise Unreadable(f"it ends {header.size - len(data)} bytes early; it was truncated")
    repetition, definition = header.levels
    before = repetition + definition
    if min(header.levels) < 0 or before > min(header.size, header.unpacked):
        raise Unreadable("the levels of a page are longer than the page")
    levels = (data[:repetition], data[repetition:before])
    data = data[before:]
    if chunk.codec != "UNCOMPRESSED" and header.is_packed and header.unpacked > before:
        data = _codec(chunk.codec).decompress(data, header.unpacked - before, asbytes=True)
    return levels, data


@functools.cache
def _codec(name: str) -> Any:
    import pyarrow

    if name not in ("SNAPPY", "GZIP", "BROTLI", "ZSTD", "LZ4"):
        raise Unreadable(f"its compression {name} isn't supported; write it with snappy or zstd")
    # Parquet's LZ4_RAW, which pyarrow names LZ4; its older form has another name.
    return pyarrow.Codec(name.lower().replace("lz4", "lz4_raw"))


# ---------------------------------------------------------------- values


def _values(kind: str, data: bytes, count: int, encoding: int) -> ByteValues | np.ndarray:
    """Returns ``count`` values of a physical type."""
    if kind == "BOOLEAN" and encoding == _RUNS:
        return _runs(data[_LENGTH.size :], 1, count)
    if encoding != _PLAIN:
        raise Unreadable(
            f"its encoding number {encoding} isn't supported; write it again, such as with"
            " pandas' to_parquet"
        )
    if kind == "BOOLEAN":
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:count]
        values: Any = bits.astype(np.int64)
    elif kind in _NUMBERS:
        values = np.frombuffer(data, _NUMBERS[kind], min(count, len(data) // 4))
        values = values.astype(np.int64)
    elif kind == "BYTE_ARRAY":
        return _byte_values(data, count)
    else:
        raise Unreadable(f"its column has values of {kind}, expected whole numbers or texts")
    if len(values) < count:
        raise Unreadable(f"a page has {len(values)} values, expected {count}")
    return values


def _byte_values(data: bytes, count: int) -> ByteValues:
    """Returns values that each follow their length."""
    starts = np.zeros(count, np.int64)
    ends = np.zeros(count, np.int64)
    place = 0
    most = len(data)
    for index in range(count):
        start = place + _LENGTH.size
        if start > most:
            raise Unreadable("a value reaches beyond its page")
        place = start + _LENGTH.unpack_from(data, place)[0]
        starts[index] = start
        ends[index] = place
    if place > most:
        raise Unreadable("a value reaches beyond its page")
    return ByteValues(data, starts, ends)


def _levels(data: bytes, most: int, count: int) -> Levels:
    return _runs(data, most.bit_length(), count) if most else None


def _runs(data: bytes, width: int, count: int) -> np.ndarray:
    """Returns numbers that are stored as runs of one number, and as groups of 8, [count].

    Args:
        width: bits of a number.
    """
    if width > 32:
        raise Unreadable(f"its numbers have {width} bits")
    numbers = np.zeros(count, np.int64)
    filled = 0
    place = 0
    while filled < count:
        head, place = _varint(data, place)
        if head & 1:
            size = (head >> 1) * width
            taken = min((head >> 1) * 8, count - filled)
            packed = np.frombuffer(data[place : place + size], np.uint8)
            bits = np.unpackbits(packed, bitorder="little")
            if len(bits) < taken * width:
                raise IndexError("the runs end early")
            padded = np.zeros((taken, 32), np.uint8)
            padded[:, :width] = bits[: taken * width].reshape(taken, width)
            numbers[filled : filled + taken] = np.packbits(padded, axis=1, bitorder="little").view(
                "<u4"
            )[:, 0]
        else:
            size = (width + 7) // 8
            taken = min(head >> 1, count - filled)
            numbers[filled : filled + taken] = int.from_bytes(data[place : place + size], "little")
        if not taken:
            raise Unreadable("a page has an empty run")
        filled += taken
        place += size
    return numbers


# --------------------------------------------------------------- headers


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Returns (a number of 7 bits a byte, the place behind it)."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
    raise Unreadable("a page's header has a number of more than ten bytes")


def _struct(data: bytes, place: int, depth: int) -> tuple[dict[int, Any], int]:
    """Returns (the fields of a structure in Thrift's compact protocol, the place behind it).

    Raises:
        IndexError: the data ends early.
        Unreadable: it is something else.
    """
    if not depth:
        raise Unreadable("a page's header is nested too deep")
    fields: dict[int, Any] = {}
    number = 0
    while head := data[place]:
        place += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, place = _signed(data, place)
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind == 3:
            place += 1
        elif kind in (4, 5, 6):
            fields[number], place = _signed(data, place)
        elif kind == 7:
            place += 8
        elif kind == 8:
            length, place = _varint(data, place)
            place += length
        elif kind == 12:
            fields[number], place = _struct(data, place, depth - 1)
        else:
            raise Unreadable("a page's header is damaged")
    return fields, place + 1


def _signed(data: bytes, place: int) -> tuple[int, int]:
    number, place = _varint(data, place)
    return (number >> 1) ^ -(number & 1), place
