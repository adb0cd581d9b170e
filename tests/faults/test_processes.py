"""Each process of a run, killed at each moment of it: one line that names the cause, nothing left,
the same bits.

python -m pytest -m slow tests/faults/test_processes.py -s    every process at every moment, a line for each
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from support.fault_runs import RUN, assert_ends_like, finish
from support.programs import assert_none_left, descendants, ranks_of, start, wait_for

KILL = signal.SIGKILL
FLAGS = [*RUN, "DATA.NUM_WORKERS", "1", "DATA.BATCH_SIZE_EVAL", "4"]  # an evaluation takes a while
RANK = r"error: rank {} was killed by SIGKILL \(out of memory\?\) at step \d+\n"
WORKER = r"rank \d: error: loader worker \d+ was killed by SIGKILL; out of memory\?\n"


def read(path):
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def found(process):
    """The pids of the run's processes, by what they are."""
    rows = descendants(process.pid)
    ranks = sorted(ranks_of(process))
    return {
        "main": [process.pid],
        "rank 0": ranks[:1],
        "rank 1": ranks[1:],
        "worker": [pid for pid, (parent, args) in rows.items() if parent in ranks],
        "tracker": [pid for pid, (_, args) in rows.items() if "resource_tracker" in args],
    }


def maps(process, what):
    return [
        pid
        for rank in ("rank 0", "rank 1")
        for pid in found(process)[rank]
        if what in read(f"/proc/{pid}/maps")
    ]


def says(text):
    return lambda _, run: text in read(run / "log.txt")


def saves(number):
    return lambda _, run: any(
        f"epoch_{number:04d}" in path.name for path in run.glob("checkpoints/.epoch_*")
    )


MOMENTS = {
    "ranks start": lambda process, _: found(process)["rank 1"],
    "ranks import Paddle": lambda process, _: maps(process, "libpaddle"),
    "rendezvous": lambda process, _: len(maps(process, "libpaddle")) == 2,
    "training": says("epoch 1/3 step 4"),
    "a save": saves(1),
    "evaluation": says("epoch 1/3 step 22:"),
    "the last save": saves(3),
    "curves": lambda process, _: maps(process, "ft2font"),
    "the end": lambda _, run: (run / "result.json").exists(),
}
EARLY = ("ranks start", "ranks import Paddle", "rendezvous")
LATE = ("the last save", "curves", "the end")  # the loaders' work is done


def victims(process, role):
    return found(process)[role]


def expected(role, moment):
    """(exit status, what stderr says) that may come of it."""
    outcomes = {"main": [(-KILL, "")], "worker": [(1, WORKER)], "tracker": [(0, "")]}
    outcomes |= {f"rank {place}": [(1, RANK.format(place))] for place in (0, 1)}
    return outcomes[role] + ([(0, "")] if moment in LATE else [])


def strike(folder, role, moment, number):
    """Starts the run, and sends ``number`` to its ``role`` at ``moment``: (status, stderr,
    seconds), or None if the run ended before that.
    """
    process = start(folder, *FLAGS)
    if not wait_for(lambda: MOMENTS[moment](process, folder / "run"), process):
        return None
    if not (hit := victims(process, role)):
        return None
    pids = [*descendants(process.pid), process.pid]
    began = time.monotonic()
    os.kill(hit[0], number)
    _, errors = process.communicate(timeout=120)
    took = time.monotonic() - began
    assert_none_left(pids)
    return process.returncode, errors, took


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was left alone."""
    return finish(tmp_path_factory.mktemp("whole"), FLAGS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", ["main", "rank 0", "rank 1", "worker", "tracker"])
def test_a_process_is_killed(tmp_path, whole, role, moment):
    if role == "worker" and moment in EARLY:
        pytest.skip("there are none yet")
    struck = strike(tmp_path, role, moment, KILL)
    assert struck or moment in LATE
    print(f"\n{role}, {moment}: {struck or 'it ended before that'}")
    if struck:
        status, errors, _ = struck
        assert any(
            status == code and re.fullmatch(line, errors) for code, line in expected(role, moment)
        ), struck
    assert_ends_like(whole, tmp_path, FLAGS)
