"""How the processes of a launched run find one another, before Paddle does.

Paddle's own start (its TCPStore, in 3.3.1 and 2.6.2) tries an address that doesn't answer for ever.
It hangs where another program listens there. It waits 900 s for a rank that never comes, without
naming it. So the ranks first meet at the same address. Rank 0 listens (``admission``), each rank
proves that it knows the user's secret (``channel``), and all get the result. After that, Paddle
gets the port. The processes that watch ranks stay connected for the whole run (``launched``),
others until all are ready.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from errors import InputError, RunError
from launch import channel, secret
from launch.admission import GRACE, LIMITS, WRONG, Admission, keep_alive, number_list, tell
from launch.channel import Channel, Forged

# seconds: for a connection, and for each of rank 0's first answers
CONNECT = 5.0
ANSWER = 10.0
TAKEN = 2.0  # seconds in which whoever holds rank 0's port may show that it is another rank 0
LOOPBACK = "127.0.0.1"
ENDING = 3.0  # seconds that an earlier run's processes may take to end and free the port


@dataclass
class Meeting:
    """Ranks that found one another.

    Attributes:
        own_address: this machine's IPv4 address, as the others reach it. With a single rank it is
            the master's.
        connection: to rank 0.
        guests: on rank 0, the connections to all ranks, by their numbers.
        run_key: a key that only these ranks know (``secret.take_run``).
        claim: on rank 0, what holds the port (``claim``).
    """

    address: str
    kind: str
    own_address: str
    connection: Channel
    guests: dict[int, Channel]
    run_key: str = ""
    claim: socket.socket | None = None

    def ready(self) -> None:
        """Returns when all ranks have called it, which ends the meeting.

        Raises:
            RunError: a rank has ended meanwhile.
        """
        with contextlib.closing(self):
            with contextlib.suppress(OSError):  # ``_verdict`` gets the same error
                self.connection.send("ready")
            if gone := [place for place, guest in self.guests.items() if not _is_ready(guest)]:
                tell(
                    self.guests,
                    f"{self.kind} {number_list(gone)} ended before the run started; read its error message",
                )
            else:
                tell(self.guests, "ok")
            _verdict(self.connection, f"{self.kind} 0 at {self.address}", None)

    def close(self) -> None:
        """Closes this process's connections."""
        for connection in (self.connection, *self.guests.values(), self.claim):
            if connection:
                connection.close()


