"""Weight files that are cut, changed, foreign, or lie: one line each, nothing out of proportion."""

import io
import json
import os
import pickle
import random
import struct
import zipfile

import numpy as np
import pytest
from conftest import ROOT
from safetensors.numpy import save
from support.small_models import small_vit
from support.weight_files import (
    ONE,
    LittleMemory,
    Named,
    entry,
    made,
    program,
    safetensors,
    save_npz,
    storage,
    tensor,
    write_pickle,
    write_zip,
)

from errors import InputError
from weights import load_weights, save_weights
from weights.formats import read_weights
from weights.sums import SUMS, sha256_of

GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The contents of one file of each kind."""
    folder = tmp_path_factory.mktemp("originals")
    arrays = {"a": np.ones((3, 4), np.float32), "b": np.arange(5)}
    made(folder / "a.npz", arrays)
    made(folder / "a.pdparams", arrays)
    np.savez_compressed(folder / "b.npz", **arrays)
    names = (
        "weights.pth",
        "weights_legacy.pth",
        "weights.safetensors",
        "checkpoint.pth",
        "checkpoint_legacy.pth",
    )
    paths = [GOLDEN / name for name in names]
    paths += [folder / name for name in ("a.npz", "b.npz", "a.pdparams")]
    return {path.name: path.read_bytes() for path in paths}


def test_a_file_cut_anywhere_is_refused(tmp_path, originals):
    for name, content in originals.items():
        (tmp_path / name).write_bytes(content)
        read_weights(tmp_path / name)
        lengths = {
            *range(0, len(content), 1 + len(content) // 300),
            *range(len(content) - 90, len(content)),
        }
        for length in sorted(lengths, reverse=True):
            os.truncate(tmp_path / name, length)
            with pytest.raises(InputError):
                read_weights(tmp_path / name)


def test_changed_bytes_are_read_or_refused_in_one_line(tmp_path, originals):
    draw = random.Random(0)
    refused = []
    for name, content in originals.items():
        for _ in range(150):
            changed = bytearray(content)
            for _ in range(draw.choice((1, 1, 8))):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            (tmp_path / name).write_bytes(changed)
            try:
                read_weights(tmp_path / name)
            except InputError as error:
                refused.append(str(error))
    assert 100 < len(refused) < 150 * len(originals) - 100  # both happen
    assert not any("\n" in line for line in refused)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), r"it isn't a weight file \(it starts with b'\\x89PNG"),
        (b"hello, world", "it isn't a weight file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 346\n",
            "a Git LFS pointer.*git lfs pull",
        ),
        (b"\n<!DOCTYPE html><html>", "an HTML page, not the weights; download the file itself"),
        (b"<html>\n<head>", "an HTML page"),
        (b"\x1f\x8b\x08\x00" + bytes(20), "it isn't a weight file"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", "it isn't a weight file"),
        (b"\x80\x06.", "it isn't a weight file"),
        (b"(dp0\n.", "it isn't a weight file"),
        (b"PK\x03\x04", "can't be read as weights .BadZipFile"),
    ],
)
def test_foreign_files_are_told(tmp_path, content, message):
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_weights(tmp_path / "a.pth")


EIGHT = entry("F32", [2], 0, 8)


LIES = [
    ({"a": EIGHT, "b": entry("F32", [2], 4, 12)}, bytes(12), "overlap"),
    ({"a": EIGHT, "b": entry("F32", [2], 0, 8)}, bytes(8), "overlap"),
    ({"a": EIGHT, "b": entry("F32", [2], 12, 20)}, bytes(20), "leave gaps"),
    ({"a": EIGHT}, bytes(9), r"its tensors end at byte \d+, but the file"),
    ({"a": EIGHT}, bytes(7), "its tensors end at byte"),
    ({"a": entry("F32", [2**40], 0, 2**42)}, bytes(8), "its tensors end at byte"),
    ({"a": entry("F32", [3], 0, 8)}, bytes(8), "the sizes that the header lists .a"),
    (
        {"a": entry("F32", [-2, -1], 0, 8)},
        bytes(8),
        r"its a\.shape is \[-2, -1\], expected a list of sizes",
    ),
    ({"a": entry("F32", [2.0], 0, 8)}, bytes(8), r"its a\.shape is \[2\.0\], expected"),
    (
        {"a": entry("F32", [2], -8, 0)},
        bytes(8),
        r"its a\.data_offsets is \[-8, 0\], expected two places",
    ),
    (
        {"a": entry("F32", [2**50, 0], 0, 0)},
        b"",
        r"its a\.shape is \[1125899906842624, 0\], expected",
    ),
    (
        {"a": entry("F8_E4M3", [8], 0, 8)},
        bytes(8),
        r"its a\.dtype is 'F8_E4M3', expected one of F64, F32",
    ),
    ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), r"its a\.data_offsets is missing"),
    ({"a": 3}, bytes(8), "its a is 3, expected a dictionary"),
    ([EIGHT], bytes(8), "it isn't a weight file"),
    ({"__metadata__": {"format": "pt"}}, b"", "it contains no arrays"),
    (b'{"a": %b, "a": %b}' % ((json.dumps(EIGHT).encode(),) * 2), bytes(8), "the same name twice"),
    (b'{"a"' + b"[" * 100_000, b"", "can't be read as weights"),
    (b'{"a": ' + b"[" * 100_000, b"", "RecursionError"),
    (b'{"a": ' + b"9" * 10_000 + b"}", b"", "it contains a number of 10000 digits"),
]


@pytest.mark.parametrize(("header", "data", "message"), LIES, ids=range(len(LIES)))
def test_safetensors_headers_that_lie(tmp_path, header, data, message):
    with LittleMemory(), pytest.raises(InputError, match=message):
        read_weights(safetensors(tmp_path / "a.safetensors", header, data))


def test_a_header_of_terabytes_is_not_read(tmp_path):
    for length in (1 << 42, (1 << 64) - 1, 100):
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", length) + b'{"a": 1}')
        with (
            LittleMemory(),
            pytest.raises(
                InputError, match=f"its safetensors header announces {length} bytes, the file"
            ),
        ):
            read_weights(tmp_path / "a")


def npy(array, **claims):
    """Returns a .npy file's bytes, whose header may claim another shape or dtype."""
    header = np.lib.format.header_data_from_array_1_0(array)
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {**header, **claims})
    return stream.getvalue() + array.tobytes()


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"shape": (2**40,)}, "a.npy has the shape .1099511627776., which doesn't match its size"),
        ({"shape": (1,)}, "has the shape"),
        ({"shape": (-2,)}, "a.npy has a header unlike those of NumPy"),
        ({"shape": (2**62, 2**62)}, "aren't a tuple of sizes"),
        ({"descr": "|O"}, "has the dtype \\|O; expected numbers"),
        ({"descr": "<c8"}, "has the dtype <c8; expected numbers"),
        ({"descr": [("x", "<f4")]}, "expected numbers"),
        ({"descr": "|V4"}, "expected numbers"),
    ],
)
def test_npz_headers_that_lie(tmp_path, claims, message):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", npy(np.float32([1, 2]), **claims))
    with LittleMemory(), pytest.raises(InputError, match=message):
        read_weights(tmp_path / "a.npz")


