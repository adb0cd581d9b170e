"""Runs the ranks that this process spawns, and watches them.

It sends signals on to the ranks, ends all of them if one fails or stalls, and starts them again
(DIST.MAX_RESTART). ``Watcher`` also watches a rank that a launcher started (``launched``).
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

# where multiprocessing keeps its shared arrays and locks
SHARED = "/dev/shm"
# Arrays begin at multiples of these bytes.
_ALIGNMENT = 64
_INTEGER = struct.Struct("q")
# If more seconds than these pass between two checks, this process itself was suspended.
SUSPENDED = 5.0
# The socket that holds MASTER_PORT while this process lives (``rendezvous.claim``).
_claim: socket.socket | None = None


def prepare_spawn() -> None:
    """Prepares this process for spawning ranks: it makes the run's key, and gloo will use loopback.

    The ranks meet at MASTER_PORT if that is set. Otherwise Paddle chooses a free port.

    Raises:
        InputError: MASTER_PORT is taken.
    """
    global _claim
    secret.set_run_key()
    rendezvous.use_loopback()
    if port := os.environ.get("MASTER_PORT"):
        address = f"{rendezvous.LOOPBACK}:{port}"
        if _claim:
            # An earlier run of this process, in a notebook for example, holds the port.
            _claim.close()
        _claim = rendezvous.check_free(address)
        os.environ["PADDLE_MASTER"] = address


@contextlib.contextmanager
def without_current_folder() -> Iterator[None]:
    """Keeps the Python processes that multiprocessing starts from importing their first modules
    from the current folder.

    Python looks there first, and a folder that somebody else made may contain a ``socket.py``. So
    the processes start in ``/``. They change to the current folder before they import this program.
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
    """Objects in shared memory, for the ranks of this machine. ``open`` returns them in a rank.

    Arrays are in the machine's memory once: the ranks map them instead of copying. The memory is a
    file without a name (memfd), because /dev/shm is often too small.

    Objects of this size can't be plain arguments of a rank. Arguments go through a pipe, which
    holds 64 kB. If they are larger, the parent can't start the next rank before this one has
    imported Paddle and reads the pipe. If this rank has ended, the parent waits for ever.

    The memory begins with the number of blocks and their sizes, as 64-bit integers. Then follow the
    blocks. The first one is a pickle, and each other one is the content of an array.
    """

    def __init__(self, *objects: Any) -> None:
        self._hold(os.memfd_create("shared_objects"))
        buffers: list[pickle.PickleBuffer] = []
        blocks: list[Any] = [pickle.dumps(objects, 5, buffer_callback=buffers.append)]
        blocks += [buffer.raw() for buffer in buffers]
        with open(self.descriptor, "wb", closefd=False) as file:
            file.write(struct.pack(f"{1 + len(blocks)}q", len(blocks), *map(len, blocks)))
            for block in blocks:
                file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
                file.write(block)
            # If the last block is empty, it may begin behind the end of the file: extend it.
            file.truncate()

    @classmethod
    def from_descriptor(cls, descriptor: int) -> "SharedObjects":
        """Returns the objects that another process shares, from the descriptor of their memory."""
        shared = cls.__new__(cls)
        shared._hold(descriptor)
        return shared

    def _hold(self, descriptor: int) -> None:
        """Keeps the descriptor of the memory, and closes it when this object is deleted."""
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.descriptor)

    def __setstate__(self, descriptor: Any) -> None:
        self._hold(descriptor.detach())

    def open(self) -> tuple[Any, ...]:
        """Returns the objects. A process that writes into an array gets a copy of that page."""
        # The memory is mapped, because the ranks share the position for reads.
        data = memoryview(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY))
        [count] = _INTEGER.unpack_from(data)
        sizes = struct.unpack_from(f"{count}q", data, _INTEGER.size)
        offset = _INTEGER.size * (1 + count)
        blocks = []
        for size in sizes:
            offset += -offset % _ALIGNMENT
            blocks.append(data[offset : offset + size])
            offset += size
        return pickle.loads(blocks[0], buffers=blocks[1:])


