"""An authenticated connection between two processes that know the same secret.

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

from launch.secret import MAC_SIZE, mac, same

HELLO = "paddle-vit-toolkit"
CHALLENGE = "challenge"
# The version of this protocol. Version 1 had no secret: its greeting had a party, a rank and a
# seat.
VERSION = 2
# the host's answer, without a MAC, to a guest with a different secret
OTHER_SECRET = "secret"
# bytes of a line, at most
LONGEST = 1 << 17
# bytes of the first line, at most; version 1's fits, too
LONGEST_HELLO = 1024


class Forged(ConnectionError):
    """A line has a wrong MAC, so its sender doesn't know the secret.

    Attributes:
        line: that line.
    """

    def __init__(self, line: bytes) -> None:
        super().__init__("received a line with a wrong MAC")
        self.line = line
        self.strerror = "the message isn't authentic"


class Channel:
    """An authenticated connection.

    Args:
        key: the connection's key, as the function ``key`` returns it.
        host: whether this end is the host's.
        longest: bytes of a line, at most; a longer one counts as forged.

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
        # The directions, which the MACs cover.
        self.outgoing = b"host" if host else b"guest"
        self.incoming = b"guest" if host else b"host"
        # the number of lines in each direction
        self.sent = 0
        self.received = 0
        # what has come: the beginning of a line, and complete lines
        self.rest = b""
        self.lines: deque[str] = deque()
        self.closed = False
        self.heard = time.monotonic()

    def send(self, text: str) -> None:
        """Sends a line, within a second.

        Raises:
            OSError: the line couldn't be sent.
        """
        line = text.replace("\n", " ").encode(errors="backslashreplace")
        code = mac(self.key, self.outgoing, self.sent.to_bytes(8, "big"), line).hex()
        self.sent += 1
        self.socket.settimeout(1)
        self.socket.sendall(f"{code} ".encode() + line + b"\n")

    def receive(self) -> list[str]:
        """Returns the lines that have come, without waiting.

        Raises:
            OSError: the other end has gone, and all its lines have been returned; or a MAC is
                wrong.
        """
        self._read(0)
        lines = [*self.lines]
        self.lines.clear()
        return lines

    def wait(self, limit: float | None) -> str:
        """Waits for the next line and returns it.

        Args:
            limit: seconds; None: no limit.

        Raises:
            TimeoutError: none came within ``limit`` seconds.
            OSError: as ``receive``.
        """
        until = None if limit is None else time.monotonic() + limit
        while not self.lines:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "timed out")
            self._read(left)
        return self.lines.popleft()

    def _read(self, limit: float | None) -> None:
        """Reads the data that arrives within ``limit`` seconds; with 0, the data that has arrived."""
        self.socket.settimeout(limit)
        try:
            while data := self._receive_bytes():
                self.rest += data
                self.heard = time.monotonic()
                self._check_lines()
                # After the first bytes, only read what has arrived.
                self.socket.settimeout(0)
        except (BlockingIOError, TimeoutError):
            return
        if not self.lines:
            raise _reset_error()

    def _receive_bytes(self) -> bytes:
        """Returns the data that has arrived; nothing at the end of the connection.

        If the other end closes with something left unread, the kernel resets the connection. The
        lines that came before still count.
        """
        with contextlib.suppress(ConnectionResetError):
            return self.socket.recv(1 << 16)
        return b""

    def _check_lines(self) -> None:
        """Moves the complete lines from ``rest`` to ``lines``; raises Forged for a wrong MAC."""
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            code, _, text = line.partition(b" ")
            expected = mac(self.key, self.incoming, self.received.to_bytes(8, "big"), text)
            if not same(code, expected.hex().encode()):
                raise Forged(line)
            self.received += 1
            self.lines.append(text.decode(errors="replace"))
        if len(self.rest) > self.longest:
            raise Forged(self.rest[:100])

    def close(self) -> None:
        """Closes this end."""
        self.closed = True
        self.socket.close()


def _reset_error() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


def key(secret: bytes, guest: bytes, host: bytes) -> bytes:
    """Returns a connection's key, from the secret and the nonces of guest and host."""
    return mac(secret, b"connection", guest, host)


def pair() -> tuple[Channel, Channel]:
    """Returns (guest's end, host's end) of a connection within this process."""
    guest, host = socket.socketpair()
    common = os.urandom(MAC_SIZE)
    return Channel(guest, common, False), Channel(host, common, True)


def nonce(text: str) -> bytes:
    """Returns the nonce that ``text`` has in hexadecimal digits, or raises ValueError."""
    value = bytes.fromhex(text)
    # ``fromhex`` allows spaces.
    if len(value) != MAC_SIZE or len(text) != 2 * MAC_SIZE:
        raise ValueError
    return value


def introduce(connection: socket.socket, secret: bytes, limit: float) -> Channel | str:
    """Does the guest's part of the handshake.

    Returns the channel. If no challenge came, it returns the line that came instead, or "".

    Raises:
        OSError: the other end has gone.
    """
    own_nonce = secrets.token_bytes(MAC_SIZE)
    # as many words as in version 1, whose host can then answer
    connection.sendall(f"{HELLO} {VERSION} {own_nonce.hex()} -\n".encode())
    answer = _read_line(connection, limit)
    word, _, host_nonce = answer.partition(" ")
    with contextlib.suppress(ValueError):
        if word == CHALLENGE:
            return Channel(connection, key(secret, own_nonce, nonce(host_nonce)), False)
    return answer


def _read_line(connection: socket.socket, limit: float) -> str:
    """Returns the line that comes within ``limit`` seconds; "" if none does.

    It is read byte by byte, because what follows it is for the channel.
    """
    until = time.monotonic() + limit
    line = b""
    with contextlib.suppress(TimeoutError):
        while not line.endswith(b"\n") and len(line) < LONGEST_HELLO:
            connection.settimeout(max(until - time.monotonic(), 0.001))
            if not (byte := connection.recv(1)):
                raise _reset_error()
            line += byte
            if time.monotonic() > until:
                return ""
        return line.decode(errors="replace").rstrip()
    return ""