def _is_ready(guest: Channel) -> bool:
    with contextlib.suppress(OSError):
        return guest.wait(None) == "ready"
    return False


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
        job: an identifier of this run, the same on all ranks.
        kind: "rank", or "node" if machines meet instead of ranks.
        here: the number of ranks on this machine.
        first: whether this rank is the one that prints the error for all ranks on this machine.
        seat: the UUID of this rank's GPU, which no other may have; "" where there is none.

    Raises:
        InputError: the address isn't valid, its port is taken, or two ranks contradict each other.
            Or their secrets differ or are missing, or two ranks share a GPU.
        RunError: nothing answered, or not all ranks came.
    """
    host, port = parse_address(address)
    if count == 1:  # no network needed
        connection, guest = channel.pair()
        return Meeting(address, kind, host, connection, {0: guest})
    own_secret = secret.shared_secret()
    party = _party(str(count), kind, job)
    machine = _printable(socket.gethostname())
    greeting = json.dumps(
        {"party": party, "place": place, "gpu": _printable(seat), "machine": machine}
    )
    door = None
    held = None
    with contextlib.ExitStack() as undone:  # after an error
        if place == 0:
            try:
                listener, held = listen(host, port, far=count > here)
            except InputError:
                _check_alone(address, kind, own_secret, greeting)
                raise
            door = Admission(listener, own_secret, party, count, kind)
            receiver = threading.Thread(target=door.receive_all, args=(limit,), daemon=True)
            undone.push(held or listener)
            # Whoever was admitted gets the reason before this process ends.
            undone.callback(receiver.join, CONNECT)
            undone.callback(door.close)
            receiver.start()
            more = f"{count - 1} more {kind}{'s' * (count > 2)}"
            print(f"{kind} 0 waits at {address} for {more}", file=sys.stderr, flush=True)
        try:
            found = _greet([host], port, own_secret, greeting, limit if place else ANSWER)
        except OSError as error:
            raise _no_answer_error(
                address, kind, place, limit, machine, error, here, first
            ) from None
        connection, common, key = _accept_answer(found, address, kind, party, limit)
        if door:
            receiver.join()  # its thread has ended, so this process may fork
        undone.pop_all()
    own = connection.socket.getsockname()[0]
    # On rank 0's machine its name may mean 127.0.1.1 (Debian's /etc/hosts), which others can't
    # reach.
    own = common if own.startswith("127.") else own
    run_key = secret.mac(own_secret, b"run", key.encode()).hex()
    return Meeting(address, kind, own, connection, door.guests if door else {}, run_key, held)


def cancel(
    address: str,
    place: str | None,
    count: str | None,
    reason: str,
    job: str = "",
    kind: str = "rank",
) -> None:
    """Tells all ranks that this one can't start, so that none waits for it. Any other rank than 0
    tells rank 0.

    Args:
        place: this rank's number as it was given, which may be none.
        count: the number of ranks, likewise.

    Raises:
        InputError: the address isn't valid, the port is taken, or there is no secret.
        OSError: rank 0 didn't listen within ANSWER seconds.
    """
    if count == "1":
        return
    host, port = parse_address(address)
    own_secret = secret.shared_secret()
    party = _party(_printable(count or "?"), kind, job)
    machine = _printable(socket.gethostname())
    who = f"{kind} {place}" if re.fullmatch("[0-9]{1,18}", place or "") else f"a {kind}"
    refusal = f"{who} on {machine} can't start: {reason}"
    if place == "0":
        others = int(count) - 1 if count and re.fullmatch("[1-9][0-9]{0,5}", count) else sys.maxsize
        with _claiming(host, port) as held, _bound_socket("", port) as listener, held or listener:
            listener.listen(1024)
            Admission(listener, own_secret, party, others, kind, refusal).receive_all(GRACE)
        return
    greeting = {"party": party, "place": -1, "gpu": "", "machine": machine, "refusal": refusal}
    # Where all ranks are on one machine, rank 0 listens on loopback alone.
    hosts = [host, LOOPBACK] if socket.gethostbyname(host) in addresses().values() else [host]
    connection, _ = _greet(hosts, port, own_secret, json.dumps(greeting), ANSWER)
    if connection:
        connection.close()


def _party(count: str, kind: str, job: str) -> str:
    """Describes the ranks that belong together: all of them have to say the same."""
    return f"{count} {kind}s{f' of job {_printable(job)}' if job else ''}"


def _check_alone(address: str, kind: str, own_secret: bytes, greeting: str) -> None:
    """Raises InputError if what holds rank 0's port is another rank 0 of this run, and tells it of
    this one.
    """
    host, port = parse_address(address)
    with contextlib.suppress(OSError):
        connection, answer = _greet([host], port, own_secret, greeting, 0.0, TAKEN)
        if connection:
            connection.close()
            if answer == "twice":
                raise _number_error(address, kind)


def _number_error(address: str, kind: str) -> InputError:
    found = f"another {kind} with this number came to {address} first"
    return InputError(f"{found}; number each differently", shared=False)


def _no_answer_error(
    address: str,
    kind: str,
    place: int,
    limit: float,
    machine: str,
    error: OSError,
    here: int,
    first: bool,
) -> RunError:
    """Returns the error for the case that rank 0 didn't answer."""
    reason = error.strerror or str(error)
    if place == 0:  # it listens, so the address is wrong
        found = f"{kind} 0 runs on {machine}, but can't reach itself at {address} ({reason})"
        return InputError(f"{found}; set MASTER_ADDR to an address of that machine")
    found = f"{kind} 0 didn't answer at {address} within {limit:g} s ({reason}; {LIMITS[kind]})"
    waiting = f"{here} ranks" if here > 1 else f"{kind} {place}"
    advice = "start it there, correct MASTER_ADDR and MASTER_PORT, or open the port in the firewall"
    return RunError(f"{found}; {waiting} on {machine} waited for it: {advice}", shared=not first)


def _printable(text: str) -> str:
    """Returns a name from outside, fit for a message: one line, at most 200 characters, valid
    UTF-8.
    """
    return " ".join(text.encode(errors="backslashreplace").decode().split())[:200]


def addresses() -> dict[str, str]:
    """Returns the IPv4 address of each of this machine's network interfaces that has one."""
    # SIOCGIFADDR
    found = {}
    get_address = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, get_address, struct.pack("256s", name.encode()[:15]))
            except OSError:  # this interface has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def use_loopback() -> None:
    """Makes gloo listen on loopback only, for ranks that are all on this machine."""
    for name, address in addresses().items():
        if address == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def parse_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of HOST:PORT.

    Raises:
        InputError: the address has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or ":" in host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise InputError(
            f"the master's address is {address!r}; expected HOST:PORT, a name or IPv4 address and 1 to 65535"
        )
    return host, int(port)


def check_free(address: str) -> socket.socket | None:
    """Claims a port of this machine and returns what holds it (``claim``); raises InputError if it
    can't be had.
    """
    host, port = parse_address(address)
    with _claiming(host, port) as held:
        _bound_socket("", port).close()  # as Paddle's store will
    return held


