"""Ranks that a launcher started: their parents tell each other what they see, and all end for the
same reason.
"""

import itertools
import json
import multiprocessing
import platform
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from support import dummy_ranks
from support.ranks import free_ports

from errors import InputError
from launch import channel, launched
from launch.verdict import RankState

SPAWN = multiprocessing.get_context("spawn")
HOST = re.escape(platform.node())
WAIT = (dummy_ranks.wait,)


@pytest.fixture
def run(tmp_path):
    """Returns a function that starts dummy ranks as a launcher does: (exit statuses, what each
    said), by rank.
    """
    started = []

    places = itertools.count()

    def run(*acts, timeout=60.0, separate=True):
        folder = tmp_path / str(next(places))
        folder.mkdir()
        common = (len(acts), free_ports(1)[0], str(folder), acts, timeout, separate)
        processes = [
            SPAWN.Process(target=dummy_ranks.launch, args=(place, *common))
            for place in range(len(acts))
        ]
        started.extend(processes)
        for process in processes:
            process.start()
        # A suspended process never ends by itself.
        ending = [
            process
            for process, act in zip(processes, acts, strict=True)
            if act[0] is not dummy_ranks.suspend_parent
        ]
        for process in ending:
            process.join(60)
            assert process.exitcode is not None
        said = [
            re.sub("^rank 0 waits .*\n", "", (folder / str(place)).read_text())
            for place in range(len(acts))
        ]
        return [process.exitcode for process in processes], said

    yield run
    for process in started:
        process.kill()
        process.join()


CAUSES = [
    (
        [WAIT, (dummy_ranks.kill, signal.SIGKILL), WAIT],
        1,
        "error: rank 1 {} was killed by SIGKILL \\(out of memory\\?\\) at step 7",
    ),
    (
        [(dummy_ranks.kill, signal.SIGKILL), WAIT],
        1,
        "error: rank 0 {} was killed by SIGKILL \\(out of memory\\?\\) at step 7",
    ),
    (
        [(dummy_ranks.kill, signal.SIGABRT), (dummy_ranks.kill, signal.SIGSEGV)],
        1,
        "error: rank 1 {} was killed by SIGSEGV .*",
    ),
    ([WAIT, (dummy_ranks.fail, 2, "error: so")], 2, "error: so"),
    (
        [(dummy_ranks.kill, signal.SIGABRT), (dummy_ranks.kill, signal.SIGSTOP)],
        1,
        r"error: rank 1 {} is suspended \(SIGSTOP, or a debugger\) at step 7, and the other ranks waited for it",
    ),
]


@pytest.mark.smoke
def test_every_ranks_log_tells_the_cause(run):
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda case: run(*case[0]), CAUSES)
    for (acts, status, message), (statuses, said) in zip(CAUSES, found, strict=True):
        assert statuses == [status] * len(acts)
        assert len(set(said)) == 1
        assert re.fullmatch(message.format(rf"\(process \d+ on {HOST}\)") + "\n", said[0])


def test_where_ranks_share_a_console_one_speaks(run):
    assert run(WAIT, (dummy_ranks.fail, 143, "stopped"), separate=False) == (
        [143, 143],
        ["stopped\n", ""],
    )


def test_ranks_that_end_well_say_nothing_whoever_is_first(run):
    with ThreadPoolExecutor(2) as pool:
        ends = [
            ((dummy_ranks.leave,), (time.sleep, 0.5)),
            ((time.sleep, 0.5), (dummy_ranks.leave,)),
        ]
        assert list(pool.map(lambda acts: run(*acts), ends)) == [([0, 0], ["", ""])] * 2


def test_ranks_that_have_not_begun_are_stopped_at_once(run):
    said = "stopped by SIGTERM before the first step; there is nothing to save\n"
    assert run((dummy_ranks.stop_early,), (dummy_ranks.stop_early,)) == ([143, 143], [said, said])


def test_a_rank_that_stalls_is_named(run):
    statuses, said = run(WAIT, (dummy_ranks.stay_behind,), timeout=1.0)
    who = rf"rank 1 \(process \d+ on {HOST}\) is waiting for data at step 7"
    assert statuses == [1, 1]
    assert re.fullmatch(rf"error: no progress in 1 s \(DIST\.TIMEOUT\): {who}\n", said[0])
    assert said[1] == said[0]


