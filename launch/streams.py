"""Standard streams that never end a program: if one is closed, broken, full or blocked, only what
is written to it is lost.

A run's lines are in its log files, too. So a run doesn't wait for a blocked reader, such as a
terminal that is stopped by Ctrl-S, or a pipe that nobody empties. Other commands do wait, because
their output is their result.
"""

import atexit
import contextlib
import io
import os
import select
import stat
import sys
import time
from typing import Any

# Seconds that a run waits for a blocked reader. If these have passed, it doesn't wait again before
# the reader reads again.
WAIT = 1.0
# seconds that a run waits for a blocked reader at its end
AT_END = 5.0
# Bytes that are kept for a blocked reader. Beyond that, the oldest lines are dropped.
MOST = 1 << 20
_hurried = False
# all lasting streams of this process
_raw: list["Lasting"] = []


def hurry() -> None:
    """Declares that this program is a run, which waits only briefly for a blocked reader."""
    global _hurried
    _hurried = True


class Lasting(io.RawIOBase):
    """A stream that accepts whatever is written. It passes to ``descriptor`` as much as that
    accepts, and keeps the rest for later.

    Attributes:
        kept: bytes that the descriptor hasn't accepted yet.
        stalled: whether the reader was blocked at the last attempt.
        end: a descriptor of the same pipe or terminal that doesn't block.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.kept = bytearray()
        self.stalled = False
        # Some libraries ask for a stream's name.
        self.name = "<stdout>" if descriptor == 1 else "<stderr>"
        self.end = _non_blocking(descriptor)
        # What was kept before a fork is the parent's to write.
        os.register_at_fork(after_in_child=self.kept.clear)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)

    def write(self, data: Any) -> int:
        self.kept += data
        seconds = None
        if _hurried:
            seconds = 0.0 if self.stalled else WAIT
        self.offer(seconds)
        return len(data)

    def offer(self, seconds: float | None) -> None:
        """Writes the kept output, and waits at most ``seconds`` for the reader; None: as long as it
        takes.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while self.kept:
            self.stalled = not self._ready(until)
            if self.stalled:
                break
            try:
                del self.kept[: os.write(self.end, self.kept[: select.PIPE_BUF])]
            except BlockingIOError:
                # The pipe has less space than that.
                if until is not None and time.monotonic() > until:
                    break
                time.sleep(0.01)
            except OSError:
                # The reader has gone, or the disk is full.
                self.kept.clear()
        if len(self.kept) > MOST:
            # whole lines, so that the rest begins with one
            del self.kept[: self.kept.find(b"\n", len(self.kept) - MOST) + 1]

    def _ready(self, until: float | None) -> bool:
        poll = select.poll()
        poll.register(self.end, select.POLLOUT)
        milliseconds = None
        if until is not None:
            milliseconds = max(0.0, 1000 * (until - time.monotonic()))
        return bool(poll.poll(milliseconds))


def _non_blocking(descriptor: int) -> int:
    """Returns a descriptor of the same pipe or terminal that never blocks.

    It is opened again. If O_NONBLOCK were set on ``descriptor`` itself, it would hold for all other
    programs that share it.
    """
    kind = os.fstat(descriptor).st_mode
    # It may be another user's, or there is no /proc.
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(kind) or os.isatty(descriptor):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor


def lasting(descriptor: int, lines: bool, at_once: bool = False) -> io.TextIOWrapper:
    """Returns a lasting text stream for a descriptor. Letters that its encoding lacks are written
    as escapes.

    Args:
        lines: whether each line is passed on at once.
        at_once: whether each write is passed on at once, as under python -u.
    """
    raw = Lasting(descriptor)
    _raw.append(raw)
    atexit.register(raw.offer, AT_END)
    encoding = getattr(sys.__stderr__, "encoding", None) or "utf-8"
    if at_once:
        # Under python -u, Python's own stream has no buffer, either.
        buffer: Any = raw
    else:
        buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        encoding,
        errors="backslashreplace",
        line_buffering=lines or raw.isatty(),
        write_through=at_once,
    )


def finish() -> None:
    """Writes the kept output at the end of a forked process, where Python calls no ``atexit``
    handlers.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for raw in _raw:
        raw.offer(AT_END)


def keep() -> None:
    """Replaces this process's standard streams by lasting ones. Streams that another program has
    replaced already stay, such as a notebook's.

    A closed stream becomes /dev/null. Otherwise the next file that is opened would get its number,
    and all that is printed would go into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # ``os.open`` takes the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = lasting(1, lines=False, at_once=getattr(sys.stdout, "write_through", False))
    if sys.stderr is sys.__stderr__:
        sys.stderr = lasting(2, lines=True, at_once=getattr(sys.stderr, "write_through", False))
    # This handler runs first, because it is registered last. The handlers of ``lasting`` then offer
    # what it has flushed.
    atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush()))
