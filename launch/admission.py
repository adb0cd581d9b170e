"""Rank 0's door: it hears who comes until all ranks have, and nobody else holds it up.

One thread serves all. A client that isn't proved yet may be silent, slow, wrong or one of many. Each has a few seconds,
a line of a thousand bytes, and a place; if there are too many, the next one takes it. Nothing is parsed before its
proof.
"""

import contextlib
import json
import re
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from launch import channel
from launch.channel import CHALLENGE, HELLO, LONGEST_HELLO, OTHER_SECRET, VERSION, Channel
from launch.secret import SIZE

PATIENCE = 5.0  # seconds in which a guest proves itself
MOST_STRANGERS = 128  # open at a time
LONGEST_GREETING = 1 << 14
LIMITS = {"rank": "DIST.INIT_TIMEOUT", "node": "INIT_TIMEOUT"}  # what sets the limit
WRONG = "wrong"


@dataclass
class Stranger:
    """Who isn't proved yet.

    Attributes:
        said: the beginning of its first line.
        channel: from then on.
    """

    connection: socket.socket
    since: float = field(default_factory=time.monotonic)
    said: bytes = b""
    channel: Channel | None = None


class Door:
    """Admits ``count`` guests of a ``party`` that hold ``secret``.

    Attributes:
        guests: the proved connections, by the numbers of their ranks.
        seats: each one's GPU and machine.
        others: how many came with another secret.
    """

    def __init__(self, listener: socket.socket, secret: bytes, party: str, count: int, kind: str) -> None:
        self.listener, self.secret, self.party, self.count, self.kind = listener, secret, party, count, kind
        self.guests: dict[int, Channel] = {}
        self.seats: dict[int, tuple[str, str]] = {}
        self.others, self.closed = 0, False
        self.strangers: dict[int, Stranger] = {}  # by their files, the oldest first
        self.selector = selectors.DefaultSelector()

    def receive_all(self, limit: float) -> None:
        """Hears who comes, for ``limit`` seconds, then tells all of them what came of it."""
        until = time.monotonic() + limit
        self.listener.settimeout(0)
        with self.selector, self.listener:  # closed before anybody goes on to look for Paddle there
            self.selector.register(self.listener, selectors.EVENT_READ)
            while not self.closed and len(self.guests) < self.count and (left := until - time.monotonic()) > 0:
                for found, _ in self.selector.select(min(left, 0.5)):
                    self._welcome() if found.fileobj is self.listener else self._hear(found.fd)
                for file in [file for file, one in self.strangers.items() if time.monotonic() - one.since > PATIENCE]:
                    self._drop(file)
            for file in list(self.strangers):
                self._drop(file)
        self._conclude(limit)

    def close(self) -> None:
        """Ends ``receive_all``, within half a second."""
        self.closed = True

    def _welcome(self) -> None:
        """Lets one in. Where there are too many, or no more files, the oldest stranger goes."""
        connection = None
        try:
            connection = self.listener.accept()[0]
            connection.settimeout(0)
            self.selector.register(connection, selectors.EVENT_READ)
            self.strangers[connection.fileno()] = Stranger(connection)
        except BlockingIOError:  # it left
            return
        except OSError:  # no file is left, or no memory
            if connection:
                connection.close()
            elif not self.strangers:
                time.sleep(0.1)
            self._drop_oldest()
        if len(self.strangers) > MOST_STRANGERS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        if self.strangers:
            self._drop(next(iter(self.strangers)))

    def _drop(self, file: int) -> None:
        if one := self.strangers.pop(file, None):
            with contextlib.suppress(KeyError, ValueError, OSError):
                self.selector.unregister(one.connection)
            one.connection.close()

    def _hear(self, file: int) -> None:
        """Hears a stranger. Whatever that leads to, MemoryError and RecursionError included, is its own end alone."""
        if not (one := self.strangers.get(file)):
            return
        try:
            self._listen_to(one) if one.channel else self._challenge(one)
        except Exception:
            self._drop(file)

    def _challenge(self, one: Stranger) -> None:
        data = one.connection.recv(LONGEST_HELLO)
        one.said += data
        if not data or len(one.said) > LONGEST_HELLO:
            raise ValueError
        if not one.said.endswith(b"\n"):
            return
        said = one.said.decode(errors="replace").rstrip()
        if not (found := re.fullmatch(rf"{HELLO} {VERSION} ([0-9a-f]{{{2 * SIZE}}}) -", said)):
            if said.isprintable() and (other := re.fullmatch(rf"{HELLO} (\S.*) \S+ \S+", said)):  # of another version
                one.connection.sendall(f"differs {other[1]}\n".encode())  # which takes its own party for that
            raise ValueError
        own = secrets.token_bytes(SIZE)
        one.connection.sendall(f"{CHALLENGE} {own.hex()}\n".encode())
        proved = channel.key(self.secret, channel.nonce(found[1]), own)
        one.channel = Channel(one.connection, proved, True, LONGEST_GREETING)

    def _listen_to(self, one: Stranger) -> None:
        assert one.channel
        try:
            lines = one.channel.receive()
        except channel.Forged:
            self.others += 1
            one.connection.sendall(f"{OTHER_SECRET}\n".encode())
            raise
        if not lines:
            return
        answer, place, seat = self._judge(json.loads(lines[0]))
        keep_alive(one.connection)
        one.channel.send(answer)
        if answer != "wait":
            raise ValueError
        self.selector.unregister(one.connection)
        del self.strangers[one.connection.fileno()]
        one.channel.longest = channel.LONGEST
        self.guests[place], self.seats[place] = one.channel, seat

    def _judge(self, greeting: dict[str, Any]) -> tuple[str, int, tuple[str, str]]:
        """Returns what to answer, the rank's number and its seat, or raises what shows that it is no greeting."""
        party, place, gpu, machine = (greeting[key] for key in ("party", "place", "gpu", "machine"))
        if [*map(type, (party, place, gpu, machine))] != [str, int, str, str] or not 0 <= place < self.count:
            raise ValueError
        if party != self.party:
            return f"differs {self.party}", place, (gpu, machine)
        return "twice" if self._is_here(place) else "wait", place, (gpu, machine)

    def _is_here(self, place: int) -> bool:
        """Whether a rank of this number has come and is still there: one that ended may be started again."""
        if place not in self.guests:
            return False
        try:
            self.guests[place].receive()
        except OSError:
            self.guests.pop(place).close()
            return False
        return True

    def _conclude(self, limit: float) -> None:
        """Tells all what came of it: "ok", the address at which rank 0 is found, and what the run's key is made of."""
        if missing := [place for place in range(self.count) if place not in self.guests]:
            found = (
                f"{self.kind} {number_list(missing)} of {self.count} didn't connect within {limit:g} s"
                f" ({LIMITS[self.kind]})"
            )
            if self.others:
                found += f", {self.others} had a different secret"
            self._dismiss(f"{found}; start what is missing, or read its error message")
        elif same := same_gpu(self.seats):
            self._dismiss(f"{WRONG} {same}")
        else:
            addresses = [guest.socket.getsockname()[0] for guest in self.guests.values()]
            found = min(addresses, key=lambda own: own.startswith("127."))
            tell(self.guests, f"ok {found} {secrets.token_hex(SIZE)}")

    def _dismiss(self, verdict: str) -> None:
        tell(self.guests, verdict)
        for guest in self.guests.values():
            guest.close()


