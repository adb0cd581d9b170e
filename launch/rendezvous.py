"""The rendezvous of a launched run: its processes find one another here, before Paddle starts.

Paddle's own rendezvous (its TCPStore, in 3.3.1 and 2.6.2) tries for ever if nothing answers at the
address. It hangs if another program listens there. It waits 900 s for a rank that never comes, and
doesn't name it. So the ranks first meet at the same address: rank 0 listens there (``admission``),
each rank proves that it knows the user's secret (``channel``), and all get the result. Then the
port is left to Paddle. The processes that watch ranks (``launched``) stay connected for the whole
run. Nodes (``nodes``) stay connected until all are ready.
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

# seconds in which a connection has to be made
CONNECT = 5.0
# seconds in which rank 0 has to send each of its first answers
ANSWER = 10.0
# seconds in which the program that holds rank 0's port may show that it is another rank 0
TAKEN = 2.0
LOOPBACK = "127.0.0.1"
# seconds that an earlier run's processes may take to end and free the port
ENDING = 3.0


@dataclass
class Meeting:
    """The connections between ranks that have found one another.

    Attributes:
        address: HOST:PORT at which they met.
        kind: "rank" or "node".
        own_address: this machine's IPv4 address, as the others reach it. With a single rank it is
            the master's.
        connection: to rank 0.
        guests: on rank 0, the connections to all ranks, by their numbers.
        run_key: a key that only these ranks know (``secret.set_run_key``).
        claim: on rank 0, the socket that holds the port (``claim``).
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
            # If rank 0 has gone, ``_verdict`` raises the error.
            with contextlib.suppress(OSError):
                self.connection.send("ready")
            verdict = "ok"
            if gone := [place for place, guest in self.guests.items() if not _is_ready(guest)]:
                numbers = f"{self.kind} {number_list(gone)}"
                verdict = f"{numbers} ended before the run started; read its error message"
            tell(self.guests, verdict)
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
    local_ranks: int = 1,
    prints_error: bool = True,
    gpu: str = "",
) -> Meeting:
    """Waits until all ``count`` ranks have come to ``address``.

    Args:
        address: HOST:PORT of rank 0, with a name or an IPv4 address: Paddle's store takes no IPv6.
        place: this rank's number.
        limit: seconds to wait.
        job: an identifier of this run, the same on all ranks.
        kind: "rank", or "node" if machines meet instead of ranks.
        local_ranks: the number of ranks on this machine.
        prints_error: whether this rank prints the error for all ranks of this machine if rank 0
            doesn't answer.
        gpu: the UUID of this rank's GPU, which no other rank may have; "" if it has none.

    Raises:
        InputError: the address isn't valid, its port is taken, or two ranks contradict each other.
            Or their secrets differ or are missing, or two ranks share a GPU.
        RunError: nothing answered, or not all ranks came.
    """
    host, port = parse_address(address)
    # A single rank needs no network.
    if count == 1:
        connection, guest = channel.pair()
        return Meeting(address, kind, host, connection, {0: guest})
    own_secret = secret.shared_secret()
    party = _party(str(count), kind, job)
    machine = _printable(socket.gethostname())
    greeting = json.dumps(
        {"party": party, "place": place, "gpu": _printable(gpu), "machine": machine}
    )
    admission = None
    held = None
    # Its callbacks run only after an error.
    with contextlib.ExitStack() as cleanup:
        if place == 0:
            try:
                listener, held = listen(host, port, has_other_machines=count > local_ranks)
            except InputError:
                _check_alone(address, kind, own_secret, greeting)
                raise
            admission = Admission(listener, own_secret, party, count, kind)
            receiver = threading.Thread(target=admission.receive_all, args=(limit,), daemon=True)
            cleanup.push(held or listener)
            # Before this process ends, the thread sends the reason to the admitted ranks.
            cleanup.callback(receiver.join, CONNECT)
            cleanup.callback(admission.close)
            receiver.start()
            others = f"{count - 1} more {kind}s" if count > 2 else f"1 more {kind}"
            print(f"{kind} 0 waits at {address} for {others}", file=sys.stderr, flush=True)
        try:
            answered = _greet([host], port, own_secret, greeting, limit if place else ANSWER)
        except OSError as error:
            reason = error.strerror or str(error)
            if place == 0:
                # This process listens, so the address is wrong.
                raise InputError(
                    f"{kind} 0 runs on {machine}, but can't reach itself at {address} ({reason});"
                    " set MASTER_ADDR to an address of that machine"
                ) from None
            waiting = f"{local_ranks} ranks" if local_ranks > 1 else f"{kind} {place}"
            raise RunError(
                f"{kind} 0 didn't answer at {address} within {limit:g} s"
                f" ({reason}; {LIMITS[kind]});"
                f" {waiting} on {machine} waited for it; start it there, correct MASTER_ADDR and"
                " MASTER_PORT, or open the port in the firewall",
                shared=not prints_error,
            ) from None
        connection, rank_0_address, key = _accept_answer(answered, address, kind, party, limit)
        if admission:
            # A process that runs no other thread can be forked.
            receiver.join()
        cleanup.pop_all()
    own_address = connection.socket.getsockname()[0]
    if own_address.startswith("127."):
        # On rank 0's machine, its name may stand for 127.0.1.1 (Debian's /etc/hosts), which other
        # machines can't reach.
        own_address = rank_0_address
    run_key = secret.mac(own_secret, b"run", key.encode()).hex()
    guests = admission.guests if admission else {}
    return Meeting(address, kind, own_address, connection, guests, run_key, held)