def shared_arrays(context: Any, count: int) -> tuple[Any, Any]:
    """Returns (failed, beats), the shared memory through which ``count`` ranks report to the
    process that watches them. ``failed`` has bytes for a failure, ``beats`` has ``progress.FIELDS``
    numbers for each rank.

    Raises:
        InputError: /dev/shm doesn't have enough space for them and for Python's locks. Python would
            crash later.
    """
    need = FAILURE + 64 * 1024 * (1 + count)
    try:
        disk = os.statvfs(SHARED)
        is_read_only = disk.f_flag & os.ST_RDONLY
        free = 0 if is_read_only else disk.f_bavail * disk.f_frsize
    except OSError:
        free = 0
    if free < need:
        processes = f"{count} processes need" if count > 1 else "1 process needs"
        raise InputError(
            f"{SHARED} has {free >> 10} kB free, but {processes} {need >> 10} kB;"
            " free some space, or mount a larger one (docker run --shm-size=1g)"
        )
    return context.Array("c", FAILURE), context.Array("d", FIELDS * count, lock=False)


class Watcher:
    """Watches ranks of this machine, which are child processes of this one.

    Args:
        context: the return value of ``paddle.distributed.spawn(join=False)``. It has to live as
            long as the ranks do.
        failed, beats: of ``shared_arrays``.
        timeout: the run ends after this many seconds without progress of any rank.
        can_save: whether a rank that has begun can save its state. Then it gets the signals that
        ask
            to stop; otherwise it is killed.

    Attributes:
        states: the state of each rank, by the last ``check``.
        stop_signal: the signal that asked the run to stop; 0: none.
        stop_time: when it came.
    """

    def __init__(
        self, context: Any, failed: Any, beats: Any, timeout: float, can_save: bool = True
    ) -> None:
        self.context = context
        self.processes = context.processes
        self.failed = failed
        self.beats = beats
        self.timeout = timeout
        self.can_save = can_save
        self.states = [
            RankState(place, process.pid) for place, process in enumerate(self.processes)
        ]
        # when the ranks were started, or resumed after they were suspended
        self.started = self.checked = time.monotonic()
        self.stop_signal = 0
        self.stop_time = 0.0

    def wait(self) -> Verdict | None:
        """Waits until all ranks have ended, and sends signals on to them. Returns None; if a rank
        fails or stalls, it ends all and returns why.

        Raises:
            SystemExit: after a second Ctrl-C.
        """
        signals.catch_signals(self._send_on)
        # These came while the ranks were started. The ranks of a restart shall not get them again.
        for number in list(signals.received):
            self._send_on(number, None)
        signals.received.clear()
        while not self.check():
            if verdict := self.verdict():
                self.end(verdict)
                return verdict
            wait(
                [process.sentinel for process in self.processes if process.exitcode is None],
                timeout=0.2,
            )
        return None

    def check(self) -> bool:
        """Reads the progress of the ranks; returns whether all have ended without an error."""
        before = self.checked
        self.checked = time.monotonic()
        # Ctrl-Z suspends this process and the ranks together. Their time starts again.
        if self.checked - before > SUSPENDED:
            self.started = self.checked
        for place, (state, process) in enumerate(zip(self.states, self.processes, strict=True)):
            beat = self.beats[FIELDS * place : FIELDS * (place + 1)]
            state.time, state.step, state.doing, _ = beat
            state.trouble = "" if process.exitcode is not None else trouble(process.pid)
            if process.exitcode and not state.gone:
                state.gone = how_it_ended(process.exitcode)
                state.gone_at = time.monotonic()
        # The ranks share one place for a failure, and its text names the rank. So it doesn't matter
        # which state gets it.
        failure = failure_in(self.failed.value)
        self.states[0].failure = failure
        return not failure and all(process.exitcode == 0 for process in self.processes)

    def verdict(self) -> Verdict | None:
        """Returns why the run has to end, by the last ``check``; None if it doesn't."""
        return judge(self.states, self.started, self.timeout)

    def has_stepped(self) -> bool:
        """Returns whether a step was completed: a rank has asked for its second batch."""
        batches = self.beats[FIELDS - 1 :: FIELDS]
        return max(batches) > 1

    def has_begun(self) -> bool:
        """Returns whether a rank has something to save (``signals.begin``)."""
        times = self.beats[::FIELDS]
        return any(times)

    def end(self, verdict: Verdict) -> None:
        """Ends the ranks that still run."""
        for process in self.processes:
            # SIGTERM would only ask it to save.
            process.kill()
        for process in self.processes:
            process.join()

    def _send_on(self, number: int, _: Any) -> None:
        """Sends a signal on to the ranks: the handler of this process's signals."""
        now = time.monotonic()
        # The second Ctrl-C. One that follows within half a second is the first, which came in two
        # ways (``signals.record``).
        if number == self.stop_signal == signal.SIGINT and now - self.stop_time > 0.5:
            verdict = Verdict(128 + number, "interrupted", lost=False)
            self.end(verdict)
            exit_with(verdict)
        if number in signals.STOP_SIGNALS and not self.stop_signal:
            self.stop_signal = number
            self.stop_time = now
        can_save = self.can_save and self.has_begun()
        for state, process in zip(self.states, self.processes, strict=True):
            if process.exitcode is not None:
                continue
            if can_save:
                os.kill(process.pid, number)
            elif number in signals.STOP_SIGNALS:
                # It may not handle signals yet, or it may be waiting for other ranks in C++.
                state.gone = how_it_ended(-number)
                state.gone_at = time.monotonic()
                process.kill()


