"""Ranks that stall, images that vanish, losses that aren't numbers, and two runs in one folder."""

import os
import re
import shutil
import signal
import time

import numpy as np
import pytest
from conftest import write_images
from safetensors.numpy import load_file
from support.fault_runs import RUN, assert_ends_like, assert_fails, finish
from support.programs import (
    assert_none_left,
    descendants,
    ranks_of,
    start,
    wait_for,
    wait_for_first_step,
)

from training.checkpoint.storage import find_checkpoints, verify

IMAGES = [
    "-cfg=vit_digits", "-output=run", "-resume=auto", "-dataset=folder", "-data_path=data", "-o", "DATA.BATCH_SIZE",
    "8", "TRAIN.NUM_EPOCHS", "4", "VALIDATE_FREQ", "2", "REPORT_FREQ", "1", "SAVE_STEPS", "3", "SAVE_FREQ", "0",
    "DATA.NUM_WORKERS", "2", "MODEL.NUM_CLASSES", "2", "TRAIN.WARMUP_EPOCHS", "2",
]  # fmt: skip
# seconds: a busy machine takes some to start, gloo gives up after 30
TIMEOUT = ["DIST.TIMEOUT", "15"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was left alone."""
    return finish(tmp_path_factory.mktemp("whole"))[0]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The folder of a run on 128 images in files that was left alone."""
    folder = tmp_path_factory.mktemp("images")
    write_images(folder / "data" / "train", {"a": 64, "b": 64})
    write_images(folder / "data" / "val", {"a": 4, "b": 4})
    finish(folder, IMAGES)
    return folder


def saving(folder, *flags):
    """Starts a run and waits for its first checkpoint; returns it and the pids of its processes."""
    process = start(folder, *flags)
    last = folder / "run" / "checkpoints" / "last"
    assert wait_for(last.exists, process), process.stderr.read()
    return process, list(descendants(process.pid))


def rank_pid(process, rank):
    """Ranks are started in their order."""
    return sorted(ranks_of(process))[rank]


# ------------------------------------------------------------------- stalls


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_suspended_rank_is_named_within_the_timeout(tmp_path, whole, rank):
    process, pids = saving(tmp_path, *RUN, *TIMEOUT)
    pid = rank_pid(process, rank)
    asked = time.time()
    os.kill(pid, signal.SIGSTOP)
    who = rf"rank {rank} \(process {pid}\) is suspended \(SIGSTOP, or a debugger\) at step \d+"
    assert_fails(
        process, 1, re.compile(rf"error: no progress in 15 s \(DIST\.TIMEOUT\): {who}\n"), pids
    )
    assert 14 < time.time() - asked < 25
    assert_ends_like(whole, tmp_path)


@pytest.mark.slow
def test_a_suspended_rank_is_named_where_gloo_loses_patience_first(tmp_path):
    process, pids = saving(tmp_path, *RUN)
    pid = rank_pid(process, 1)
    asked = time.time()
    os.kill(pid, signal.SIGSTOP)
    who = rf"rank 1 \(process {pid}\) is suspended \(SIGSTOP, or a debugger\) at step \d+"
    assert_fails(
        process, 1, re.compile(rf"error: {who}, and the other ranks waited for it\n"), pids, 120
    )
    assert time.time() - asked < 60


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_images_stop_coming_is_named(tmp_path, images, rank):
    shutil.copytree(images / "data", tmp_path / "data")
    process, pids = saving(tmp_path, *IMAGES, *TIMEOUT)
    own = rank_pid(process, rank)
    workers = [pid for pid, (parent, _) in descendants(process.pid).items() if parent == own]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)  # as a network file system that hangs
    who = rf"rank {rank} \(process {own}\) is waiting for data at step \d+"
    assert_fails(
        process, 1, re.compile(rf"error: no progress in 15 s \(DIST\.TIMEOUT\): {who}\n"), pids
    )
    assert_ends_like(images / "run", tmp_path, IMAGES)


# ------------------------------------------------------------ data, numbers


@pytest.mark.slow
def test_an_image_that_vanishes_is_named(tmp_path, images):
    shutil.copytree(images / "data", tmp_path / "data")
    process, pids = saving(tmp_path, *IMAGES)
    image = tmp_path / "data" / "train" / "b" / "17.png"
    image.unlink()
    missing = "FileNotFoundError: No such file or directory"
    todo = r"repair or remove it, or train with DATA\.SKIP_BROKEN True"
    expected = rf"rank [01]: error: data/train/b/17\.png: can't be read as an image \({missing}\); {todo}\n"
    assert_fails(process, 1, re.compile(expected), pids)
    shutil.copy(images / "data" / "train" / "b" / "17.png", image)
    assert_ends_like(images / "run", tmp_path, IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["1e4", "1e6"])
def test_a_rate_that_gives_nan_ends_the_run_and_no_checkpoint_holds_it(tmp_path, whole, rate):
    process, pids = saving(tmp_path, *RUN)
    process.terminate()
    process.communicate(timeout=60)
    before = find_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    process = start(
        tmp_path,
        *RUN,
        "TRAIN.BASE_LR",
        rate,
        "TRAIN.WEIGHT_DECAY",
        rate,
        "SAVE_STEPS",
        "1",
        "KEEP_LAST",
        "9",
    )
    told = r"the loss is (nan|inf) at step \d+ \(epoch \d, rank [01]\)|epoch_\w+ isn't saved: \S+ of \S+ holds .*"
    assert_fails(process, 1, re.compile(rf"error: ({told}); lower TRAIN\.BASE_LR.*\n"), pids)
    found = find_checkpoints(tmp_path / "run" / "checkpoints")
    assert (tmp_path / "run" / "checkpoints" / "last").resolve() == found[-1].resolve()
    for folder in found:
        verify(folder)
        for file in folder.glob("*.safetensors"):
            assert all(np.isfinite(array).all() for array in load_file(file).values())
    for later in found[found.index(before) + 1 :]:  # finite, but of that rate
        shutil.rmtree(later)
    assert_ends_like(whole, tmp_path)


# ----------------------------------------------------------------- the lock


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    flags = [*RUN, "TRAIN.NUM_EPOCHS", "100"]
    first, pids = saving(tmp_path, *flags)
    owner = rank_pid(first, 0)
    expected = rf"error: run: another run is using it \(process {owner} on \S+\); wait for it, or choose .*\n"
    assert_fails(start(tmp_path, *flags), 2, re.compile(expected))
    wait_for_first_step(first, tmp_path / "run")  # unharmed
    first.kill()
    first.communicate(timeout=60)
    assert_none_left(pids)
    second = start(tmp_path, *flags)  # the lock is gone
    wait_for_first_step(second, tmp_path / "run")
    second.terminate()
    assert_fails(second, 143, re.compile(r"stopped by SIGTERM after step .*\n"))
