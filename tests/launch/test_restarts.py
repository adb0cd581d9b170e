"""DIST.MAX_RESTART: ranks that are lost are started again, with what they had, and not for ever."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT
from support import dummy_ranks

import main_multi_gpu
from config import get_config
from errors import InputError
from launch import signals, spawned
from launch.progress import COMPUTING
from main_multi_gpu import next_start

SPAWN = multiprocessing.get_context("spawn")


def restarted(monkeypatch, capsys, tmp_path, starts, next_start=next_start, **keys):
    """What ``spawned.run`` did of ``starts``: per start the dummies' calls and what the first
    rank's beats begin as.

    Returns (exit status or None, lines it said, the configurations and numbers of processes it
    started with).
    """
    given = iter(starts)
    configurations = []
    monkeypatch.setattr(signals, "received", {})

    def start(config, count, failed, beats):
        calls, asked = next(given)
        beats[:] = [time.monotonic(), 7.0, float(COMPUTING), asked] * count
        configurations.append((config.MODEL.RESUME, count))
        calls = [
            (function, failed, *args) if function is dummy_ranks.fail else (function, *args)
            for function, *args in calls
        ]
        processes = [
            SPAWN.Process(target=function, args=args, daemon=True) for function, *args in calls
        ]
        for process in processes:
            process.start()
        return SimpleNamespace(processes=processes)

    options = [
        "OUTPUT",
        str(tmp_path),
        *(word for key, value in keys.items() for word in (f"DIST.{key}", str(value))),
    ]
    handlers = {number: signal.getsignal(number) for number in signals.SIGNALS}
    try:
        spawned.run(get_config(None, [*options, "NGPUS", "2"]), 2, start, next_start)
        status = None
    except SystemExit as end:
        status = end.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status, capsys.readouterr().err.splitlines(), configurations


KILLED = [(dummy_ranks.wait,), (dummy_ranks.kill, signal.SIGKILL)]
LOST = "rank 1 was killed by SIGKILL (out of memory?) at step 7"
AGAIN = "(DIST.MAX_RESTART) with 2 processes from the beginning"


def test_lost_ranks_are_started_again_until_all_is_done(monkeypatch, capsys, tmp_path):
    done = [(dummy_ranks.leave, 0), (dummy_ranks.leave, 0)]
    starts = [(KILLED, 5), (KILLED, 5), (done, 5)]
    told = [f"{LOST}; restart {k} of 3 {AGAIN}" for k in (1, 2)]
    found = restarted(monkeypatch, capsys, tmp_path, starts, MAX_RESTART=3)
    assert found == (None, told, [(None, 2), ("auto", 2), ("auto", 2)])
    assert [line[14:] for line in (tmp_path / "log.txt").read_text().splitlines()] == told


@pytest.mark.parametrize(
    ("starts", "last"),
    [
        (
            [(KILLED, 5), (KILLED, 5)],
            f"error: {LOST}",
        ),  # as often as was allowed
        (
            [(KILLED, 1), (KILLED, 1)],
            f"error: {LOST}; not restarted again: the last two starts didn't complete a step",
        ),
    ],
)
def test_restarts_come_to_an_end(monkeypatch, capsys, tmp_path, starts, last):
    times = 1 if starts[0][1] > 1 else 9
    status, told, configurations = restarted(
        monkeypatch, capsys, tmp_path, starts, MAX_RESTART=times
    )
    assert (status, told[1:], len(configurations)) == (1, [last], 2)


def test_a_run_that_reported_its_failure_is_not_started_again(monkeypatch, capsys, tmp_path):
    starts = [([(dummy_ranks.fail, 2, "error: so"), (dummy_ranks.wait,)], 5)]
    status, told, configurations = restarted(monkeypatch, capsys, tmp_path, starts, MAX_RESTART=3)
    assert (status, told, len(configurations)) == (2, ["error: so"], 1)


def test_a_signal_that_comes_between_two_starts_ends_the_run(monkeypatch, capsys, tmp_path):
    def interrupted(config, count):
        os.kill(os.getpid(), signal.SIGTERM)
        return next_start(config, count)

    starts = [(KILLED, 5), ([(dummy_ranks.wait,), (dummy_ranks.wait,)], 5)]
    status, told, configurations = restarted(
        monkeypatch, capsys, tmp_path, starts, interrupted, MAX_RESTART=3
    )
    assert (status, told[1:], len(configurations)) == (143, ["stopped by SIGTERM at step 7"], 2)


def test_ranks_start_with_every_signal_blocked():
    """In a process that had no shared memory before: Python's resource tracker unblocks SIGINT and
    SIGTERM.
    """
    program = """
import signal, sys
from config import get_config
from launch import signals, spawned

def start(*_):
    sys.exit(repr(set(signals.SIGNALS) - signal.pthread_sigmask(signal.SIG_BLOCK, [])))

spawned.run(get_config(None, []), 2, start)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "set()\n"


def test_a_restart_before_the_run_began_makes_no_folder(tmp_path, capsys):
    spawned._print_and_log(get_config(None, ["OUTPUT", str(tmp_path / "run")]), "restart 1 of 3")
    assert capsys.readouterr().err == "restart 1 of 3\n"
    assert not (tmp_path / "run").exists()


def test_a_batch_that_fewer_devices_cannot_share_is_reported_after_the_cause(monkeypatch, tmp_path):
    """``next_start`` goes through, so that the reason of the restart is printed first."""
    options = ["OUTPUT", str(tmp_path), "DIST.MAX_RESTART", "1", "DATA.GLOBAL_BATCH", "64"]
    monkeypatch.setattr(main_multi_gpu, "devices_now", lambda: 3)
    config, ranks, how = main_multi_gpu.next_start(get_config(None, options), 4)
    assert (config.MODEL.RESUME, ranks) == ("auto", 3)
    assert how.startswith("with 3 processes instead of 4, the number of devices now, from")


def test_restarts_need_a_folder_and_nothing_that_a_restart_would_undo():
    for options in (
        [],
        ["OUTPUT", "run", "MODEL.RESUME", "x"],
        ["OUTPUT", "run", "TRAIN.LAST_EPOCH", "1"],
    ):
        with pytest.raises(
            InputError, match="DIST.MAX_RESTART is 1, expected 0, or -output with it"
        ):
            get_config(None, [*options, "DIST.MAX_RESTART", "1"])
