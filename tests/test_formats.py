"""Weight files of every kind: torch's own, Paddle's own, NumPy's; what is found where; damaged and foreign files."""

import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.stored import SHAPES, values
from pickles import Call, LittleMemory, Named, numpy_array, program, storage, tensor, write_pickle, write_zip
from safetensors.numpy import load_file, save, save_file

from errors import InputError
from weights.formats import find_weights, read_config, read_weights, write_weights

GOLDEN = ROOT / "tests" / "golden"
MADE_BY_TORCH = ("weights.pth", "weights_legacy.pth", "weights.safetensors")
SETTINGS = json.loads((GOLDEN / "config.json").read_text())


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


# ------------------------------------------------------------ what is read


@pytest.mark.smoke
@pytest.mark.parametrize("name", MADE_BY_TORCH)
def test_every_dtype_and_view_that_torch_saves(name):
    read = read_weights(GOLDEN / name)
    assert (read.path, read.layout, read.notes) == (GOLDEN / name, "torch", [])
    assert sorted(read.arrays) == sorted(SHAPES)
    for key, array in read.arrays.items():
        assert array.dtype == values(key).dtype, key
        np.testing.assert_array_equal(array, values(key), key)
        assert array.shape == values(key).shape
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize("name", ["checkpoint.pth", "checkpoint_legacy.pth"])
def test_a_checkpoint_with_optimizer_namespace_and_configurations(name):
    read = read_weights(GOLDEN / name)
    assert read.notes == ["its model_ema was taken (it holds model_ema, model)"]
    assert sorted(read.arrays) == ["bias", "weight"]
    np.testing.assert_array_equal(read.arrays["weight"], np.full((2, 3), 0.25))


@pytest.mark.smoke
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_paddle_saves(tmp_path, protocol):
    layer = paddle.nn.Sequential(paddle.nn.Linear(300, 70), paddle.nn.BatchNorm1D(70))  # longer than a text is kept
    state = layer.state_dict()
    optimizer = paddle.optimizer.Adam(parameters=layer.parameters())
    paddle.save(state, str(tmp_path / "a.pdparams"), protocol=protocol)
    paddle.save(
        {"model": state, "optimizer": optimizer.state_dict(), "epoch": 3}, str(tmp_path / "b"), protocol=protocol
    )
    for name in ("a.pdparams", "b"):
        read = read_weights(tmp_path / name)
        assert (read.layout, read.notes) == ("paddle", [])
        assert list(read.arrays) == list(state)
        for key, value in state.items():
            np.testing.assert_array_equal(read.arrays[key], value.numpy(), key)


def test_paddles_bfloat16_is_no_integer(tmp_path):
    paddle.save({"weight": paddle.to_tensor([0.5, -2.0]).astype("bfloat16")}, str(tmp_path / "a.pdparams"))
    array = read_weights(tmp_path / "a.pdparams").arrays["weight"]
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, [0.5, -2])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_numpys_orders_and_types_in_a_pickle(tmp_path, protocol):
    grid = np.arange(-3, 3).reshape(2, 3)
    arrays = {
        "fortran": np.asfortranarray(grid.astype(np.float32)), "big": grid.astype(">f4"), "bigger": grid.astype(">i8"),
        "half": grid.astype(np.float16), "double": grid.astype(np.float64), "one": np.array(2.5, np.float32),
        "none": np.zeros((0, 3), np.float32), "bool": grid > 0, "long": np.arange(40_000, dtype=np.float32),
    }  # fmt: skip
    read = read_weights(write_pickle(tmp_path / "a.pdparams", pickle.dumps(arrays, protocol)))
    for name, array in arrays.items():
        found = read.arrays[name]
        np.testing.assert_array_equal(found, array, name)
        assert found.shape == array.shape
        assert found.dtype == (np.float32 if array.dtype.kind == "f" else array.dtype.newbyteorder("=")), name


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_googles_npz(tmp_path, write):
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    short = (kernel.view(np.uint32) >> 16).astype("<u2").view("V2")  # bfloat16, as JAX's arrays come out of np.savez
    arrays = {
        "Transformer/encoderblock_0/kernel": kernel,
        "turned": kernel.T,
        "half": kernel.astype("f2"),
        "short": short,
    }
    write(tmp_path / "a.npz", step=np.array(7), **arrays)
    read = read_weights(tmp_path / "a.npz")
    assert read.layout == "jax"
    assert list(read.arrays) == ["step", *arrays]
    for name in arrays:
        np.testing.assert_array_equal(read.arrays[name], kernel.T if name == "turned" else kernel, name)
        assert read.arrays[name].dtype == np.float32
        assert read.arrays[name].flags.c_contiguous
    assert read.arrays["step"].dtype == np.int64
    assert read.arrays["step"] == 7


