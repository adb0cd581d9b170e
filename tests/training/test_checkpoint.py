"""Checkpoints on disk are whole or absent."""

import errno
import os
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.training_runs import checkpoint_names

from errors import InputError, RunError
from training.checkpoint import classes_of, storage
from training.checkpoint.state import read_state
from weights.formats import write_weights

STATE = {
    "epoch": 1, "samples": 0, "step": 9, "images": 99, "ranks": 1, "lr": 0.1, "window": [], "format": 2,
    "versions": {"toolkit": "1"}, "best": {"val": {"epoch": 1, "checkpoint": "epoch_0001", "acc1": 50.0}},
    "scaler": {"loss_scale": 65536.0, "good_updates": 0}, "classes": ["one", "two"], "config": {"SEED": 0},
}  # fmt: skip


def arrays(value=1.0):
    names = (storage.MODEL, storage.EMA, storage.OPTIMIZER)
    return {name: {"a": np.full((2, 3), value, np.float32), "b": np.arange(4)} for name in names}


def write(directory, name="epoch_0001", value=1.0):
    return storage.write_checkpoint(directory, name, arrays(value), STATE, {})


@pytest.mark.smoke
def test_what_is_written_is_found_whole(tmp_path):
    written = write(tmp_path, value=2.0)
    storage.verify(written)
    assert {file.name for file in written.iterdir()} == {*arrays(), "state.json", "SHA256SUMS"}
    assert read_state(written) == STATE
    assert classes_of(tmp_path / "last") == ["one", "two"]
    for name, expected in arrays(2.0).items():
        found = load_file(written / name)
        assert found.keys() == expected.keys()
        for key in expected:
            np.testing.assert_array_equal(found[key], expected[key])
    assert checkpoint_names(tmp_path) == {"epoch_0001", "last"}
    assert os.readlink(tmp_path / "last") == "epoch_0001"
    subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=written,
        check=True,
        capture_output=True,
    )


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, os.unlink])
@pytest.mark.parametrize("name", [storage.MODEL, storage.EMA, storage.OPTIMIZER, storage.STATE])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    written = write(tmp_path)
    damage(written / name)
    what = "can't be read as a file (FileNotFoundError: No such file"
    what = what if damage is os.unlink else "its content has changed (its SHA-256 differs)"
    with pytest.raises(InputError) as caught:
        storage.verify(written)
    assert f"{written}: damaged checkpoint: {name}: {what}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: None, r"SHA256SUMS: can't be read as a list of files \(FileNotFoundError"),
        (
            lambda text: text.splitlines(True)[0],
            r"SHA256SUMS: it doesn't list optimizer.safetensors",
        ),
        (
            lambda text: "".join(text.splitlines(True)[:-1]),
            r"SHA256SUMS: it doesn't list state.json",
        ),
        (
            lambda text: "é" + text,
            r"SHA256SUMS: can't be read as a list of files \(UnicodeDecodeError",
        ),
        *(
            (
                lambda text, name=name: f"{text}{'0' * 64}  {name}\n",
                r"SHA256SUMS: its line 5 isn't a SHA-256 and the name",
            )
            for name in (
                "../other",
                "/dev/zero",
                "..",
                ".",
                "",
                ".hidden",
                "a/b",
                "a\0b",
                "a\x1b[2J",
                "x  y",
            )
        ),
        (lambda text: text + text.splitlines(True)[0], "SHA256SUMS: it lists a file twice"),
        (lambda text: text * 9000, "SHA256SUMS: it has more than 1048576 bytes"),
        (
            lambda text: f"{text}{'0' * 64}  {'x' * 300}\n",
            "x+.*File name too long",
        ),
    ],
)
def test_damaged_sums_are_named(tmp_path, change, message):
    sums = write(tmp_path) / storage.SUMS
    text = change(sums.read_text())
    sums.unlink()
    if text is not None:
        sums.write_text(text)
    with pytest.raises(InputError, match=f"damaged checkpoint: {message}"):
        storage.verify(tmp_path / "epoch_0001")


def test_a_state_that_is_none_is_one_line(tmp_path):
    write_weights(tmp_path / "model.safetensors", {"a": np.zeros(1, np.float32)})
    for text in ("{", "{}", '{"classes": 3}', '{"classes": [1]}', "[" * 100_000):
        (tmp_path / "state.json").write_text(text)
        with pytest.raises(InputError, match=r"damaged checkpoint: state\.json: "):
            classes_of(tmp_path)


def test_what_is_no_checkpoint_is_told_from_a_damaged_one(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            InputError, match=f"no checkpoint at {path}: expected a folder that holds state.json"
        ):
            storage.verify(path)