def test_what_a_zip_archive_must_not_be(tmp_path):
    bomb = tmp_path / "bomb"
    np.savez_compressed(bomb.with_suffix(".npz"), a=np.zeros(1 << 25, np.float32))
    write_zip(
        bomb.with_suffix(".pth"), program({"a": "x" * (1 << 27)}), compression=zipfile.ZIP_DEFLATED
    )
    for ending in (".npz", ".pth"):
        liar = bytearray(bomb.with_suffix(ending).read_bytes())
        # the size before compression, in both headers
        for sign, place in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
            start = liar.index(sign) + place
            liar[start : start + 4] = struct.pack("<I", 4096)
        (tmp_path / f"liar{ending}").write_bytes(liar)
    of = tensor(storage("0", 2), (2,), (1,))
    write_zip(tmp_path / "packed.pth", program({"a": of}), {"0": bytes(8)}, zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "lzma.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npy", npy(np.float32([1, 2])))
    with zipfile.ZipFile(tmp_path / "other.pth", "w") as archive:
        archive.writestr("a.txt", "text")
    with zipfile.ZipFile(tmp_path / "none.npz", "w"):
        pass
    with zipfile.ZipFile(tmp_path / "big.pth", "w") as archive:
        archive.writestr("a/data.pkl", program({"a": ONE}))
        archive.writestr("a/byteorder", "big")
    for name, message in {
        "bomb.npz": "would take more than 64 MiB and more than three times its 130673 bytes",
        "bomb.pth": "would take more than 64 MiB and more than three times",
        "liar.npz": "Bad CRC-32",
        "liar.pth": "Bad CRC-32",
        "packed.pth": "its tensors are compressed or encrypted",
        "lzma.npz": "has a compression that neither torch nor NumPy uses",
        "other.pth": "neither torch's data.pkl nor .npy arrays",
        "none.npz": "neither torch's data.pkl nor .npy arrays",
        "big.pth": "written on a big-endian machine",
    }.items():
        with LittleMemory(), pytest.raises(InputError, match=message):
            read_weights(tmp_path / name)