def test_the_content_decides_what_a_file_is(tmp_path):
    for name in MADE_BY_TORCH:
        for other in ("a.npz", "a.pdparams", "a.safetensors", "a.pth"):
            (tmp_path / other).write_bytes((GOLDEN / name).read_bytes())
            assert sorted(read_weights(tmp_path / other).arrays) == sorted(SHAPES)


def test_safetensors_of_paddles_layout_say_so(tmp_path):
    for form, layout in (("pd", "paddle"), ("pt", "torch")):
        save_file({"a": np.zeros(2, np.float32)}, tmp_path / "a.safetensors", {"format": form})
        assert read_weights(tmp_path / "a").layout == layout


ONE, TWO = (numpy_array((1,), np.float32([value]).tobytes()) for value in (1, 2))


@pytest.mark.parametrize(
    ("content", "taken", "notes"),
    [
        ({"state_dict_ema": {"a": ONE}, "model_ema": {"a": TWO}, "state_dict": {"a": TWO}}, "state_dict_ema", 1),
        ({"model": {"a": TWO}, "state_dict": {"a": TWO}, "model_ema": {"a": ONE}}, "model_ema", 1),
        ({"model": {"a": TWO}, "state_dict": {"a": ONE}, "model_ema": None}, "state_dict", 1),
        ({"student": {"a": TWO}, "teacher": {"a": ONE}, "epoch": 3}, "teacher", 0),
        ({"model_state_dict": {"a": ONE}}, "model_state_dict", 0),
        ({"state_dict": {"model": {"a": ONE}}}, "model", 0),
        ({"module": {"a": ONE}, "model_ema": {}}, "module", 0),
        ({"net": {"_orig_mod.module.a": ONE}}, "net", 0),
        ({"model": {"module._orig_mod.a": ONE}}, "model", 0),
        ({"module.a": ONE}, None, 0),
        ({"a": ("linear_0.w_0", ONE), "StructuredToParameterName@@": {"a": "linear_0.w_0"}}, None, 0),
    ],
)
def test_the_weights_of_a_checkpoint_by_timms_order(tmp_path, content, taken, notes):
    read = read_weights(write_pickle(tmp_path / "a.pth", program(content)))
    assert list(read.arrays) == ["a"]
    assert read.arrays["a"] == 1
    assert [note.split(" was")[0] for note in read.notes] == [f"its {taken}"] * notes


def test_prefixes_inside_a_name_stay(tmp_path):
    read = read_weights(write_pickle(tmp_path / "a.pth", program({"head.module.weight": ONE, "module_list.0": TWO})))
    assert list(read.arrays) == ["head.module.weight", "module_list.0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "state": {"x": ONE}}, "it holds no arrays, but epoch, state$"),
        ({}, "it holds no arrays, but nothing$"),
        ([ONE], "it holds no dictionary of arrays$"),
        (3, "it holds no dictionary of arrays$"),
        ({"model": Call("argparse", "Namespace")}, "it holds no arrays, but model$"),
        ({"a\x1b[2J": ONE}, r"an array under the name a\\x1b\[2J, which can't be printed$"),
        ({"module.a": ONE, "a": TWO}, "it holds a twice, with a prefix and without$"),
        (Call("timm.models", "ViT"), r"it asks to load timm\.models\.ViT; only arrays and plain containers are read$"),
    ],
)
def test_checkpoints_without_weights_are_refused(tmp_path, content, message):
    for write in (write_pickle, write_zip):
        with pytest.raises(InputError, match=message):
            read_weights(write(tmp_path / "a.pth", program(content)))