def claim(port: int) -> socket.socket | None:
    """Holds a port of this machine for one run of the toolkit, until the returned socket is closed.
    Between the meeting and the start of Paddle's store nobody listens there. So two runs that start
    together could mix without this.

    Raises:
        OSError: another run holds it.
    """
    if not sys.platform.startswith("linux"):
        return None
    until = time.monotonic() + ENDING
    while True:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # a name of the network namespace, as the port is; no file
            held.bind(f"\0{channel.HELLO}:{port}")
            return held
        except OSError:
            held.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def listen(host: str, port: int, far: bool = False) -> tuple[socket.socket, socket.socket | None]:
    """Returns a socket that listens at HOST:PORT, and ``claim``'s. It listens on as few addresses
    as possible.

    A name may mean 127.0.1.1 on this machine only. Behind NAT, this machine doesn't have the
    address itself. Kubeflow gives rank 0's machine the name "localhost". In these cases it listens
    on all addresses, and prints a note.

    Args:
        far: whether ranks of other machines will connect.
    """
    with _claiming(host, port) as held:
        listener = _bound_socket("", port)
        with contextlib.suppress(OSError):  # if the name is unknown, ``_greet`` raises the error
            found = socket.gethostbyname(host)
            is_known = host in (found, "" if far else "localhost") or not found.startswith("127.")
            if found != "0.0.0.0" and is_known:
                listener.close()
                listener = _bound_socket(found, port, instead="")
        if listener.getsockname()[0] == "0.0.0.0":
            note = f"other machines may not reach this one as {host}, so it listens on all its addresses"
            print(f"note: {note} (docs/reliability.md, The network)", file=sys.stderr, flush=True)
        listener.listen(1024)
    return listener, held


def _bound_socket(address: str, port: int, instead: str | None = None) -> socket.socket:
    """Returns a socket at the address; at ``instead``, if this machine doesn't have that address."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Paddle's store will
    try:
        found.bind((address, port))
    except OSError as error:
        found.close()
        if instead is None or error.errno != errno.EADDRNOTAVAIL:
            raise
        return _bound_socket(instead, port)
    return found


@contextlib.contextmanager
def _claiming(host: str, port: int) -> Iterator[socket.socket | None]:
    """Holds the port; raises InputError with the reason if that isn't possible."""
    held = None
    try:
        held = claim(port)
        yield held
    except OSError as error:
        if held:
            held.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "is taken (by another run?)" if taken else f"can't be opened ({error.strerror})"
        raise InputError(f"port {port} on {host} {reason}; choose another MASTER_PORT") from None


def _verdict(connection: Channel, host: str, limit: float | None) -> list[str]:
    """Returns the words after rank 0's "ok". Raises any other verdict: InputError after WRONG, else
    RunError.
    """
    try:
        said = connection.wait(limit)
    except OSError:
        said = f"{host} ended before the run started; its own error message says why"
    verdict, _, rest = said.partition(" ")
    if verdict == WRONG:
        raise InputError(rest)
    if verdict != "ok":
        raise RunError(said, shared=True)
    return rest.split()


def _greet(
    hosts: Sequence[str],
    port: int,
    own: bytes,
    greeting: str,
    limit: float,
    patience: float | None = None,
) -> tuple[Channel | None, str]:
    """Returns the connection to rank 0 and its answer to the greeting; (None, answer) if it didn't
    prove its secret.

    Args:
        hosts: names or addresses of rank 0's machine, which are tried in turn.
        patience: seconds for each answer; ANSWER by default.

    Raises:
        OSError: no connection within ``limit`` seconds; the last attempt's error.
    """
    deadline = time.monotonic() + limit
    patience = ANSWER if patience is None else patience
    for host in itertools.cycle(hosts):
        connection = socket.socket()
        try:
            connection.settimeout(min(CONNECT, patience))
            connection.connect((host, port))
            # nobody listens: it is connected to itself
            if connection.getsockname() == connection.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            keep_alive(connection)
            found = channel.introduce(connection, own, patience)
            if isinstance(found, str):
                connection.close()
                return None, found
            found.send(greeting)
            return found, found.wait(patience)
        except Forged as error:
            connection.close()
            return None, error.line.decode(errors="replace")
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise error
            time.sleep(0.2)
    raise ValueError("no host")


def _accept_answer(
    found: tuple[Channel | None, str], address: str, kind: str, party: str, limit: float
) -> tuple[Channel, str, str]:
    """Waits for all ranks. Returns the connection, the address at which rank 0 was found, and the
    run's key.
    """
    connection, answer = found
    if connection and answer == "wait":
        try:
            common, key = _verdict(connection, f"{kind} 0 at {address}", limit + ANSWER)
        except RunError:
            connection.close()
            raise
        return connection, common, key
    if connection:
        connection.close()
    if connection and answer == "twice":
        raise _number_error(address, kind)
    if connection and answer.startswith(f"{WRONG} "):
        raise InputError(answer.removeprefix(f"{WRONG} "))
    if connection and answer.startswith("differs "):
        there = f"{kind} 0 at {address} waits for {answer.removeprefix('differs ')}, but this is one of {party}"
        advice = "another run has the port (choose another MASTER_PORT), or not all were started with the same numbers"
        raise InputError(f"{there}: {advice}", shared=False)
    if answer == channel.OTHER_SECRET:
        there = f"{kind} 0 at {address} has another secret than {socket.gethostname()}"
        raise InputError(f"{there}; {secret.differs(f'{kind} 0')}", shared=False)
    if answer.startswith("differs "):  # another version's answer to this version's greeting
        there = f"{kind} 0 at {address} runs another version of this toolkit"
        raise InputError(f"{there}; install the same on all machines", shared=False)
    there = f"another run or program answers at {address}, not this run's {kind} 0"
    raise InputError(f"{there}; choose another MASTER_PORT", shared=False)
