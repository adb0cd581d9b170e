"""What the launched ranks of a machine read once: one of them reads it, and hands it to the others.

The first rank that takes a name reads. The name is that of an abstract Unix socket: no file, and
free again as soon as its process ends. It follows from the run's key, from what is to be read and
from the files that a process sees. So ranks that would read something else don't meet. The others
connect and wait. They get the descriptor of memory without a name (``spawned.SharedObjects``), so nothing
is left anywhere, whichever process is killed.

The kernel says whose process is at the other end. Only processes of the same user hand anything
over, or get it.
"""

import contextlib
import errno
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from errors import InputError, RunError
from launch import channel, secret
from launch.spawned import SharedObjects

_LONGEST = 1 << 14  # bytes of a message: an error is one line
_WAITING = 4096  # connections that the kernel keeps until they are answered; it may keep fewer
_CREDENTIALS = struct.Struct("3i")  # process, user, group
# of the rank that reads: where the others come, what they get
_hands: tuple[socket.socket, SharedObjects] | None = None


def read_once(read: Callable[[], tuple[Any, ...]], what: bytes) -> tuple[Any, ...]:
    """Returns what ``read()`` returns, which one of this machine's ranks calls for all of them.

    That rank has to call ``answer`` until all have it.

    Args:
        what: what decides the result. A rank with other bytes reads by itself.

    Raises:
        RunError: what ``read`` raised, on the ranks that wait for it, too.
    """
    global _hands
    if int(os.environ.get("PADDLE_TRAINERS_NUM") or 1) == 1 or not sys.platform.startswith("linux"):
        return read()
    name = f"\0{channel.HELLO}:{secret.mac(secret.of_run(), b'read', what, _seen_files()).hex()}"
    while True:
        with contextlib.ExitStack() as unless_done:
            listener = unless_done.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            )
            try:
                listener.bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return read()
                # Another rank reads.
                found = _wait(name)
                if found is None:
                    continue
                return found.open() if found else read()
            listener.listen(_WAITING)
            listener.setblocking(False)
            try:
                handed = SharedObjects(*read())
            except RunError as error:
                failure = {"status": error.exit_status, "text": str(error), "shared": error.shared}
                _answer(listener, json.dumps(failure).encode(), [])
                raise
            unless_done.pop_all()
            _hands = listener, handed
            return handed.open()


def answer() -> None:
    """Hands over what this rank has read to those that have come for it."""
    if _hands:
        listener, handed = _hands
        _answer(listener, b"{}", [handed.descriptor])


def close() -> None:
    """Ends the handing over: all ranks have it."""
    global _hands
    if _hands:
        _hands[0].close()
        _hands = None


def _answer(listener: socket.socket, message: bytes, descriptors: list[int]) -> None:
    with contextlib.suppress(BlockingIOError):  # nobody else is there
        while True:
            guest, _ = listener.accept()
            with guest, contextlib.suppress(OSError):  # it may have ended
                if _is_own(guest):
                    socket.send_fds(guest, [message], descriptors)


def _wait(name: str) -> Any:
    """Waits for the rank that reads. Returns what it hands over; None if it has ended; False if it
    can't be had.

    Raises:
        RunError: what it failed by.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        try:
            asked.setblocking(False)  # where others fill the queue, connect would wait
            asked.connect(name)
            asked.setblocking(True)
            if not _is_own(asked):
                return False
        except ConnectionRefusedError:  # it doesn't listen yet, or no more
            time.sleep(0.02)
            return None
        except OSError:
            return False
        try:
            message, descriptors, _, _ = socket.recv_fds(asked, _LONGEST, 1)
        except OSError:
            return None
    if descriptors:
        return SharedObjects.of(descriptors[0])
    if not message:
        return None
    if not (failure := json.loads(message)):  # this process may open no more files
        return False
    kind = InputError if failure["status"] == InputError.exit_status else RunError
    raise kind(failure["text"], shared=failure["shared"])


def _seen_files() -> bytes:
    """Returns what tells which files a path leads to: ranks in containers of their own may see
    others.
    """
    seen = []
    for path in (".", "/", "/proc/self/ns/mnt"):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            seen.append((path, found.st_dev, found.st_ino))
    return repr(seen).encode()


def _is_own(connection: socket.socket) -> bool:
    """Returns whether a process of this user is at the other end."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)[1] == os.geteuid()
