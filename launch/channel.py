"""A connection between two processes that know one secret. Each line on it is authenticated.

The guest (the process that connects) sends HELLO and a nonce. The host (the process that listens)
answers with its own nonce. From both nonces and the secret, each derives the connection's key. From
then on each line begins with its MAC (message authentication code). The MAC also covers the
direction and the number of earlier lines. So nobody else can make up a line, repeat it, send it
back or leave it out.
"""

import contextlib
import errno
import os
import secrets
import socket
import time
from collections import deque

from launch.secret import SIZE, mac, same

HELLO = "paddle-vit-toolkit"
CHALLENGE = "challenge"
# of this protocol. Version 1 had no secret: its greeting had a party, a rank and a seat
VERSION = 2
OTHER_SECRET = "secret"  # the host's answer, without a MAC, to a guest with a different secret
LONGEST = 1 << 17  # bytes of a line, at most
LONGEST_HELLO = 1024  # bytes of the first line, at most; version 1's fits, too


class Forged(ConnectionError):
    """A line came whose MAC is wrong, so its sender doesn't know the secret; ``line`` is that line."""

    def __init__(self, line: bytes) -> None:
        super().__init__("a line with a wrong MAC came")
        self.line = line
        self.strerror = "what came isn't authentic"


class Channel:
    """An authenticated connection.

    Args:
        key: of this connection (``key``).
        host: whether this end is the host's.
        longest: bytes of a line; a longer one ends the connection.

    Attributes:
        closed: whether this end is closed.
        heard: when something came the last time.
    """

    def __init__(
        self, connection: socket.socket, key: bytes, host: bool, longest: int = LONGEST
    ) -> None:
        self.socket = connection
        self.key = key
        self.longest = longest
        self.ours, self.theirs = (b"host", b"guest") if host else (b"guest", b"host")
        self.sent = self.taken = 0
        self.rest, self.lines = b"", deque[str]()
        self.closed, self.heard = False, time.monotonic()

    def send(self, text: str) -> None:
        """Sends a line, within a second.

        Raises:
            OSError: the line couldn't be sent.
        """
        said = text.replace("\n", " ").encode(errors="backslashreplace")
        proof = mac(self.key, self.ours, self.sent.to_bytes(8, "big"), said).hex()
        self.sent += 1
        self.socket.settimeout(1)
        self.socket.sendall(f"{proof} ".encode() + said + b"\n")

    def receive(self) -> list[str]:
        """Returns the lines that have come, without waiting.

        Raises:
            OSError: the other end is gone, and all its lines have been returned; or a MAC is wrong.
        """
        self._hear(0)
        lines = [*self.lines]
        self.lines.clear()
        return lines

    def wait(self, limit: float | None) -> str:
        """Waits for the next line and returns it. ``limit`` is in seconds; None: no limit.

        Raises:
            OSError: as ``receive``; TimeoutError: none came.
        """
        until = limit and time.monotonic() + limit
        while not self.lines:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "timed out")
            self._hear(left)
        return self.lines.popleft()

    def _hear(self, limit: float | None) -> None:
        """Reads what comes within ``limit`` seconds; with 0, what has come already."""
        self.socket.settimeout(limit)
        try:
            while data := self._received():
                self.rest, self.heard = self.rest + data, time.monotonic()
                self._take()
                self.socket.settimeout(0)
        except (BlockingIOError, TimeoutError):
            return
        if not self.lines:
            raise _reset_error()

    def _received(self) -> bytes:
        """Returns what has come, or nothing at the end. A close resets the connection where
        something was left unread; the lines that came before it count.
        """
        with contextlib.suppress(ConnectionResetError):
            return self.socket.recv(1 << 16)
        return b""

    def _take(self) -> None:
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            proof, _, said = line.partition(b" ")
            if not same(
                proof,
                mac(self.key, self.theirs, self.taken.to_bytes(8, "big"), said).hex().encode(),
            ):
                raise Forged(line)
            self.taken += 1
            self.lines.append(said.decode(errors="replace"))
        if len(self.rest) > self.longest:
            raise Forged(self.rest[:100])

    def close(self) -> None:
        """Ends the connection."""
        self.closed = True
        self.socket.close()


def _reset_error() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


def key(secret: bytes, guest: bytes, host: bytes) -> bytes:
    """Returns a connection's key, from the secret and the nonces of guest and host."""
    return mac(secret, b"connection", guest, host)


def pair() -> tuple[Channel, Channel]:
    """Returns the two ends of a connection within this process: the guest's, the host's."""
    guest, host = socket.socketpair()
    common = os.urandom(SIZE)
    return Channel(guest, common, False), Channel(host, common, True)


def nonce(text: str) -> bytes:
    """Returns the nonce that ``text`` has in hexadecimal digits, or raises ValueError."""
    found = bytes.fromhex(text)
    if len(found) != SIZE or len(text) != 2 * SIZE:
        raise ValueError
    return found


def introduce(connection: socket.socket, secret: bytes, limit: float) -> Channel | str:
    """Does the guest's part of the handshake. Returns the channel; if no challenge came, the line
    that did, or "".

    Raises:
        OSError: the other end is gone.
    """
    own = secrets.token_bytes(SIZE)
    connection.sendall(
        f"{HELLO} {VERSION} {own.hex()} -\n".encode()
    )  # with as many words as version 1, which can then answer
    said = _read_line(connection, limit)
    word, _, theirs = said.partition(" ")
    with contextlib.suppress(ValueError):
        if word == CHALLENGE:
            return Channel(connection, key(secret, own, nonce(theirs)), False)
    return said


def _read_line(connection: socket.socket, limit: float) -> str:
    """Returns the line that comes within ``limit`` seconds; "" if none does.

    It is read byte by byte, because what follows it is for the channel.
    """
    until = time.monotonic() + limit
    said = b""
    with contextlib.suppress(TimeoutError):
        while not said.endswith(b"\n") and len(said) < LONGEST_HELLO:
            connection.settimeout(max(until - time.monotonic(), 0.001))
            if not (byte := connection.recv(1)):
                raise _reset_error()
            said += byte
            if time.monotonic() > until:
                return ""
        return said.decode(errors="replace").rstrip()
    return ""
