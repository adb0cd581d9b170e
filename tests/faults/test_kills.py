"""Runs that are killed and stopped at random moments, resumed until they end, and compared with one
left alone.

python -m pytest -m slow tests/faults/test_kills.py -s    the campaign of 25 faults, a line for each
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
from support.programs import (
    assert_none_left,
    ranks_of,
    start,
    wait_for,
    wait_for_first_step,
    workers_of,
)
from support.training_runs import assert_same_run, records

from training.checkpoint import storage
from training.checkpoint.state import read_state

RUN = [
    "-cfg=vit_digits", "-output=run", "-resume=auto", "-o", "TRAIN.NUM_EPOCHS", "3", "TRAIN.WARMUP_EPOCHS", "2",
    "REPORT_FREQ", "4", "TRAIN.ACCUM_ITER", "3", "TRAIN.MODEL_EMA", "True", "TRAIN.MODEL_EMA_DECAY", "0.9",
    "MODEL.DROPOUT", "0.1", "MODEL.DROPPATH", "0.1", "DATA.NUM_WORKERS", "2", "SAVE_STEPS", "5", "KEEP_LAST", "3",
    "SAVE_MINUTES", "none", "SAVE_FREQ", "0", "VALIDATE_FREQ", "2",
]  # fmt: skip
SEED = 5


class Fault(NamedTuple):
    """``number`` is sent to one of ``victims(process)``; the run ends with ``status`` and says
    ``message``.
    """

    name: str
    number: signal.Signals
    victims: Callable
    status: int
    message: str


def the_parent(process):
    return [process.pid]


def the_group(process):
    return [-process.pid]  # as Ctrl-C does


def stopped(name):
    return rf"stopped by {name} after step (\d+), saved in run/checkpoints/(epoch\w+); -resume=auto -output=run .*\n"


KILL = signal.SIGKILL
TERM = signal.SIGTERM
LOST_WORKER = r"rank \d: error: loader worker \d+ was killed by SIGKILL; out of memory\?\n"
KILL_RANK = Fault(
    "kill a rank",
    KILL,
    ranks_of,
    1,
    r"error: rank \d was killed by SIGKILL \(out of memory\?\) at step \d+\n",
)
KILL_PARENT = Fault("kill the parent", KILL, the_parent, -KILL, "")
TERMINATE = Fault("SIGTERM", TERM, the_parent, 143, stopped("SIGTERM"))
SAVE = Fault("SIGUSR1, kill", signal.SIGUSR1, the_parent, -KILL, "")
FAULTS = [
    KILL_RANK,
    KILL_PARENT,
    Fault("kill a worker", KILL, workers_of, 1, LOST_WORKER),
    TERMINATE,
    Fault("SIGTERM to rank", TERM, ranks_of, 143, stopped("SIGTERM")),
    Fault("SIGINT to all", signal.SIGINT, the_group, 130, stopped("SIGINT")),
    SAVE,
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was left alone."""
    place = tmp_path_factory.mktemp("whole")
    _, errors = start(place, *RUN, disturbed=False).communicate(timeout=240)
    assert (place / "run" / "result.json").exists(), errors
    return place / "run"


def newest(run):
    """(name, step) of the checkpoint to resume; every one that has its name is whole."""
    found = storage.find_checkpoints(run / "checkpoints")
    for checkpoint in found:
        storage.verify(checkpoint)
    return (found[-1].name, read_state(found[-1])["step"]) if found else ("nothing", 0)


def assert_went_on(run, checkpoint):
    """The last start took up ``checkpoint``."""
    taken = re.findall(
        r"resumed after .*, from .*/(\w+)\n|; (starting) a new run", (run / "log.txt").read_text()
    )
    assert taken[-1] == ((checkpoint, "") if checkpoint != "nothing" else ("", "starting"))


def writing(run):
    """The names of checkpoints that aren't whole yet."""
    return {path.name for path in (run / "checkpoints").glob(".epoch_*")}


def saved_and_going_on(process, run):
    """After SIGUSR1: waits for a checkpoint within an epoch, which nothing else asks for, and for
    steps after it.
    """
    log = run / "log_0.txt"
    before = log.read_text().count("_sample_")
    process.send_signal(signal.SIGUSR1)
    return wait_for(
        lambda: log.read_text().count("_sample_") > before, process
    ) and wait_for_first_step(process, run)


