"""Checkpoints whose files are damaged: named, refused, and under -resume=auto left for the one
before.
"""

import hashlib
import json
import os
import re
import shutil

import numpy as np
import pytest
from conftest import TINY
from safetensors.numpy import load_file, save_file
from support.fault_runs import assert_fails
from support.programs import start
from support.ranks import run_ranks
from support.training_runs import assert_same_run, train

from errors import InputError, RunError
from training.checkpoint.storage import find_checkpoints, verify

FILES = [
    "model.safetensors",
    "ema.safetensors",
    "optimizer.safetensors",
    "state.json",
    "SHA256SUMS",
]
OPTIONS = [
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "2", "TRAIN.MODEL_EMA", "True", "SAVE_STEPS", "1", "KEEP_LAST", "1000",
    "REPORT_FREQ", "3",
]  # fmt: skip
BATCH_NORM = [
    *TINY[: TINY.index("MODEL.PATCH_SIZE")], *TINY[TINY.index("MODEL.NUM_CLASSES") :], *OPTIONS, "MODEL.TYPE",
    "ConvMixer", "MODEL.EMBED_DIM", "8", "MODEL.DEPTH", "1", "MODEL.KERNEL_SIZE", "3", "MODEL.PATCH_SIZE", "2",
]  # fmt: skip


@pytest.fixture
def damaged(tmp_path, whole):
    """The folder of the run, as it was in its second epoch."""
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    cut(run / "checkpoints", "epoch_0002_sample_000000016")
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of two epochs of four steps, with a checkpoint of each step."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train([*TINY, *OPTIONS], run, 32)
    return run


def cut(checkpoints, newest):
    found = find_checkpoints(checkpoints)
    for later in found[found.index(checkpoints / newest) + 1 :]:
        shutil.rmtree(later)
    for link in ("last", "best", "best_ema.safetensors"):
        (checkpoints / link).unlink()
    (checkpoints / "last").symlink_to(newest)


OTHER = "its content has changed (its SHA-256 differs)"


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)
    return "it doesn't list optimizer.safetensors" if file.name == "SHA256SUMS" else OTHER


