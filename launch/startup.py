"""Prepares a program for signals and broken streams. Importing this module does it.

A program imports this module first, because its other imports take a second. From then on a signal
ends the program with one line, and a closed or broken standard stream doesn't end it. So this
module itself imports next to nothing.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from launch import files, streams

# Bytes of address space that Paddle's libraries need. With less, Paddle hangs or crashes.
MIN_MEMORY = 1200 << 20
# seconds in which a killed process ends
ENDING = 5.0
# Files that a process with a few ranks and loader workers has open.
MIN_FILES = 64

# The signals that ask a program to stop. They come from a scheduler, from Ctrl-C, from a closed
# terminal, and from a limit on CPU time, which Linux announces by SIGXCPU before it kills.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
# Signals that were already ignored when the program started, by nohup for example, stay ignored.
# SIGINT doesn't count: shells ignore it for all commands in the background.
IGNORED = [number for number in STOP_SIGNALS[2:] if signal.getsignal(number) is signal.SIG_IGN]
STOPPED = "stopped by {}"
NOT_BEGUN = "stopped by {} before the first step; there is nothing to save"
_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_FOLDER, _PROGRAM = os.path.split(os.path.realpath(getattr(sys, "argv", [""])[0]))
# The process that prints the line when a signal ends the program. Its forks inherit the number, so
# they don't print; a process that multiprocessing has spawned doesn't, either.
_SPEAKER = os.getpid()
if "--multiprocessing-fork" in getattr(sys, "orig_argv", []):
    _SPEAKER = None


def end_at_once(number: int, _: object) -> None:
    """Ends this process at once with one line: the signal handler of tools, and of a run with
    nothing to save yet.

    Before that, it ends the processes that it has started, and removes what it has begun to write.
    """
    # Forks have this handler, too.
    if os.getpid() == _SPEAKER:
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        end_descendants()
        files.remove_unfinished()
        message = NOT_BEGUN if _IS_RUN else STOPPED
        line = f"{message.format(signal.Signals(number).name)}\n"
        if os.isatty(2):
            # The terminal has shown ^C at the beginning of this line.
            line = f"\n{line}"
        # Whoever would read it may have gone.
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
    os._exit(128 + number)


def stop_at_once() -> None:
    """Makes each of STOP_SIGNALS end this process from now on.

    SIGUSR1, which asks a run to save, is ignored: by default it would kill the process.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in STOP_SIGNALS:
        if number not in IGNORED:
            signal.signal(number, end_at_once)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Switches Python's garbage collector off within the body.

    Imports and parsers make many objects, none of which is garbage. The collector would look
    through all of them again and again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def end_descendants() -> None:
    """Kills the processes that this one has started, and theirs, and waits for their end."""
    until = time.monotonic() + ENDING
    while (processes := descendants()) and time.monotonic() < until:
        for process in processes:
            # It may have ended, or be another user's.
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)


def descendants() -> list[int]:
    """Returns the processes that this one has started, and theirs, the oldest first; without those
    that have ended.
    """
    if sys.platform != "linux":
        return []
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The program's name, in parentheses, may have any characters; state and parent follow.
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            # Z is a zombie, X is dead.
            if state not in b"ZX":
                children.setdefault(int(parent), []).append(int(name))
    family = [os.getpid()]
    # The loop also reaches the children that it appends.
    for process in family:
        family += children.get(process, [])
    return family[1:]


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send this process the signal ``number`` when its parent ends, however that
    ends.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(number))


class _Finder:
    """An import hook that holds signals back while NumPy or Paddle is imported, wherever a tool
    does so first.

    Paddle's import installs handlers in C++ for SIGTERM and others, which print a dump. NumPy's
    import starts threads. They inherit the mask of blocked signals; otherwise they would receive
    signals that Python's main thread blocks later.
    """

    def find_spec(self, name: str, path: Any = None, _: Any = None) -> ModuleSpec | None:
        if name not in ("numpy", "paddle"):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec and spec.loader:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _run_package(run, module)  # type: ignore[method-assign]
        return spec


def _run_package(run: Callable[[Any], None], module: Any) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with without_collection():
            run(module)
        if module.__name__ == "paddle":
            # Later collections leave out the many objects that exist now.
            gc.freeze()
            module.disable_signal_handler()
            # Paddle has left the default handlers. Python still knows its own: set them again.
            for number in STOP_SIGNALS:
                signal.signal(number, signal.getsignal(number))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _ignore_stop_signals() -> None:
    """Ignores signals at a tool's end: its work is done, and Python, which takes a moment to end,
    restores the default handlers.
    """
    if os.getpid() == _SPEAKER:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _open_tool() -> None:
    """Prepares a tool: signals end it as they end the main programs, and whatever it forks ends
    with it.
    """
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    # The function that is registered first is called last.
    atexit.register(_ignore_stop_signals)
    os.register_at_fork(after_in_child=end_with_parent)
    # This is a process that the tool has spawned.
    if not _SPEAKER:
        end_with_parent()
    stop_at_once()


def speak_utf8() -> None:
    """Restarts this program with UTF-8 if the locale's encoding is another one, which lacks most
    letters: names of classes and files may have any.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def environment_error() -> str:
    """Returns why no program can work in this process's environment, and what to do; "" if programs
    can.

    It also raises this process's limit on open files to the administrator's.
    """
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and files < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    # The mask can't be read without being set.
    mask = os.umask(0o77)
    os.umask(mask)
    if not _has_current_folder():
        return "the current folder no longer exists; change to another one"
    if mask & 0o700:
        return f"umask {mask:03o} denies you access to your own files; use umask 022"
    if 0 <= most < MIN_FILES:
        expected = f"expected {MIN_FILES} at least"
        return f"the limit on open files is {most}, {expected}; raise it (ulimit -n)"
    if 0 <= memory < MIN_MEMORY:
        expected = f"expected {MIN_MEMORY >> 20} MB at least, for Paddle alone"
        return f"the limit on memory is {memory >> 20} MB, {expected}; raise it (ulimit -v)"
    return ""


def _has_current_folder() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


# What follows runs when a program of the toolkit imports this module. Other programs that import it
# keep their own handlers and streams.
_IS_RUN = _FOLDER == _ROOT and _PROGRAM.startswith("main_")
if _IS_RUN:
    stop_at_once()
if os.path.join(_ROOT, "tools") == _FOLDER and _PROGRAM.endswith(".py"):
    _open_tool()
_OURS = _FOLDER in (_ROOT, os.path.join(_ROOT, "tools"), os.path.join(_ROOT, "examples"))
# Not for python -c, nor for a program that is read from stdin, which could not be restarted.
if _OURS and _PROGRAM.endswith(".py"):
    streams.keep()
    speak_utf8()
    if problem := environment_error():
        print(f"error: {problem}", file=sys.stderr, flush=True)
        os._exit(2)