@pytest.mark.parametrize(("name", "epoch"), [("MAE-Epoch-12-Loss-0.93", "12"), ("vit", "N")])
def test_weights_in_a_checkpoints_place_are_told_from_nothing(tmp_path, name, epoch):
    """PaddleViT's -resume takes a file, without its ending."""
    file = tmp_path / f"{name}.pdparams"
    file.touch()
    for asked in (file, tmp_path / name):
        with pytest.raises(InputError) as caught:
            storage.verify(asked)
        assert str(caught.value) == (
            f"no checkpoint at {asked}: expected a folder that holds state.json, such as <run>/checkpoints/last; {file}"
            f" is a file: -pretrained takes its weights, and -last_epoch={epoch} continues the schedule, without the"
            " optimizer's state"
        )


@pytest.mark.parametrize("failing", range(1, 6))
def test_a_failing_disk_leaves_nothing_and_last_where_it_was(tmp_path, monkeypatch, failing):
    write(tmp_path)
    fsync = os.fsync
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, "epoch_0002")
    assert len(calls) == failing
    assert checkpoint_names(tmp_path) == {"epoch_0001", "last"}
    monkeypatch.undo()
    write(tmp_path, "epoch_0002")
    assert os.readlink(tmp_path / "last") == "epoch_0002"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_not_saved(tmp_path, value):
    write(tmp_path)
    files = arrays()
    files[storage.EMA]["a"][1, 2] = value
    with pytest.raises(
        RunError, match=r"epoch_0002 isn't saved: a of ema.safetensors holds NaN or infinite values"
    ):
        storage.write_checkpoint(tmp_path, "epoch_0002", files, STATE, {})
    assert checkpoint_names(tmp_path) == {"epoch_0001", "last"}


def test_checkpoints_are_found_in_the_order_of_training(tmp_path):
    moments = [
        (0, 0),
        (0, 64),
        (9, 0),
        (9, 999_999_999),
        (9, 1_000_000_000),
        (10, 0),
        (10, 12_800),
        (10_000, 0),
    ]
    names = [storage.checkpoint_name(*moment) for moment in moments]
    assert names[2:7] == [
        "epoch_0009", "epoch_0010_sample_999999999", "epoch_0010_sample_1000000000", "epoch_0010",
        "epoch_0011_sample_000012800",
    ]  # fmt: skip
    for name in [*reversed(names), ".epoch_0012.77", "damaged_epoch_0012", "epoch_0012.old"]:
        (tmp_path / name).mkdir()
    assert [found.name for found in storage.find_checkpoints(tmp_path)] == names


# (epoch, samples of the next, what is the best) as they are saved, and what stays in the end
@pytest.mark.parametrize(
    ("keep_last", "save_freq", "saved", "kept"),
    [
        (1, 0, [(1, 0, ""), (2, 0, ""), (2, 8, "")], [(2, 8)]),
        (2, 0, [(1, 0, ""), (1, 8, ""), (2, 0, "")], [(1, 8), (2, 0)]),
        (1, 2, [(e, s, "") for e in range(1, 6) for s in (0, 8)], [(2, 0), (4, 0), (5, 8)]),
        (1, 0, [(1, 0, "val"), (2, 0, "ema"), (3, 0, ""), (4, 0, "")], [(1, 0), (2, 0), (4, 0)]),
        (
            1,
            0,
            [(1, 0, "val ema"), (2, 0, "val"), (3, 0, "ema"), (4, 0, "")],
            [(2, 0), (3, 0), (4, 0)],
        ),
        (3, 10, [(e, 0, "val") for e in range(1, 12)], [(9, 0), (10, 0), (11, 0)]),
    ],
)
def test_the_last_the_best_and_every_nth_stay(tmp_path, keep_last, save_freq, saved, kept):
    found = []
    for epoch, samples, best in saved:
        name = storage.checkpoint_name(epoch, samples)
        write(tmp_path, name)
        found.append(tmp_path / name)
        if "val" in best:
            storage.replace_link(tmp_path / storage.BEST, name)
        if "ema" in best:
            storage.replace_link(tmp_path / storage.BEST_EMA, f"{name}/{storage.EMA}")
        checkpoint_names(tmp_path)
        found, left = storage.remove_superseded(tmp_path, found, keep_last, save_freq)
        assert not left
        assert len(found) <= keep_last + 2  # the best two
        assert os.readlink(tmp_path / "last") == name
    links = {storage.LAST, storage.BEST, storage.BEST_EMA}
    assert checkpoint_names(tmp_path) - links == {
        storage.checkpoint_name(*moment) for moment in kept
    }


def test_a_checkpoint_that_lost_a_file_while_it_was_written_gets_no_name(tmp_path, monkeypatch):
    write_file = storage.write_file

    def losing(file, *content):
        line = write_file(file, *content)
        if file.name == storage.STATE:
            (file.parent / storage.MODEL).unlink()
        return line

    monkeypatch.setattr(storage, "write_file", losing)
    with pytest.raises(FileNotFoundError, match=storage.MODEL):
        write(tmp_path)
    assert not list(tmp_path.iterdir())