def flip(file):
    data = bytearray(file.read_bytes())
    data[64 if file.name == "SHA256SUMS" else len(data) // 2] ^= 1  # a space, there
    file.write_bytes(data)
    sums = "its line 1 isn't a SHA-256 and the name of a file next to it"
    return sums if file.name == "SHA256SUMS" else OTHER


def delete(file):
    file.unlink()
    what = "a list of files" if file.name == "SHA256SUMS" else "a file"
    return f"can't be read as {what} (FileNotFoundError: No such file or directory)"


@pytest.mark.parametrize("damage", [truncate, flip, delete])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_auto_takes_the_checkpoint_before(
    damaged, whole, tmp_path, tiny, name, damage
):
    chosen = damaged / "checkpoints" / "epoch_0002_sample_000000016"
    what = damage(chosen / name)
    expected = f"{chosen}: damaged checkpoint: {name}: {what}"
    with pytest.raises(
        InputError, match=rf"^{re.escape(expected)}; use an earlier one, or -resume=auto, which"
    ):
        train([*tiny, *OPTIONS, "MODEL.RESUME", str(chosen)], tmp_path / "other", 32)
    train([*tiny, *OPTIONS, "MODEL.RESUME", "auto"], damaged, 32)
    told = [line[14:] for line in (damaged / "log.txt").read_text().splitlines()]
    at = told.index(expected)
    before = damaged / "checkpoints" / "epoch_0002_sample_000000008"
    assert told[at + 1] == f"resumed after epoch 1, 8 samples into the next, from {before}"
    assert (damaged / "checkpoints" / f"damaged_{chosen.name}").is_dir()
    assert_same_run(whole, damaged)


def test_no_bit_of_the_sums_can_flip_unseen(damaged):
    folder = damaged / "checkpoints" / "last"
    content = (folder / "SHA256SUMS").read_bytes()
    unseen = set()
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            (folder / "SHA256SUMS").write_bytes(flipped)
            try:
                verify(folder)
                unseen.add((content[place], flipped[place]))
            except InputError:
                pass
    assert unseen <= {(0x0A, 0x0B)}  # a line's end by another character: the sums are the same


def test_the_statistics_of_each_rank_are_verified(tmp_path):
    run_ranks(train, BATCH_NORM, tmp_path / "whole", 64)
    shutil.copytree(tmp_path / "whole", tmp_path / "run", symlinks=True)
    cut(tmp_path / "run" / "checkpoints", "epoch_0002_sample_000000032")
    chosen = tmp_path / "run" / "checkpoints" / "epoch_0002_sample_000000032"
    spare = tmp_path / "spare"
    shutil.copytree(chosen, spare)
    for damage in (truncate, delete, flip):
        shutil.copy(spare / "statistics.safetensors", chosen)
        expected = re.escape(
            f"damaged checkpoint: statistics.safetensors: {damage(chosen / 'statistics.safetensors')}"
        )
        with pytest.raises(InputError, match=expected):
            train([*BATCH_NORM, "MODEL.RESUME", str(chosen)], tmp_path / "other", 64)
    run_ranks(train, [*BATCH_NORM, "MODEL.RESUME", "auto"], tmp_path / "run", 64)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.smoke
def test_auto_goes_back_as_far_as_it_has_to_and_no_further(damaged, whole, tiny):
    found = find_checkpoints(damaged / "checkpoints")
    for folder in found[1:]:
        flip(folder / "optimizer.safetensors")
    with pytest.raises(InputError, match="damaged checkpoint: optimizer"):
        train([*tiny, *OPTIONS, "MODEL.RESUME", str(damaged / "checkpoints" / "last")], damaged, 32)
    train([*tiny, *OPTIONS, "MODEL.RESUME", "auto"], damaged, 32)
    told = (damaged / "log.txt").read_text()
    assert (
        told.count("damaged checkpoint: optimizer.safetensors: its content has changed")
        == len(found) - 1
    )
    assert f"resumed after epoch 0, 8 samples into the next, from {found[0]}\n" in told
    assert_same_run(whole, damaged)


def test_where_all_are_damaged_nothing_begins_afresh_by_itself(damaged, tiny):
    found = find_checkpoints(damaged / "checkpoints")
    for folder in found:
        flip(folder / "model.safetensors")
    expected = rf"checkpoints: none of its {len(found)} checkpoints is complete \(.*{found[-1].name}: damaged checkpoint: "
    with pytest.raises(InputError, match=expected + r"model\.saf.*\); remove them to start over$"):
        train([*tiny, *OPTIONS, "MODEL.RESUME", "auto"], damaged, 32)
    assert find_checkpoints(damaged / "checkpoints") == found


def test_the_link_to_the_last_may_dangle(damaged, whole, tiny):
    newest = find_checkpoints(damaged / "checkpoints")[-1]
    shutil.rmtree(newest)
    with pytest.raises(
        InputError, match=f"no checkpoint at {newest}: expected a folder that holds state.json"
    ):
        train([*tiny, *OPTIONS, "MODEL.RESUME", str(damaged / "checkpoints" / "last")], damaged, 32)
    train([*tiny, *OPTIONS, "MODEL.RESUME", "auto"], damaged, 32)
    assert_same_run(whole, damaged)


@pytest.mark.parametrize("damage", [flip, shutil.rmtree])
def test_a_damaged_best_is_the_best_no_more(damaged, tiny, damage):
    best = damaged / "checkpoints" / "epoch_0001"
    damage(best / "model.safetensors" if damage is flip else best)
    train([*tiny, *OPTIONS, "MODEL.RESUME", "auto"], damaged, 32)
    assert os.readlink(damaged / "checkpoints" / "best") == "epoch_0002"
    state = json.loads((damaged / "checkpoints" / "last" / "state.json").read_text())
    assert state["best"]["val"]["checkpoint"] == "epoch_0002"


# Without a rate no epoch is better than the first.
STILL = [*TINY, *OPTIONS, "TRAIN.BASE_LR", "0"]


def test_the_ranks_agree_that_a_damaged_best_is_the_best_no_more(tmp_path):
    options = [*STILL, "TRAIN.NUM_EPOCHS", "4"]
    checkpoints = tmp_path / "checkpoints"
    run_ranks(train, options, tmp_path, 64)
    assert os.readlink(checkpoints / "best") == "epoch_0001"
    cut(checkpoints, "epoch_0002")
    flip(checkpoints / "epoch_0001" / "state.json")
    resumed = [*options, "SAVE_STEPS", "0", "SAVE_FREQ", "0", "MODEL.RESUME", "auto"]
    errors = run_ranks(train, resumed, tmp_path, 64)
    assert os.readlink(checkpoints / "best") == "epoch_0003", errors
    assert (
        "the best checkpoint so far, epoch_0001, is incomplete"
        in (tmp_path / "log.txt").read_text()
    )


def test_a_run_that_is_done_and_lost_its_best_is_evaluated_again(tmp_path):
    train(STILL, tmp_path, 32)
    flip(tmp_path / "checkpoints" / "epoch_0001" / "model.safetensors")
    train([*STILL, "MODEL.RESUME", "auto"], tmp_path, 32)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["best"]["checkpoint"] == result["ema"]["best"]["checkpoint"] == "epoch_0002"


@pytest.mark.parametrize("name", FILES[:3])
def test_a_checkpoint_that_holds_nan_is_refused(damaged, tmp_path, tiny, name):
    chosen = damaged / "checkpoints" / "last"
    arrays = load_file(chosen / name)
    key = next(key for key, array in arrays.items() if array.ndim > 1)
    arrays[key] = np.full_like(arrays[key], np.nan)
    save_file(arrays, chosen / name)
    lines = [line.split("  ")[1] for line in (chosen / "SHA256SUMS").read_text().splitlines()]
    sums = [
        f"{hashlib.sha256((chosen / line).read_bytes()).hexdigest()}  {line}\n" for line in lines
    ]
    (chosen / "SHA256SUMS").write_text("".join(sums))
    with pytest.raises(InputError, match=rf"{name}.*{re.escape(key)}.* NaN or infinite"):
        train([*tiny, *OPTIONS, "MODEL.RESUME", str(chosen)], tmp_path / "other", 32)


def test_no_checkpoint_holds_nan(tmp_path, tiny):
    with pytest.raises(
        RunError, match=r"the loss is nan at step \d|isn't saved: .* holds NaN or infinite values"
    ):
        train([*tiny, *OPTIONS, "TRAIN.BASE_LR", "1e6", "TRAIN.WEIGHT_DECAY", "1e6"], tmp_path, 32)
    for folder in find_checkpoints(tmp_path / "checkpoints"):
        verify(folder)
        for file in folder.glob("*.safetensors"):
            assert all(np.isfinite(array).all() for array in load_file(file).values())


@pytest.mark.slow
def test_the_command_refuses_in_one_line(damaged):
    flags = ["-cfg=vit_digits", "-output=run", "-resume=run/checkpoints/last"]
    what = flip(damaged / "checkpoints" / "last" / "ema.safetensors")
    expected = re.escape(
        f"{damaged}/checkpoints/epoch_0002_sample_000000016: damaged checkpoint: ema.safetensors: {what};"
    )
    assert_fails(
        start(damaged.parent, *flags), 2, re.compile(f"error: {expected} use an earlier one, .*\n")
    )