# ------------------------------------------------------------------- writing


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("ending", "layout"), [(".safetensors", "torch"), (".pdparams", "paddle"), (".npz", "jax")]
)  # fmt: skip
def test_what_is_written_is_read(tmp_path, ending, layout):
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"blocks.0.weight": kernel, "turned": kernel.T, "one": np.float32(3), "count": np.arange(3)}
    read = read_weights(made(tmp_path / f"a{ending}", arrays))
    assert read.layout == layout
    assert sorted(read.arrays) == sorted(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read.arrays[name], array, name)
        assert read.arrays[name].shape == np.shape(array)
    assert os.listdir(tmp_path) == [f"a{ending}"]


def test_safetensors_are_written_as_by_their_library(tmp_path):
    arrays = {name: values(name) for name in ("bool", "single", "empty", "scalar", "short")}
    arrays |= {"größe": np.arange(3)[::-1], "turned": arrays["single"].T}
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    assert made(tmp_path / "a.safetensors", arrays).read_bytes() == save(contiguous)
    arrays = {name: values(name) for name in SHAPES}  # the library has an order of its own among types of one size
    loaded = load_file(made(tmp_path / "a.safetensors", arrays))
    assert sorted(loaded) == sorted(arrays)
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, arrays[name], name, strict=True)


def test_paddle_loads_what_is_written(tmp_path):
    arrays = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "a.bias": np.ones(3, np.float32)}
    loaded = paddle.load(str(made(tmp_path / "a.pdparams", arrays)))
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), array)


@pytest.mark.parametrize("ending", [".safetensors", ".pdparams"])  # np.savez 1.26 leaves an open archive behind
def test_a_write_that_fails_leaves_the_file_before_it(tmp_path, ending):
    class Unwritable:
        def __array__(self, *_, **__):
            return np.array([lambda: 0], object)

    path = made(tmp_path / f"a{ending}", {"a": np.ones(2, np.float32)})
    with pytest.raises((KeyError, AttributeError, pickle.PicklingError)):
        write_weights(path, {"a": np.zeros(2, np.float32), "b": Unwritable()})
    np.testing.assert_array_equal(read_weights(path).arrays["a"], [1, 1])
    assert os.listdir(tmp_path) == [path.name]


def test_only_known_kinds_are_written(tmp_path):
    with pytest.raises(InputError, match=r"expected \.safetensors, \.pdparams or \.npz$"):
        write_weights(tmp_path / "a.pth", {})


# ------------------------------------------------------------ what lies where


def test_the_file_that_a_path_means(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"a folder without model\.safetensors or pytorch_model\.bin"):
        find_weights(tmp_path / "folder")
    with pytest.raises(InputError, match=r"no weights at .*/a: no such file or folder, nor .* \.safetensors, \.pth,"):
        find_weights(tmp_path / "a")
    for name in (".npz", ".pdparams", ".bin", ".pt", ".pth", ".safetensors"):
        (tmp_path / f"a{name}").touch()
        assert find_weights(tmp_path / "a") == find_weights(f"{tmp_path}/a") == tmp_path / f"a{name}"
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / "folder" / name).touch()
        assert find_weights(tmp_path / "folder") == tmp_path / "folder" / name
    for path in ("", ".", "/"):
        with pytest.raises(InputError, match="no weights at"):
            find_weights(path)


@pytest.mark.parametrize("form", SETTINGS)
def test_configurations_are_merged_as_timm_does(tmp_path, form):
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS[form]["file"]))
    made(tmp_path / "model.safetensors", {"a": np.ones(2, np.float32)})
    for config in (read_config(tmp_path), read_config(tmp_path / "model"), read_weights(tmp_path).config):
        assert {**config, "model_args": config.get("model_args", {})} == {
            **SETTINGS[form]["settings"],
            **({"num_features": 8} if form == "flat" else {}),  # which timm keeps apart
        }


def test_other_configurations(tmp_path):
    assert read_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"architectures": ["ViTForImageClassification"]}')
    assert read_config(tmp_path) == {}
    for text in (
        "",
        "[" * 100_000,
        "[1]",
        '{"architecture": "a", "pretrained_cfg": 3}',
        '{"architecture": "a", "x": \xff',
    ):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        if text != "[1]":
            with pytest.raises(InputError, match=r"config\.json: not a configuration of timm's"):
                read_config(tmp_path)


ASK = """
import json, sys
import errors
from weights.formats import read_config, read_weights
for name in sys.argv[1:]:
    try:
        read = read_weights(name)
        print(json.dumps([str(read.path), read.arrays["a"].tolist(), read.config, read_config(name)]))
    except errors.InputError as error:
        print(json.dumps(str(error)))
"""


