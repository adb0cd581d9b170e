"""Weight files of every kind: torch's own, Paddle's own, NumPy's; how they are written."""

import json
import os
import pickle

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.stored import SHAPES, values
from safetensors.numpy import load_file, save, save_file
from support.weight_files import ONE, TWO, Call, made, program, write_pickle, write_zip

from errors import InputError, Unreadable
from weights.arrays import Array, is_count, sizes
from weights.formats import files_of, read_metadata, read_weights, write_weights

GOLDEN = ROOT / "tests" / "golden"
MADE_BY_TORCH = ("weights.pth", "weights_legacy.pth", "weights.safetensors")


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
    assert read.notes == ["its model_ema was used (it contains model_ema, model)"]
    assert sorted(read.arrays) == ["bias", "weight"]
    np.testing.assert_array_equal(read.arrays["weight"], np.full((2, 3), 0.25))


@pytest.mark.smoke
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_paddle_saves(tmp_path, protocol):
    # longer than a text is kept
    layer = paddle.nn.Sequential(paddle.nn.Linear(300, 70), paddle.nn.BatchNorm1D(70))
    state = layer.state_dict()
    optimizer = paddle.optimizer.Adam(parameters=layer.parameters())
    paddle.save(state, str(tmp_path / "a.pdparams"), protocol=protocol)
    paddle.save(
        {"model": state, "optimizer": optimizer.state_dict(), "epoch": 3},
        str(tmp_path / "b"),
        protocol=protocol,
    )
    for name in ("a.pdparams", "b"):
        read = read_weights(tmp_path / name)
        assert (read.layout, read.notes) == ("paddle", [])
        assert list(read.arrays) == list(state)
        for key, value in state.items():
            np.testing.assert_array_equal(read.arrays[key], value.numpy(), key)


def test_paddles_bfloat16_is_no_integer(tmp_path):
    paddle.save(
        {"weight": paddle.to_tensor([0.5, -2.0]).astype("bfloat16")}, str(tmp_path / "a.pdparams")
    )
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
        assert found.dtype == (
            np.float32 if array.dtype.kind == "f" else array.dtype.newbyteorder("=")
        ), name


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_googles_npz(tmp_path, write):
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    # bfloat16, as JAX's arrays come out of np.savez
    short = (kernel.view(np.uint32) >> 16).astype("<u2").view("V2")
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
        np.testing.assert_array_equal(
            read.arrays[name], kernel.T if name == "turned" else kernel, name
        )
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


@pytest.mark.parametrize(
    ("content", "taken", "notes"),
    [
        (
            {"state_dict_ema": {"a": ONE}, "model_ema": {"a": TWO}, "state_dict": {"a": TWO}},
            "state_dict_ema",
            1,
        ),
        ({"model": {"a": TWO}, "state_dict": {"a": TWO}, "model_ema": {"a": ONE}}, "model_ema", 1),
        ({"model": {"a": TWO}, "state_dict": {"a": ONE}, "model_ema": None}, "state_dict", 1),
        ({"student": {}, "teacher": {"a": ONE}, "epoch": 3}, "teacher", 0),
        ({"student": 3, "teacher": {"a": ONE}}, "teacher", 0),
        ({"model_state_dict": {"a": ONE}}, "model_state_dict", 0),
        ({"model_state": {"a": ONE}, "epoch": 1}, "model_state", 0),
        ({"state_dict": {"model": {"a": ONE}}}, "model", 0),
        ({"module": {"a": ONE}, "model_ema": {}}, "module", 0),
        ({"net": {"_orig_mod.module.a": ONE}}, "net", 0),
        ({"model": {"module._orig_mod.a": ONE}}, "model", 0),
        ({"module.a": ONE}, None, 0),
        (
            {
                "state_dict": {"model.a": ONE},
                "pytorch-lightning_version": "2.5",
                "hyper_parameters": {},
            },
            "state_dict",
            0,
        ),
        ({"state_dict": {"net._orig_mod.a": ONE}}, "state_dict", 0),
        ({"module.backbone.a": ONE}, None, 0),
        ({"_forward_module._orig_mod.model.a": ONE}, None, 0),
        ({"_fsdp_wrapped_module.model._checkpoint_wrapped_module.a": ONE}, None, 0),
        (
            {"a": ("linear_0.w_0", ONE), "StructuredToParameterName@@": {"a": "linear_0.w_0"}},
            None,
            0,
        ),
    ],
)
def test_the_weights_of_a_checkpoint_by_timms_order(tmp_path, content, taken, notes):
    read = read_weights(write_pickle(tmp_path / "a.pth", program(content)))
    assert list(read.arrays) == ["a"]
    assert read.arrays["a"] == 1
    assert [note.split(" was")[0] for note in read.notes] == [f"its {taken}"] * notes


