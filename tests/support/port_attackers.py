"""Attackers of a run's ports: silent, many, slow, malformed, and ones that replay old messages."""

import contextlib
import itertools
import json
import os
import re
import resource
import socket
import struct
import time
from pathlib import Path

from launch import channel
from launch.rendezvous import addresses

HELLO = f"{channel.HELLO} {channel.VERSION} {'ab' * 32} -\n".encode()
GREETING = {"party": "2 ranks", "place": 1, "gpu": "", "machine": "host"}
# A rank's greeting of an earlier meeting, as an attacker may have recorded it.
REPLAYED = f"{'cd' * 32} {json.dumps(GREETING)}\n".encode()
WORDS = [
    b"GET / HTTP/1.0\r\n\r\n", b"?\n", b"\xff \n", b"\0" * 5000, b"[" * 200_000 + b"\n", b"{" * 200_000, b"\n" * 1000,
    f"{channel.HELLO} 2 ranks 1 @host\n".encode(), f"{channel.HELLO} 2 ranks 99999999999999999999 @host\n".encode(),
    f"{channel.HELLO} 1500 ranks 1 @host\n".encode(), f"{channel.HELLO} {channel.VERSION} {'zz' * 32} -\n".encode(),
    HELLO + REPLAYED, HELLO + b"x" * 1_000_000 + b"\n", HELLO, f"{'0' * 64} {{}}\n".encode(), b"challenge\n", b"wait\n",
    struct.pack("<iQ", 3, 1 << 62), struct.pack("<i", 5), b"\0" * 64, bytes(range(256)),
]  # fmt: skip


def listening(pids):
    """{(address, port): pid} of the ports on which these processes listen, by /proc."""
    found = {}
    sockets = {}
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[fields[9]] = fields[1]
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inode = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                    if inode and inode[1] in sockets:
                        address, _, port = sockets[inode[1]].rpartition(":")
                        found[
                            socket.inet_ntoa(bytes.fromhex(address)[::-1][-4:]), int(port, 16)
                        ] = pid
    return found


def attack(targets, ended, done):
    """Attacks until ``ended`` is set.

    Args:
        targets: returns the ports to attack now.
        done: shared counters of attempts, of accepted connections and of the most open ones.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096) if hard > 0 else 4096, hard))
    ways = itertools.cycle([_say, _many, _slowly, _say, _half, _reset, _answered, _say])
    held = []
    words = itertools.cycle(WORDS)
    while not ended.is_set():
        for port in targets():
            for address in {"127.0.0.1", *addresses().values()}:
                with contextlib.suppress(OSError):
                    done[0] += 1
                    next(ways)((address, port), held, next(words))
                    done[1] += 1
        done[2] = max(done[2], len(held))
        while len(held) > 1500:
            held.pop(0).close()
        for slow in held[-20:]:
            with contextlib.suppress(OSError):
                slow.send(b"p")
        time.sleep(0.01)


def _connected(address):
    found = socket.socket()
    found.settimeout(0.05)
    found.connect(address)
    return found


def _say(address, held, words):
    held.append(_connected(address))
    held[-1].sendall(words)


def _many(address, held, words):
    for _ in range(100):
        found = socket.socket()
        found.setblocking(False)
        held.append(found)
        found.connect_ex(address)


def _slowly(address, held, words):
    held.append(_connected(address))


def _half(address, held, words):
    held.append(_connected(address))
    held[-1].sendall(words[:20])
    held[-1].shutdown(socket.SHUT_WR)


def _reset(address, held, words):
    with _connected(address) as found:
        found.sendall(words[:20])
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _answered(address, held, words):
    """Answers a challenge with the proof of another secret, or with an earlier meeting's."""
    found = _connected(address)
    held.append(found)
    proved = channel.introduce(found, b"another", 1.0)
    if isinstance(proved, channel.Channel):
        if len(held) % 2:
            proved.send(json.dumps(GREETING))
        else:
            found.sendall(REPLAYED)
