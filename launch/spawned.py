"""The process that spawned the ranks: passes signals on, ends all when one fails or stalls, and starts them again."""

import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from yacs.config import CfgNode

from errors import FAILURE, InputError
from launch import signals
from launch.progress import FIELDS
from launch.verdict import Seen, Verdict, failure_in, how_it_ended, judge, trouble

SHARED = "/dev/shm"
SUSPENDED = 5.0  # seconds between two looks after which the watching process itself must have been suspended


class Handed:
    """Objects in shared memory without a name, for spawned ranks: /dev/shm is often too small.

    What a rank is given as an argument goes through a pipe, which 64 kB fill. Whoever fills it waits until the rank has
    imported Paddle, before it starts the next; or for ever, where the rank has ended.
    """

    def __init__(self, *objects: Any) -> None:
        self._keep(os.memfd_create("handed"))
        with open(self.descriptor, "wb", closefd=False) as file:
            pickle.dump(objects, file, pickle.HIGHEST_PROTOCOL)

    def _keep(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.descriptor)

    def __setstate__(self, descriptor: Any) -> None:
        self._keep(descriptor.detach())

    def open(self) -> tuple[Any, ...]:
        """Returns copies of the objects."""
        with mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ) as data:  # ranks share the file's position
            return pickle.loads(data)


def shared_arrays(context: Any, count: int) -> tuple[Any, Any]:
    """Returns what ranks tell the process that watches them by: bytes for a failure, and FIELDS numbers for each.

    Raises:
        InputError: /dev/shm, where that and Python's locks are, has no room. It would be a crash.
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
        context: what ``paddle.distributed.spawn(join=False)`` returned; what its processes share lives as long as it.
        failed: the shared bytes that the ranks' ``errors.reporting`` was given.
        beats: shared doubles, FIELDS per rank (``progress.beat``).
        timeout: seconds without any rank's progress that end the run.
    """

    def __init__(self, context: Any, failed: Any, beats: Any, timeout: float) -> None:
        self.context, self.processes = context, context.processes
        self.failed, self.beats, self.timeout = failed, beats, timeout
        self.seen = [Seen(place, process.pid) for place, process in enumerate(self.processes)]
        self.started = self.looked = time.monotonic()
        self.asked, self.asked_at = 0, 0.0  # by which signal to stop, and when

    def wait(self) -> Verdict | None:
        """Waits for the ranks and passes signals on; when one fails or stalls, ends all and says why (None: none did).

        Raises:
            SystemExit: after a second Ctrl-C.
        """
        signals.catch_signals(self._pass_on)
        for number in list(signals.noted):  # while the ranks were started
            self._pass_on(number, None)
        while not self.look():
            if verdict := self.verdict():
                self.end(verdict)
                return verdict
            wait([process.sentinel for process in self.processes if process.exitcode is None], timeout=0.2)
        return None

    def look(self) -> bool:
        """Takes in how far the ranks are; returns whether all have ended well."""
        before, self.looked = self.looked, time.monotonic()
        if self.looked - before > SUSPENDED:  # with the ranks, by Ctrl-Z: they have their time anew
            self.started = self.looked
        for place, (seen, process) in enumerate(zip(self.seen, self.processes, strict=True)):
            seen.time, seen.step, seen.doing, _ = self.beats[FIELDS * place : FIELDS * (place + 1)]
            seen.trouble = "" if process.exitcode is not None else trouble(process.pid)
            if process.exitcode and not seen.gone:
                seen.gone, seen.gone_at = how_it_ended(process.exitcode), time.monotonic()
        self.seen[0].failure = failure_in(self.failed.value)
        return not self.seen[0].failure and all(process.exitcode == 0 for process in self.processes)

    def verdict(self) -> Verdict | None:
        """Returns why the run has to end, as it was seen last."""
        return judge(self.seen, self.started, self.timeout)

    def has_stepped(self) -> bool:
        """Returns whether any rank asked for a second batch: a step was made."""
        return max(self.beats[FIELDS - 1 :: FIELDS]) > 1

    def has_begun(self) -> bool:
        """Returns whether a rank has something to save (``signals.begin``)."""
        return any(self.beats[::FIELDS])

    def end(self, verdict: Verdict) -> None:
        """Ends what is left of the ranks."""
        for process in self.processes:
            process.kill()  # SIGTERM would ask them to save
        for process in self.processes:
            process.join()

    def _pass_on(self, number: int, _: Any) -> None:
        if number == self.asked == signal.SIGINT and time.monotonic() - self.asked_at > 0.5:
            verdict = Verdict(128 + number, "interrupted", lost=False)  # Ctrl-C once more: at once
            self.end(verdict)
            leave(verdict)
        if number in signals.STOPS and not self.asked:
            self.asked, self.asked_at = number, time.monotonic()
        begun = self.has_begun()
        for seen, process in zip(self.seen, self.processes, strict=True):
            if process.exitcode is not None:
                continue
            if begun:
                os.kill(process.pid, number)
            elif number in signals.STOPS:  # it may not listen yet, or wait for others in C++
                seen.gone, seen.gone_at = how_it_ended(-number), time.monotonic()
                process.kill()