def cached(home, name, files, absent=(), revision="main"):
    """Lays out a repository as the Hub's cache does; ``absent`` are files that it is known not to have."""
    commit = name[0] * 40
    repository = home / "hub" / f"models--org--{name}"
    folders = [repository / "refs", repository / "snapshots" / commit, repository / ".no_exist" / commit]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / revision).write_text(commit)
    for file in files:
        if file == "config.json":
            config = {"architecture": "vit", "pretrained_cfg": {"mean": [0.5] * 3}}
            (folders[1] / file).write_text(json.dumps(config))
        elif file == "model.safetensors":
            made(folders[1] / file, {"a": np.float32([1])})
        else:
            write_pickle(folders[1] / file, program({"a": TWO}))
    for file in absent:
        (folders[2] / file).touch()
    return folders[1]


def test_weights_of_the_hub_from_its_cache(tmp_path):
    both = cached(tmp_path, "both", ["model.safetensors", "pytorch_model.bin", "config.json"])
    older = cached(tmp_path, "older", ["pytorch_model.bin", "config.json"], revision="v2")
    plain = cached(tmp_path, "plain", ["model.safetensors"], absent=["config.json"])
    cached(tmp_path, "half", ["model.safetensors"])
    cached(tmp_path, "none", [], absent=["model.safetensors", "pytorch_model.bin"])
    config = {"architecture": "vit", "mean": [0.5] * 3}
    unknown = "can't be had ("
    expected = {
        "hf-hub:org/both": [str(both / "model.safetensors"), [1], config, config],
        "hf_hub:org/both@main": [str(both / "model.safetensors"), [1], config, config],
        "hf-hub:org/older@v2": [str(older / "pytorch_model.bin"), [2], config, config],
        "hf-hub:org/plain": [str(plain / "model.safetensors"), [1], {}, {}],
        "hf-hub:org/none": "hf-hub:org/none: the repository holds neither model.safetensors nor pytorch_model.bin",
        "hf-hub:org/older": f"hf-hub:org/older: model.safetensors or pytorch_model.bin {unknown}",
        "hf-hub:org/half": f"hf-hub:org/half: config.json {unknown}",
        "hf-hub:a/b/c": f"hf-hub:a/b/c: model.safetensors {unknown}",
    }
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", ASK, *expected]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    for (name, wanted), line in zip(expected.items(), done.stdout.splitlines(), strict=True):
        answer = json.loads(line)
        assert (answer[: len(wanted)] if isinstance(wanted, str) else answer) == wanted, name


def test_the_hub_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it weren't installed
    for ask in (find_weights, read_config, read_weights):
        with pytest.raises(InputError, match=r"^hf-hub:a/b: needs huggingface_hub; pip install huggingface_hub$"):
            ask("hf-hub:a/b")


