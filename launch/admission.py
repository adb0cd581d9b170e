"""Rank 0's part of the rendezvous: it accepts connections until all ranks have come, whatever other
clients do.

One thread serves all clients. A guest is a client that has proved that it knows the secret, and so
is a rank of this user. Any other client may be silent, slow or wrong, and there may be many of
them. Each has a few seconds and a line of a thousand bytes to prove that it knows the secret. If
too many unproved clients are connected, the oldest is dropped. Nothing that a client sends is
parsed before its MAC was verified.
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
from launch.secret import MAC_SIZE

# Seconds in which ranks may still come after one that contradicts rank 0 or can't start.
GRACE = 5.0
# seconds in which a client has to prove itself
PATIENCE = 5.0
# connections of unproved clients that are open at a time
MOST_UNPROVED = 128
# bytes of a greeting, at most
LONGEST_GREETING = 1 << 14
# the key or variable that sets the time limit
LIMITS = {"rank": "DIST.INIT_TIMEOUT", "node": "INIT_TIMEOUT"}
# the first word of a verdict that is an InputError
WRONG = "wrong"


@dataclass
class Unproved:
    """A client that hasn't proved yet that it knows the secret.

    Attributes:
        since: when it connected.
        first_line: the part of its first line that has come.
        channel: its connection after the first line.
    """

    connection: socket.socket
    since: float = field(default_factory=time.monotonic)
    first_line: bytes = b""
    channel: Channel | None = None


class Admission:
    """Admits the ranks of one run that know the secret.

    Args:
        listener: the socket to which they connect.
        secret: the user's secret (``secret.shared_secret``).
        party: a description of the run, the same on all of its ranks (``rendezvous``).
        count: the number of ranks.
        kind: "rank", or "node" if machines meet.
        refusal: why rank 0 can't start, which every rank gets as its answer; "" if it can start.

    Attributes:
        guests: the connections of the admitted ranks, by their numbers.
        seats: the GPU and the machine of each guest, by the ranks' numbers.
        unproved: the other clients, by their sockets' descriptors, the oldest first.
        others: how many clients had a different secret.
        until: when to stop waiting, by ``time.monotonic``.
        contradiction: how a rank that knows the secret contradicts rank 0; "" if none does.
        refused: how many ranks got ``refusal``.
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
        self.unproved: dict[int, Unproved] = {}
        self.selector = selectors.DefaultSelector()

    def receive_all(self, limit: float) -> None:
        """Admits ranks for ``limit`` seconds at most, then sends the result to all of them."""
        self.until = time.monotonic() + limit
        self.listener.settimeout(0)
        # The listener is closed before any rank looks for Paddle's store at this address.
        with self.selector, self.listener:
            self.selector.register(self.listener, selectors.EVENT_READ)
            while not self.closed and self._expects_more():
                left = self.until - time.monotonic()
                if left <= 0:
                    break
                for key, _ in self.selector.select(min(left, 0.5)):
                    if key.fileobj is self.listener:
                        self._accept()
                    else:
                        self._read(key.fd)
                now = time.monotonic()
                for descriptor, client in list(self.unproved.items()):
                    if now - client.since > PATIENCE:
                        self._drop(descriptor)
            for descriptor in list(self.unproved):
                self._drop(descriptor)
        if not self.refusal:
            self._conclude(limit)

    def _expects_more(self) -> bool:
        return len(self.guests) + self.refused < self.count

    def close(self) -> None:
        """Ends ``receive_all``, within half a second."""
        self.closed = True

    def _accept(self) -> None:
        """Accepts a connection. If there are too many, or this process can open no more files, the
        oldest unproved client is dropped.
        """
        connection = None
        try:
            connection = self.listener.accept()[0]
            connection.settimeout(0)
            self.selector.register(connection, selectors.EVENT_READ)
            self.unproved[connection.fileno()] = Unproved(connection)
        except BlockingIOError:
            # The client has gone again.
            return
        except OSError:
            # This process can open no more files, or has no memory.
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

    def _drop(self, descriptor: int) -> None:
        if client := self.unproved.pop(descriptor, None):
            with contextlib.suppress(KeyError, ValueError, OSError):
                self.selector.unregister(client.connection)
            client.connection.close()

    def _read(self, descriptor: int) -> None:
        """Reads what an unproved client sent. Any error, even MemoryError or RecursionError, ends
        only this connection.
        """
        client = self.unproved.get(descriptor)
        if not client:
            return
        try:
            if client.channel:
                self._read_greeting(client, client.channel)
            else:
                self._challenge(client)
        except Exception:
            self._drop(descriptor)

    def _challenge(self, client: Unproved) -> None:
        """Reads a client's first line; when it is complete, answers with the challenge."""
        data = client.connection.recv(LONGEST_HELLO)
        client.first_line += data
        if not data or len(client.first_line) > LONGEST_HELLO:
            raise ValueError
        if not client.first_line.endswith(b"\n"):
            return
        line = client.first_line.decode(errors="replace").rstrip()
        hello = re.fullmatch(rf"{HELLO} {VERSION} ([0-9a-f]{{{2 * MAC_SIZE}}}) -", line)
        if not hello:
            # In its first line, a rank of another version sends its party. It compares that with
            # this answer.
            other = re.fullmatch(rf"{HELLO} (\S.*) \S+ \S+", line)
            if other and line.isprintable():
                client.connection.sendall(f"differs {other[1]}\n".encode())
            raise ValueError
        own_nonce = secrets.token_bytes(MAC_SIZE)
        client.connection.sendall(f"{CHALLENGE} {own_nonce.hex()}\n".encode())
        key = channel.key(self.secret, channel.nonce(hello[1]), own_nonce)
        client.channel = Channel(client.connection, key, True, LONGEST_GREETING)

    def _read_greeting(self, client: Unproved, connection: Channel) -> None:
        """Reads the greeting, whose MAC proves that the client knows the secret, and answers it."""
        try:
            lines = connection.receive()
        except channel.Forged:
            self.others += 1
            client.connection.sendall(f"{OTHER_SECRET}\n".encode())
            if self.others == 1:
                where = client.connection.getpeername()[0]
                _note(
                    f"a process at {where} has another secret and is rejected;"
                    f" {self.kind} 0 waits for those of its run"
                )
            raise
        if not lines:
            return
        greeting = json.loads(lines[0])
        answer, place, seat = self._judge(greeting)
        keep_alive(client.connection)
        if answer != "wait":
            # Noted first: a rank that has its answer may rely on it.
            self._contradict(greeting, answer)
            connection.send(answer)
            raise ValueError
        connection.send(answer)
        self.selector.unregister(client.connection)
        del self.unproved[client.connection.fileno()]
        connection.longest = channel.LONGEST
        self.guests[place] = connection
        self.seats[place] = seat

    def _judge(self, greeting: dict[str, Any]) -> tuple[str, int, tuple[str, str]]:
        """Returns the answer to a greeting, the rank's number and its seat. Raises any error if
        this isn't a greeting.
        """
        party, place, gpu, machine = (greeting[key] for key in ("party", "place", "gpu", "machine"))
        # ``isinstance`` would accept a bool as an int.
        if [type(value) for value in (party, place, gpu, machine)] != [str, int, str, str]:
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
        """Notes that a rank of this job can't start, or was started with other numbers: then not
        all ranks will come. A rank of another job may have found this address by mistake, and is
        ignored.
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
                f"{who} has the same number as one on {first}; number each {self.kind} differently"
            )
        else:
            says = f"{who} belongs to a run of {greeting['party']}, {self.kind} 0 waits for {self.party}"
            self.contradiction = (
                f"{says}; start all {kinds} with the same numbers, or choose another MASTER_PORT"
            )
        self.until = min(self.until, time.monotonic() + GRACE)

    def _is_here(self, place: int) -> bool:
        """Returns whether a rank of this number is connected. If its connection has ended, it may
        have been started again, and the new one is admitted.
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
        """Sends the result to all guests: an error, or "ok" with rank 0's address and a random part
        of the run's key.
        """
        missing = [place for place in range(self.count) if place not in self.guests]
        if missing and self.contradiction:
            self._dismiss(f"{WRONG} {self.contradiction}")
        elif missing:
            reason = (
                f"{self.kind} {number_list(missing)} of {self.count} didn't connect"
                f" within {limit:g} s ({LIMITS[self.kind]})"
            )
            if self.others:
                reason += f", {self.others} had a different secret"
            self._dismiss(f"{reason}; start what is missing, or read its error message")
        elif error := shared_gpu_error(self.seats):
            self._dismiss(f"{WRONG} {error}")
        else:
            # The address at which ranks reached this one. Ranks of this machine may have used
            # loopback, so any other address comes first.
            addresses = [guest.socket.getsockname()[0] for guest in self.guests.values()]
            address = min(addresses, key=lambda address: address.startswith("127."))
            tell(self.guests, f"ok {address} {secrets.token_hex(MAC_SIZE)}")

    def _dismiss(self, verdict: str) -> None:
        tell(self.guests, verdict)
        for guest in self.guests.values():
            guest.close()


