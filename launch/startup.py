"""What stands before a program's other imports, which take a second: from then on a signal ends a run with one line,
and no standard stream ends it. It imports next to nothing.
"""

import os
import signal
import sys

from launch import streams

# Ctrl-C; a closed terminal; a limit on the processor's time, of which the system tells a while before it kills.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
# nohup and the like; what a program starts inherits that. Shells ignore SIGINT for what they start beside themselves.
IGNORED = [number for number in STOPS[2:] if signal.getsignal(number) is signal.SIG_IGN]
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
    """From now on STOPS end this process. SIGUSR1, which asks for a save, is ignored: it would kill."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in STOPS:
        if number not in IGNORED:
            signal.signal(number, end_at_once)


def speak_utf8() -> None:
    """Starts this program anew, in its place, where Python goes by a locale that lacks most letters: the names of
    classes and files may hold any.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


if _FOLDER == _ROOT and _PROGRAM.startswith("main_"):
    stop_at_once()
if _FOLDER in (_ROOT, os.path.join(_ROOT, "tools"), os.path.join(_ROOT, "examples")):
    streams.keep()
    speak_utf8()
