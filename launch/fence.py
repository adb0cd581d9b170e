"""Closes a listening socket of this process to whoever comes from now on, though it isn't ours: Paddle's store.

That store listens on all of a machine's addresses for the whole run and answers anybody. Once all ranks are connected
nobody else has business there. Linux lets a process filter what comes to its own sockets: this filter passes nothing.
Connections that stand keep their own.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

SO_ATTACH_FILTER = 26  # asm-generic/socket.h: x86, ARM, POWER since 5.1
_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: of a packet, 0 bytes


def listeners() -> Iterator[socket.socket]:
    """Yields copies of this process's listening TCP sockets, which are closed again."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
                inet = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                if inet and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield found


def shut(found: socket.socket) -> bool:
    """Lets nobody connect to a listening socket any more; returns whether the kernel could."""
    program = ctypes.create_string_buffer(_NOTHING, len(_NOTHING))
    # struct sock_fprog: how many instructions, and where they are
    given = struct.pack("HP", 1, ctypes.addressof(program))
    try:
        found.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, given)
    except OSError:
        return False
    return True


def shut_store() -> bool:
    """Shuts Paddle's store, where it is this process's; every rank has to be connected. Returns whether all that was
    found could be shut.
    """
    named = os.environ.get("PADDLE_MASTER"), os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
    ports = {int(port) for address in named if (port := (address or "").rpartition(":")[2]).isdigit()}
    return not [found for found in listeners() if found.getsockname()[1] in ports and not shut(found)]
