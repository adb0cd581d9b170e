"""Signals to stop or to save: noted in a rank, for ``Requests``; passed on by the process that watches ranks."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

from launch import progress, startup

STOPS = startup.STOPS
SIGNALS = [number for number in (*STOPS, signal.SIGUSR1) if number not in startup.IGNORED]  # that are heeded
noted: dict[int, float] = {}  # signals that came, and when


def hold_signals() -> None:
    """Lets SIGNALS wait in the processes that this one starts, until ``catch_signals``. Here they are noted: threads
    that libraries have started would let them through.
    """
    for number in SIGNALS:
        signal.signal(number, note)
    block_signals()


def block_signals() -> None:
    """Lets SIGNALS wait, until ``catch_signals`` or ``stop_at_once``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def catch_signals(handler: Any) -> None:
    """Lets ``handler`` have them."""
    for number in SIGNALS:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def stop_at_once() -> None:
    """Lets a signal to stop end this process until ``begin``: there is nothing to save."""
    startup.stop_at_once()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def begin() -> None:
    """Says that there is something to save from now on. Signals are noted, for ``Requests``, and the watching process
    passes them on instead of ending the ranks.
    """
    if signal.getsignal(signal.SIGTERM) is startup.end_at_once:  # not in a program that has handlers of its own
        note_signals()
    progress.beat(progress.STARTING)


def note_signals() -> None:
    """Notes signals from now on, for ``Requests``. If no parent does it, a second SIGINT ends this process."""
    catch_signals(note)


def ignore_signals() -> None:
    """Ignores signals in a loader's worker. A signal to the whole group is for its rank, which needs the worker."""
    if signal.getsignal(signal.SIGTERM) is note:
        catch_signals(signal.SIG_IGN)


def end_workers() -> None:
    """Ends the loaders' workers, at a run's end: Python would send SIGTERM, which they ignore, and wait for ever."""
    catch_signals(signal.SIG_IGN)  # nothing is left to stop, and Python, as it ends, would let them kill this process
    for worker in multiprocessing.active_children():
        worker.kill()


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux for a signal to this process when the one that started it ends, however it ends: no orphans."""
    parent = multiprocessing.parent_process()
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(number))
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("500")  # where memory is short, not the one that could tell of it
    if parent and not parent.is_alive():  # it ended before that
        os._exit(1)


def note(number: int, _: Any) -> None:
    """Notes a signal, as its handler."""
    again = time.monotonic() - noted.get(number, time.monotonic()) > 0.5  # not the same one by two ways
    if number == signal.SIGINT and again and not progress.is_watched():
        raise KeyboardInterrupt
    noted.setdefault(number, time.monotonic())
