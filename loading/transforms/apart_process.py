"""The process of ``loading/transforms/apart.py``: reads image files from stdin, and writes their pixels to stdout.

It is started by its path and imports Pillow alone, so it takes 20 MB and a tenth of a second.
"""

import ctypes
import io
import json
import os
import resource
import struct
import sys
import time
from typing import BinaryIO

HEAD = struct.Struct("<I")  # bytes of a message's head, which is JSON; its "size" tells what follows
_PAGE = resource.getpagesize()


def write_message(file: BinaryIO, head: dict, content: bytes = b"") -> None:
    """Writes a head and ``content``."""
    text = json.dumps(head | {"size": len(content)}).encode()
    file.write(HEAD.pack(len(text)) + text)
    file.write(content)
    file.flush()


def _read_message(file: BinaryIO) -> tuple[dict, bytes] | None:
    """Returns a head and what follows it; None at the end."""
    start = file.read(HEAD.size)
    if len(start) < HEAD.size:
        return None
    head = json.loads(file.read(HEAD.unpack(start)[0]))
    return head, file.read(head["size"])


def _main() -> None:
    end_with_parent, kill = 1, 9
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(end_with_parent, kill)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = sys.argv[1:]
    # Libraries print to the descriptors 1 and 2, so answers get another one.
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    while (message := _read_message(sys.stdin.buffer)) is not None:
        request, data = message
        try:
            _limit(request["seconds"], request["memory"])
            image = Image.open(io.BytesIO(data), formats=[request["kind"]])
            image.load()
            if image.mode in ("P", "PA"):
                image = image.convert("RGB")
            answer, pixels = {"mode": image.mode, "shown": image.size}, image.tobytes()
        except MemoryError:
            answer, pixels = {"memory": True}, b""
        except Exception as error:
            answer, pixels = {"error": f"{type(error).__name__}: {error}"[:200]}, b""
        _limit(None, None)
        write_message(answers, answer, pixels)


def _limit(seconds: int | None, memory: int | None) -> None:
    """Limits what this process may use from now on; None: no more than at its start."""
    most = {resource.RLIMIT_CPU: resource.RLIM_INFINITY, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    if seconds is not None:
        most[resource.RLIMIT_CPU] = int(time.process_time()) + 1 + seconds
    if memory is not None and sys.platform == "linux":
        with open("/proc/self/statm") as file:
            most[resource.RLIMIT_AS] = int(file.read().split()[0]) * _PAGE + memory
    for what, soft in most.items():
        _, hard = resource.getrlimit(what)
        if hard != resource.RLIM_INFINITY:
            soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(what, (soft, hard))


if __name__ == "__main__":
    _main()
