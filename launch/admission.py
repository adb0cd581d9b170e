"""Rank 0's part of the rendezvous: it accepts connections until all ranks have come, whatever other
clients do.

One thread serves all clients. A guest is a rank that has proved that it knows the secret. Every
other client is a stranger: it may be silent, slow, wrong or one of many. A stranger has a few
seconds and a line of a thousand bytes to prove itself. If there are too many strangers, the oldest
is dropped. Nothing is parsed before its proof was right.
"""

import contextlib
import json
import math
import re
import secrets
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from launch import channel
from launch.channel import CHALLENGE, HELLO, LONGEST_HELLO, OTHER_SECRET, VERSION, Channel
from launch.secret import SIZE

GRACE = 5.0  # seconds that ranks may still come after one that contradicts them
PATIENCE = 5.0  # seconds in which a stranger has to prove itself
MOST_UNPROVED = 128  # connections of strangers that are open at a time
LONGEST_GREETING = 1 << 14
# the key or variable that sets the time limit
LIMITS = {"rank": "DIST.INIT_TIMEOUT", "node": "INIT_TIMEOUT"}
WRONG = "wrong"


@dataclass
class Unproved:
    """A client that hasn't proved yet that it knows the secret.

    Attributes:
        said: what has come of its first line.
        channel: its connection after the first line.
    """

    connection: socket.socket
    since: float = field(default_factory=time.monotonic)
    said: bytes = b""
    channel: Channel | None = None


