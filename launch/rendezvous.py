"""How the processes of a launched run find one another, before Paddle does.

Paddle's own start (its TCPStore, in 3.3.1 and 2.6.2) tries an address that doesn't answer for ever, hangs where another
program listens there, and waits 900 s for a rank that never comes, without naming it. So the ranks first meet at the
same address: rank 0 listens, each tells its number, and all hear what came of it. Then the port is Paddle's. They stay
connected: the processes that watch ranks for the whole run (``launched``), others until all are ready.
"""

import contextlib
import errno
import fcntl
import os
import re
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass

from errors import InputError, RunError

GREETING, WRONG = "paddle-vit-toolkit", "wrong"
CONNECT, ANSWER, STRANGER = 5.0, 10.0, 2.0  # seconds: to connect, for rank 0's first word, for a guest's
LIMITS = {"rank": "DIST.INIT_TIMEOUT", "node": "INIT_TIMEOUT"}  # what sets the limit


@dataclass
class Meeting:
    """Ranks that found one another.

    Attributes:
        own_address: this machine's IPv4 address, as the others reach it; the master's, of one rank alone.
        connection: to rank 0.
        guests: rank 0's connections to all, by their numbers.
    """

    address: str
    kind: str
    own_address: str
    connection: socket.socket
    guests: dict[int, socket.socket]

    def ready(self) -> None:
        """Returns when all ranks have called it, which ends the meeting.

        Raises:
            RunError: a rank has ended meanwhile.
        """
        with contextlib.closing(self):
            with contextlib.suppress(OSError):  # which _verdict meets, too
                self.connection.sendall(b"ready\n")
            if gone := [place for place, guest in self.guests.items() if _line(guest, None, lost="") != "ready"]:
                _tell(self.guests, f"{self.kind} {_listed(gone)} ended before the start; see what it said")
            else:
                _tell(self.guests, "ok")
            _verdict(self.connection, f"{self.kind} 0 at {self.address}", None)

    def close(self) -> None:
        """Closes this process's connections."""
        for connection in (self.connection, *self.guests.values()):
            connection.close()


def meet(
    address: str,
    place: int,
    count: int,
    limit: float,
    job: str = "",
    kind: str = "rank",
    here: int = 1,
    first: bool = True,
    seat: str = "",
) -> Meeting:
    """Waits until all ``count`` ranks have come to ``address``.

    Args:
        address: HOST:PORT at rank 0, a name or IPv4: Paddle's store takes no IPv6.
        place: this rank's number.
        limit: seconds.
        job: what tells this run from another; the same on all ranks.
        kind: "rank", or "node" where it is machines that meet.
        here: the number of ranks on this machine, for which the ``first`` speaks where nothing answers.
        seat: the UUID of this rank's GPU, which no other may have; "" where there is none.

    Raises:
        InputError: the address is none, its port is taken, two ranks contradict each other, or have one GPU.
        RunError: nothing answered, or not all ranks came.
    """
    host, port = parsed(address)
    if count == 1:  # no network needed
        connection, guest = socket.socketpair()
        return Meeting(address, kind, host, connection, {0: guest})
    party = f"{count} {kind}s{f' of job {_printable(job)}' if job else ''}"
    guests: dict[int, socket.socket] = {}
    machine = _printable(socket.gethostname(), "")  # without blanks, as the seat, for they end the greeting
    if place == 0:
        given = (_listen(host, port), guests, party, count, limit, kind)
        receiver = threading.Thread(target=_receive, args=given, daemon=True)
        receiver.start()
        print(f"{kind} 0 waits at {address} for {count - 1} more", file=sys.stderr, flush=True)
    hello = f"{GREETING} {party} {place} {_printable(seat, '').replace('@', '-')}@{machine}\n"
    try:
        connection, answer = _attend(host, port, hello, ANSWER if place == 0 else limit)
    except OSError as error:
        reason = error.strerror or str(error)
        if place == 0:  # it listens: what doesn't answer is the address
            found = f"{kind} 0 runs on {machine}, which doesn't reach itself as {address} ({reason})"
            raise InputError(f"{found}; MASTER_ADDR has to be an address of that machine") from None
        found = f"no {kind} 0 answered at {address} in {limit:g} s ({reason}; {LIMITS[kind]})"
        waiting = f"{here} ranks" if here > 1 else f"{kind} {place}"
        advice = "start it there, correct MASTER_ADDR and MASTER_PORT, or let the firewall pass the port"
        raise RunError(f"{found}; {waiting} on {machine} waited for it: {advice}", shared=not first) from None
    try:
        common = _understand(connection, answer, address, kind, party, limit)
    except RunError:
        connection.close()
        raise
    if place == 0:
        receiver.join()  # it has told all: this process may fork
    own = connection.getsockname()[0]
    # On rank 0's machine its name may stand for 127.0.1.1 (Debian's /etc/hosts), where no other finds it.
    return Meeting(address, kind, common if own.startswith("127.") else own, connection, guests)


