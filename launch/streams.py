"""Standard streams that don't end a program. If one is closed, broken, full or blocked, only its
lines are lost.

A run's lines are in its log files, too. So a run doesn't wait for whoever reads its output: a
terminal that is stopped by Ctrl-S, or a pipe that nobody empties. Other commands do wait: their
output is their purpose.
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

# seconds that a run waits for a blocked reader; then it doesn't wait until that reads again
WAIT = 1.0
AT_END = 5.0  # seconds that a run waits for a blocked reader at its end
MOST = 1 << 20  # bytes that are kept for a blocked reader; beyond that, the oldest are dropped
_hurried = False
_raw: list["Lasting"] = []  # all that this process has


def hurry() -> None:
    """Stops waiting for blocked readers: a run has begun, and its lines are in log files, too."""
    global _hurried
    _hurried = True


class Lasting(io.RawIOBase):
    """Accepts whatever is written, and passes to ``descriptor`` as much as that accepts. It keeps
    the rest.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.kept, self.stalled = descriptor, bytearray(), False
        self.name = "<stdout>" if descriptor == 1 else "<stderr>"  # which some libraries ask for
        self.end = _not_waiting(descriptor)
        os.register_at_fork(after_in_child=self.kept.clear)  # the parent writes it

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)

    def write(self, data: Any) -> int:
        self.kept += data
        self.offer((0.0 if self.stalled else WAIT) if _hurried else None)
        return len(data)

    def offer(self, seconds: float | None) -> None:
        """Writes what is kept; waits ``seconds`` at most for the reader (None: as long as it
        takes).
        """
        until = seconds if seconds is None else time.monotonic() + seconds
        while self.kept:
            self.stalled = not self._ready(until)
            if self.stalled:
                break
            try:
                del self.kept[: os.write(self.end, self.kept[: select.PIPE_BUF])]
            except BlockingIOError:  # there is less space in the pipe
                if until is not None and time.monotonic() > until:
                    break
                time.sleep(0.01)
            except OSError:  # the reader has gone, or the disk is full
                self.kept.clear()
        if len(self.kept) > MOST:
            del self.kept[: self.kept.find(b"\n", len(self.kept) - MOST) + 1]

    def _ready(self, until: float | None) -> bool:
        poll = select.poll()
        poll.register(self.end, select.POLLOUT)
        return bool(
            poll.poll(None if until is None else max(0.0, 1000 * (until - time.monotonic())))
        )


def _not_waiting(descriptor: int) -> int:
    """Returns a descriptor of the same pipe or terminal that never blocks. Programs that share the
    first still may.
    """
    kind = os.fstat(descriptor).st_mode
    with contextlib.suppress(OSError):  # another user's; no /proc
        if stat.S_ISFIFO(kind) or os.isatty(descriptor):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor


def lasting(descriptor: int, lines: bool, at_once: bool = False) -> io.TextIOWrapper:
    """Returns a text stream for a descriptor. Letters that its encoding lacks are written as
    escapes.

    Args:
        lines: whether each line is passed on at once.
        at_once: whether each write is passed on at once (python -u).
    """
    raw = Lasting(descriptor)
    _raw.append(raw)
    atexit.register(raw.offer, AT_END)
    encoding = getattr(sys.__stderr__, "encoding", None) or "utf-8"
    return io.TextIOWrapper(
        raw if at_once else io.BufferedWriter(raw),  # type: ignore[arg-type]  # as Python's own of -u
        encoding,
        errors="backslashreplace",
        line_buffering=lines or raw.isatty(),
        write_through=at_once,
    )


def finish() -> None:
    """Writes what is kept, at the end of a forked process, where Python doesn't do it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for raw in _raw:
        raw.offer(AT_END)


def keep() -> None:
    """Replaces this process's standard streams by lasting ones. A closed one becomes /dev/null: the
    next opened file would get its number, and with it all that is printed. Streams that another
    program has replaced stay, such as a notebook's.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # open takes the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = lasting(1, lines=False, at_once=getattr(sys.stdout, "write_through", False))
    if sys.stderr is sys.__stderr__:
        sys.stderr = lasting(2, lines=True, at_once=getattr(sys.stderr, "write_through", False))
    # runs before the handlers of ``lasting``
    atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush()))
