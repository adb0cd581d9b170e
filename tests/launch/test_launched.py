"""Ranks that a launcher started: their parents tell each other what they see, and all end for the same reason."""

import itertools
import json
import multiprocessing
import platform
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import dummies
import pytest

from errors import InputError
from launch import launched

SPAWN = multiprocessing.get_context("spawn")
HOST = re.escape(platform.node())
WAIT = (dummies.wait,)


@pytest.fixture
def run(tmp_path):
    """Returns a function that starts dummy ranks as a launcher does: (exit statuses, what each said), by rank."""
    started = []

    places = itertools.count()

    def run(*acts, timeout=60.0, separate=True):
        folder = tmp_path / str(next(places))
        folder.mkdir()
        common = (len(acts), str(folder), acts, timeout, separate)
        processes = [SPAWN.Process(target=dummies.launch, args=(place, *common)) for place in range(len(acts))]
        started.extend(processes)
        for process in processes:
            process.start()
        # A suspended process never ends by itself.
        ending = [process for process, act in zip(processes, acts, strict=True) if act[0] is not dummies.suspend_parent]
        for process in ending:
            process.join(60)
            assert process.exitcode is not None
        said = [(folder / str(place)).read_text() for place in range(len(acts))]
        return [process.exitcode for process in processes], said

    yield run
    for process in started:
        process.kill()
        process.join()


CAUSES = [
    ([WAIT, (dummies.kill, signal.SIGKILL), WAIT], 1, "error: rank 1 {} was killed by SIGKILL at step 7"),
    ([(dummies.kill, signal.SIGKILL), WAIT], 1, "error: rank 0 {} was killed by SIGKILL at step 7"),
    ([(dummies.kill, signal.SIGABRT), (dummies.kill, signal.SIGSEGV)], 1, "error: rank 1 {} was killed by SIGSEGV .*"),
    ([WAIT, (dummies.fail, 2, "error: so")], 2, "error: so"),
    (
        [(dummies.kill, signal.SIGABRT), (dummies.kill, signal.SIGSTOP)],
        1,
        r"error: rank 1 {} is suspended \(SIGSTOP, or a debugger\) at step 7, and the others waited for it in vain",
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
    assert run(WAIT, (dummies.fail, 143, "stopped"), separate=False) == ([143, 143], ["stopped\n", ""])


def test_ranks_that_end_well_say_nothing_whoever_is_first(run):
    with ThreadPoolExecutor(2) as pool:
        ends = [((dummies.leave, 0), (time.sleep, 0.5)), ((time.sleep, 0.5), (dummies.leave, 0))]
        assert list(pool.map(lambda acts: run(*acts), ends)) == [([0, 0], ["", ""])] * 2


def test_ranks_that_have_not_begun_are_stopped_at_once(run):
    said = "stopped by SIGTERM before the first step: nothing to save\n"
    assert run((dummies.stop_early,), (dummies.stop_early,)) == ([143, 143], [said, said])


def test_a_rank_that_stalls_is_named(run):
    statuses, said = run(WAIT, (dummies.stay_behind,), timeout=1.0)
    who = rf"rank 1 \(process \d+ on {HOST}\) is waiting for data at step 7"
    assert statuses == [1, 1]
    assert re.fullmatch(rf"error: no progress in 1 s \(DIST\.TIMEOUT\): {who}\n", said[0])
    assert said[1] == said[0]


def test_a_machine_that_is_lost_is_named(run):
    statuses, said = run(WAIT, (dummies.kill_parent,))
    assert statuses == [1, -signal.SIGKILL]
    assert re.fullmatch(rf"error: rank 1 \(process \d+ on {HOST}\) was lost \(its machine .*\) at step 7\n", said[0])
    statuses, said = run((dummies.kill_parent,), WAIT)
    assert statuses == [-signal.SIGKILL, 1]
    assert said[1] == f"error: rank 0 on 127.0.0.1 {launched.LOST}\n"


@pytest.mark.slow
def test_a_machine_that_does_not_answer_is_named(run):
    statuses, said = run(WAIT, (dummies.suspend_parent,), timeout=2.0)
    who = rf"rank 1 \(process \d+ on {HOST}\) isn't answering \(is its machine down, or out of reach\?\) at step 7"
    assert statuses[0] == 1
    assert re.fullmatch(rf"error: no progress in 2 s \(DIST\.TIMEOUT\): {who}\n", said[0])
    statuses, said = run((dummies.suspend_parent,), WAIT, timeout=2.0)
    assert statuses[1] == 1
    assert re.fullmatch(rf"error: rank 0 on 127.0.0.1 {re.escape(launched.SILENT)} for 2 s\n", said[1])


def test_restarts_are_a_launchers_own():
    with pytest.raises(InputError, match="DIST.MAX_RESTART is for ranks that this program spawns"):
        launched.watch(dummies.wait, SimpleNamespace(DIST=SimpleNamespace(MAX_RESTART=1)))


def test_strangers_are_not_listened_to(monkeypatch):
    monkeypatch.setattr(launched, "_door", SimpleNamespace(value=b""))
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    own = SimpleNamespace(pid=1, exitcode=None, start=lambda: None)
    first = launched.First(own, SimpleNamespace(value=b""), [0.0] * 4, 60.0)
    port, password = json.loads(launched._door.value)
    told = {"place": 1, "pid": 7, "host": "far", "step": 3.0, "time": 1.0, "failure": [2, "error: so", False]}
    for given, text in (("nö", None), (None, None), (password, "error: so")):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(json.dumps({"password": given, "seen": told, "done": False}).encode() + b"\n")
            stranger.sendall(b"{\n" if given is None else b"")
            time.sleep(0.05)
            first.look()
            assert (first.verdict() or SimpleNamespace(text=None)).text == text
    for line in (b"1\n", b"[]\n", b"GET / HTTP/1.0\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(line)
            time.sleep(0.05)
            first.look()
            assert first.verdict().text == "error: so"
    for connection in (*first.lines, first.listener):
        connection.close()