class Admission:
    """Admits ``count`` ranks of one run (``party`` describes it) that know ``secret``.

    Attributes:
        guests: the connections of the admitted ranks, by their numbers.
        seats: the GPU and the machine of each.
        others: how many clients had a different secret.
        contradiction: what a rank that knows the secret says otherwise; "": none does.
        refusal: why rank 0 can't start, which is the answer to every rank; "": it can.
        refused: how many ranks got it.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        party: str,
        count: int,
        kind: str,
        refusal: str = "",
    ) -> None:
        self.listener = listener
        self.secret = secret
        self.party = party
        self.count = count
        self.kind = kind
        self.guests: dict[int, Channel] = {}
        self.seats: dict[int, tuple[str, str]] = {}
        self.others = 0
        self.closed = False
        self.contradiction = ""
        self.until = math.inf
        self.refusal = refusal
        self.refused = 0
        self.unproved: dict[int, Unproved] = {}  # by their files, the oldest first
        self.selector = selectors.DefaultSelector()

    def receive_all(self, limit: float) -> None:
        """Admits ranks for ``limit`` seconds at most, then sends the result to all of them."""
        self.until = time.monotonic() + limit
        self.listener.settimeout(0)
        with self.selector, self.listener:  # closed before any rank looks for Paddle's store there
            self.selector.register(self.listener, selectors.EVENT_READ)
            while (
                not self.closed
                and self._expects_more()
                and (left := self.until - time.monotonic()) > 0
            ):
                for found, _ in self.selector.select(min(left, 0.5)):
                    self._welcome() if found.fileobj is self.listener else self._hear(found.fd)
                for file in [
                    file
                    for file, one in self.unproved.items()
                    if time.monotonic() - one.since > PATIENCE
                ]:
                    self._drop(file)
            for file in list(self.unproved):
                self._drop(file)
        if not self.refusal:
            self._conclude(limit)

    def _expects_more(self) -> bool:
        return len(self.guests) + self.refused < self.count

    def close(self) -> None:
        """Ends ``receive_all``, within half a second."""
        self.closed = True

    def _welcome(self) -> None:
        """Accepts a connection. If there are too many, or no more files, the oldest stranger is
        dropped.
        """
        connection = None
        try:
            connection = self.listener.accept()[0]
            connection.settimeout(0)
            self.selector.register(connection, selectors.EVENT_READ)
            self.unproved[connection.fileno()] = Unproved(connection)
        except BlockingIOError:  # it has gone again
            return
        except OSError:  # this process has no more files, or no memory
            if connection:
                connection.close()
            elif not self.unproved:
                time.sleep(0.1)
            self._drop_oldest()
        if len(self.unproved) > MOST_UNPROVED:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        if self.unproved:
            self._drop(next(iter(self.unproved)))

    def _drop(self, file: int) -> None:
        if one := self.unproved.pop(file, None):
            with contextlib.suppress(KeyError, ValueError, OSError):
                self.selector.unregister(one.connection)
            one.connection.close()

    def _hear(self, file: int) -> None:
        """Reads what a stranger sent. Any error, even MemoryError or RecursionError, ends only this
        connection.
        """
        if not (one := self.unproved.get(file)):
            return
        try:
            self._listen_to(one) if one.channel else self._challenge(one)
        except Exception:
            self._drop(file)

    def _challenge(self, one: Unproved) -> None:
        data = one.connection.recv(LONGEST_HELLO)
        one.said += data
        if not data or len(one.said) > LONGEST_HELLO:
            raise ValueError
        if not one.said.endswith(b"\n"):
            return
        said = one.said.decode(errors="replace").rstrip()
        if not (found := re.fullmatch(rf"{HELLO} {VERSION} ([0-9a-f]{{{2 * SIZE}}}) -", said)):
            # of another version
            if said.isprintable() and (other := re.fullmatch(rf"{HELLO} (\S.*) \S+ \S+", said)):
                # which compares this with its own party
                one.connection.sendall(f"differs {other[1]}\n".encode())
            raise ValueError
        own = secrets.token_bytes(SIZE)
        one.connection.sendall(f"{CHALLENGE} {own.hex()}\n".encode())
        proved = channel.key(self.secret, channel.nonce(found[1]), own)
        one.channel = Channel(one.connection, proved, True, LONGEST_GREETING)

    def _listen_to(self, one: Unproved) -> None:
        assert one.channel
        try:
            lines = one.channel.receive()
        except channel.Forged:
            self.others += 1
            one.connection.sendall(f"{OTHER_SECRET}\n".encode())
            if self.others == 1:
                where = one.connection.getpeername()[0]
                _note(
                    f"a process at {where} has another secret, and isn't admitted; {self.kind} 0 waits for its own"
                )
            raise
        if not lines:
            return
        greeting = json.loads(lines[0])
        answer, place, seat = self._judge(greeting)
        keep_alive(one.connection)
        one.channel.send(answer)
        if answer != "wait":
            self._contradict(greeting, answer)
            raise ValueError
        self.selector.unregister(one.connection)
        del self.unproved[one.connection.fileno()]
        one.channel.longest = channel.LONGEST
        self.guests[place], self.seats[place] = one.channel, seat

    def _judge(self, greeting: dict[str, Any]) -> tuple[str, int, tuple[str, str]]:
        """Returns the answer, the rank's number and its seat. Raises any error if this isn't a
        greeting.
        """
        party, place, gpu, machine = (greeting[key] for key in ("party", "place", "gpu", "machine"))
        if [*map(type, (party, place, gpu, machine))] != [str, int, str, str]:
            raise ValueError
        if self.refusal and _job(party) == _job(self.party):
            self.refused += 1
            return f"{WRONG} {self.refusal}", place, (gpu, machine)
        if greeting.get("refusal"):
            return "told", place, (gpu, machine)
        if party != self.party:
            return f"differs {self.party}", place, (gpu, machine)
        if not 0 <= place < self.count:
            raise ValueError
        return "twice" if self._is_here(place) else "wait", place, (gpu, machine)

    def _contradict(self, greeting: dict[str, Any], answer: str) -> None:
        """Notes that a rank of this job can't start, or has other numbers: then some rank won't
        come. Those of another job may have found this address by mistake.
        """
        if self.contradiction or _job(greeting["party"]) != _job(self.party):
            return
        who = f"{self.kind} {greeting['place']} on {greeting['machine']}"
        kinds = f"{self.kind}s"
        if answer == "told":
            self.contradiction = str(greeting["refusal"])
        elif answer == "twice":
            _, first = self.seats[greeting["place"]]
            self.contradiction = (
                f"{who} has the number of one on {first}; number each {self.kind} differently"
            )
        else:
            says = f"{who} is one of {greeting['party']}, {self.kind} 0 waits for {self.party}"
            self.contradiction = (
                f"{says}; start all {kinds} with the same numbers, or choose another MASTER_PORT"
            )
        self.until = min(self.until, time.monotonic() + GRACE)

    def _is_here(self, place: int) -> bool:
        """Returns whether a rank of this number is connected. One that has ended may have been
        started again.
        """
        if place not in self.guests:
            return False
        try:
            self.guests[place].receive()
        except OSError:
            self.guests.pop(place).close()
            return False
        return True

    def _conclude(self, limit: float) -> None:
        """Sends the result to all: what is wrong, or "ok", rank 0's address and a random part of
        the run's key.
        """
        if missing := [place for place in range(self.count) if place not in self.guests]:
            found = (
                f"{self.kind} {number_list(missing)} of {self.count} didn't connect within {limit:g} s"
                f" ({LIMITS[self.kind]})"
            )
            if self.contradiction:
                self._dismiss(f"{WRONG} {self.contradiction}")
                return
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


def _job(party: str) -> str:
    return party.partition(" of job ")[2]


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def tell(guests: dict[int, Channel], verdict: str) -> None:
    """Sends the same line to all. Rank 0 comes last, because the line may end this process."""
    for place in sorted(guests, reverse=True):
        with contextlib.suppress(OSError):  # it has gone: Meeting.ready reports it
            guests[place].send(verdict)


def same_gpu(seats: dict[int, tuple[str, str]]) -> str:
    """Returns an error message if ranks of one machine share a GPU, else "".

    Containers with different names may share one: NCCL, too, knows machines by their names.
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
    """Turns on keep-alive packets. Routers forget idle connections; a machine without power closes
    none.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)


def number_list(places: list[int]) -> str:
    """Returns the numbers as text for one line: at most ten of them."""
    return ", ".join(map(str, places[:10])) + (", ..." if len(places) > 10 else "")
