"""Decoders that have no limit of their own, in a process of their own, where the kernel limits
their time and memory.

libtiff inflates, allocates and prints as much as a file tells it to. Pillow's decoder of BMP's run
lengths allocates up to 255 rows for two bytes of a file. libwebp makes tables for each block of
lossless pixels. Nothing in this process can stop them while they work. In another process the
kernel does, what they print is dropped, and their crash ends nothing else.
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
from typing import IO, Any

from PIL import Image

from errors import RunError, Unreadable, printable
from loading.transforms import isolated_process
from loading.transforms.isolated_process import ANSWER, FAILED, REQUEST, TOO_MUCH_MEMORY

# What decoding may take: of memory for each pixel four channels of 32 bits, twice.
_BYTES = 64 << 20
_BYTES_PER_PIXEL = 32
_SECONDS = 4
_FILE_PER_SECOND = 100_000_000
_PIXELS_PER_SECOND = 10_000_000
_WALL_CLOCK_FACTOR = 20  # a busy machine takes longer than the CPU time that is allowed


def decode_isolated(data: bytes, kind: str, size: tuple[int, int]) -> Image.Image:
    """Returns the image in a file, with its pixels; an image with a palette becomes RGB.

    Args:
        data: the file.
        kind: its format, as Pillow names it.
        size: (width, height) in pixels that its header tells.

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
        except _Killed:  # by whoever kills processes; it isn't asked a third time
            answer = _own_process().answer(kind, seconds, memory, data)
    what, mode, shown, content = answer
    if what == TOO_MUCH_MEMORY:
        raise Unreadable(f"decoding it takes more than {memory >> 20} MiB")
    if what == FAILED:
        raise Unreadable(f"can't be read as an image ({printable(content.decode())})")
    return Image.frombytes(mode, shown, content)


class _Killed(RunError):
    """Something else than a limit or a crash has ended the process."""


class _Process:
    """A process that decodes one file after the other. It ends with the process that started it."""

    def __init__(self) -> None:
        command = [
            sys.executable,
            "-IS",
            isolated_process.__file__,
            str(os.getpid()),
            *filter(None, sys.path),
        ]
        try:
            # In a session of its own: Ctrl-C is meant for a run, which goes on until its state is
            # saved.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, TypeError, ValueError) as error:  # there may be no sys.executable
            raise RunError(f"a process that decodes images can't be started ({error})") from None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def answer(
        self, kind: str, seconds: int, memory: int, data: bytes
    ) -> tuple[int, str, tuple[int, int], bytes]:
        """Returns (what it is, its mode, its size, its content), of ``isolated_process``.

        Raises:
            Unreadable: the process ended before by its limit or a crash, or takes too long.
            _Killed: something else killed it.
        """
        requests: Any = self._process.stdin
        answers: Any = self._process.stdout
        try:
            with contextlib.suppress(BrokenPipeError):
                requests.write(REQUEST.pack(kind.encode(), seconds, memory, len(data)))
                requests.write(data)
                requests.flush()
            until = time.monotonic() + _WALL_CLOCK_FACTOR * seconds
            what, mode, *shown, length = ANSWER.unpack(_read(answers, ANSWER.size, until))
            content = _read(answers, length, until)
            return what, mode.rstrip(b"\0").decode(), (shown[0], shown[1]), content
        except EOFError:
            ended = self._process.wait()
        except TimeoutError:
            ended = -signal.SIGXCPU
        except BaseException:
            # The answer that is still to come would be taken for the next one's.
            self.end()
            raise
        self.end()
        if ended == -signal.SIGXCPU:
            raise Unreadable(f"decoding it takes longer than {seconds} s")
        if ended in (-signal.SIGKILL, -signal.SIGTERM):
            how = signal.Signals(-ended).name
            raise _Killed(f"the process that decodes images was killed by {how}; is memory short?")
        raise Unreadable(f"its decoder crashed (exit status {ended})")

    def end(self) -> None:
        """Kills it, unless it has ended, and closes its pipes."""
        self._process.kill()
        self._process.communicate()


# By the process that started it: a forked process inherits an entry that isn't its own.
_processes: dict[int, _Process] = {}
_lock = threading.Lock()


def _new_lock() -> None:
    """In a forked process: a thread that isn't there may have held the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def _own_process() -> _Process:
    """Returns this process's process; a new one if there is none, or it has ended."""
    process = _processes.get(os.getpid())
    if process and process.alive:
        return process
    if process:
        process.end()
    process = _processes[os.getpid()] = _Process()
    return process


@atexit.register
def _end_own_process() -> None:
    if process := _processes.pop(os.getpid(), None):
        process.end()


def _read(file: IO[bytes], size: int, until: float) -> bytes:
    """Returns ``size`` bytes of a pipe.

    Raises:
        EOFError: it ends before.
        TimeoutError: they didn't come until then, by ``time.monotonic``.
    """
    ready = select.poll()  # select takes no descriptor from 1,024 on
    ready.register(file, select.POLLIN)
    parts = []
    while size:
        if not ready.poll(max(0.0, 1000 * (until - time.monotonic()))):
            raise TimeoutError
        part = os.read(file.fileno(), min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
