"""The program of the process that ``loading/transforms/isolated.py`` starts.

It reads image files from stdin and writes their pixels to stdout. It is started by its path and
imports Pillow alone, so it takes 20 MB and a tenth of a second.
"""

import io
import os
import resource
import select
import signal
import struct
import sys
import time

# A request: format, seconds, bytes of memory, bytes of the file. The file follows.
REQUEST = struct.Struct("<8sQQQ")
# An answer: outcome, mode, width, height, bytes of the content. The content follows.
ANSWER = struct.Struct("<B8sIIQ")
# The outcomes. Their content: the pixels, the text of the error, nothing.
DECODED = 0
FAILED = 1
TOO_MUCH_MEMORY = 2

# Seconds between two looks at whether the parent process lives.
_PARENT_INTERVAL = 2.0
# The soft limits of this process at its start.
_INITIAL_LIMITS = {
    kind: resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS)
}
_PAGE = resource.getpagesize()


def _main() -> None:
    parent = int(sys.argv[1])
    sys.path[:] = sys.argv[2:]
    # The limit on CPU time ends a process by SIGXCPU. A loader's worker ignores this signal, a
    # server's blocks it, and both states are inherited.
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Libraries print to the descriptors 1 and 2, so answers get another one.
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    while True:
        # The pipe doesn't always end with the parent: another process that was forked from it may
        # hold it open.
        while not select.select([0], [], [], _PARENT_INTERVAL)[0]:
            if os.getppid() != parent:
                return
        head = sys.stdin.buffer.read(REQUEST.size)
        if len(head) < REQUEST.size:
            return
        kind, seconds, memory, length = REQUEST.unpack(head)
        data = sys.stdin.buffer.read(length)
        mode = ""
        size = (0, 0)
        try:
            _limit(seconds, memory)
            image = Image.open(io.BytesIO(data), formats=[kind.rstrip(b"\0").decode()])
            image.load()
            if image.mode in ("P", "PA"):
                image = image.convert("RGB")
            content = image.tobytes()
            outcome = DECODED
            mode = image.mode
            size = image.size
        except MemoryError:
            outcome = TOO_MUCH_MEMORY
            content = b""
        except Exception as error:
            outcome = FAILED
            content = f"{type(error).__name__}: {error}"[:200].encode(errors="replace")
        _limit(None, None)
        answers.write(ANSWER.pack(outcome, mode.encode(), *size, len(content)))
        answers.write(content)
        answers.flush()
        # The memory is free before the next file comes.
        image = None
        data = b""
        content = b""


def _limit(seconds: int | None, memory: int | None) -> None:
    """Limits the CPU time and the memory that this process may use from now on.

    Args:
        seconds, memory: how much more; None: as much as at the start of the process.
    """
    limits = dict(_INITIAL_LIMITS)
    if seconds is not None:
        total = int(time.process_time()) + 1 + seconds
        limits[resource.RLIMIT_CPU] = _lower(limits[resource.RLIMIT_CPU], total)
    # Elsewhere than in Linux there is no /proc, and memory isn't limited.
    if memory is not None and sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * _PAGE
        limits[resource.RLIMIT_AS] = _lower(limits[resource.RLIMIT_AS], used + memory)
    for kind, soft in limits.items():
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


def _lower(initial: int, wanted: int) -> int:
    """Returns the lower one of two limits, of which the first may be infinite."""
    return wanted if initial == resource.RLIM_INFINITY else min(initial, wanted)


if __name__ == "__main__":
    _main()
