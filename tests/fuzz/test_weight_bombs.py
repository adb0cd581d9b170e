"""Small weight files that would take gigabytes or minutes: each within 64 MiB and more than three times its
size, and 10 s.
"""

import io
import json
import struct
import warnings
import zipfile

import pytest
from support.hostile_files import FREE_BYTES, attempt
from support.weight_files import (
    MAGIC,
    Named,
    Raw,
    numpy_array,
    program,
    storage,
    tensor,
    write_legacy,
    write_zip,
)

from weights.formats import read_weights
from weights.hub import read_config


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def zipped(members, kind=zipfile.ZIP_STORED):
    with zipfile.ZipFile(file := io.BytesIO(), "w", kind) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def empty_tensors(count):
    one = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return safetensors(("{" + ",".join(one % number for number in range(count)) + "}").encode())


def npy(text, data=b""):
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + data


def array_of(size):
    """A .npy of so many zeros."""
    return npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }\n" % size, bytes(size))


def directory(count):
    """An archive of so many empty members, each with a name of its own."""
    return zipped([(f"{number}.npy", b"") for number in range(count)])


def overlapping(count, size):
    """A directory that names one compressed member many times."""
    whole = zipped([("a.npy", array_of(size))], zipfile.ZIP_DEFLATED)
    start = whole.index(b"PK\x01\x02")
    entry = whole[start : whole.index(b"PK\x05\x06")]
    data = whole[:start]
    entries = b"".join(entry[:46] + b"%c.npy" % (65 + number) for number in range(count))
    return (
        data
        + entries
        + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(entries), len(data), 0)
    )


def legacy(value, data=b""):
    return (
        MAGIC
        + program({"little_endian": True})
        + program(value)
        + program(["0"])
        + struct.pack("<q", 1)
        + data
    )


