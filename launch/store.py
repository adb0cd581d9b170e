"""Closes the listening socket of Paddle's store to new connections.

That store listens on all of a machine's addresses for the whole run, and answers anybody. Once all
ranks are connected, no other program needs it. Linux lets a process filter the packets of its own
sockets: this filter drops all of them. Established connections have their own sockets, which stay
as they are.
"""

import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

# seconds after which a rank tries again to connect, if Paddle's store didn't listen yet
AGAIN = 3.0
LISTENING = "0A"  # in /proc/net/tcp
SO_ATTACH_FILTER = 26  # asm-generic/socket.h: x86, ARM, POWER since 5.1
_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: of a packet, 0 bytes


def listeners() -> Iterator[socket.socket]:
    """Yields copies of this process's listening TCP sockets, and closes each copy."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
                inet = (
                    found.family in (socket.AF_INET, socket.AF_INET6)
                    and found.type == socket.SOCK_STREAM
                )
                if inet and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield found


def shut(found: socket.socket) -> bool:
    """Makes a listening socket accept no new connections; returns whether the kernel supports this."""
    program = ctypes.create_string_buffer(_NOTHING, len(_NOTHING))
    # struct sock_fprog: how many instructions, and where they are
    given = struct.pack("HP", 1, ctypes.addressof(program))
    try:
        found.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, given)
    except OSError:
        return False
    return True


def shut_store() -> bool:
    """Shuts Paddle's store if this process has it. Every rank has to be connected before. Returns
    False if the store is here and couldn't be shut.
    """
    ports = store_ports()
    return not [
        found for found in listeners() if found.getsockname()[1] in ports and not shut(found)
    ]


def store_ports() -> set[int]:
    """Returns the ports that the environment names, one of which is that of Paddle's store."""
    named = (
        os.environ.get("PADDLE_MASTER"),
        os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0],
    )
    return {
        int(port) for address in named if (port := (address or "").rpartition(":")[2]).isdigit()
    }


def wait_for_store() -> None:
    """Waits until Paddle's store listens, if rank 0 is on this machine: a rank that is early loses
    AGAIN seconds.
    """
    hosts = [
        os.environ.get(name, "").partition(":")[0]
        for name in ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")
    ]
    until = time.monotonic() + AGAIN * (
        hosts[0] == hosts[1] and os.environ.get("PADDLE_TRAINER_ID") != "0"
    )
    while time.monotonic() < until and not store_ports() & listening_ports():
        time.sleep(0.005)


def listening_ports() -> set[int]:
    """Returns the TCP ports at which processes of this machine (of this network namespace) wait for
    connections.
    """
    ports = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with contextlib.suppress(OSError):
            rows = [row.split() for row in table.read_text().splitlines()[1:]]
            ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENING}
    return ports
