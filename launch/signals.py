"""Signals that ask a run to stop or to save.

A rank records them, and ``training.requests.Requests`` reads the records between two steps. The
process that watches ranks sends each signal on to them.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

from launch import progress, startup

STOP_SIGNALS = startup.STOP_SIGNALS
# all that are handled here: SIGUSR1 asks to save
SIGNALS = [number for number in (*STOP_SIGNALS, signal.SIGUSR1) if number not in startup.IGNORED]
# the signals that this process received, and when
received: dict[int, float] = {}


def hold_signals() -> None:
    """Blocks SIGNALS in this process, and in those that it starts, until ``catch_signals``.

    This process also records them: the kernel may deliver them to threads that libraries have
    started, which don't block them.
    """
    for number in SIGNALS:
        signal.signal(number, record)
    block_signals()


def block_signals() -> None:
    """Blocks SIGNALS. Those that come meanwhile are delivered after ``catch_signals`` or
    ``stop_at_once``.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def catch_signals(handler: Any) -> None:
    """Makes ``handler`` handle SIGNALS, and unblocks them."""
    for number in SIGNALS:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def stop_at_once() -> None:
    """Makes a signal that asks to stop end this process at once. Until ``begin`` there is nothing
    to save.
    """
    startup.stop_at_once()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def begin() -> None:
    """Declares that there is something to save from now on. This process records signals, and the
    process that watches it sends them on instead of ending the ranks.
    """
    # A program that has set handlers of its own keeps them.
    if signal.getsignal(signal.SIGTERM) is startup.end_at_once:
        record_signals()
    progress.beat(progress.STARTING)


def record_signals() -> None:
    """Records signals from now on. If no process watches this one, a second SIGINT ends it."""
    catch_signals(record)


def ignore_signals() -> None:
    """Ignores signals in a loader's worker. One that is sent to the whole process group is meant
    for the rank, which still needs its workers to stop in order.
    """
    if signal.getsignal(signal.SIGTERM) is record:
        catch_signals(signal.SIG_IGN)


def end_workers() -> None:
    """Ends the loaders' workers at a run's end. Python itself would send SIGTERM, which they
    ignore, and wait for ever.
    """
    # At its end Python restores the default handlers, and a signal would kill this process.
    catch_signals(signal.SIG_IGN)
    for worker in multiprocessing.active_children():
        worker.kill()


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send this process the signal ``number`` when its parent ends, however that
    ends. So no orphan stays behind.
    """
    parent = multiprocessing.parent_process()
    startup.end_with_parent(number)
    if sys.platform == "linux":
        # If memory runs out, Linux kills this process before its parent, which reports it.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("500")
    # The parent may have ended before Linux was asked.
    if parent and not parent.is_alive():
        os._exit(1)


def record(number: int, _: Any) -> None:
    """Records a signal: the handler that ``record_signals`` sets."""
    now = time.monotonic()
    # A signal can come in two ways at once, from the terminal and from another process. Only one
    # that comes later is a second one.
    is_second = now - received.get(number, now) > 0.5
    if number == signal.SIGINT and is_second and not progress.is_watched():
        raise KeyboardInterrupt
    received.setdefault(number, now)