def _printable(text: str, blank: str = " ") -> str:
    """Returns a name that others chose as a part of one line: up to 200 characters that UTF-8 has."""
    return blank.join(text.encode(errors="backslashreplace").decode().split())[:200]


def addresses() -> dict[str, str]:
    """Returns the IPv4 address of each of this machine's network interfaces that has one."""
    found, get_address = {}, 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, get_address, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def parsed(address: str) -> tuple[str, int]:
    """Returns the host and the port of HOST:PORT.

    Raises:
        InputError: it is none.
    """
    host, _, port = address.rpartition(":")
    if not host or ":" in host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise InputError(f"the master's address is {address!r}; expected HOST:PORT, a name or IPv4 and 1 to 65535")
    return host, int(port)


def check_free(address: str) -> None:
    """Raises InputError where HOST:PORT, of this machine, is none or taken."""
    _listen(*parsed(address)).close()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Paddle's store will
    try:
        listener.bind(("", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "is taken (by another run?)" if taken else f"can't be listened on ({error.strerror})"
        raise InputError(f"port {port} on {host} {reason}; choose another MASTER_PORT") from None
    return listener


def _receive(
    listener: socket.socket, guests: dict[int, socket.socket], party: str, count: int, limit: float, kind: str
) -> None:
    """Rank 0's part: hears who comes, then tells all of them what came of it."""
    deadline, seats = time.monotonic() + limit, {}
    while len(guests) < count and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError):  # nobody came in time
            connection = listener.accept()[0]
            if not _admit(connection, guests, seats, party):
                connection.close()
    listener.close()  # before anybody goes on to look for Paddle there
    if missing := [place for place in range(count) if place not in guests]:
        found = f"{kind} {_listed(missing)} of {count} didn't come in {limit:g} s ({LIMITS[kind]})"
        _dismiss(guests, f"{found}; start what is missing, or see what it said")
    elif same := _same_seat(seats):
        _dismiss(guests, f"{WRONG} {same}")
    else:
        addresses = [guest.getsockname()[0] for guest in guests.values()]
        _tell(guests, f"ok {min(addresses, key=lambda own: own.startswith('127.'))}")


def _same_seat(seats: dict[int, str]) -> str:
    """Returns which ranks of a machine have one GPU, and what to do; "" where none have. Containers of several names
    may share one: NCCL, too, tells machines by name.
    """
    ranks: dict[str, list[int]] = {}
    for place, seat in sorted(seats.items()):
        ranks.setdefault(seat, []).append(place)
    for (gpu, _, machine), places in [(seat.partition("@"), places) for seat, places in ranks.items()]:
        if gpu and len(places) > 1:
            who = f"ranks {_listed(places)} on {machine} have one GPU, {gpu}"
            advice = "start a process per GPU, or give each its own (CUDA_VISIBLE_DEVICES; srun --gpus-per-task=1)"
            return f"{who}, and NCCL needs one for each: {advice}"
    return ""


def _dismiss(guests: dict[int, socket.socket], verdict: str) -> None:
    _tell(guests, verdict)
    for connection in guests.values():
        connection.close()


def _admit(connection: socket.socket, guests: dict[int, socket.socket], seats: dict[int, str], party: str) -> bool:
    """Answers who connected; whether it is one of the party."""
    try:
        said = _line(connection, STRANGER)
        theirs, place, seat = said.rsplit(" ", 2)
        answer = "wait"
        if re.fullmatch(rf"{re.escape(f'{GREETING} {party}')} [0-9]+", said):  # as ranks greeted before they had a seat
            answer = f"differs {party} with another version of this toolkit"
        elif theirs != f"{GREETING} {party}":
            answer = f"differs {party}"
        elif int(place) in guests:
            answer = "twice"
        connection.sendall(f"{answer}\n".encode())
    except (OSError, ValueError):  # a stranger, or one that left
        return False
    if answer == "wait":
        _keep_alive(connection)
        guests[int(place)], seats[int(place)] = connection, seat
    return answer == "wait"


def _keep_alive(connection: socket.socket) -> None:
    """Routers forget a connection on which nothing passes, and a machine that loses power says no goodbye."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)


def _tell(guests: dict[int, socket.socket], verdict: str) -> None:
    for place in sorted(guests, reverse=True):  # rank 0 last: what it hears may end this process
        with contextlib.suppress(OSError):  # it has left: Meeting.ready will tell
            guests[place].sendall(f"{verdict}\n".encode())


def _listed(places: list[int]) -> str:
    return ", ".join(map(str, places[:10])) + (", ..." if len(places) > 10 else "")


def _verdict(connection: socket.socket, host: str, limit: float | None) -> str:
    """Returns what ``host`` (rank 0) adds to its "ok"; a RunError, unless it says that: an InputError after WRONG."""
    said = _line(connection, limit, lost=f"{host} ended before the start; it says why")
    verdict, _, rest = said.partition(" ")
    if verdict == WRONG:
        raise InputError(rest)
    if verdict != "ok":
        raise RunError(said, shared=True)
    return rest


def _attend(host: str, port: int, hello: str, limit: float) -> tuple[socket.socket, str]:
    """Returns a connection to who listens there, and the answer to ``hello``: "" for silence.

    Raises:
        OSError: the last one, after ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while True:
        connection = socket.socket()
        try:
            connection.settimeout(CONNECT)
            connection.connect((host, port))
            if connection.getsockname() == connection.getpeername():  # nobody listens: the kernel chose this very port
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            _keep_alive(connection)
            connection.sendall(hello.encode())
            return connection, _line(connection, ANSWER, silent="")
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise error
            time.sleep(0.2)


def _understand(connection: socket.socket, answer: str, address: str, kind: str, party: str, limit: float) -> str:
    """Returns, when all ranks have come, the address at which rank 0 was found."""
    if answer == "wait":
        return _verdict(connection, f"{kind} 0 at {address}", limit + ANSWER)
    if answer == "twice":
        raise InputError(f"one of the same number came to {address} before; each {kind} needs its own", shared=False)
    if answer.startswith("differs "):
        there = answer.removeprefix("differs ")
        if there == party:  # it didn't take this greeting
            found = f"{kind} 0 at {address} runs another version of this toolkit"
            raise InputError(f"{found}; install the same on all machines", shared=False)
        found = f"at {address} meet {there}, this is one of {party}"
        advice = "another run has the port (choose another MASTER_PORT), or this one was started with other numbers"
        raise InputError(f"{found}: {advice}", shared=False)
    found = f"another run or program answers at {address}, not this run's {kind} 0"
    raise InputError(f"{found}; choose another MASTER_PORT", shared=False)


def _line(connection: socket.socket, limit: float | None, silent: str | None = None, lost: str | None = None) -> str:
    """Returns the line (up to 1000 bytes) that comes next.

    Args:
        limit: seconds; None waits for ever.
        silent: what stands for a line that doesn't come in time, if anything does.
        lost: what stands for a line that doesn't come, for whatever reason.

    Raises:
        OSError: nothing came, and nothing stands for it.
    """
    connection.settimeout(limit)
    said = b""
    try:
        while not said.endswith(b"\n") and len(said) < 1000:
            byte = connection.recv(1)
            if not byte:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            said += byte
    except OSError as error:
        instead = silent if isinstance(error, TimeoutError) and lost is None else lost
        if instead is None:
            raise
        return instead
    return said.decode(errors="replace").rstrip()