def test_a_machine_that_is_lost_is_named(run):
    statuses, said = run(WAIT, (dummy_ranks.kill_parent,))
    assert statuses == [1, -signal.SIGKILL]
    assert re.fullmatch(
        rf"error: rank 1 \(process \d+ on {HOST}\) was lost \(its machine .*\) at step 7\n", said[0]
    )
    statuses, said = run((dummy_ranks.kill_parent,), WAIT)
    assert statuses == [-signal.SIGKILL, 1]
    assert said[1] == f"error: rank 0 on 127.0.0.1 {launched.LOST}\n"


@pytest.mark.slow
def test_a_machine_that_does_not_answer_is_named(run):
    statuses, said = run(WAIT, (dummy_ranks.suspend_parent,), timeout=2.0)
    who = rf"rank 1 \(process \d+ on {HOST}\) isn't answering \(is its machine down, or out of reach\?\) at step 7"
    assert statuses[0] == 1
    assert re.fullmatch(rf"error: no progress in 2 s \(DIST\.TIMEOUT\): {who}\n", said[0])
    statuses, said = run((dummy_ranks.suspend_parent,), WAIT, timeout=2.0)
    assert statuses[1] == 1
    assert re.fullmatch(
        rf"error: rank 0 on 127.0.0.1 {re.escape(launched.SILENT)} for 2 s\n", said[1]
    )


def test_restarts_are_a_launchers_own():
    with pytest.raises(
        InputError, match="DIST.MAX_RESTART restarts only ranks that this program starts"
    ):
        launched.watch(dummy_ranks.wait, SimpleNamespace(DIST=SimpleNamespace(MAX_RESTART=1)))


def test_a_rank_that_fails_before_the_others_are_ready_ends_all_with_its_line(run):
    statuses, said = run(WAIT, (dummy_ranks.fail_early, 2, "rank 1: error: so"), WAIT)
    assert (statuses, set(said)) == ([2, 2, 2], {"rank 1: error: so\n"})


def test_a_rank_that_is_slow_to_be_ready_is_waited_for(run):
    began = time.monotonic()
    assert run((dummy_ranks.leave,), (dummy_ranks.read_slowly,)) == ([0, 0], ["", ""])
    assert time.monotonic() - began > 3


SEEN = asdict(RankState(1, 7, "far", 1.0, 3.0)) | {"failure": [2, "error: so", False]}
NONSENSE = [
    1,
    [],
    {},
    {"seen": 1},
    {"seen": {}},
    {"seen": SEEN | {"more": 1}},
    {"seen": SEEN | {"place": 2}},
]
NONSENSE += [
    {"seen": SEEN | {"time": "now"}},
    {"seen": SEEN | {"failure": 3}},
    {"seen": SEEN | {"failure": [1]}},
]
NONSENSE += ["[" * 100_000, "{", "\ud800", '{"seen": 1e999}']


@pytest.mark.parametrize(
    "told",
    [*NONSENSE, {"seen": SEEN, "ready": False, "done": False}],
    ids=lambda told: str(told)[:40],
)
def test_nonsense_is_not_listened_to(monkeypatch, told):
    monkeypatch.setattr(launched, "_stage", [launched.READING])
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    own = SimpleNamespace(pid=1, exitcode=None, start=lambda: None)
    theirs, ours = channel.pair()
    first = launched.DecidingWatcher(
        SimpleNamespace(guests={0: None, 1: ours}), own, SimpleNamespace(value=b""), [0.0] * 4, 60.0
    )
    with theirs.socket:
        theirs.send(told if isinstance(told, str) else json.dumps(told))
        first.check()
        assert ours.closed == (told in NONSENSE)
    assert first.all_states[1].failure == (None if told in NONSENSE else (2, "error: so", False))
    assert first.all_states[1].gone == (launched.LOST if told in NONSENSE else "")
    ours.close()


def test_what_a_rank_said_last_is_heard_though_it_left_something_unread():
    """Its parent ends at once, and so may close the connection over a report that it hasn't read."""
    first, other = map(launched.Peer, channel.pair())
    first.send({})
    other.send({"done": True})
    other.close()
    first.send({})  # fails
    assert not first.closed
    assert first.receive() == [{"done": True}]
    assert first.receive() == []
    assert first.closed