@pytest.mark.parametrize("wrapper", [(), ("model",), ("state_dict", "model")])
def test_the_parts_of_self_distillation_are_read_together(tmp_path, wrapper):
    """The model of such a checkpoint is the teacher's (``weights.names.encoder_arrays``)."""
    content = {
        "student": {"module.backbone.a": TWO},
        "teacher": {"_orig_mod.backbone.a": ONE},
        "dino_loss": {"center": TWO},
        "optimizer": {"state": {}},
    }
    for name in wrapper:
        content = {name: content}
    read = read_weights(write_pickle(tmp_path / "a.pth", program(content)))
    assert {name: int(array) for name, array in read.arrays.items()} == {
        "student.module.backbone.a": 2,
        "teacher.backbone.a": 1,
        "dino_loss.center": 2,
    }
    assert read.notes == []


def test_a_part_of_self_distillation_with_a_long_name_is_refused(tmp_path):
    content = {"student": {"a" * 300: ONE}, "teacher": {"a": ONE}}
    file = write_pickle(tmp_path / "a.pth", program(content))
    with pytest.raises(InputError, match=r"a\.pth: it contains an array under the name student\.a"):
        read_weights(file)


def test_prefixes_inside_a_name_stay(tmp_path):
    names = [
        "head.module.weight",
        "module_list.0",
        "head.model.0",
        "network.0",
        "model_ema.a",
        "model.0.a",
    ]
    read = read_weights(write_pickle(tmp_path / "a.pth", program(dict.fromkeys(names, ONE))))
    assert list(read.arrays) == names


def test_what_wraps_a_layer_is_left_out_at_any_depth(tmp_path):
    names = {
        "blocks.0._checkpoint_wrapped_module.norm1.weight": ONE,
        "blocks.1._orig_mod.norm1.weight": TWO,
    }
    read = read_weights(write_pickle(tmp_path / "a.pth", program(names)))
    assert list(read.arrays) == ["blocks.0.norm1.weight", "blocks.1.norm1.weight"]


# ---------------------------------------------------- weights in several files


INDEX = "model.safetensors.index.json"


def parts(folder, files, index=None):
    """Writes files of arrays, and the index of them."""
    for name, arrays in files.items():
        made(folder / name, {key: np.float32(value) for key, value in arrays.items()})
    named = {key: name for name, arrays in files.items() for key in arrays}
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": named} if index is None else index)
    )
    return folder


ONE_OF = "model-00001-of-00002.safetensors"
TWO_OF = "model-00002-of-00002.safetensors"


def test_weights_in_several_files_are_one(tmp_path):
    parts(tmp_path, {ONE_OF: {"a": [1], "b": [2]}, TWO_OF: {"c": [3]}})
    for path in (tmp_path, tmp_path / INDEX):
        read = read_weights(path)
        assert (read.path, read.layout) == (tmp_path / INDEX, "torch")
        assert {name: array.tolist() for name, array in read.arrays.items()} == {
            "a": [1],
            "b": [2],
            "c": [3],
        }
        assert [file.name for file in files_of(path)] == [ONE_OF, TWO_OF]
    assert read_metadata(tmp_path / INDEX) == {}
    # which comes first, as in transformers
    made(tmp_path / "model.safetensors", {"whole": np.float32([1])})
    assert list(read_weights(tmp_path).arrays) == ["whole"]


def test_a_part_alone_is_refused(tmp_path):
    parts(tmp_path, {ONE_OF: {"a": [1]}, TWO_OF: {"c": [3]}})
    with pytest.raises(
        InputError,
        match=r"00002-of-00002\.safetensors is one of 2 files of the weights; pass their folder",
    ):
        read_weights(tmp_path / TWO_OF)
    made(tmp_path / "model-00001-of-00001.safetensors", {"a": np.float32([1])})
    assert list(read_weights(tmp_path / "model-00001-of-00001.safetensors").arrays) == ["a"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"weight_map": {"a": "../outside.safetensors"}},
            "its weight_map is a dictionary of 1, expected tensors and",
        ),
        (
            {"weight_map": {"a": "/etc/passwd"}},
            "its weight_map is a dictionary of 1, expected tensors and the file",
        ),
        (
            {"weight_map": {"a": ".hidden.safetensors"}},
            "its weight_map is a dictionary of 1, expected tensors and",
        ),
        (
            {"weight_map": {"a": 3}},
            "its weight_map is a dictionary of 1, expected tensors and the file of each",
        ),
        (
            {"weight_map": {}},
            "its weight_map is a dictionary of 0, expected tensors and the file of each",
        ),
        (
            {"weight_map": {f"a{i}": f"{i}.bin" for i in range(1001)}},
            "of at most 1000, beside the index",
        ),
        ({"metadata": {}}, "its weight_map is missing, expected tensors and the file of each"),
        ([1], "its content is \\[1\\], expected a dictionary"),
        (
            {"weight_map": {"a": "absent.safetensors"}},
            "absent.safetensors, which it lists, isn't next to it; copy it",
        ),
        (
            {"weight_map": {"a": ONE_OF, "b": "again.safetensors"}},
            "it contains a, which occurs in another of the 2 files as well",
        ),
        (
            {"weight_map": {"a": ONE_OF, "b": "paddle.safetensors"}},
            "its files have different layouts",
        ),
    ],
)
def test_an_index_is_held_to_its_form(tmp_path, index, message):
    parts(tmp_path, {ONE_OF: {"a": [1]}, "again.safetensors": {"a": [1]}}, index)
    save_file({"b": np.float32([1])}, tmp_path / "paddle.safetensors", {"format": "pd"})
    with pytest.raises(InputError, match=message) as caught:
        read_weights(tmp_path)
    assert str(caught.value).isprintable()


