"""How the processes of a launched run find one another, before Paddle does.

Paddle's own start (its TCPStore, in 3.3.1 and 2.6.2) tries an address that doesn't answer for ever, hangs where another
program listens there, and waits 900 s for a rank that never comes, without naming it. So the ranks first meet at the
same address: rank 0 listens, each tells its number, and all hear what came of it. Then the port is Paddle's.
"""

import contextlib
import errno
import fcntl
import os
import socket
import struct
import sys
import threading
import time

from errors import InputError, RunError

GREETING = "paddle-vit-toolkit"
CONNECT, ANSWER, STRANGER = 5.0, 10.0, 2.0  # seconds: to connect, for rank 0's first word, for a guest's
LIMITS = {"rank": "DIST.INIT_TIMEOUT", "node": "INIT_TIMEOUT"}  # what sets the limit


def meet(
    address: str,
    place: int,
    count: int,
    limit: float,
    job: str = "",
    kind: str = "rank",
    here: int = 1,
    first: bool = True,
) -> str:
    """Waits until all ``count`` ranks have come to ``address``.

    Args:
        address: HOST:PORT at rank 0, a name or IPv4: Paddle's store takes no IPv6.
        place: this rank's number.
        limit: seconds.
        job: what tells this run from another; the same on all ranks.
        kind: "rank", or "node" where it is machines that meet.
        here: the number of ranks on this machine, for which the ``first`` speaks where nothing answers.

    Returns:
        this machine's IPv4 address, as rank 0's machine reaches it.

    Raises:
        InputError: the address is none, its port is taken, or two ranks contradict each other.
        RunError: nothing answered, or not all ranks came.
    """
    host, port = _parsed(address)
    party = f"{count} {kind}s{f' of job {job}' if job else ''}"
    reception = None
    if place == 0:
        given = (_listen(host, port), party, count, limit, kind)
        reception = threading.Thread(target=_receive, args=given, daemon=True)
        reception.start()
        print(f"{kind} 0 waits at {address} for {count - 1} more", file=sys.stderr, flush=True)
    try:
        connection, answer = _attend(host, port, f"{GREETING} {party} {place}\n", ANSWER if place == 0 else limit)
    except OSError as error:
        reason, machine = error.strerror or str(error), socket.gethostname()
        if place == 0:  # it listens: what doesn't answer is the address
            found = f"{kind} 0 runs on {machine}, which doesn't reach itself as {address} ({reason})"
            raise InputError(f"{found}; MASTER_ADDR has to be an address of that machine") from None
        waiting = f"{here} ranks of {machine} wait" if here > 1 else f"{kind} {place} on {machine} waits"
        found = f"no {kind} 0 answered at {address} in {limit:g} s ({reason}; {LIMITS[kind]}), where {waiting} for it"
        advice = "start it there, correct MASTER_ADDR and MASTER_PORT, or let the firewall pass the port"
        raise RunError(f"{found}; {advice}", shared=not first) from None
    with connection:
        _understand(connection, answer, address, kind, party, limit)
        own = connection.getsockname()[0]
    if reception:
        reception.join()  # the port is free
    return own


def interface(address: str) -> str | None:
    """Returns the name of this machine's network interface that has the IPv4 address."""
    get_address = 0x8915  # SIOCGIFADDR
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):  # it has none
            found = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or ":" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"the master's address is {address!r}; expected HOST:PORT, a name or IPv4 and 1 to 65535")
    return host, int(port)


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


def _receive(listener: socket.socket, party: str, count: int, limit: float, kind: str) -> None:
    """Rank 0's part: hears who comes, then tells all of them what came of it."""
    guests: dict[int, socket.socket] = {}
    deadline = time.monotonic() + limit
    with contextlib.ExitStack() as connections:
        while len(guests) < count and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError, ValueError):  # nobody came in time; a stranger, or one that left
                listener.settimeout(left)
                connection = connections.enter_context(listener.accept()[0])
                greeting, *theirs, place = _line(connection, STRANGER).split(" ")
                if greeting != GREETING:
                    continue
                if " ".join(theirs) != party:
                    answer = f"differs {party}"
                elif int(place) in guests:
                    answer = "twice"
                else:
                    answer, guests[int(place)] = "wait", connection
                connection.sendall(f"{answer}\n".encode())
        listener.close()  # before anybody goes on to look for Paddle there
        missing = [place for place in range(count) if place not in guests]
        verdict = "ok"
        if missing:
            named = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            found = f"{kind} {named} of {count} didn't come in {limit:g} s ({LIMITS[kind]})"
            verdict = f"{found}; start what is missing, or see what it said"
        for connection in guests.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{verdict}\n".encode())


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
            connection.sendall(hello.encode())
            return connection, _line(connection, ANSWER, silence="")
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise error
            time.sleep(0.2)


def _understand(connection: socket.socket, answer: str, address: str, kind: str, party: str, limit: float) -> None:
    """Returns when all ranks have come."""
    if answer == "wait":
        try:
            answer = _line(connection, limit + ANSWER)
        except OSError:
            raise RunError(f"{kind} 0 at {address} ended while others came; it says why", shared=True) from None
        if answer != "ok":
            raise RunError(answer, shared=True)
    elif answer == "twice":
        raise InputError(f"one of the same number came to {address} before; each {kind} needs its own", shared=False)
    elif answer.startswith("differs "):
        found = f"at {address} meet {answer.removeprefix('differs ')}, this is one of {party}"
        advice = "another run has the port (choose another MASTER_PORT), or this one was started with other numbers"
        raise InputError(f"{found}: {advice}", shared=False)
    else:
        found = f"another run or program answers at {address}, not this run's {kind} 0"
        raise InputError(f"{found}; choose another MASTER_PORT", shared=False)


def _line(connection: socket.socket, limit: float, silence: str | None = None) -> str:
    """Returns the line (up to 1000 bytes) that comes next, or ``silence`` if that is given and none comes.

    Raises:
        OSError: nothing came within ``limit`` seconds, or the connection was closed.
    """
    connection.settimeout(limit)
    said = b""
    while not said.endswith(b"\n") and len(said) < 1000:
        try:
            byte = connection.recv(1)
        except TimeoutError:
            if silence is None:
                raise
            return silence
        if not byte:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        said += byte
    return said.decode(errors="replace").rstrip()