SHARED = Raw(
    b"("
    + b"".join(b"\x8a\x06" + ((1 << 40) + n).to_bytes(6, "little") for n in range(32))
    + b"tq\x05"
)
# Bytes of what is compressed: a quarter more than may be taken of a file that is next to nothing.
HUGE = FREE_BYTES // 4 * 5
BOMBS = {
    "bzip2": lambda: zipped([("a/data.pkl", bytes(HUGE))], zipfile.ZIP_BZIP2),
    "LZMA": lambda: zipped([("a/data.pkl", bytes(HUGE))], zipfile.ZIP_LZMA),
    "bzip2, byteorder": lambda: zipped([("a/data.pkl", b"."), ("a/byteorder", bytes(HUGE))], zipfile.ZIP_BZIP2),
    "deflate": lambda: zipped([("a/data.pkl", bytes(HUGE))], zipfile.ZIP_DEFLATED),
    "deflate, byteorder": lambda: zipped([("a/data.pkl", b"."), ("a/byteorder", bytes(HUGE))], zipfile.ZIP_DEFLATED),
    "deflate, npy": lambda: zipped([("a.npy", array_of(HUGE))], zipfile.ZIP_DEFLATED),
    "LZMA, npy": lambda: zipped([("a.npy", array_of(HUGE))], zipfile.ZIP_LZMA),
    "one deflated member named 50 times": lambda: overlapping(50, 1 << 24),
    "a directory of 60,000": lambda: directory(60_000),
    "a directory of 110,000": lambda: directory(110_000),
    "a header of 40 MB": lambda: safetensors(b'{"a":[' + b"{}," * 13_000_000 + b"{}]}"),
    "a header of 40 MB of texts": lambda: safetensors(b'{"a":[' + b'"aa",' * 8_000_000 + b'"aa"]}'),
    "a header of 99 MB": lambda: safetensors(b'{"__metadata__":{' + b'"a":"b",' * 12_000_000 + b'"c":"d"}}'),
    "a header of spaces": lambda: safetensors(b"{" + b" " * 50_000_000 + b"}"),
    "10,000 empty tensors": lambda: empty_tensors(10_000),
    "600,000 empty tensors": lambda: empty_tensors(600_000),
    "digits": lambda: safetensors(b'{"a":{"dtype":"F32","shape":[' + b"9" * 3_000_000 + b'],"data_offsets":[0,0]}}'),
    "a name of 1 MB": lambda: safetensors({"a" * (1 << 20): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
    "a name of an emoji and 1 MB": lambda: safetensors(b'{"\xf0\x9f\x98\x80' + b"a" * (1 << 20) + b'":1}'),
    "brackets": lambda: safetensors(b'{"a":' + b"[" * 1_000_000),
    "objects in objects": lambda: safetensors(b'{"a":' * 300_000),
    "LONG_BINPUT 2^27": lambda: b"\x80\x02}r" + struct.pack("<I", 1 << 27) + b".",
    "lists": lambda: b"\x80\x02" + b"]" * 5_000_000 + b".",
    "lists in lists": lambda: b"\x80\x02(" + b"(" * 3_000_000 + b"t" * 3_000_000 + b".",
    "tuples in tuples": lambda: b"\x80\x02)" + b"\x85" * 5_000_000 + b".",
    "memoized": lambda: b"\x80\x04}" + b"\x94" * 5_000_000 + b".",
    "one long shape, many arrays": lambda: program(
        {"a": SHARED, "b": Raw(b"(" + b"h\x05h\x05\x86" * 500_000 + b"t")}
    ),
    "many arrays of one storage": lambda: program(
        {f"a{n}": numpy_array((0,) * 32, b"") for n in range(10_000)},
    ),
    "stride 0": lambda: write(write_zip, {"a": tensor(storage("0", 4), (1 << 20, 1 << 10), (0, 0))}, {"0": bytes(16)}),
    "stride 0 in legacy": lambda: write(
        write_legacy, {"a": tensor(storage("0", 4), (1 << 28,), (0,))}, {"0": bytes(16)}
    ),
    "a view under 3,000 names": lambda: write(
        write_zip,
        {f"a{n}": tensor(storage("0", 1 << 18), (1 << 18,), (1,)) for n in range(3000)},
        {"0": bytes(1 << 20)},
    ),
    "calls in calls": lambda: nested(3000),
    "a storage of 2^40": lambda: legacy({"a": tensor(storage("0", 1 << 40), (4,), (1,))}, bytes(16)),
    "npy: brackets": lambda: zipped([("a.npy", npy(b"(" * 9000))]),
    "npy: minus signs": lambda: zipped([("a.npy", npy(b"-" * 9000 + b"1"))]),
    "npy: a header of 2^31": lambda: zipped([("a.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31))]),
    "npy: a shape of digits": lambda: zipped(
        [("a.npy", npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 9000 + b",), }\n"))]
    ),
    "npy: 2^40 by nothing": lambda: zipped(
        [("a.npy", npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 0), }\n"))]
    ),
    "texts of 64 KiB": lambda: b"\x80\x02(" + (b"X\x00\x00\x01\x00\xf0\x9f\x98\x80" + b"a" * 65_532) * 900 + b"t.",
    "a text for an array": lambda: program({"a": numpy_array((1 << 24,), "\xff" * (1 << 24))}),
    "float16": lambda: np_safetensors("F16", 1 << 25, 2),
    "bfloat16": lambda: np_safetensors("BF16", 1 << 25, 2),
    "bytes": lambda: np_safetensors("U8", 1 << 26, 1),
}  # fmt: skip
READ = ("10,000 empty tensors", "float16", "bfloat16", "bytes", "npy: 2^40 by nothing")


def np_safetensors(dtype, count, size):
    entry = {"dtype": dtype, "shape": [count], "data_offsets": [0, count * size]}
    return safetensors({"a": entry}, bytes(count * size))


def write(writer, value, data):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return writer(Path(folder) / "file", program(value), data).read_bytes()


def nested(depth):
    """Calls whose argument is a call."""
    name = program(Named("torch._tensor", "_rebuild_from_type_v2"))[2:-1]
    return b"\x80\x02" + (name + b"(" + name + b"N") * depth + b"N" + b"NttR" * depth + b"."


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_no_more_than_it_may(name, tmp_path):
    data = BOMBS[name]()
    (tmp_path / "file").write_bytes(data)
    size = len(data)
    del data
    line = attempt("bombs", size, lambda: read_weights(tmp_path / "file"))
    assert bool(line) != (name in READ), line


def test_a_gigabyte_that_is_mostly_a_header_is_bounded_by_its_time(tmp_path):
    text = empty_tensors(100_000)[8:]
    with open(tmp_path / "file", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(1 << 26)
    attempt("bombs", 1 << 26, lambda: read_weights(tmp_path / "file"))


CONFIGS = [
    "[" * 1_000_000, "{" * 1_000_000, '{"a":' * 300_000, "[{}," * 500_000, "-" * 1_000_000, "9" * 4_000_000,
    '{"architecture": "a", "x": [' + "{}," * 900_000, '"' + "\U0001f600" * 900_000,
    '{"architecture": "' + "a" * 3_000_000 + '"}',
]  # fmt: skip


@pytest.mark.parametrize("text", CONFIGS, ids=range(len(CONFIGS)))
def test_a_config_that_is_a_bomb_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    size = (tmp_path / "config.json").stat().st_size
    assert "config.json: " in attempt("config.json, bombs", size, lambda: read_config(tmp_path))


INDEXES = [
    *CONFIGS,
    '{"weight_map": {' + ",".join(f'"{n}": "{n}.bin"' for n in range(100_000)) + "}}",
]


@pytest.mark.parametrize("text", INDEXES, ids=range(len(INDEXES)))
def test_an_index_that_is_a_bomb_is_refused(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    size = (tmp_path / "model.safetensors.index.json").stat().st_size
    assert "index.json: " in attempt("index.json, bombs", size, lambda: read_weights(tmp_path))
