"""The launched ranks of a machine read their data once, hold it once, and leave nothing."""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from config import get_config
from errors import InputError, RunError
from launch import secret, sharing, spawned
from loading.files import Paths
from main_multi_gpu import datasets_key

FORK = multiprocessing.get_context("fork")
LARGE = 32 << 20  # bytes


def names():
    """The files that a run could leave."""
    return {
        path for folder in ("/dev/shm", "/tmp") for path in os.listdir(folder) if "handed" in path
    }


@pytest.fixture
def ranks(monkeypatch):
    """Returns a function that calls ``act(rank, *args)`` in processes: (exit status, what it
    returned), by rank.
    """
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "5")
    secret.set_run_key()
    monkeypatch.setenv(secret.RUN_KEY_VARIABLE, os.environ[secret.RUN_KEY_VARIABLE])
    started = []

    def call(rank, act, args, pipe):
        try:
            pipe.send(act(rank, *args))
        except RunError as error:
            pipe.send(error)

    def run(act, *args, count=5):
        pipes = [FORK.Pipe() for _ in range(count)]
        given = [(rank, act, args, pipes[rank][1]) for rank in range(count)]
        processes = [FORK.Process(target=call, args=each) for each in given]
        started.extend(processes)
        for process in processes:
            process.start()
        for _, end in pipes:
            end.close()
        found = []
        for process, (pipe, _) in zip(processes, pipes, strict=True):
            told = None
            with contextlib.suppress(EOFError):
                told = pipe.recv()
            process.join(60)
            found.append((process.exitcode, told))
        return found

    before = names()
    yield run
    for process in started:
        process.kill()
        process.join()
    assert names() == before


@pytest.fixture
def reads():
    return FORK.Value("i", 0)


def share(read, what, ready):
    """What a rank reads; it returns when all have it."""
    found = sharing.read_once(read, what)
    wait_for_all(ready, 5)
    sharing.close()
    return found


def wait_for_all(ready, count):
    """Returns when ``ready`` was raised ``count`` times. Meanwhile this rank hands over what it has
    read.
    """
    with ready.get_lock():
        ready.value += 1
    until = time.monotonic() + 30
    while ready.value < count and time.monotonic() < until:
        sharing.answer()
        time.sleep(0.02)


def counting(reads, *found, seconds=0.0):
    def read():
        with reads.get_lock():
            reads.value += 1
        time.sleep(seconds)
        return found

    return read


def private():
    """Returns the bytes of memory that this process doesn't share."""
    told = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(map(int, re.findall(r"^Private_\w+: +(\d+) kB", told, re.MULTILINE)))


def take(rank, reads, ready):
    paths = Paths(f"train/{place}.jpg" for place in range(1000))
    read = counting(reads, {"a": rank}, np.full(LARGE, 7, np.uint8), paths, np.zeros(0, np.int64))
    before = private()
    config, array, found, nothing = share(read, b"data", ready)
    total = int(array.sum())
    wait_for_all(ready, 10)
    grown = private() - before
    wait_for_all(ready, 15)
    array[rank] = rank  # in a copy of the page
    wait_for_all(ready, 20)
    return config["a"], total, array[:5].tolist(), [*found] == [*paths], len(nothing), grown


@pytest.mark.smoke
def test_one_rank_reads_for_all_and_memory_is_shared(ranks, reads):
    found = ranks(take, reads, FORK.Value("i", 0))
    assert reads.value == 1
    assert len({told[0] for _, told in found}) == 1
    for rank, (status, told) in enumerate(found):
        assert status == 0
        assert told[1:5] == (
            7 * LARGE,
            [rank if place == rank else 7 for place in range(5)],
            True,
            0,
        )
        assert told[5] < LARGE // 4


def differ(rank, reads, ready):
    return share(counting(reads, rank % 2), b"%d" % (rank % 2), ready)


def test_ranks_that_would_read_something_else_read_by_themselves(ranks, reads):
    found = ranks(differ, reads, FORK.Value("i", 0))
    assert [told for _, told in found] == [(0,), (1,), (0,), (1,), (0,)]
    assert reads.value == 2


def elsewhere(rank, folder, reads, ready):
    if rank == 1:
        os.chdir(folder)
    return share(counting(reads, os.getcwd()), b"data", ready)


