"""Weights are opened, not loaded: a model takes them tensor by tensor, whatever the kind of file."""

import os
import time
import tracemalloc

import numpy as np
import paddle
import pytest
from support.weight_files import program, storage, tensor, write_zip

import errors
from errors import Allowance, InputError, Unreadable
from models import create_model
from weights import file_arrays, load_weights, save_weights
from weights.adapters import PREFIX, adapter_metadata, of_base
from weights.arrays import LazyArray, concatenated
from weights.formats import WeightFile, open_weights, read_weights, write_weights
from weights.names import google_names

SIZES = {"embed_dim": 192, "depth": 6, "num_heads": 3, "image_size": 32, "num_classes": 10}
LARGEST = 192 * 4 * 192 * 4  # bytes, of an MLP's matrix
NUMBERS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture(scope="module")
def model():
    return create_model("vit_tiny_patch16_224", **SIZES)


def as_torch(path, arrays):
    tensors = {}
    for key, (name, array) in enumerate(arrays.items()):
        strides = tuple(stride // array.itemsize for stride in np.ascontiguousarray(array).strides)
        tensors[name] = tensor(storage(str(key), array.size), array.shape, strides)
    content = {
        str(key): np.ascontiguousarray(array).tobytes() for key, array in enumerate(arrays.values())
    }
    return write_zip(path, program(tensors), content)


def written(model, kind, folder):
    """A file of the model's weights, in this kind, and the model's own arrays."""
    arrays = file_arrays(model)
    path = folder / f"weights.{kind}"
    if kind == "pth":
        return as_torch(path, arrays)
    if kind == "pdparams":
        arrays = {name: t.numpy() for name, t in model.state_dict().items()}
    if kind == "npz":
        arrays = google_names(model, arrays)
    if kind == "transformers":  # its queries, keys and values are apart
        arrays = as_transformers(arrays)
        path = folder / "weights.safetensors"
    write_weights(path, arrays)
    return path


def as_transformers(arrays):
    """Arrays of a ViT by names of which transformers' are recognised, with what is joined to
    ``qkv`` again.
    """
    found = {}
    for name, array in arrays.items():
        block, _, leaf = name.removeprefix("blocks.").partition(".attn.qkv.")
        if leaf:
            layer = f"encoder.layer.{block}.attention.attention"
            parts = zip(("query", "key", "value"), np.split(array, 3), strict=True)
            found |= {f"{layer}.{part}.{leaf}": piece for part, piece in parts}
        else:
            found[name] = array
    return found


def peak_of_loading(*arguments, **keywords):
    """The most memory that NumPy's arrays took meanwhile, in bytes, and the report."""
    tracemalloc.start()
    try:
        report = load_weights(*arguments, **keywords)
        return tracemalloc.get_traced_memory()[1], report
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("kind", ["safetensors", "pth", "pdparams", "npz", "transformers"])
def test_one_tensor_at_a_time_is_in_memory(model, tmp_path, kind, checksums):
    file = written(model, kind, tmp_path)
    expected = {name: t.numpy().copy() for name, t in model.state_dict().items()}
    assert file.stat().st_size > 18 * LARGEST
    other = create_model("vit_tiny_patch16_224", **SIZES)
    peak, report = peak_of_loading(other, file, checksums=checksums)
    # The tensor itself, in the other order, and what it is checked with; some for names and
    # descriptions.
    assert peak < 5 * LARGEST
    assert len(report.loaded) == len(expected)
    assert len(report.checksums) == (len(expected) if checksums else 0)
    for name, t in other.state_dict().items():
        np.testing.assert_array_equal(t.numpy(), expected[name])


def test_an_adapter_is_merged_tensor_by_tensor(model, tmp_path):
    base = written(model, "safetensors", tmp_path)
    numbers = np.random.default_rng(0)
    arrays = {}
    for block in range(6):
        layer = f"{PREFIX}blocks.{block}.mlp.fc1"
        arrays[f"{layer}.lora_A.weight"] = numbers.normal(size=(2, 192)).astype(np.float32)
        arrays[f"{layer}.lora_B.weight"] = numbers.normal(size=(768, 2)).astype(np.float32)
    state = {name: t.numpy().copy() for name, t in model.state_dict().items()}
    metadata = adapter_metadata("lora", 0.5, of_base(model, state), 2, arrays)
    write_weights(tmp_path / "adapter.safetensors", arrays, metadata)
    other = create_model("vit_tiny_patch16_224", **SIZES)
    peak, _ = peak_of_loading(other, base, adapter=tmp_path / "adapter.safetensors")
    assert peak < 6 * LARGEST
    a, b = (arrays[f"{PREFIX}blocks.3.mlp.fc1.lora_{part}.weight"] for part in "AB")
    expected = state["blocks.3.mlp.fc1.weight"] + np.float32(0.5) * (a.T @ b.T)
    np.testing.assert_allclose(
        other.state_dict()["blocks.3.mlp.fc1.weight"].numpy(), expected, rtol=1e-6
    )


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array.T,
        lambda array: array.transpose(1, 2, 0),
        lambda array: array.reshape(6, 4),
        lambda array: array.reshape((-1, 3)),
        lambda array: array[1],
        lambda array: array[:, ::-1],
        lambda array: array[None, ..., 1:3],
        lambda array: array[:, [2, 0]],
        lambda array: array.T.reshape(4, -1)[:2].T,
        lambda array: concatenated([array, array[:1]]),
    ],
)
def test_views_are_numpys_and_read_nothing(view):
    reads = []
    lazy = LazyArray(NUMBERS.shape, NUMBERS.dtype, lambda: reads.append(1) or NUMBERS)
    expected = np.asarray(view(NUMBERS))
    found = view(lazy)
    assert isinstance(found, LazyArray)
    told = (
        found.shape,
        found.dtype,
        found.ndim,
        found.size,
        found.nbytes,
        found.itemsize,
        len(found),
    )
    assert told == (
        expected.shape, np.float32, expected.ndim, expected.size, expected.nbytes, 4, len(expected)
    )  # fmt: skip
    assert not reads
    np.testing.assert_array_equal(found, expected)
    assert reads


