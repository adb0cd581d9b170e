"""The process that spawned the ranks. It sends signals on, ends all ranks if one fails or stalls,
and restarts them.
"""

import contextlib
import itertools
import mmap
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from yacs.config import CfgNode

from errors import FAILURE, InputError
from launch import rendezvous, secret, signals
from launch.files import open_to_append
from launch.progress import FIELDS
from launch.verdict import RankState, Verdict, failure_in, how_it_ended, judge, trouble

SHARED = "/dev/shm"
_ALIGNED = 64  # bytes: where an array's content begins
_NUMBER = struct.Struct("q")
SUSPENDED = 5.0  # seconds between two checks: after more, this process itself was suspended

_claim: socket.socket | None = None  # holds MASTER_PORT while this process lives


def prepare_spawn() -> None:
    """Prepares for the ranks that this process will spawn: makes their run's key, and has them use
    loopback. They meet at MASTER_PORT if that is set, else at a free port that Paddle chooses.

    Raises:
        InputError: MASTER_PORT is taken.
    """
    global _claim
    secret.take_run()
    rendezvous.use_loopback()
    if port := os.environ.get("MASTER_PORT"):
        address = f"{rendezvous.LOOPBACK}:{port}"
        if _claim:
            # of an earlier run of this process, in a notebook, say
            _claim.close()
        _claim = rendezvous.check_free(address)
        os.environ["PADDLE_MASTER"] = address


@contextlib.contextmanager
def without_current_folder() -> Iterator[None]:
    """Has multiprocessing start its Python processes so that they import no module from the current
    folder.

    They would look there first, and a run's folder that somebody else made may have a
    ``socket.py``. So they start in ``/``. Before they import anything of this program, they change
    to the current folder.
    """
    current = os.getcwd()
    get_preparation_data = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = lambda name: get_preparation_data(name) | {
        "dir": current
    }
    os.chdir("/")
    try:
        yield
    finally:
        os.chdir(current)
        multiprocessing.spawn.get_preparation_data = get_preparation_data


class SharedObjects:
    """Objects in the machine's memory, which the ranks on it map instead of copying.

    The memory belongs to a file without a name (memfd): /dev/shm is often too small.

    Arguments of a rank go through a pipe, which holds 64 kB. If they are larger, the parent waits
    until the rank has imported Paddle before it starts the next one. It would wait for ever if the
    rank has ended.

    The memory holds the sizes of its parts, a pickle, and then the content of each array. Ranks
    don't copy these: they are once in the machine's memory.
    """

    def __init__(self, *objects: Any) -> None:
        self._keep(os.memfd_create("handed"))
        buffers: list[pickle.PickleBuffer] = []
        parts: list[Any] = [pickle.dumps(objects, 5, buffer_callback=buffers.append)]
        parts += [buffer.raw() for buffer in buffers]
        with open(self.descriptor, "wb", closefd=False) as file:
            file.write(struct.pack(f"{1 + len(parts)}q", len(parts), *map(len, parts)))
            for part in parts:
                file.seek(-file.tell() % _ALIGNED, os.SEEK_CUR)
                file.write(part)
            # An empty part at the end may lie behind what was written.
            file.truncate()

    @classmethod
    def of(cls, descriptor: int) -> "SharedObjects":
        """Returns the objects that another process keeps in the memory of this descriptor."""
        handed = cls.__new__(cls)
        handed._keep(descriptor)
        return handed

    def _keep(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.descriptor)

    def __setstate__(self, descriptor: Any) -> None:
        self._keep(descriptor.detach())

    def open(self) -> tuple[Any, ...]:
        """Returns copies of the objects. A page of an array is copied where a rank writes into it."""
        # Not read: ranks share the file's position.
        data = memoryview(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY))
        [count] = _NUMBER.unpack_from(data)
        sizes = struct.unpack_from(f"{count}q", data, _NUMBER.size)
        place = _NUMBER.size * (1 + count)
        parts = []
        for size in sizes:
            place += -place % _ALIGNED
            parts.append(data[place : place + size])
            place += size
        return pickle.loads(parts[0], buffers=parts[1:])


