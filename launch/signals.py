"""Signals that ask to stop or to save. A rank records them for ``Requests``; its watching process
sends them on.
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
# handled here
SIGNALS = [number for number in (*STOP_SIGNALS, signal.SIGUSR1) if number not in startup.IGNORED]
received: dict[int, float] = {}  # the signals that this process received, and when


def hold_signals() -> None:
    """Blocks SIGNALS in this process, and in those that it starts, until ``catch_signals``. This
    process records them, too: threads that libraries have started don't block them.
    """
    for number in SIGNALS:
        signal.signal(number, record)
    block_signals()


def block_signals() -> None:
    """Blocks SIGNALS: they are delivered after ``catch_signals`` or ``stop_at_once``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def catch_signals(handler: Any) -> None:
    """Makes ``handler`` handle SIGNALS, and unblocks them."""
    for number in SIGNALS:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def stop_at_once() -> None:
    """Makes a signal to stop end this process at once, until ``begin``: there is nothing to save
    yet.
    """
    startup.stop_at_once()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def begin() -> None:
    """Declares that there is something to save from now on. This process records signals for
    ``Requests``, and the process that watches it forwards them instead of ending the ranks.
    """
    # not in a program that has handlers of its own
    if signal.getsignal(signal.SIGTERM) is startup.end_at_once:
        record_signals()
    progress.beat(progress.STARTING)


def record_signals() -> None:
    """Records signals from now on, for ``Requests``. If no process watches this one, a second
    SIGINT ends it.
    """
    catch_signals(record)


def ignore_signals() -> None:
    """Ignores signals in a loader's worker: one to the whole process group is meant for the rank,
    which needs it.
    """
    if signal.getsignal(signal.SIGTERM) is record:
        catch_signals(signal.SIG_IGN)


def end_workers() -> None:
    """Ends the loaders' workers at a run's end. Python would send SIGTERM, which they ignore, and
    wait for ever.
    """
    # at its end Python restores the defaults, and a signal would kill
    catch_signals(signal.SIG_IGN)
    for worker in multiprocessing.active_children():
        worker.kill()


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send this process ``number`` when its parent ends, however that ends. So no
    orphan stays behind.
    """
    parent = multiprocessing.parent_process()
    startup.end_with_parent(number)
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            # if memory runs out, Linux kills this process before its parent, which reports it
            score.write("500")
    if parent and not parent.is_alive():  # it ended before that
        os._exit(1)


def record(number: int, _: Any) -> None:
    """Records a signal: the handler that ``record_signals`` sets."""
    # sooner, it is the same one by two ways
    again = time.monotonic() - received.get(number, time.monotonic()) > 0.5
    if number == signal.SIGINT and again and not progress.is_watched():
        raise KeyboardInterrupt
    received.setdefault(number, time.monotonic())
