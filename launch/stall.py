"""Names an image that takes a process too long: its decoder can't be interrupted, and may hold the
interpreter's lock.

With DATA.NUM_WORKERS 0 a run's process reads images itself. It notes each one in memory that it
shares with a fork of its own, a small process that tells which image it is. Loader workers are
watched by the process that waits for them (``loading.workers``).
"""

import json
import math
import mmap
import multiprocessing
import os
import signal
import struct
import sys
import time
from typing import Any

from errors import Failure
from launch.signals import die_with_parent

# of DIST.TIMEOUT: the process that watches ranks would only say that they wait for data
SHARE = 0.8
GLOO = 25.0  # seconds; other ranks that wait by gloo give up after 30
SUSPENDED = 5.0  # seconds between two looks: after more, the processes were suspended
limit = math.inf  # seconds that an image may take
_HEAD = struct.Struct("dI")  # when it was begun (0: none is read), and the length of its name
_memory: mmap.mmap | None = None


def begin(timeout: float, by_gloo: bool) -> None:
    """Sets how long an image may take in this process and its workers.

    Args:
        timeout: DIST.TIMEOUT.
        by_gloo: whether other ranks wait for this one by gloo.
    """
    global limit
    limit = min(SHARE * timeout, GLOO if by_gloo else math.inf)


def watch(failed: Any = None) -> None:
    """Starts the process that watches this one, which reads images itself.

    Args:
        failed: as of ``errors.reporting``: where another process watches this one, that reports the
            image.
    """
    global _memory
    _memory = mmap.mmap(-1, mmap.PAGESIZE)
    given = _memory, limit, failed, os.getpid()
    multiprocessing.get_context("fork").Process(target=_watch, args=given, daemon=True).start()


def is_watched() -> bool:
    """Returns whether ``watch`` was called."""
    return _memory is not None


def note(name: str) -> None:
    """Notes that this process begins to read an image; "": it reads none from now on."""
    if _memory is None:
        return
    text = name.encode(errors="replace")[: mmap.PAGESIZE - _HEAD.size]
    _HEAD.pack_into(_memory, 0, 0.0, 0)
    _memory[_HEAD.size : _HEAD.size + len(text)] = text
    now = time.monotonic()
    _HEAD.pack_into(_memory, 0, now if name else 0.0, len(text))


def line(who: str, name: str) -> str:
    """Returns the error about an image that takes too long."""
    return f"no progress in {limit:.3g} s (DIST.TIMEOUT): {who} reads {name}; repair or remove it"


def _watch(memory: mmap.mmap, seconds: float, failed: Any, process: int) -> None:
    from launch.verdict import trouble

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    begun = looked = time.monotonic()
    while True:
        time.sleep(min(0.2, seconds / 10))
        before = looked
        looked = time.monotonic()
        if looked - before > SUSPENDED or trouble(process):
            begun = looked
        since, length = _HEAD.unpack_from(memory)
        if since and looked - max(since, begun) > seconds:
            name = memory[_HEAD.size : _HEAD.size + length].decode(errors="replace")
            text = f"error: {line(f'process {process}', name)}"
            if failed is None:
                print(text, file=sys.stderr, flush=True)
                os.kill(process, signal.SIGKILL)  # it handles no other signal now
            else:
                failed.value = failed.value or json.dumps(Failure(1, text, False)).encode()
            return