def inject(place, fault, rng, delay):
    """Starts or resumes the run and injects ``fault``.

    Args:
        delay: in seconds, after the first step; None: aimed at a save.

    Returns:
        None if the run ended before that, otherwise whether it was within a save.
    """
    run = place / "run"
    names = set()
    before, _ = newest(run)
    process = start(place, *RUN, *(["SAVE_STEPS", "0"] if fault is SAVE else []))
    try:
        pids = wait_for_first_step(process, run)
        victims = fault.victims(process)  # chosen before the moment: a save lasts 30 ms
        alive = bool(pids and victims)
        if alive and delay is None:
            alive = wait_for(lambda: writing(run), process)
            time.sleep(rng.uniform(0, 0.02))
        elif alive:
            moment = time.time() + delay
            alive = wait_for(lambda: time.time() > moment, process)
        if alive and fault is SAVE:
            alive = saved_and_going_on(process, run)
        asked = time.time()
        if alive:
            names = writing(run)
            # the run may have come to its end meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    *((process.pid, KILL) if fault is SAVE else (rng.choice(victims), fault.number))
                )
        within = bool(names & writing(run))  # before the signal and after it
        _, errors = process.communicate(timeout=60)
        took = time.time() - asked
    finally:
        if process.poll() is None:
            os.killpg(process.pid, KILL)
    assert_none_left(pids)
    if pids:
        assert_went_on(run, before)
    if process.returncode == 0:
        return None
    assert process.returncode == fault.status, errors
    said = re.fullmatch(fault.message, errors)
    assert said, errors
    assert took < 30
    name, step = newest(run)
    assert said.groups() in ((), (str(step), name))
    when = "aimed" if delay is None else f"{delay:.1f} s"
    when += ", in a save" * within
    cut = "a writing cut short; " if writing(run) else ""
    print(
        f"{fault.name:16} {when:18} {took:4.1f} s  {cut}goes on from step {step}  {errors.strip()}"
    )
    return within


def finish(place, whole):
    """Resumes the run until its end and compares it with the one that was left alone."""
    run = place / "run"
    before, _ = newest(run)
    process = start(place, *RUN, disturbed=False)
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")
    assert_went_on(run, before)
    newest(run)
    assert not list((run / "checkpoints").glob(".*"))
    assert not list((run / "checkpoints").glob("damaged*"))
    assert_same_run(whole, run)
    assert records(run) == records(whole)
    result, expected = (json.loads((path / "result.json").read_text()) for path in (run, whole))
    for key in ("loss", "acc1", "best", "ema"):
        assert result[key] == expected[key]


@pytest.mark.long
@pytest.mark.smoke
def test_a_run_that_is_killed_and_stopped_ends_in_the_same_bits(tmp_path, whole):
    rng = random.Random(SEED)
    assert inject(tmp_path, KILL_RANK, rng, None) is not None
    assert inject(tmp_path, TERMINATE, rng, 0.3) is not None
    finish(tmp_path, whole)


@pytest.mark.long
def test_a_signal_to_a_run_that_is_done_is_no_failure(tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    (run / "result.json").unlink()
    process = start(tmp_path, *RUN)
    assert wait_for((run / "result.json").exists, process)
    time.sleep(0.1)  # Python is ending
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.slow
def test_twenty_five_faults(tmp_path, whole):
    rng = random.Random(SEED)
    hits = []
    runs = 1
    while len(hits) < 25:
        place = tmp_path / str(runs)
        place.mkdir(exist_ok=True)
        fault = FAULTS[len(hits) % len(FAULTS)]
        delay = None if fault is not SAVE and rng.random() < 0.4 else rng.uniform(0, 3)
        if (within := inject(place, fault, rng, delay)) is not None:
            hits.append(within)
            continue
        finish(place, whole)
        runs += 1
        assert runs < 25, f"the runs end without obeying '{fault.name}'"
    finish(place, whole)
    print(
        f"{len(hits)} faults, {sum(hits)} of them in a save, in {runs} runs: the same bits as one left alone"
    )
    assert sum(hits) > 3