def test_a_changed_tensor_is_found_by_its_checksum(tmp_path):
    of = tensor(storage("0", 4), (4,), (1,))
    values = np.float32([1, 2, 3, 4]).tobytes()
    content = write_zip(tmp_path / "a.pth", program({"a": of}), {"0": values}).read_bytes()
    (tmp_path / "a.pth").write_bytes(content.replace(values, values[:-1] + b"\x41"))
    with pytest.raises(InputError, match="doesn't match its checksum; copy it again"):
        read_weights(tmp_path / "a.pth")
    content = save_npz(tmp_path / "a.npz", a=np.float32([1, 2, 3, 4])).read_bytes()
    (tmp_path / "a.npz").write_bytes(content.replace(values, values[:-1] + b"\x41"))
    with pytest.raises(InputError, match="Bad CRC-32"):
        read_weights(tmp_path / "a.npz")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_told(tmp_path, bad):
    for dtype in (np.float16, np.float32, np.float64):
        arrays = {
            "fine": np.ones(2, dtype),
            "head.weight": np.array([[1, bad, 2], [bad, 0, 0]], dtype),
        }
        (tmp_path / "a.safetensors").write_bytes(save(arrays))
        write_pickle(tmp_path / "a.pdparams", pickle.dumps(arrays, 4))
        save_npz(tmp_path / "a.npz", **arrays)
        for name in ("a.safetensors", "a.pdparams", "a.npz"):
            with pytest.raises(
                InputError,
                match=r"2 of the 6 values of head\.weight are NaN or infinite; use other",
            ):
                read_weights(tmp_path / name)


def test_bfloat16_and_float64_that_are_no_numbers_in_float32(tmp_path):
    # 1, NaN, -inf, the least number above 0
    bits = np.array([0x3F80, 0x7FC0, 0xFF80, 0x0001], "<u2").tobytes()
    safetensors(tmp_path / "a.safetensors", {"a": entry("BF16", [4], 0, 8)}, bits)
    write_zip(
        tmp_path / "a.pth",
        program({"a": tensor(storage("0", 4, Named("torch", "BFloat16Storage")), (4,), (1,))}),
        {"0": bits},
    )
    np.savez(tmp_path / "a.npz", a=np.frombuffer(bits, "V2"))
    for name in ("a.safetensors", "a.pth", "a.npz"):
        with pytest.raises(InputError, match="2 of the 4 values of a are NaN or infinite"):
            read_weights(tmp_path / name)
    made(tmp_path / "b.npz", {"a": np.array([1e300, 1.0])})
    with pytest.raises(InputError, match="1 of the 2 values of a are NaN or infinite"):
        read_weights(tmp_path / "b.npz")


def test_a_file_that_is_not_what_its_list_says_is_refused(tmp_path):
    """One flipped bit of a weight, which no check of the format sees."""
    model = small_vit()
    folder = tmp_path / "epoch_0001"
    folder.mkdir()
    file = folder / "model.safetensors"
    save_weights(model, file)
    content = bytearray(file.read_bytes())
    (folder / SUMS).write_text(f"{sha256_of(file)}  {file.name}\n")
    link = tmp_path / "best.safetensors"
    link.symlink_to(file)
    load_weights(model, link)
    content[-3] ^= 1
    file.write_bytes(content)
    for path in (file, link):
        with pytest.raises(
            InputError, match="its SHA-256 isn't the one in SHA256SUMS next to it.*; copy it again"
        ):
            load_weights(model, path)
    # Lists of other files, or of another form, say nothing about it.
    for text in (f"{'0' * 64}  other.safetensors\n", "no list\n", "\N{NO-BREAK SPACE}"):
        (folder / SUMS).write_text(text)
        load_weights(model, file)