def shared_arrays(context: Any, count: int) -> tuple[Any, Any]:
    """Returns the memory through which ranks report to the process that watches them: bytes for a
    failure, and FIELDS numbers for each rank.

    Raises:
        InputError: there isn't enough space in /dev/shm for it and for Python's locks: a crash
            would follow.
    """
    need = FAILURE + 64 * 1024 * (1 + count)
    try:
        disk = os.statvfs(SHARED)
        free = 0 if disk.f_flag & os.ST_RDONLY else disk.f_bavail * disk.f_frsize
    except OSError:
        free = 0
    if free < need:
        what = f"{count} processes need" if count > 1 else "1 process needs"
        raise InputError(
            f"{SHARED} has {free >> 10} kB free, but {what} {need >> 10} kB; free some, or mount a larger one"
            " (docker run --shm-size=1g)"
        )
    return context.Array("c", FAILURE), context.Array("d", FIELDS * count, lock=False)


class Ranks:
    """Ranks of this machine, as their parent sees them.

    Args:
        context: what ``paddle.distributed.spawn(join=False)`` returned; it has to live as long as
            the ranks do.
        failed: the shared bytes in which the ranks' ``errors.reporting`` leaves a failure.
        beats: shared doubles, FIELDS per rank (``progress.beat``).
        timeout: the run ends after this many seconds without progress of any rank.
        saves: a rank that has begun gets a signal to stop, and saves. Otherwise it is ended at
            once.
    """

    def __init__(
        self, context: Any, failed: Any, beats: Any, timeout: float, saves: bool = True
    ) -> None:
        self.context = context
        self.processes = context.processes
        self.failed = failed
        self.beats = beats
        self.timeout = timeout
        self.saves = saves
        self.seen = [RankState(place, process.pid) for place, process in enumerate(self.processes)]
        self.started = self.looked = time.monotonic()
        # the signal that asked to stop (0: none), and when
        self.asked = 0
        self.asked_at = 0.0

    def wait(self) -> Verdict | None:
        """Waits for the ranks and sends signals on. If one fails or stalls, ends all and returns
        why, else None.

        Raises:
            SystemExit: after a second Ctrl-C.
        """
        signals.catch_signals(self._pass_on)
        for number in list(signals.received):  # came while the ranks were started
            self._pass_on(number, None)
        signals.received.clear()  # no later start shall get them again
        while not self.look():
            if verdict := self.verdict():
                self.end(verdict)
                return verdict
            wait(
                [process.sentinel for process in self.processes if process.exitcode is None],
                timeout=0.2,
            )
        return None

    def look(self) -> bool:
        """Reads how far the ranks are; returns whether all have ended without an error."""
        before = self.looked
        self.looked = time.monotonic()
        # together with the ranks, by Ctrl-Z: their time starts again
        if self.looked - before > SUSPENDED:
            self.started = self.looked
        for place, (seen, process) in enumerate(zip(self.seen, self.processes, strict=True)):
            seen.time, seen.step, seen.doing, _ = self.beats[FIELDS * place : FIELDS * (place + 1)]
            seen.trouble = "" if process.exitcode is not None else trouble(process.pid)
            if process.exitcode and not seen.gone:
                seen.gone, seen.gone_at = how_it_ended(process.exitcode), time.monotonic()
        self.seen[0].failure = failure_in(self.failed.value)
        return not self.seen[0].failure and all(process.exitcode == 0 for process in self.processes)

    def verdict(self) -> Verdict | None:
        """Returns why the run has to end, by the last ``look``; None if it doesn't."""
        return judge(self.seen, self.started, self.timeout)

    def has_stepped(self) -> bool:
        """Returns whether any rank asked for a second batch, so that a step was completed."""
        return max(self.beats[FIELDS - 1 :: FIELDS]) > 1

    def has_begun(self) -> bool:
        """Returns whether a rank has something to save (``signals.begin``)."""
        return any(self.beats[::FIELDS])

    def end(self, verdict: Verdict) -> None:
        """Ends the ranks that still run."""
        for process in self.processes:
            process.kill()  # SIGTERM would only ask them to save
        for process in self.processes:
            process.join()

    def _pass_on(self, number: int, _: Any) -> None:
        if number == self.asked == signal.SIGINT and time.monotonic() - self.asked_at > 0.5:
            verdict = Verdict(128 + number, "interrupted", lost=False)  # a second Ctrl-C
            self.end(verdict)
            leave(verdict)
        if number in signals.STOP_SIGNALS and not self.asked:
            self.asked, self.asked_at = number, time.monotonic()
        begun = self.saves and self.has_begun()
        for seen, process in zip(self.seen, self.processes, strict=True):
            if process.exitcode is not None:
                continue
            if begun:
                os.kill(process.pid, number)
            elif number in signals.STOP_SIGNALS:
                # it may not handle signals yet, or wait for others in C++
                seen.gone, seen.gone_at = how_it_ended(-number), time.monotonic()
                process.kill()


