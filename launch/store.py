"""Waits for Paddle's store, through which ranks exchange addresses, and later closes it to others.

The store listens on all of a machine's addresses for the whole run, and answers any program. Once
all ranks are connected, nobody else needs it. Linux lets a process filter the packets of its own
sockets, and the filter here drops all that come to the listening socket. Established connections
have sockets of their own, which stay as they are.
"""

import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

# Seconds after which a rank tries again to connect, if Paddle's store didn't listen yet.
AGAIN = 3.0
# the state of a listening socket in /proc/net/tcp
LISTENING = "0A"
# from asm-generic/socket.h: x86, ARM, and POWER since Linux 5.1
SO_ATTACH_FILTER = 26
# The filter: BPF_RET | BPF_K, which keeps 0 bytes of a packet.
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)


def listeners() -> Iterator[socket.socket]:
    """Yields copies of this process's listening TCP sockets, and closes each copy."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            # A descriptor that isn't a socket raises an OSError.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
                is_inet = copy.family in (socket.AF_INET, socket.AF_INET6)
                is_tcp = is_inet and copy.type == socket.SOCK_STREAM
                if is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield copy


def shut(listener: socket.socket) -> bool:
    """Makes a socket accept no new connections. Returns whether the kernel supports this."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    # struct sock_fprog: the number of instructions, and their address
    description = struct.pack("HP", 1, ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, description)
    except OSError:
        return False
    return True


def shut_store() -> bool:
    """Shuts Paddle's store if it runs in this process. Every rank has to be connected before.

    Returns False if the store is in this process and couldn't be shut.
    """
    ports = store_ports()
    # Each is closed when the next one is yielded.
    results = [shut(copy) for copy in listeners() if copy.getsockname()[1] in ports]
    return all(results)


def store_ports() -> set[int]:
    """Returns the ports that the variables name; Paddle's store has one of them."""
    addresses = (
        os.environ.get("PADDLE_MASTER", ""),
        os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0],
    )
    ports = [address.rpartition(":")[2] for address in addresses]
    return {int(port) for port in ports if port.isdigit()}


def wait_for_store() -> None:
    """Waits until Paddle's store listens, if rank 0 is on this machine. A rank that tries too early
    would lose AGAIN seconds.
    """
    first_host = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").partition(":")[0]
    own_host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "").partition(":")[0]
    if first_host != own_host or os.environ.get("PADDLE_TRAINER_ID") == "0":
        return
    until = time.monotonic() + AGAIN
    while time.monotonic() < until and not store_ports() & listening_ports():
        time.sleep(0.005)


def listening_ports() -> set[int]:
    """Returns the TCP ports at which processes of this machine or network namespace listen."""
    ports = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with contextlib.suppress(OSError):
            rows = [row.split() for row in table.read_text().splitlines()[1:]]
            ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENING}
    return ports