def _job(party: str) -> str:
    """Returns what ``party`` says about the job; "" if it says nothing."""
    return party.partition(" of job ")[2]


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def tell(guests: dict[int, Channel], verdict: str) -> None:
    """Sends a line to all guests. Rank 0 comes last, because the line may end this process."""
    for place in sorted(guests, reverse=True):
        # ``Meeting.ready`` reports a guest that has gone.
        with contextlib.suppress(OSError):
            guests[place].send(verdict)


def shared_gpu_error(seats: dict[int, tuple[str, str]]) -> str:
    """Returns an error message if two ranks of one machine use the same GPU, else "".

    Two containers on one machine have different names, so a GPU that they share isn't noticed here.
    NCCL, too, tells machines apart by their names.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for place, seat in sorted(seats.items()):
        ranks.setdefault(seat, []).append(place)
    for (gpu, machine), places in ranks.items():
        if gpu and len(places) > 1:
            return (
                f"ranks {number_list(places)} on {machine} share one GPU, {gpu}, but NCCL needs one"
                " for each: start one process per GPU, or give each its own (CUDA_VISIBLE_DEVICES;"
                " srun --gpus-per-task=1)"
            )
    return ""


def keep_alive(connection: socket.socket) -> None:
    """Turns on keep-alive packets: routers forget idle connections, and a machine that loses its
    power doesn't close its own.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)


def number_list(places: list[int]) -> str:
    """Returns the numbers as text for a message: at most ten of them."""
    numbers = [str(place) for place in places[:10]]
    if len(places) > 10:
        numbers.append("...")
    return ", ".join(numbers)