# ------------------------------------------------------------ damaged, foreign


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The contents of one file of each kind."""
    folder = tmp_path_factory.mktemp("originals")
    arrays = {"a": np.ones((3, 4), np.float32), "b": np.arange(5)}
    made(folder / "a.npz", arrays)
    made(folder / "a.pdparams", arrays)
    np.savez_compressed(folder / "b.npz", **arrays)
    paths = [GOLDEN / name for name in (*MADE_BY_TORCH, "checkpoint.pth", "checkpoint_legacy.pth")]
    paths += [folder / name for name in ("a.npz", "b.npz", "a.pdparams")]
    return {path.name: path.read_bytes() for path in paths}


def test_a_file_cut_anywhere_is_refused(tmp_path, originals):
    for name, content in originals.items():
        (tmp_path / name).write_bytes(content)
        read_weights(tmp_path / name)
        lengths = {*range(0, len(content), 1 + len(content) // 300), *range(len(content) - 90, len(content))}
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
        (b"\x89PNG\r\n\x1a\n" + bytes(50), r"it is no weight file \(it starts with b'\\x89PNG"),
        (b"hello, world", "it is no weight file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 346\n", "a Git LFS pointer.*git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "an HTML page, not the weights; download the file itself"),
        (b"<html>\n<head>", "an HTML page"),
        (b"\x1f\x8b\x08\x00" + bytes(20), "it is no weight file"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", "it is no weight file"),
        (b"\x80\x06.", "it is no weight file"),
        (b"(dp0\n.", "it is no weight file"),
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
    ({"a": EIGHT}, bytes(9), r"its tensors end at byte \d+, the file at"),
    ({"a": EIGHT}, bytes(7), "its tensors end at byte"),
    ({"a": entry("F32", [2**40], 0, 2**42)}, bytes(8), "its tensors end at byte"),
    ({"a": entry("F32", [3], 0, 8)}, bytes(8), "other sizes than they claim .a"),
    ({"a": entry("F32", [-2, -1], 0, 8)}, bytes(8), "no tuple of sizes"),
    ({"a": entry("F32", [2.0], 0, 8)}, bytes(8), "no tuple of sizes"),
    ({"a": entry("F32", [2], -8, 0)}, bytes(8), "overlap"),
    ({"a": entry("F32", [2**50, 0], 0, 0)}, b"", "no tuple of sizes"),
    ({"a": entry("F8_E4M3", [8], 0, 8)}, bytes(8), "a has the dtype F8_E4M3, which isn't read"),
    ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "KeyError"),
    ({"a": 3}, bytes(8), "TypeError"),
    ([EIGHT], bytes(8), "it is no weight file"),
    ({"__metadata__": {"format": "pt"}}, b"", "it holds no arrays"),
    (b'{"a": %b, "a": %b}' % ((json.dumps(EIGHT).encode(),) * 2), bytes(8), "the same name twice"),
    (b'{"a"' + b"[" * 100_000, b"", "can't be read as weights"),
    (b'{"a": ' + b"[" * 100_000, b"", "RecursionError"),
    (b'{"a": ' + b"9" * 10_000 + b"}", b"", "ValueError"),
]


@pytest.mark.parametrize(("header", "data", "message"), LIES, ids=range(len(LIES)))
def test_safetensors_headers_that_lie(tmp_path, header, data, message):
    with LittleMemory(), pytest.raises(InputError, match=message):
        read_weights(safetensors(tmp_path / "a.safetensors", header, data))


def test_a_header_of_terabytes_is_not_read(tmp_path):
    for length in (1 << 42, (1 << 64) - 1, 100):
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", length) + b'{"a": 1}')
        with LittleMemory(), pytest.raises(InputError, match=f"its safetensors header claims {length} bytes, the file"):
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
        ({"shape": (2**40,)}, "a.npy claims the shape .1099511627776., which isn't its size"),
        ({"shape": (1,)}, "claims the shape"),
        ({"shape": (-2,)}, "no tuple of sizes"),
        ({"shape": (2**62, 2**62)}, "no tuple of sizes"),
        ({"descr": "|O"}, "has the dtype object; expected numbers"),
        ({"descr": "<c8"}, "has the dtype complex64; expected numbers"),
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
    write_zip(bomb.with_suffix(".pth"), program({"a": "x" * (1 << 27)}), compression=zipfile.ZIP_DEFLATED)
    for ending in (".npz", ".pth"):
        liar = bytearray(bomb.with_suffix(ending).read_bytes())
        for sign, place in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):  # the size before compression, in both headers
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
        "bomb.npz": "out of proportion",
        "bomb.pth": "out of proportion",
        "liar.npz": "Bad CRC-32",
        "liar.pth": "Bad CRC-32",
        "packed.pth": "its tensors are compressed or encrypted",
        "lzma.npz": "compressed in a way that NumPy doesn't write",
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
        arrays = {"fine": np.ones(2, dtype), "head.weight": np.array([[1, bad, 2], [bad, 0, 0]], dtype)}
        (tmp_path / "a.safetensors").write_bytes(save(arrays))
        write_pickle(tmp_path / "a.pdparams", pickle.dumps(arrays, 4))
        save_npz(tmp_path / "a.npz", **arrays)
        for name in ("a.safetensors", "a.pdparams", "a.npz"):
            with pytest.raises(InputError, match=r"2 of the 6 values of head\.weight are NaN or infinite; take other"):
                read_weights(tmp_path / name)


def test_bfloat16_and_float64_that_are_no_numbers_in_float32(tmp_path):
    bits = np.array([0x3F80, 0x7FC0, 0xFF80, 0x0001], "<u2").tobytes()  # 1, NaN, -inf, the least number above 0
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