def test_numbers_and_other_attributes_are_read():
    lazy = LazyArray(NUMBERS.shape, NUMBERS.dtype, lambda: NUMBERS)
    assert lazy[1, 2, 3] == 23
    assert type(lazy[0, 0, 0]) is np.float32
    assert lazy.any()
    assert lazy.tobytes() == NUMBERS.tobytes()
    assert [len(one) for one in lazy] == [3, 3]
    np.testing.assert_array_equal(np.split(lazy, 2, axis=2)[1], NUMBERS[:, :, 2:])
    assert np.asarray(lazy, np.float64).dtype == np.float64
    with pytest.raises(IndexError):
        lazy[2]
    with pytest.raises(AttributeError):
        lazy._other  # noqa: B018
    with pytest.raises(ValueError, match="reshape"):
        lazy.reshape(5, 5)


def test_parts_of_other_shapes_are_not_joined():
    lazy = LazyArray(NUMBERS.shape, NUMBERS.dtype, lambda: NUMBERS)
    with pytest.raises(ValueError, match="must match"):
        concatenated([lazy, lazy[:, :1]])


@pytest.mark.parametrize("kind", ["safetensors", "pth", "npz", "pdparams"])
def test_a_file_that_is_shortened_meanwhile_is_an_error(model, tmp_path, kind):
    file = written(model, kind, tmp_path)
    with open_weights(file) as stored:
        names = list(stored.arrays)
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(InputError, match=rf"^{file}: "):
            for name in names:
                np.asarray(stored.arrays[name])