def cancel(
    address: str,
    place: str | None,
    count: str | None,
    reason: str,
    job: str = "",
    kind: str = "rank",
) -> None:
    """Informs all ranks that this one can't start, so that none waits for it. Rank 0 informs all
    others; another rank informs rank 0.

    Args:
        place: this rank's number as the user or a launcher gave it: maybe no number, or None.
        count: the number of ranks, as it was given.
        reason: the error message.

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
        # Outside Linux there is no claim. Then the listener is closed twice, which does no harm.
        with _claiming(host, port) as held, _bound_socket("", port) as listener, held or listener:
            listener.listen(1024)
            Admission(listener, own_secret, party, others, kind, refusal).receive_all(GRACE)
        return
    greeting = {"party": party, "place": -1, "gpu": "", "machine": machine, "refusal": refusal}
    hosts = [host]
    if socket.gethostbyname(host) in addresses().values():
        # If all ranks are on this machine, rank 0 listens on loopback alone.
        hosts.append(LOOPBACK)
    connection, _ = _greet(hosts, port, own_secret, json.dumps(greeting), ANSWER)
    if connection:
        connection.close()


def _party(count: str, kind: str, job: str) -> str:
    """Returns a description of the run, which has to be the same for all of its ranks."""
    party = f"{count} {kind}s"
    return f"{party} of job {_printable(job)}" if job else party


def _check_alone(address: str, kind: str, own_secret: bytes, greeting: str) -> None:
    """Raises InputError if the program that holds rank 0's port is another rank 0 of this run,
    which then gets the same error.
    """
    host, port = parse_address(address)
    with contextlib.suppress(OSError):
        connection, answer = _greet([host], port, own_secret, greeting, 0.0, TAKEN)
        if connection:
            connection.close()
            if answer == "twice":
                raise _number_error(address, kind)


def _number_error(address: str, kind: str) -> InputError:
    return InputError(
        f"another {kind} with this number connected to {address} first; number each differently",
        shared=False,
    )


def _printable(text: str) -> str:
    """Returns a text from outside in a form that fits a message: one line of valid UTF-8, at most
    200 characters.
    """
    return " ".join(text.encode(errors="backslashreplace").decode().split())[:200]


def addresses() -> dict[str, str]:
    """Returns the IPv4 address of each of this machine's network interfaces that has one."""
    by_interface = {}
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket, siocgifaddr, request)
            except OSError:
                # This interface has no IPv4 address.
                continue
            by_interface[name] = socket.inet_ntoa(answer[20:24])
    return by_interface


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
            f"the master's address is {address!r};"
            " expected HOST:PORT, a name or IPv4 address and 1 to 65535"
        )
    return host, int(port)


def check_free(address: str) -> socket.socket | None:
    """Claims a port of this machine, and returns the socket that holds it (``claim``).

    Raises:
        InputError: the port is taken, or can't be opened.
    """
    host, port = parse_address(address)
    with _claiming(host, port) as held:
        # Paddle's store will bind to it in the same way.
        _bound_socket("", port).close()
    return held


def claim(port: int) -> socket.socket | None:
    """Holds a port of this machine for one run of the toolkit, until the returned socket is closed.

    Nobody listens at the port between the meeting and the start of Paddle's store. Without the
    claim, two runs that start at the same time could mix.

    Raises:
        OSError: another run holds it.
    """
    if not sys.platform.startswith("linux"):
        return None
    until = time.monotonic() + ENDING
    while True:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # An abstract name isn't a file, and belongs to the network namespace, as the port does.
            held.bind(f"\0{channel.HELLO}:{port}")
            return held
        except OSError:
            held.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def listen(
    host: str, port: int, has_other_machines: bool = False
) -> tuple[socket.socket, socket.socket | None]:
    """Returns (a socket that listens at HOST:PORT, the socket of ``claim``).

    It listens at that address alone if possible. In these cases it listens on all addresses
    instead, and prints a note:

    - On this machine alone, the name stands for a loopback address such as 127.0.1.1.
    - This machine is behind NAT, and doesn't have the address itself.
    - The name is "localhost", by which Kubeflow calls rank 0's machine on that machine itself.

    Args:
        has_other_machines: whether ranks of other machines will connect.
    """
    with _claiming(host, port) as held:
        listener = _bound_socket("", port)
        # If the name is unknown, the listener stays as it is, and ``_greet`` raises the error.
        with contextlib.suppress(OSError):
            ip = socket.gethostbyname(host)
            # A loopback address counts only if the user named it, or if all ranks are on this machine.
            is_meant = host == ip or (host == "localhost" and not has_other_machines)
            if ip != "0.0.0.0" and (is_meant or not ip.startswith("127.")):
                listener.close()
                listener = _bound_socket(ip, port, instead="")
        if listener.getsockname()[0] == "0.0.0.0":
            print(
                f"note: other machines may not reach this one as {host}, so it listens on all its"
                " addresses (docs/evidence/guarantees.md, The network)",
                file=sys.stderr,
                flush=True,
            )
        listener.listen(1024)
    return listener, held