def tell(guests: dict[int, Channel], verdict: str) -> None:
    """Says the same to all; rank 0 last: what it hears may end this process."""
    for place in sorted(guests, reverse=True):
        with contextlib.suppress(OSError):  # it has left: Meeting.ready will tell
            guests[place].send(verdict)


def same_gpu(seats: dict[int, tuple[str, str]]) -> str:
    """Returns which ranks of a machine have one GPU, and what to do; "" where none have. Containers of several names
    may share one: NCCL, too, tells machines by name.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for place, seat in sorted(seats.items()):
        ranks.setdefault(seat, []).append(place)
    for (gpu, machine), places in ranks.items():
        if gpu and len(places) > 1:
            who = f"ranks {number_list(places)} on {machine} share one GPU, {gpu}"
            advice = "start one process per GPU, or give each its own (CUDA_VISIBLE_DEVICES; srun --gpus-per-task=1)"
            return f"{who}, but NCCL needs one for each: {advice}"
    return ""


def keep_alive(connection: socket.socket) -> None:
    """Routers forget a connection on which nothing passes, and a machine that loses power says no goodbye."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)


def number_list(places: list[int]) -> str:
    """Returns numbers for a line: ten at most."""
    return ", ".join(map(str, places[:10])) + (", ..." if len(places) > 10 else "")