def leave(verdict: Verdict) -> NoReturn:
    """Prints why the run ends, and exits with its status. Signals are ignored from now on."""
    # at its end Python restores the defaults, and one would kill
    signals.catch_signals(signal.SIG_IGN)
    if verdict.text:  # there is none if the reader of standard output left
        print(verdict.text, file=sys.stderr, flush=True)
    sys.exit(verdict.status)


def run(
    config: CfgNode,
    count: int,
    start: Callable[..., Any],
    next_start: Callable[[CfgNode, int], tuple[CfgNode, int, str]] | None = None,
) -> None:
    """Starts the ranks and waits for them. If ranks are lost or stall, it restarts all,
    DIST.MAX_RESTART times at most.

    Each time they resume from the newest complete checkpoint, with as many processes as there are
    devices now. If two starts in a row completed no step, it stops, because a third wouldn't
    either.

    Args:
        count: the number of ranks.
        start: is called with the configuration, the number of ranks, ``failed`` and ``beats``. It
            starts the ranks and returns their context.
        next_start: is called with the configuration and the number of ranks. It returns both for a
            restart, and words that describe them. None: no restarts, and nothing to save.
    """
    context = multiprocessing.get_context("spawn")
    stepped = True
    restarts = config.DIST.MAX_RESTART if not config.EVAL else 0
    for attempt in itertools.count(1):
        # It starts Python's resource tracker, which unblocks two signals.
        with without_current_folder():
            failed, beats = shared_arrays(context, count)
        signals.hold_signals()  # until the ranks handle them; this process sends signals on
        started = start(config, count, failed, beats)
        ranks = Ranks(started, failed, beats, config.DIST.TIMEOUT, saves=next_start is not None)
        verdict = ranks.wait()
        signals.hold_signals()  # the next ranks get what comes until they are waited for
        forget_lost_tracker()
        if not verdict:
            signals.catch_signals(signal.SIG_IGN)  # as in ``leave``
            return
        before = stepped
        stepped = ranks.has_stepped()
        if not verdict.lost or ranks.asked or next_start is None or attempt > restarts:
            leave(verdict)
        if not (before or stepped):
            leave(
                verdict._replace(
                    text=f"{verdict.text}; no further restart: the last two starts completed no step"
                )
            )
        config, count, where = next_start(config, count)
        what = verdict.text.strip().splitlines()[-1].removeprefix("error: ")
        _print_and_log(
            config, f"{what}; restart {attempt} of {restarts} (DIST.MAX_RESTART) {where}"
        )


def forget_lost_tracker() -> None:
    """Keeps Python quiet at its end if its resource tracker was killed. It would start another one,
    which warns of each name that it doesn't know. This process removes its shared memory without a
    tracker, too.
    """
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    if tracker._fd is not None and not tracker._check_alive():
        resource_tracker.unregister = lambda name, rtype: None


def _print_and_log(config: CfgNode, line: str) -> None:
    print(line, file=sys.stderr, flush=True)
    if Path(config.OUTPUT).is_dir():  # else the run has no folder yet
        # It was said on stderr already.
        with contextlib.suppress(OSError), open_to_append(Path(config.OUTPUT) / "log.txt") as log:
            log.write(f"{time.strftime('%m%d %H:%M:%S')} {line}\n")