def test_a_folder_of_torchs_distributed_checkpoint_is_told(tmp_path):
    (tmp_path / ".metadata").touch()
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(
        InputError, match=r"checkpoint; its format_utils\.dcp_to_torch_save converts it to a \.pth"
    ):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "state": {"x": ONE}}, "it contains no arrays, but epoch, state$"),
        ({}, "it contains no arrays, but nothing$"),
        ([ONE], "it contains no dictionary of arrays$"),
        (3, "it contains no dictionary of arrays$"),
        ({"model": Call("argparse", "Namespace")}, "it contains no arrays, but model$"),
        (
            {"a\x1b[2J": ONE},
            r"an array under the name a\\x1b\[2J, which has unprintable characters$",
        ),
        ({"module.a": ONE, "a": TWO}, "it contains a twice, with a prefix and without$"),
        (
            Call("timm.models", "ViT"),
            r"it asks to load timm\.models\.ViT; only arrays and plain containers are read$",
        ),
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
    arrays = {
        "blocks.0.weight": kernel,
        "turned": kernel.T,
        "one": np.float32(3),
        "count": np.arange(3),
    }
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
    # the library has an order of its own among types of one size
    arrays = {name: values(name) for name in SHAPES}
    loaded = load_file(made(tmp_path / "a.safetensors", arrays))
    assert sorted(loaded) == sorted(arrays)
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, arrays[name], name, strict=True)


def test_paddle_loads_what_is_written(tmp_path):
    arrays = {
        "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a.bias": np.ones(3, np.float32),
    }
    loaded = paddle.load(str(made(tmp_path / "a.pdparams", arrays)))
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), array)


# np.savez 1.26 leaves an open archive behind
@pytest.mark.parametrize("ending", [".safetensors", ".pdparams"])
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


def test_what_describes_an_array_is_bounded():
    counts = {
        0: True,
        (1 << 48) - 1: True,
        1 << 48: False,
        (1 << 48) + 1: False,
        -1: False,
        1.0: False,
    }
    assert {value: is_count(value) for value in counts} == counts
    assert not is_count(True)
    assert sizes((1,) * 32) == (1,) * 32  # as many as NumPy 1 has
    for wrong in ((1,) * 33, [1], (1, -1)):
        with pytest.raises(Unreadable, match="whose shape or strides aren't a tuple of sizes"):
            sizes(wrong)
    for shape, strides, first in (((2,), (), 0), ((), (1,), 0), ((2,), (1,), -1)):
        with pytest.raises(Unreadable, match="whose shape, strides and offset are inconsistent"):
            Array("<f4", shape, strides, "", first)
    for dtype, shape, strides, held, passing in (
        ("|u1", (3,), (1,), 3, 3), ("bfloat16", (3,), (1,), 12, 6), ("<f8", (3,), (1,), 12, 24),
        ("<f4", (5,), (0,), 20, 20), ("<f4", (2,), (9,), 8, 40),
    ):  # fmt: skip
        assert (
            Array(dtype, shape, strides).num_bytes(),
            Array(dtype, shape, strides).temporary_bytes(),
        ) == (held, passing)
    assert len({Array(), Array()}) == 2  # each is itself


@pytest.mark.parametrize(("depth", "read"), [(1, True), (3, True), (4, False)])
def test_weights_lie_in_three_dictionaries_at_most(tmp_path, depth, read):
    content = {"a": ONE}
    for _ in range(depth):
        content = {"model": content}
    file = write_pickle(tmp_path / "weights", program(content))
    if read:
        assert read_weights(file).arrays.keys() == {"a"}
    else:
        with pytest.raises(InputError, match="contains no array"):
            read_weights(file)


def test_pdparams_are_written_for_large_arrays(tmp_path):
    write_weights(tmp_path / "a.pdparams", {"a": np.zeros(2, np.float32)})
    # protocol 4: more than 4 GB fit
    assert (tmp_path / "a.pdparams").read_bytes()[:2] == b"\x80\x04"


def test_a_path_that_python_3_13_wrote_is_a_path(tmp_path):
    """Its module is pathlib._local there; training scripts keep their arguments beside the weights."""
    path = Call("pathlib._local", "PosixPath", ("/data",))
    found = read_weights(
        write_zip(tmp_path / "a.pth", program({"model": {"a": ONE}, "args": path}))
    )
    assert list(found.arrays) == ["a"]


def test_a_torchscript_program_that_holds_itself_ends(tmp_path):
    write_zip(tmp_path / "a.pt", b"\x80\x02c__torch__\nA\n)\x81q\x00}(X\x01\x00\x00\x00ah\x00ub.")
    with pytest.raises(InputError, match="it contains no arrays"):
        read_weights(tmp_path / "a.pt")
