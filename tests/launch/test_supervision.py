"""Ranks agree on what signals and the clock ask; their parent passes signals on and names a rank
that fails.
"""

import functools
import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from support import dummy_ranks
from support.ranks import run_ranks

from errors import FAILURE
from launch import signals, spawned
from launch.progress import COMPUTING, LOADING
from launch.spawned import Watcher
from training import requests
from training.requests import Requests, Stopped
from utils import rank, world_size

LOST = "rank 1 was killed by SIGKILL (out of memory?) at step 7"
SPAWN = multiprocessing.get_context("spawn")

# ----------------------------------------------------------------- requests


class Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def monotonic(self):
        return self.now


def polled(count, seconds, save_minutes=None, event=None, at=0, failed_on=None):
    """Polls ``count`` times, every ``seconds[rank]``; before the ``at``-th, the last rank gets a
    signal by ``event``.

    Returns the numbers of polls at which the ranks met, and what changed then: (poll, signal, save,
    failed).
    """
    collectives = []
    all_reduce_sum = requests.all_reduce_sum

    def counted(tensor):
        collectives.append(poll)
        return all_reduce_sum(tensor)

    clock = requests.time = signals.time = Clock()
    requests.all_reduce_sum = counted
    signals.received = {}
    signals.record_signals()
    asking = Requests(save_minutes)
    told = []
    for poll in range(1, count + 1):
        clock.now += seconds[rank()]
        if poll == at and rank() == world_size() - 1:
            os.kill(os.getpid(), event)
        found = asking.poll(failed=poll >= at and rank() == failed_on)
        if found or asking.save or asking.failed:
            told.append((poll, found, asking.save, asking.failed))
            asking.record_save()
    requests.time = signals.time = time
    requests.all_reduce_sum = all_reduce_sum
    return collectives, told


@pytest.mark.smoke
def test_ranks_meet_about_once_a_second_and_agree():
    every_8 = functools.partial(polled, 41, [0.125, 0.125])
    runs = [
        functools.partial(every_8, event=signal.SIGTERM, at=3),
        functools.partial(every_8, event=signal.SIGINT, at=10),
        functools.partial(every_8, event=signal.SIGUSR1, at=10),
        functools.partial(every_8, at=34, event=0, failed_on=0),
        functools.partial(every_8, save_minutes=2 / 60),  # two seconds
        functools.partial(polled, 21, [0.0, 0.5]),  # on average 0.25 s a step
        functools.partial(polled, 21, [4.0, 4.0]),
        functools.partial(polled, 121, [0.0, 0.0]),
    ]
    for found in run_ranks(call_each, runs):
        terminated, interrupted, asked, failed, clock, *meetings = found
        eighth = [1, 9, 17, 25, 33, 41]
        assert terminated == (eighth, [(poll, signal.SIGTERM, False, False) for poll in eighth[1:]])
        assert interrupted == (eighth, [(poll, signal.SIGINT, False, False) for poll in eighth[2:]])
        assert asked == (eighth, [(17, None, True, False)])
        assert failed[0] == eighth
        assert failed[1][0] == (41, None, False, True)
        assert clock == (eighth, [(17, None, True, False), (33, None, True, False)])
        assert [met for met, _ in meetings] == [
            [1, 5, 9, 13, 17, 21],
            list(range(1, 22)),
            [1, 51, 101],
        ]


def call_each(functions):
    return [function() for function in functions]


def test_one_rank_heeds_a_signal_at_once(monkeypatch):
    monkeypatch.setattr(signals, "received", {})
    asking = Requests(None)
    assert [asking.poll() for _ in range(3)] == [None, None, None]
    signals.received[signal.SIGUSR1] = 0.0
    assert (asking.poll(), asking.save) == (None, True)
    asking.record_save()
    assert (asking.poll(), asking.save) == (None, False)
    signals.received |= {signal.SIGINT: 0.0, signal.SIGTERM: 0.0}
    assert [asking.poll(), asking.poll()] == [signal.SIGTERM, signal.SIGTERM]
    assert (asking.poll(failed=True), asking.failed) == (signal.SIGTERM, True)


