"""Names an image whose reading takes too long. The decoder can't be interrupted, and it may hold
the interpreter's lock, so another process has to do this.

With DATA.NUM_WORKERS 0, a run's process reads images itself. It notes the name of each one in
memory that it shares with a fork of its own, and this fork watches the time. Loader workers are
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

# The share of DIST.TIMEOUT that an image may take. After the whole timeout, the process that
# watches ranks would end the run, and its message could only say that they wait for data.
SHARE = 0.8
# Seconds that an image may take if other ranks wait in gloo, which gives up after 30.
GLOO = 25.0
# If more seconds than these pass between two checks, the processes were suspended.
SUSPENDED = 5.0
# seconds that an image may take
limit = math.inf
# when the image was begun (0: none is being read), and the length of its name, which follows
_HEAD = struct.Struct("dI")
_memory: mmap.mmap | None = None


def begin(timeout: float, by_gloo: bool) -> None:
    """Sets how long an image may take in this process and its workers.

    Args:
        timeout: DIST.TIMEOUT.
        by_gloo: whether other ranks wait for this one in gloo.
    """
    global limit
    limit = SHARE * timeout
    if by_gloo:
        limit = min(limit, GLOO)


def watch(failed: Any = None) -> None:
    """Starts the process that watches how long this one reads an image.

    Args:
        failed: where a failure is left for the process that watches this rank, as in
            ``errors.reporting``; None: no process does.
    """
    global _memory
    _memory = mmap.mmap(-1, mmap.PAGESIZE)
    arguments = _memory, limit, failed, os.getpid()
    multiprocessing.get_context("fork").Process(target=_watch, args=arguments, daemon=True).start()


def is_watched() -> bool:
    """Returns whether ``watch`` was called."""
    return _memory is not None


def note(name: str) -> None:
    """Notes that this process begins to read an image; "": it reads none from now on."""
    if _memory is None:
        return
    text = name.encode(errors="replace")[: mmap.PAGESIZE - _HEAD.size]
    # While the name is written, no image is being read.
    _HEAD.pack_into(_memory, 0, 0.0, 0)
    _memory[_HEAD.size : _HEAD.size + len(text)] = text
    now = time.monotonic()
    _HEAD.pack_into(_memory, 0, now if name else 0.0, len(text))


def line(who: str, name: str) -> str:
    """Returns the error message about an image ``name`` that takes ``who`` too long."""
    return (
        f"no progress in {limit:.3g} s (DIST.TIMEOUT): {who} is reading {name}; repair or remove it"
    )


def _watch(memory: mmap.mmap, seconds: float, failed: Any, process: int) -> None:
    from launch.verdict import trouble

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resumed = now = time.monotonic()
    while True:
        time.sleep(min(0.2, seconds / 10))
        before = now
        now = time.monotonic()
        # The time in which a process is suspended doesn't count.
        if now - before > SUSPENDED or trouble(process):
            resumed = now
        since, length = _HEAD.unpack_from(memory)
        if since and now - max(since, resumed) > seconds:
            name = memory[_HEAD.size : _HEAD.size + length].decode(errors="replace")
            text = f"error: {line(f'process {process}', name)}"
            if failed is None:
                print(text, file=sys.stderr, flush=True)
                # It handles no other signal while it decodes.
                os.kill(process, signal.SIGKILL)
            else:
                failed.value = failed.value or json.dumps(Failure(1, text, False)).encode()
            return