def test_a_value_that_is_not_finite_changes_no_tensor(model, tmp_path):
    arrays = {name: array.copy() for name, array in file_arrays(model).items()}
    last = list(model.state_dict())[-1]
    arrays[last].flat[0] = np.nan
    write_weights(tmp_path / "weights.safetensors", arrays)
    other = create_model("vit_tiny_patch16_224", **SIZES)
    before = {name: t.numpy().copy() for name, t in other.state_dict().items()}
    with pytest.raises(
        InputError, match=rf"weights.safetensors: 1 of the \d+ values of {last} are NaN or infinite"
    ):
        load_weights(other, tmp_path / "weights.safetensors")
    for name, t in other.state_dict().items():
        np.testing.assert_array_equal(t.numpy(), before[name])


def test_what_must_be_unpacked_is_read_once(tmp_path):
    numbers = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    np.savez_compressed(tmp_path / "packed.npz", a=numbers)
    np.savez(tmp_path / "stored.npz", a=numbers)
    with (
        open_weights(tmp_path / "packed.npz") as packed,
        open_weights(tmp_path / "stored.npz") as stored,
    ):
        assert isinstance(packed.arrays["a"], np.ndarray)
        assert isinstance(stored.arrays["a"], LazyArray)
    assert isinstance(read_weights(tmp_path / "stored.npz").arrays["a"], np.ndarray)
    np.testing.assert_array_equal(packed.arrays["a"], numbers)
    with pytest.raises(InputError, match="stored.npz"):  # it is closed
        np.asarray(stored.arrays["a"])


def test_time_between_two_reads_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(errors.time, "thread_time", lambda: now[0])
    allowance = Allowance(0)
    for _ in range(5):
        now[0] += 9  # of something else
        allowance.resume()
        now[0] += 1.9
        allowance.take(0)
    allowance.resume()
    now[0] += 1
    with pytest.raises(Unreadable, match="takes too long"):
        allowance.take(0)


def small(seed=0):
    paddle.seed(seed)
    return create_model("vit_digits", depth=1)


def write_in_place(file, byte):
    """Changes the last number of the last tensor, and sets the time of modification back."""
    state = file.stat()
    with open(file, "r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([byte]))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("way", ["write", "cut"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_file_that_is_changed_while_it_is_loaded(tmp_path, monkeypatch, way, after):
    """Before the first tensor is set, nothing is changed; later, the error says that the model is
    of no use.
    """
    file = tmp_path / "m.safetensors"
    save_weights(small(), file)
    model = small(seed=1)
    before = {name: value.numpy() for name, value in model.state_dict().items()}
    checks = []
    check = WeightFile.check_unchanged

    def change(stored):
        if len(checks) == after:
            time.sleep(0.02)  # as long as the kernel's clock takes to go on
            write_in_place(file, 0) if way == "write" else os.truncate(
                file, file.stat().st_size - 1
            )
        checks.append(stored)
        check(stored)

    monkeypatch.setattr(WeightFile, "check_unchanged", change)
    with pytest.raises(InputError) as caught:
        load_weights(model, file)
    useless = "; the model was loaded partially and can't be used"
    expected = f"{file}: it changed while it was read; load it again once it is written completely"
    assert str(caught.value) == expected + useless * bool(after)
    now = {name: value.numpy() for name, value in model.state_dict().items()}
    changed = [name for name in before if (before[name] != now[name]).any()]
    assert (len(changed) > 0) == (after > 0)
    assert len(checks) == after + 1


def test_a_file_whose_name_another_takes_while_it_is_loaded_is_read_to_its_end(
    tmp_path, monkeypatch
):
    """As a training's last checkpoint may be replaced: what is open stays as it was."""
    file = tmp_path / "m.safetensors"
    save_weights(small(), file)
    save_weights(small(seed=2), tmp_path / "next.safetensors")
    check = WeightFile.check_unchanged

    def replace(stored):
        if (tmp_path / "next.safetensors").exists():
            time.sleep(0.02)
            (tmp_path / "next.safetensors").replace(file)
        check(stored)

    monkeypatch.setattr(WeightFile, "check_unchanged", replace)
    model = small(seed=1)
    load_weights(model, file)
    expected = small().state_dict()
    assert all(
        (value.numpy() == expected[name].numpy()).all()
        for name, value in model.state_dict().items()
    )
