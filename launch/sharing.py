"""Reads data once for all launched ranks of a machine: one of them reads it and shares it.

The rank that first binds a socket to a certain name reads. It is the name of an abstract Unix
socket, which isn't a file, and is free again as soon as its process ends. The name is derived from
the run's key, from what is to be read and from the files that a process sees. So ranks that would
read something else have another name. The other ranks connect and wait. They get the descriptor of
memory that has no name (``spawned.SharedObjects``), so nothing is left over, whichever process is
killed.

The kernel says whose process is at the other end. Data is only shared between processes of one
user.
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

# bytes of a message, which is an error of one line, at most
_LONGEST = 1 << 14
# Connections that the kernel keeps until they are answered. It may keep fewer.
_BACKLOG = 4096
# process, user, group
_CREDENTIALS = struct.Struct("3i")
# On the rank that has read: the socket to which the others connect, and the objects that they get.
_shared: tuple[socket.socket, SharedObjects] | None = None


def read_once(read: Callable[[], tuple[Any, ...]], key: bytes) -> tuple[Any, ...]:
    """Returns the result of ``read()``. One of this machine's ranks calls it for all of them. That
    rank then has to call ``answer`` until all have the result.

    Args:
        key: bytes that determine the result. A rank with another key reads by itself.

    Raises:
        RunError: the error of ``read``, also on the ranks that wait for the one that reads.
    """
    global _shared
    if int(os.environ.get("PADDLE_TRAINERS_NUM") or 1) == 1 or not sys.platform.startswith("linux"):
        return read()
    name = f"\0{channel.HELLO}:{secret.mac(secret.run_key(), b'read', key, _seen_files()).hex()}"
    while True:
        # The listener is closed, unless this rank has read and still has to share.
        with contextlib.ExitStack() as cleanup:
            listener = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            try:
                listener.bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return read()
                # Another rank reads.
                try:
                    shared = _wait(name)
                except _NotShared:
                    return read()
                if shared is None:
                    continue
                return shared.open()
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            try:
                objects = SharedObjects(*read())
            except RunError as error:
                failure = {"status": error.exit_status, "text": str(error), "shared": error.shared}
                _answer(listener, json.dumps(failure).encode(), [])
                raise
            cleanup.pop_all()
            _shared = listener, objects
            return objects.open()


def answer() -> None:
    """Sends the data that this rank has read to the ranks that are connected by now."""
    if _shared:
        listener, objects = _shared
        _answer(listener, b"{}", [objects.descriptor])


def close() -> None:
    """Stops sharing, when all ranks have the data."""
    global _shared
    if _shared:
        listener, _ = _shared
        listener.close()
        _shared = None


def _answer(listener: socket.socket, message: bytes, descriptors: list[int]) -> None:
    # ``accept`` raises BlockingIOError when no other connection waits.
    with contextlib.suppress(BlockingIOError):
        while True:
            guest, _ = listener.accept()
            # The other rank may have ended.
            with guest, contextlib.suppress(OSError):
                if _is_own(guest):
                    socket.send_fds(guest, [message], descriptors)


class _NotShared(Exception):
    """This rank can't receive the data that another one has read."""


def _wait(name: str) -> SharedObjects | None:
    """Waits for the rank that reads. Returns the objects that it shares; None if it has ended, so
    that another one has to read.

    Raises:
        _NotShared: this rank can't get the objects.
        RunError: the error by which that rank failed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            # A blocking connect would wait if the queue of the other rank is full.
            connection.setblocking(False)
            connection.connect(name)
            connection.setblocking(True)
            if not _is_own(connection):
                raise _NotShared
        except ConnectionRefusedError:
            # The other rank doesn't listen yet, or no longer.
            time.sleep(0.02)
            return None
        except OSError:
            raise _NotShared from None
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 1)
        except OSError:
            return None
    if descriptors:
        return SharedObjects.from_descriptor(descriptors[0])
    if not message:
        return None
    failure = json.loads(message)
    if not failure:
        # The kernel dropped the descriptor: this process can open no more files.
        raise _NotShared
    kind = InputError if failure["status"] == InputError.exit_status else RunError
    raise kind(failure["text"], shared=failure["shared"])


def _seen_files() -> bytes:
    """Returns bytes that differ between processes for which a path leads to different files. Ranks
    in containers of their own may see other files.
    """
    identities = []
    for path in (".", "/", "/proc/self/ns/mnt"):
        with contextlib.suppress(OSError):
            state = os.stat(path)
            identities.append((path, state.st_dev, state.st_ino))
    return repr(identities).encode()


def _is_own(connection: socket.socket) -> bool:
    """Returns whether a process of this user is at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return user == os.geteuid()