def test_a_second_ctrl_c_ends_a_run_without_a_parent_at_once(monkeypatch):
    monkeypatch.setattr(signals, "received", {})
    clock = Clock()
    monkeypatch.setattr(signals, "time", clock)
    signals.record(signal.SIGINT, None)
    clock.now = 0.1  # the same one, by the terminal and by a launcher
    signals.record(signal.SIGINT, None)
    clock.now = 1.0
    signals.record(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        signals.record(signal.SIGINT, None)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_has_its_exit_status(number, status):
    stopped = Stopped(number, "after step 3")
    assert (stopped.exit_status, str(stopped)) == (status, f"stopped by {number.name} after step 3")


# -------------------------------------------------------------- the spawner


@pytest.fixture
def ranks():
    """Returns a function that starts dummy ranks: (Watcher, their processes); ends what is left of
    them.
    """
    started = []
    handlers = {number: signal.getsignal(number) for number in signals.SIGNALS}

    def start(*calls, failed=None, beats=None, timeout=60.0):
        processes = [
            SPAWN.Process(target=function, args=args, daemon=True) for function, *args in calls
        ]
        started.extend(processes)
        for process in processes:
            process.start()
        failed = SPAWN.Array("c", FAILURE) if failed is None else failed
        beats = (
            [time.monotonic(), 7.0, float(COMPUTING), 8.0] * len(calls) if beats is None else beats
        )
        return Watcher(SimpleNamespace(processes=processes), failed, beats, timeout), processes

    yield start
    for process in started:
        process.kill()
        process.join()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def ended(parent, processes, capsys):
    """(exit status, what was said); no process is left."""
    verdict = parent.wait()
    assert all(process.exitcode is not None for process in processes)
    with pytest.raises(SystemExit) as end:
        spawned.exit_with(verdict)
    return end.value.code, capsys.readouterr().err


def test_ranks_that_end_well_end_the_run(ranks):
    parent, processes = ranks((dummy_ranks.leave, 0), (dummy_ranks.leave, 0))
    assert parent.wait() is None
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_rank_that_reported_its_failure_ends_all_with_its_status(ranks, capsys):
    failed = SPAWN.Array("c", FAILURE)
    parent, processes = ranks(
        (dummy_ranks.wait,), (dummy_ranks.fail, failed, 2, "error: so"), failed=failed
    )
    assert ended(parent, processes, capsys) == (2, "error: so\n")


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            [(dummy_ranks.wait,), (dummy_ranks.kill, signal.SIGKILL)],
            f"error: {LOST}\n",
        ),
        (
            [(dummy_ranks.leave, 3), (dummy_ranks.wait,)],
            "error: rank 0 ended with status 3 at step 7\n",
        ),
        (
            # the first: its peer was gone
            [(dummy_ranks.kill, signal.SIGABRT), (dummy_ranks.kill, signal.SIGSEGV)],
            "error: rank 1 was killed by SIGSEGV at step 7\n",
        ),
    ],
)
def test_a_rank_that_was_lost_is_named(ranks, capsys, calls, message):
    parent, processes = ranks(*calls)
    for (function, *_), process in zip(calls, processes, strict=True):
        if function is not dummy_ranks.wait:
            process.join(60)
    assert ended(parent, processes, capsys) == (1, message)


def test_a_suspended_rank_is_named_when_its_peers_give_up(ranks, capsys):
    parent, processes = ranks(
        (dummy_ranks.kill, signal.SIGABRT), (dummy_ranks.kill, signal.SIGSTOP)
    )
    processes[0].join(60)
    wait_until_stopped(processes[1])
    who = f"rank 1 (process {processes[1].pid}) is suspended (SIGSTOP, or a debugger) at step 7"
    assert ended(parent, processes, capsys) == (
        1,
        f"error: {who}, and the other ranks waited for it\n",
    )