def leave(verdict: Verdict) -> NoReturn:
    """Says why the run ends, and exits with its status, whatever is asked from now on."""
    signals.catch_signals(signal.SIG_IGN)  # Python, as it ends, would let them kill this process
    print(verdict.text, file=sys.stderr, flush=True)
    sys.exit(verdict.status)


def run(
    config: CfgNode,
    count: int,
    start: Callable[..., Any],
    next_start: Callable[[CfgNode, int], tuple[CfgNode, int, str]] | None = None,
) -> None:
    """Starts the ranks and waits for them; those that are lost or stall are started again, DIST.MAX_RESTART times.

    Each time they go on from the newest whole checkpoint, with as many processes as there are devices now. Where two
    starts, one after the other, made no step, a third wouldn't either.

    Args:
        count: how many.
        start: given the configuration, how many, ``failed`` and ``beats``, starts them and returns their context.
        next_start: given the configuration and how many there were, returns both for a restart, and words for them;
            None: nothing is started again.
    """
    context, stepped = multiprocessing.get_context("spawn"), True
    restarts = config.DIST.MAX_RESTART if not config.EVAL else 0
    for attempt in itertools.count(1):
        signals.hold_signals()  # until the ranks listen; this process passes signals on
        failed, beats = shared_arrays(context, count)
        ranks = Ranks(start(config, count, failed, beats), failed, beats, config.DIST.TIMEOUT)
        verdict = ranks.wait()
        forget_lost_tracker()
        if not verdict:
            signals.catch_signals(signal.SIG_IGN)  # as in ``leave``
            return
        before, stepped = stepped, ranks.has_stepped()
        if not verdict.lost or ranks.asked or next_start is None or attempt > restarts:
            leave(verdict)
        if not (before or stepped):
            leave(verdict._replace(text=f"{verdict.text}; no further restart: the last two starts completed no step"))
        config, count, where = next_start(config, count)
        what = verdict.text.strip().splitlines()[-1].removeprefix("error: ")
        _print_and_log(config, f"{what}; restart {attempt} of {restarts} (DIST.MAX_RESTART) {where}")


def forget_lost_tracker() -> None:
    """Where Python's resource tracker was killed, Python would start another one as it ends, which complains of each
    name that it doesn't know. This process removes its own, with or without it.
    """
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    if tracker._fd is not None and not tracker._check_alive():
        resource_tracker.unregister = lambda name, rtype: None


def _print_and_log(config: CfgNode, line: str) -> None:
    print(line, file=sys.stderr, flush=True)
    if Path(config.OUTPUT).is_dir():  # else the run hadn't begun
        with open(Path(config.OUTPUT) / "log.txt", "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%m%d %H:%M:%S')} {line}\n")