def _bound_socket(address: str, port: int, instead: str | None = None) -> socket.socket:
    """Returns a socket that is bound to the address, or to ``instead`` if this machine doesn't have
    that address.
    """
    bound = socket.socket()
    # Paddle's store sets this, too, and so gets the port while the meeting's connections stay open.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address, port))
    except OSError as error:
        bound.close()
        if instead is None or error.errno != errno.EADDRNOTAVAIL:
            raise
        return _bound_socket(instead, port)
    return bound


@contextlib.contextmanager
def _claiming(host: str, port: int) -> Iterator[socket.socket | None]:
    """Claims the port for the body. Raises InputError if that isn't possible, or if the body can't
    open the port.
    """
    held = None
    try:
        held = claim(port)
        yield held
    except OSError as error:
        if held:
            held.close()
        reason = f"can't be opened ({error.strerror})"
        if error.errno == errno.EADDRINUSE:
            reason = "is taken (by another run?)"
        raise InputError(f"port {port} on {host} {reason}; choose another MASTER_PORT") from None


def _verdict(connection: Channel, host: str, limit: float | None) -> list[str]:
    """Waits for rank 0's verdict, and returns the words after its "ok".

    Raises:
        InputError: the verdict begins with WRONG.
        RunError: it is another one, or the connection ended.
    """
    try:
        verdict = connection.wait(limit)
    except OSError:
        verdict = f"{host} ended before the run started; see its error message"
    first_word, _, rest = verdict.partition(" ")
    if first_word == WRONG:
        raise InputError(rest)
    if first_word != "ok":
        raise RunError(verdict, shared=True)
    return rest.split()


def _greet(
    hosts: Sequence[str],
    port: int,
    own_secret: bytes,
    greeting: str,
    limit: float,
    patience: float | None = None,
) -> tuple[Channel | None, str]:
    """Returns (the connection to rank 0, its answer to the greeting). If the other end didn't prove
    that it knows the secret, the connection is None.

    Args:
        hosts: names or addresses of rank 0's machine, which are tried in turn.
        own_secret: the user's secret.
        limit: seconds after which no further attempt is made.
        patience: seconds for each answer; None: ANSWER.

    Raises:
        OSError: the error of the last attempt, if there was no connection within ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    if patience is None:
        patience = ANSWER
    for host in itertools.cycle(hosts):
        connection = socket.socket()
        try:
            connection.settimeout(min(CONNECT, patience))
            connection.connect((host, port))
            # If nobody listens at a port of this machine, the system may connect a socket to
            # itself.
            if connection.getsockname() == connection.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            keep_alive(connection)
            introduced = channel.introduce(connection, own_secret, patience)
            if isinstance(introduced, str):
                connection.close()
                return None, introduced
            introduced.send(greeting)
            return introduced, introduced.wait(patience)
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
    answered: tuple[Channel | None, str], address: str, kind: str, party: str, limit: float
) -> tuple[Channel, str, str]:
    """Waits until all ranks have come. Returns the connection, the address at which rank 0 was
    reached, and the random part of the run's key.

    Args:
        answered: the return value of ``_greet``.
        limit: seconds that rank 0 waits for all ranks.

    Raises:
        InputError: the answer, or the verdict, is that something is wrong.
        RunError: not all ranks came.
    """
    connection, answer = answered
    if connection and answer == "wait":
        try:
            rank_0_address, key = _verdict(connection, f"{kind} 0 at {address}", limit + ANSWER)
        except RunError:
            connection.close()
            raise
        return connection, rank_0_address, key
    # An answer that came by a channel is authentic. Without a channel, any program may have sent
    # it.
    if connection:
        connection.close()
        if answer == "twice":
            raise _number_error(address, kind)
        if answer.startswith(f"{WRONG} "):
            raise InputError(answer.removeprefix(f"{WRONG} "))
        if answer.startswith("differs "):
            raise InputError(
                f"{kind} 0 at {address} waits for {answer.removeprefix('differs ')},"
                f" but this one belongs to {party}: another run uses the port (choose another"
                " MASTER_PORT), or not all were started with the same numbers",
                shared=False,
            )
    if answer == channel.OTHER_SECRET:
        raise InputError(
            f"{kind} 0 at {address} has a different secret than {socket.gethostname()};"
            f" {secret.advice_if_different(f'{kind} 0')}",
            shared=False,
        )
    # This is how another version of the toolkit answers to this version's greeting.
    if answer.startswith("differs "):
        raise InputError(
            f"{kind} 0 at {address} runs another version of this toolkit;"
            " install the same version on all machines",
            shared=False,
        )
    raise InputError(
        f"another run or program answers at {address}, not this run's {kind} 0;"
        " choose another MASTER_PORT",
        shared=False,
    )