def test_another_current_folder_is_other_data(ranks, reads, tmp_path):
    found = ranks(elsewhere, tmp_path, reads, FORK.Value("i", 0))
    assert [told == (str(tmp_path),) for _, told in found] == [False, True, False, False, False]
    assert reads.value == 2


def fail(rank, reads, error):
    def read():
        counting(reads, seconds=1.0)()
        raise error

    return sharing.read_once(read, b"data")


@pytest.mark.parametrize(
    "error", [InputError("no \N{SNOWMAN} " + "\N{PILE OF POO}" * 490), RunError("x", shared=True)]
)
def test_what_the_reader_fails_by_is_every_ranks_error(ranks, reads, error):
    for status, told in ranks(fail, reads, error):
        assert status == 0
        assert (type(told), str(told), told.shared) == (type(error), str(error), error.shared)
    assert reads.value == 1


def end_first(rank, number, reads, ready):
    def read():
        counting(reads, seconds=0.5)()
        if reads.value == 1:
            os.kill(os.getpid(), number)
            time.sleep(60)
        ready.value += 1  # for the one that is gone
        return (rank,)

    return share(read, b"data", ready)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_another_rank_reads_where_the_reader_was_killed(ranks, reads, number):
    found = ranks(end_first, number, reads, FORK.Value("i", 0))
    assert sorted(status for status, _ in found) == [-number, 0, 0, 0, 0]
    assert len({told for _, told in found}) == 2
    assert reads.value == 2


def estranged(rank, reads, ready):
    if rank == 0:
        sharing.os = Estranged()
    return share(counting(reads, rank), b"data", ready)


class Estranged:
    """The module ``os`` of another user's process."""

    def __getattr__(self, name):
        return getattr(os, name)

    def geteuid(self):
        return os.geteuid() + 1


def test_nothing_is_taken_from_another_users_process_nor_given_to_it(ranks, reads):
    found = ranks(estranged, reads, FORK.Value("i", 0))
    own, *others = [told for _, told in found]
    assert own == (0,)
    assert (0,) not in others
    if reads.value == 2:  # the others found each other
        assert len(set(others)) == 1
    else:  # it came first, so each read by itself
        assert others == [(1,), (2,), (3,), (4,)]


def test_a_reader_that_may_open_no_more_files_reads_by_itself(ranks, reads, monkeypatch):
    monkeypatch.setattr(socket, "recv_fds", lambda *_: (b"{}", [], 0, None))
    found = ranks(differ, reads, FORK.Value("i", 0))
    assert [told for _, told in found] == [(0,), (1,), (0,), (1,), (0,)]
    assert reads.value == 5


def test_every_setting_decides_what_is_read():
    words = ["DATA.DATASET", "folder", "SEED", "1"]
    same = get_config(None, words)
    other = get_config(None, [*words[:-1], "2"])
    assert datasets_key(same) == datasets_key(get_config(None, words)) != datasets_key(other)


def test_a_rank_does_not_wait_in_a_full_queue():
    name = f"\0paddle-vit-toolkit:{os.getpid()}"
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(name)
        listener.listen(0)
        for _ in range(2):  # as many as fit, and more
            guest = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            guest.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                guest.connect(name)
        with pytest.raises(sharing._NotShared):
            sharing._wait(name)
    assert sharing._wait(name) is None  # nobody listens


def test_a_system_that_refuses_such_names_reads_on_every_rank(ranks, reads, monkeypatch):
    monkeypatch.setattr(sharing.errno, "EADDRINUSE", -1)
    found = ranks(differ, reads, FORK.Value("i", 0))
    assert [told for _, told in found] == [(0,), (1,), (0,), (1,), (0,)]
    assert reads.value == 5


def test_one_rank_alone_opens_nothing(monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "1")
    monkeypatch.setattr(sharing, "socket", None)
    assert sharing.read_once(lambda: (1,), b"data") == (1,)


def test_what_ranks_are_handed_is_as_it_was():
    objects = (
        np.arange(12).reshape(3, 4).T,
        np.zeros(0),
        np.array(["a", "bc"]),
        [b"x", "y"],
        np.float32(2),
    )
    for own, other in zip(spawned.SharedObjects(*objects).open(), objects, strict=True):
        np.testing.assert_array_equal(own, other)
        assert type(own) is type(other)
