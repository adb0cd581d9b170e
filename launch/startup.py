"""What stands before a program's other imports, which take a second: a signal ends it with one line from then on. It
imports next to nothing.
"""

import os
import signal
import sys

NOT_BEGUN = "stopped by {} before the first step: nothing to save"
_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_FOLDER, _PROGRAM = os.path.split(os.path.realpath(getattr(sys, "argv", [""])[0]))
_SPEAKER = None if "--multiprocessing-fork" in getattr(sys, "orig_argv", []) else os.getpid()  # for what it starts, too


def end_at_once(number: int, _: object) -> None:
    """Ends this process, as a signal's handler: nothing has begun that could be saved."""
    if os.getpid() == _SPEAKER:
        os.write(2, f"{NOT_BEGUN.format(signal.Signals(number).name)}\n".encode())
    os._exit(128 + number)


def stop_at_once() -> None:
    """From now on SIGTERM and SIGINT end this process. SIGUSR1, which asks for a save, is ignored: it would kill."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_at_once)
    signal.signal(signal.SIGINT, end_at_once)


if _FOLDER == _ROOT and _PROGRAM.startswith("main_"):
    stop_at_once()
