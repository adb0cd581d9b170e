"""A program imports this first, because its other imports take a second. From then on a signal ends
the program with one line, and a closed or broken standard stream doesn't end it. This module
imports next to nothing.
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

# bytes of address space that Paddle's libraries need; with less, Paddle hangs or crashes
LEAST_MEMORY = 1200 << 20
ENDING = 5.0  # seconds in which a killed process ends
LEAST_FILES = 64  # files that a process with a few ranks and loader workers has open

# A scheduler; Ctrl-C; a closed terminal; a limit on CPU time, which Linux announces by SIGXCPU
# before it kills.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
# By nohup, say: child processes inherit it. SIGINT isn't among them: shells ignore it for commands
# in the background.
IGNORED = [number for number in STOP_SIGNALS[2:] if signal.getsignal(number) is signal.SIG_IGN]
STOPPED = "stopped by {}"
NOT_BEGUN = "stopped by {} before the first step: nothing to save"
_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_FOLDER, _PROGRAM = os.path.split(os.path.realpath(getattr(sys, "argv", [""])[0]))
# child processes keep it
_SPEAKER = None if "--multiprocessing-fork" in getattr(sys, "orig_argv", []) else os.getpid()


def end_at_once(number: int, _: object) -> None:
    """Ends this process at once with one line: the signal handler of tools, and of a run with
    nothing to save yet.

    Before that, it ends the processes that it has started, and removes what it has begun to write.
    """
    if os.getpid() == _SPEAKER:  # forks have this handler, too
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        end_descendants()
        files.remove_unfinished()
        line = (NOT_BEGUN if _IS_RUN else STOPPED).format(signal.Signals(number).name)
        os.write(2, f"{os.linesep * os.isatty(2)}{line}\n".encode())
    os._exit(128 + number)


def stop_at_once() -> None:
    """Makes each of STOP_SIGNALS end this process from now on. SIGUSR1, which asks for a save, is ignored:
    by default it would kill.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in STOP_SIGNALS:
        if number not in IGNORED:
            signal.signal(number, end_at_once)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Switches Python's garbage collector off. It would look again and again through many new
    objects, none of which is garbage: imports and parsers make such objects.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def end_descendants() -> None:
    """Kills the processes that this one has started, and theirs, and waits until they have ended."""
    until = time.monotonic() + ENDING
    while (found := descendants()) and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)


def descendants() -> list[int]:
    """Returns the processes that this one has started, and theirs, the oldest first; without those
    that have ended.
    """
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in b"ZX":
                children.setdefault(int(parent), []).append(int(name))
    found = [os.getpid()]
    for process in found:  # which grows
        found += children.get(process, [])
    return found[1:]


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send this process ``number`` when its parent ends, however that ends."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(number))


class _Finder:
    """Finds two packages for ``import``, wherever a tool imports them first, and has signals wait
    meanwhile.

    Paddle's import takes SIGTERM and others over, in C++, which prints a dump. NumPy's starts
    threads: they would get the signals that only Python's thread holds back.
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
            gc.freeze()  # later collections leave out what is there now
            module.disable_signal_handler()
            for number in STOP_SIGNALS:  # Python knows its handlers; Paddle has left the defaults
                signal.signal(number, signal.getsignal(number))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _ignore_stops() -> None:
    """At a tool's end, which Python then takes a moment for, with the default handlers: its work is
    done.
    """
    if os.getpid() == _SPEAKER:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _open_tool() -> None:
    """Starts a tool: signals end it as they end the main programs, and whatever it forks ends with
    it.
    """
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    atexit.register(_ignore_stops)  # the first to be registered is the last that is called
    os.register_at_fork(after_in_child=end_with_parent)
    if not _SPEAKER:  # a process that the tool has spawned
        end_with_parent()
    stop_at_once()


def speak_utf8() -> None:
    """Restarts this program with UTF-8 if Python's locale lacks most letters: class and file names
    may have any.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def unfit() -> str:
    """Returns why no program can work in this process's environment, and what to do; "" if there is
    no such reason.

    It also raises this process's limit on open files to the administrator's.
    """
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and files < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    mask = os.umask(0o77)
    os.umask(mask)
    if not _there():
        return "the current folder no longer exists; change to another one"
    if mask & 0o700:
        return f"umask {mask:03o} takes away your right to your own files; use umask 022"
    if 0 <= most < LEAST_FILES:
        return f"the limit on open files is {most}, expected {LEAST_FILES} at least; raise it (ulimit -n)"
    if 0 <= memory < LEAST_MEMORY:
        expected = f"expected {LEAST_MEMORY >> 20} MB at least, for Paddle alone"
        return f"the limit on memory is {memory >> 20} MB, {expected}; raise it (ulimit -v)"
    return ""


def _there() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


_IS_RUN = _FOLDER == _ROOT and _PROGRAM.startswith("main_")
if _IS_RUN:
    stop_at_once()
if os.path.join(_ROOT, "tools") == _FOLDER and _PROGRAM.endswith(".py"):
    _open_tool()
_OURS = _FOLDER in (_ROOT, os.path.join(_ROOT, "tools"), os.path.join(_ROOT, "examples"))
# not python -c, nor a program that comes by stdin, which is read only once
if _OURS and _PROGRAM.endswith(".py"):
    streams.keep()
    speak_utf8()
    if problem := unfit():
        print(f"error: {problem}", file=sys.stderr, flush=True)
        os._exit(2)