def wait_until_stopped(process):
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("beats", "who"),
    [
        ([[5, COMPUTING], [4, COMPUTING]], "rank 1 (process {}) is computing at step 4"),
        ([[5, COMPUTING], [5, LOADING]], "rank 1 (process {}) is waiting for data at step 5"),
        ([[0, 0], [0, 0]], "rank 0 (process {}) is starting at step 0, like the others"),
        (None, "rank 1 (process {}) is suspended (SIGSTOP, or a debugger) at step 7"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(ranks, capsys, beats, who):
    last = (dummy_ranks.wait,) if beats else (dummy_ranks.kill, signal.SIGSTOP)
    beats = beats and [value for own in beats for value in (time.monotonic(), *own, 0.0)]
    parent, processes = ranks((dummy_ranks.wait,), last, beats=beats, timeout=0.5)
    if last != (dummy_ranks.wait,):
        wait_until_stopped(processes[1])
    named = who.format(processes[int(who[5])].pid)
    assert ended(parent, processes, capsys) == (
        1,
        f"error: no progress in 0.5 s (DIST.TIMEOUT): {named}\n",
    )


def test_signals_are_passed_on(ranks, capsys):
    ready = SPAWN.Semaphore(0)
    failed = SPAWN.Array("c", FAILURE)
    asked = [SPAWN.Value("i", 0) for _ in range(2)]
    parent, processes = ranks(
        *((dummy_ranks.obey, ready, failed, own) for own in asked), failed=failed
    )
    for _ in processes:
        assert ready.acquire(timeout=60)

    def send():
        while signal.getsignal(signal.SIGTERM) != parent._send_on:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not all(own.value for own in asked):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert ended(parent, processes, capsys) == (143, "stopped\n")
    sender.join(60)
    assert [own.value for own in asked] == [1, 1]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ranks_that_have_nothing_to_save_are_ended_at_once(ranks, capsys, number, status):
    fresh = [0.0] * 8
    parent, processes = ranks((dummy_ranks.wait,), (dummy_ranks.wait,), beats=fresh)
    parent._send_on(signal.SIGUSR1, None)  # which would kill them: they don't listen yet
    parent._send_on(number, None)
    said = f"stopped by {number.name} before the first step; there is nothing to save\n"
    assert ended(parent, processes, capsys) == (status, said)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


def test_what_ranks_are_handed_does_not_go_through_a_pipe():
    objects = ({"a": "b"}, list(range(100_000)))
    assert spawned.SharedObjects(*objects).open() == objects


def held():
    """Which signals were noted after ``hold_signals``, beside a thread that blocks none."""
    threading.Thread(target=time.sleep, args=[60], daemon=True).start()
    signals.hold_signals()
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while not signals.received and time.monotonic() < deadline:
        time.sleep(0.01)
    return list(signals.received)


def test_signals_that_come_before_the_ranks_listen_are_held(ranks, capsys, monkeypatch):
    assert run_ranks(held) == [[signal.SIGUSR1]] * 2
    monkeypatch.setattr(signals, "received", {signal.SIGTERM: 0.0})
    ready = SPAWN.Semaphore(0)
    failed = SPAWN.Array("c", FAILURE)
    asked = SPAWN.Value("i", 0)
    parent, processes = ranks((dummy_ranks.obey, ready, failed, asked), failed=failed)
    assert ready.acquire(timeout=60)
    assert ended(parent, processes, capsys) == (143, "stopped\n")


def test_ctrl_c_once_more_ends_ranks_that_do_not_heed_it(ranks, capsys):
    ready = SPAWN.Semaphore(0)
    parent, processes = ranks((dummy_ranks.ignore, ready), (dummy_ranks.ignore, ready))
    for _ in processes:
        assert ready.acquire(timeout=60)
    parent._send_on(signal.SIGINT, None)
    parent._send_on(signal.SIGINT, None)  # the same, by two ways
    assert [process.exitcode for process in processes] == [None, None]
    parent.stop_time -= 1
    with pytest.raises(SystemExit) as end:
        parent._send_on(signal.SIGINT, None)
    assert (end.value.code, capsys.readouterr().err) == (130, "interrupted\n")
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2