def exit_with(verdict: Verdict) -> NoReturn:
    """Prints why the run ends, and exits with its status. Signals are ignored from now on."""
    # While Python ends, it restores the default handlers, and a signal would change the exit
    # status.
    signals.catch_signals(signal.SIG_IGN)
    # The verdict on a tool whose standard output was closed has no text.
    if verdict.text:
        print(verdict.text, file=sys.stderr, flush=True)
    sys.exit(verdict.status)


def run(
    config: CfgNode,
    count: int,
    start: Callable[..., Any],
    next_start: Callable[[CfgNode, int], tuple[CfgNode, int, str]] | None = None,
) -> None:
    """Starts the ranks and waits until they have ended. If ranks are lost or stall, all are started
    again, at most DIST.MAX_RESTART times.

    Each time they resume from the newest complete checkpoint, with as many processes as there are
    devices now. If two starts in a row completed no step, the run ends, because a third one
    wouldn't either.

    Args:
        count: the number of ranks.
        start: a function of the configuration, the number of ranks, ``failed`` and ``beats``. It
            starts the ranks and returns their context.
        next_start: a function of the configuration and the number of ranks. It returns both for a
            restart, and words that describe them. None: there are no restarts, and nothing to save.
    """
    context = multiprocessing.get_context("spawn")
    has_stepped = True
    restarts = config.DIST.MAX_RESTART if not config.EVAL else 0
    for attempt in itertools.count(1):
        # Before signals are held back: this starts Python's resource tracker, which unblocks SIGINT
        # and SIGTERM again.
        with without_current_folder():
            failed, beats = shared_arrays(context, count)
        # Signals are held back until the ranks handle them. Then this process sends them on.
        signals.hold_signals()
        started = start(config, count, failed, beats)
        can_save = next_start is not None
        watcher = Watcher(started, failed, beats, config.DIST.TIMEOUT, can_save)
        verdict = watcher.wait()
        # A signal that comes from now on is for the next ranks.
        signals.hold_signals()
        forget_lost_tracker()
        if not verdict:
            # As in ``exit_with``, a signal would change the exit status.
            signals.catch_signals(signal.SIG_IGN)
            return
        had_stepped = has_stepped
        has_stepped = watcher.has_stepped()
        if not verdict.lost or watcher.stop_signal or next_start is None or attempt > restarts:
            exit_with(verdict)
        if not (had_stepped or has_stepped):
            reason = "not restarted again: the last two starts didn't complete a step"
            exit_with(verdict._replace(text=f"{verdict.text}; {reason}"))
        config, count, how = next_start(config, count)
        cause = verdict.text.strip().splitlines()[-1].removeprefix("error: ")
        _print_and_log(config, f"{cause}; restart {attempt} of {restarts} (DIST.MAX_RESTART) {how}")


def forget_lost_tracker() -> None:
    """Keeps Python from starting a second resource tracker at its end if the first one was killed.

    The second one would warn of each name that this process unregisters. Shared memory is removed
    without it, too.
    """
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    if tracker._fd is not None and not tracker._check_alive():
        resource_tracker.unregister = lambda name, rtype: None


def _print_and_log(config: CfgNode, line: str) -> None:
    print(line, file=sys.stderr, flush=True)
    # Otherwise the run has no directory yet.
    if Path(config.OUTPUT).is_dir():
        # The line is on stderr already, so a full disk does no harm.
        with contextlib.suppress(OSError), open_to_append(Path(config.OUTPUT) / "log.txt") as log:
            log.write(f"{time.strftime('%m%d %H:%M:%S')} {line}\n")
