"""Runs that are killed and stopped at random moments, resumed until they end, and compared with one left alone.

python -m pytest -m slow tests/faults/test_kills.py -s    the campaign of 25 faults, a line for each
"""

import json
import os
import random
import re
import signal
import time

import pytest
from programs import assert_none_left, descendants, ranks_of, start, wait_for, wait_for_first_step, workers_of
from runs import assert_same_run

RUN = [
    "-cfg=vit_digits", "-output=run", "-resume=auto", "-o", "TRAIN.NUM_EPOCHS", "3", "VALIDATE_FREQ", "2",
    "REPORT_FREQ", "4", "TRAIN.ACCUM_ITER", "3", "TRAIN.MODEL_EMA", "True", "TRAIN.MODEL_EMA_DECAY", "0.9",
    "MODEL.DROPOUT", "0.1", "MODEL.DROPPATH", "0.1", "DATA.NUM_WORKERS", "2", "SAVE_STEPS", "5", "KEEP_LAST", "3",
    "SAVE_MINUTES", "none", "SAVE_FREQ", "0",
]  # fmt: skip
SEED = 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    _, errors = start(folder, *RUN).communicate(timeout=120)
    assert (folder / "run" / "result.json").exists(), errors
    return folder / "run"


def kill_rank(process, rng):
    os.kill(rng.choice(ranks_of(process)), signal.SIGKILL)
    return 1, r"error: rank \d was killed by SIGKILL at step \d+\n"


def kill_parent(process, rng):
    process.kill()
    return -signal.SIGKILL, ""


def kill_worker(process, rng):
    os.kill(rng.choice(workers_of(process)), signal.SIGKILL)
    return 1, r"rank \d: error: loader worker \d+ was killed by signal: Killed; is memory short\?\n"


def terminate(process, rng):
    process.terminate()
    return (
        143,
        r"stopped by SIGTERM after step (\d+), saved in run/checkpoints/(epoch\w+); -resume=auto -output=run .*\n",
    )


def terminate_rank(process, rng):
    os.kill(rng.choice(ranks_of(process)), signal.SIGTERM)
    return (
        143,
        r"stopped by SIGTERM after step (\d+), saved in run/checkpoints/(epoch\w+); -resume=auto -output=run .*\n",
    )


def interrupt(process, rng):
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to the whole group
    return (
        130,
        r"stopped by SIGINT after step (\d+), saved in run/checkpoints/(epoch\w+); -resume=auto -output=run .*\n",
    )


def save_then_kill(process, rng):
    """SIGUSR1 saves and goes on: a checkpoint appears that SAVE_STEPS doesn't ask for; only then comes the kill."""
    log = next(iter(process.run.glob("log_0.txt")))
    saved = log.read_text().count("saved epoch_")
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: log.read_text().count("saved epoch_") > saved, process)
    return kill_parent(process, rng)


FAULTS = [kill_rank, kill_parent, kill_worker, terminate, terminate_rank, interrupt, save_then_kill]


def in_a_save(run, process):
    """Waits for a checkpoint that is being written; returns whether there was one."""
    checkpoints = run / "checkpoints"
    return wait_for(lambda: checkpoints.exists() and any(checkpoints.glob(".epoch_*")), process)


def inject(folder, fault, rng, delay):
    """Starts or resumes the run, injects ``fault`` after ``delay`` seconds (None: within a save); returns whether it
    hit: the run may have ended before.
    """
    run = folder / "run"
    process = start(folder, *RUN)
    process.run = run
    try:
        wait_for_first_step(process, run)
        moment = time.time() + (delay or 0)
        alive = in_a_save(run, process) if delay is None else wait_for(lambda: time.time() > moment, process)
        pids = list(descendants(process.pid))
        asked = time.time()
        status, message = fault(process, rng) if alive and len(pids) > 6 else (0, "")
        _, errors = process.communicate(timeout=60)
        took = time.time() - asked
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert_none_left(pids)
    found = "within a save" if delay is None else f"{delay:.1f} s"
    if process.returncode == 0:  # it had ended, or was about to
        return False
    assert process.returncode == status, errors
    assert took < 30
    assert re.fullmatch(message, errors), errors
    print(f"{fault.__name__:15} {found:14} {took:4.1f} s  {errors.strip()}")
    if status > 128:
        state = json.loads((run / "checkpoints" / "last" / "state.json").read_text())
        assert re.fullmatch(message, errors).groups() == (
            str(state["step"]),
            (run / "checkpoints" / "last").resolve().name,
        )
    return True


def finish(folder, whole):
    """Resumes the run until its end and compares it with the one that was left alone."""
    process = start(folder, *RUN)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    checkpoints = folder / "run" / "checkpoints"
    assert not list(checkpoints.glob(".*"))
    assert not list(checkpoints.glob("damaged*"))
    assert_same_run(whole, folder / "run")
    result, expected = (json.loads((run / "result.json").read_text()) for run in (folder / "run", whole))
    for key in ("loss", "acc1", "best", "ema"):
        assert result[key] == expected[key]


def test_a_run_that_is_killed_and_stopped_ends_in_the_same_bits(tmp_path, whole):
    rng = random.Random(SEED)
    assert inject(tmp_path, kill_rank, rng, None)
    assert inject(tmp_path, terminate, rng, 0.3)
    finish(tmp_path, whole)


@pytest.mark.slow
def test_twenty_five_faults(tmp_path, whole):
    rng = random.Random(SEED)
    hits = runs = 0
    folder = tmp_path / "0"
    folder.mkdir()
    while hits < 25:
        delay = None if rng.random() < 0.3 else rng.uniform(0, 3)
        if inject(folder, FAULTS[hits % len(FAULTS)], rng, delay):
            hits += 1
            continue
        finish(folder, whole)
        runs += 1
        folder = tmp_path / str(runs)
        folder.mkdir()
    finish(folder, whole)
    print(f"{hits} faults in {runs + 1} runs, each of which ended in the same bits as the one left alone")
