"""The process of ``loading/transforms/isolated.py``: reads image files from stdin, and writes their
pixels to stdout.

It is started by its path and imports Pillow alone, so it takes 20 MB and a tenth of a second.
"""

import io
import os
import resource
import select
import signal
import struct
import sys
import time

# format, seconds, bytes of memory, bytes of the file, which follows
REQUEST = struct.Struct("<8sQQQ")
ANSWER = struct.Struct("<B8sIIQ")  # one of these, mode, width, height, bytes of what follows
DECODED, FAILED, TOO_MUCH_MEMORY = range(3)  # pixels, or the error's text, or nothing follows
_LOOK = 2.0  # seconds between two looks at whether the parent lives
_AT_START = {
    what: resource.getrlimit(what)[0] for what in (resource.RLIMIT_CPU, resource.RLIMIT_AS)
}
_PAGE = resource.getpagesize()


def _main() -> None:
    parent, sys.path[:] = int(sys.argv[1]), sys.argv[2:]
    # A loader's worker ignores the signal of the limit on CPU time, a server's blocks it: both are
    # inherited.
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
        # Another process that was forked meanwhile may hold the pipe open after its end.
        while not select.select([0], [], [], _LOOK)[0]:
            if os.getppid() != parent:
                return
        head = sys.stdin.buffer.read(REQUEST.size)
        if len(head) < REQUEST.size:
            return
        kind, seconds, memory, size = REQUEST.unpack(head)
        data = sys.stdin.buffer.read(size)
        mode = ""
        shown = (0, 0)
        try:
            _limit(seconds, memory)
            image = Image.open(io.BytesIO(data), formats=[kind.rstrip(b"\0").decode()])
            image.load()
            if image.mode in ("P", "PA"):
                image = image.convert("RGB")
            what = DECODED
            content = image.tobytes()
            mode = image.mode
            shown = image.size
        except MemoryError:
            what = TOO_MUCH_MEMORY
            content = b""
        except Exception as error:
            what = FAILED
            content = f"{type(error).__name__}: {error}"[:200].encode(errors="replace")
        _limit(None, None)
        answers.write(ANSWER.pack(what, mode.encode(), *shown, len(content)))
        answers.write(content)
        answers.flush()
        image = data = content = None


def _limit(seconds: int | None, memory: int | None) -> None:
    """Limits what this process may use from now on; None: no more than at its start."""
    most = dict(_AT_START)
    if seconds is not None:
        most[resource.RLIMIT_CPU] = _least(
            _AT_START[resource.RLIMIT_CPU], int(time.process_time()) + 1 + seconds
        )
    if memory is not None and sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * _PAGE
        most[resource.RLIMIT_AS] = _least(_AT_START[resource.RLIMIT_AS], used + memory)
    for what, soft in most.items():
        resource.setrlimit(what, (soft, resource.getrlimit(what)[1]))


def _least(limit: int, own: int) -> int:
    return own if limit == resource.RLIM_INFINITY else min(limit, own)


if __name__ == "__main__":
    _main()
