"""Decodes images in a separate process with limits of time and memory.

It is for decoders without a limit of their own. libtiff inflates, allocates and prints as much as a
file says. Pillow's decoder of BMP's run lengths allocates up to 255 rows for two bytes of a file.
libwebp makes tables for each block of lossless pixels. While they work, nothing in their own
process can stop them, but the kernel can stop another process. What that process prints is dropped,
and a crash ends nothing else.
"""

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any, NamedTuple

from PIL import Image

from errors import RunError, Unreadable, printable
from loading.transforms import isolated_process
from loading.transforms.isolated_process import ANSWER, FAILED, REQUEST, TOO_MUCH_MEMORY

# The memory that decoding may take, besides the file: for each pixel four channels of 32 bits,
# twice.
_BYTES = 64 << 20
_BYTES_PER_PIXEL = 32
# The CPU time that it may take.
_SECONDS = 4
_FILE_PER_SECOND = 100_000_000
_PIXELS_PER_SECOND = 10_000_000
# On a busy machine the CPU time takes longer by the clock, up to this factor.
_WALL_CLOCK_FACTOR = 20


def decode_isolated(data: bytes, kind: str, size: tuple[int, int]) -> Image.Image:
    """Returns the image in a file, with its pixels; an image with a palette becomes RGB.

    Args:
        data: the file.
        kind: its format, as Pillow names it.
        size: (width, height) in pixels, as its header says.

    Raises:
        Unreadable: it can't be decoded, that takes too much time or memory, or the decoder crashed.
        RunError: the process can't be started, or something else killed it: the image may be fine.
    """
    pixels = size[0] * size[1]
    seconds = _SECONDS + len(data) // _FILE_PER_SECOND + pixels // _PIXELS_PER_SECOND
    memory = _BYTES + 3 * len(data) + _BYTES_PER_PIXEL * pixels
    with _lock:
        try:
            answer = _own_process().answer(kind, seconds, memory, data)
        except _Killed:
            # The file may not be the reason, so it is tried once more.
            answer = _own_process().answer(kind, seconds, memory, data)
    if answer.outcome == TOO_MUCH_MEMORY:
        raise Unreadable(f"decoding it takes more than {memory >> 20} MiB")
    if answer.outcome == FAILED:
        raise Unreadable(f"can't be read as an image ({printable(answer.content.decode())})")
    return Image.frombytes(answer.mode, answer.size, answer.content)


class _Answer(NamedTuple):
    """The process's answer to a file.

    Attributes:
        outcome: DECODED, FAILED or TOO_MUCH_MEMORY of ``isolated_process``.
        mode: Pillow's mode of the image.
        size: its (width, height) in pixels.
        content: its pixels, or the text of the error.
    """

    outcome: int
    mode: str
    size: tuple[int, int]
    content: bytes


class _Killed(RunError):
    """The process was ended by something other than its limits or a crash."""


class _Process:
    """A process that decodes one file after the other. It ends with the process that started it."""

    def __init__(self) -> None:
        program = isolated_process.__file__
        folders = filter(None, sys.path)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-IS", program, str(os.getpid()), "", *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # Ctrl-C stops the run, which still reads images until its state is saved. In a
                # session of its own, this process doesn't get the signal.
                start_new_session=True,
            )
        except (OSError, TypeError, ValueError) as error:  # there may be no sys.executable
            raise RunError(f"a process that decodes images can't be started ({error})") from None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def answer(self, kind: str, seconds: int, memory: int, data: bytes) -> _Answer:
        """Sends a file, and returns the process's answer.

        Args:
            kind: the file's format, as Pillow names it.
            seconds: of CPU time that decoding may take.
            memory: bytes that it may take.
            data: the file.

        Raises:
            Unreadable: the process reached a limit, crashed, or takes too long.
            _Killed: something else killed it.
        """
        requests: Any = self._process.stdin
        answers: Any = self._process.stdout
        try:
            with contextlib.suppress(BrokenPipeError):
                requests.write(REQUEST.pack(kind.encode(), seconds, memory, len(data)))
                requests.write(data)
                requests.flush()
            deadline = time.monotonic() + _WALL_CLOCK_FACTOR * seconds
            head = _read(answers, ANSWER.size, deadline)
            outcome, mode, width, height, length = ANSWER.unpack(head)
            content = _read(answers, length, deadline)
            return _Answer(outcome, mode.rstrip(b"\0").decode(), (width, height), content)
        except EOFError:
            status = self._process.wait()
        except TimeoutError:
            status = -signal.SIGXCPU
        except BaseException:
            # Otherwise the answer that is still to come would be taken for the next file's.
            self.end()
            raise
        self.end()
        if status == -signal.SIGXCPU:
            raise Unreadable(f"decoding it takes longer than {seconds} s")
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            name = signal.Signals(-status).name
            raise _Killed(f"the process that decodes images was killed by {name}; out of memory?")
        raise Unreadable(f"its decoder crashed (exit status {status})")

    def end(self) -> None:
        """Kills the process, unless it has ended, and closes its pipes."""
        self._process.kill()
        self._process.communicate()


# By the id of the process that started it. A forked process inherits its parent's entry, which
# isn't its own.
_processes: dict[int, _Process] = {}
_lock = threading.Lock()


def _new_lock() -> None:
    """Replaces the lock in a forked process. A thread that isn't there may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def _own_process() -> _Process:
    """Returns this process's decoding process, and starts one if none is running."""
    process = _processes.get(os.getpid())
    if process and process.alive:
        return process
    if process:
        process.end()
    process = _Process()
    _processes[os.getpid()] = process
    return process


@atexit.register
def _end_own_process() -> None:
    if process := _processes.pop(os.getpid(), None):
        process.end()


def _read(file: IO[bytes], size: int, deadline: float) -> bytes:
    """Returns ``size`` bytes of a pipe.

    Args:
        deadline: the time by which they must have come, as of ``time.monotonic``.

    Raises:
        EOFError: the pipe ends before.
        TimeoutError: they didn't come in time.
    """
    ready = select.poll()  # select takes no descriptor from 1,024 on
    ready.register(file, select.POLLIN)
    parts = []
    while size:
        if not ready.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise TimeoutError
        part = os.read(file.fileno(), min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
