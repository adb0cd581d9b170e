"""The tools: averaging checkpoints, by value and by command line."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import warm
from conftest import ROOT
from safetensors.numpy import load_file, save_file

from config import get_config
from errors import InputError
from models import build_model
from tools.average_checkpoints import average, metadata_of
from training.checkpoint import describe
from training.checkpoint.description import METADATA
from weights import file_arrays, load_weights
from weights.formats import read_metadata, write_weights


def run(folder, *arguments):
    command = [warm.python(), str(ROOT / "tools" / "average_checkpoints.py"), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def write(file, **arrays):
    save_file({name: np.asarray(array) for name, array in arrays.items()}, file)
    return file


def test_the_mean_is_taken_in_float64_and_written_as_float32(tmp_path):
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(3, 4)).astype(np.float32) for _ in range(3)]
    # In float32, 1 is lost beside 2 ** 25; in float16, the sum would overflow.
    large = np.array([2.0**25, 1.0, -(2.0**25)], np.float32)
    half = np.full(2, 60000, np.float16)
    files = [
        write(
            tmp_path / f"{i}.safetensors",
            w=weights[i],
            large=large[i : i + 1],
            half=half,
            scalar=np.float64(i),
            steps=[i, 7],
        )
        for i in range(3)
    ]
    with average(files) as lazy:
        found = {name: np.asarray(array) for name, array in lazy.items()}
    assert {name: array.dtype.name for name, array in found.items()} == {
        "w": "float32", "large": "float32", "half": "float32", "scalar": "float32", "steps": "int64",
    }  # fmt: skip
    np.testing.assert_array_equal(
        found["w"], np.mean(np.float64(weights), axis=0).astype(np.float32)
    )
    np.testing.assert_array_equal(found["large"], np.float32([1 / 3]))
    np.testing.assert_array_equal(found["half"], [60000, 60000])
    assert found["scalar"].shape == ()
    assert found["scalar"] == 1
    np.testing.assert_array_equal(found["steps"], [2, 7])  # the last file's
    with average(files[:1]) as lazy:
        np.testing.assert_array_equal(lazy["w"], weights[0])


def test_one_tensor_at_a_time_is_averaged(tmp_path):
    tensors = {f"w{i}": np.zeros([256, 256], np.float32) for i in range(20)}  # 256 kB each
    files = [write(tmp_path / f"{i}.safetensors", **tensors) for i in range(6)]
    tracemalloc.start()
    try:
        with average(files) as arrays:
            write_weights(tmp_path / "mean.safetensors", arrays)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * 256 * 256 * 4
    assert (tmp_path / "mean.safetensors").stat().st_size > 20 * 256 * 256 * 4


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"a": np.zeros(2), "b": np.zeros(3)},
            r"^b is real \[3\] in .*y.safetensors, is real \[2\] in .*x.safetensors",
        ),
        ({"a": np.zeros(2)}, "^b is missing in .*y.safetensors, is real"),
        (
            {"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(1)},
            r"^c is real \[1\] in .*y.*, is missing in .*x",
        ),
        ({"a": np.zeros(2), "b": np.zeros(2, np.int64)}, r"^b is int64 \[2\] in .*y"),
    ],
)
def test_the_first_tensor_that_differs_is_named(tmp_path, other, message):
    files = [
        write(tmp_path / "x.safetensors", a=np.zeros(2), b=np.zeros(2)),
        write(tmp_path / "y.safetensors", **other),
    ]
    with pytest.raises(InputError, match=message), average(files):
        pass


@pytest.mark.smoke
def test_the_command_averages_checkpoints_and_a_model_takes_the_result(tmp_path, tiny):
    models = [build_model(get_config(None, tiny)) for _ in range(3)]
    for number, model in enumerate(models[:2]):
        (tmp_path / f"epoch_{number}").mkdir()
        write_weights(
            tmp_path / f"epoch_{number}" / "model.safetensors", file_arrays(model), {"of": "two"}
        )
    for dash in ("-", "--"):
        status, printed, errors = run(
            tmp_path, f"{dash}output=new/{dash}.safetensors", "epoch_0", "epoch_1/model"
        )
        assert status == 0, errors
        tensors = len(load_file(tmp_path / "epoch_0" / "model.safetensors"))
        assert printed == (
            f"new/{dash}.safetensors: the mean of 2 checkpoints, {tensors} tensors;"
            " from epoch_0/model.safetensors, epoch_1/model.safetensors\n"
        )
        load_weights(models[2], tmp_path / "new" / f"{dash}.safetensors")
        assert read_metadata(tmp_path / "new" / f"{dash}.safetensors") == {"of": "two"}
        for first, second, mean in zip(*(model.parameters() for model in models), strict=True):
            np.testing.assert_allclose(
                mean.numpy(), (first.numpy() + second.numpy()) / 2, rtol=1e-6, atol=1e-8
            )
    assert [file.name for file in sorted((tmp_path / "new").iterdir())] == [
        "--.safetensors",
        "-.safetensors",
    ]


def test_an_average_has_no_thresholds_of_its_parts(tmp_path):
    of_parts = [
        describe(get_config(), ["a", "b"], "multilabel", own)
        for own in ([0.2, 0.3], [0.4, 0.5], [])
    ]
    for place, told in enumerate(of_parts):
        metadata = {METADATA: told.to_json(), "of": "two"}
        write_weights(tmp_path / f"{place}.safetensors", {"w": np.zeros(2, np.float32)}, metadata)
    found = [metadata_of(tmp_path / f"{place}.safetensors") for place in range(3)]
    assert found == [{METADATA: of_parts[2].to_json(), "of": "two"}] * 3


def test_outputs_of_other_classes_are_not_averaged(tmp_path):
    def write_described(name, classes, *options):
        told = describe(get_config(None, options), classes, "classification")
        arrays = {"w": np.full(2, len(classes), np.float32)}
        write_weights(tmp_path / f"{name}.safetensors", arrays, {METADATA: told.to_json()})

    write_described("ab", ["a", "b"])
    write_described("ba", ["b", "a"])
    write_described("abc", ["a", "b", "c"])
    write_described("unknown", [])
    write_described("other", ["a", "b"], "DATA.IMAGE_SIZE", "32")
    for names, message in (
        (["ab", "ba"], "output 0 is 'b' in ba.safetensors, 'a' in ab.safetensors; only check"),
        (["unknown", "ab", "abc"], "output 2 is 'c' in abc.safetensors, nothing in ab.safetens"),
        (["abc", "ab"], "output 2 is nothing in ab.safetensors, 'c' in abc.safetensors"),
    ):
        for more in ([], ["-weights", *[str(1 / len(names))] * len(names)], ["--greedy"]):
            status, _, errors = run(tmp_path, *more, "-output=out.safetensors", *names)
            assert (status, message in errors) == (2, True), errors
            assert not (tmp_path / "out.safetensors").exists()
    # Other descriptions are left out, and a line says so.
    status, printed, errors = run(tmp_path, "-output=out.safetensors", "ab", "other")
    assert (status, errors) == (0, "")
    assert printed.splitlines()[1].startswith(
        "note: their descriptions differ, so the file doesn't"
    )
    assert METADATA not in read_metadata(tmp_path / "out.safetensors")
    # What is read isn't replaced.
    before = (tmp_path / "ab.safetensors").read_bytes()
    status, _, errors = run(tmp_path, "-output=ab.safetensors", "other", "ab")
    assert (status, "ab.safetensors is an input as well; choose another" in errors) == (
        2,
        True,
    )
    assert (tmp_path / "ab.safetensors").read_bytes() == before


def test_a_wrong_command_is_one_line_and_writes_nothing(tmp_path):
    write(tmp_path / "a.safetensors", w=np.zeros(2))
    write(tmp_path / "b.safetensors", w=np.zeros(3))
    (tmp_path / "c.safetensors").write_bytes(b"not weights")
    for arguments, message in [
        (
            ["-output=out.safetensors", "a", "b"],
            "error: w is real [3] in b.safetensors, is real [2] in a.safetensors",
        ),
        (["-output=out.safetensors", "a", "c"], "error: c.safetensors: it isn't a weight file"),
        (["-output=out.safetensors", "absent"], "error: no weights at absent"),
        (["-output=out", "a"], "error: -output is out, expected a name that ends in .safetensors"),
        (["a"], "error: command line: missing: -output"),
    ]:
        status, _, errors = run(tmp_path, *arguments)
        assert (status, errors.count("error: "), message in errors) == (2, 1, True), errors
        assert "Traceback" not in errors
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "a.safetensors",
        "b.safetensors",
        "c.safetensors",
    ]


def test_help_comes_before_paddle(tmp_path):
    status, printed, _ = run(tmp_path, "-h")
    assert status == 0
    assert "Averages the weights" in printed
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import tools.average_checkpoints; print('paddle' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "False\n"
    )


def test_an_interpreter_without_timm_is_one_line_of_the_parity_check():
    command = [
        warm.python(),
        str(ROOT / "tools" / "check_parity.py"),
        "vit_digits",
        "-python",
        "/bin/true",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = "error: /bin/true returned no logits of vit_tiny_patch16_224: it needs torch and timm (see -h)\n"
    assert (done.returncode, done.stderr) == (1, said)
