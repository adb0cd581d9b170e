"""The program of the processes that ``loading/transforms/isolated.py`` and ``video.py`` start.

It is started by its path. For images it reads files from stdin and writes their pixels to stdout.
It imports Pillow alone, so it takes 20 MB and a tenth of a second. For a video it gets an open
file, imports OpenCV, and writes the frames that stdin asks for.
"""

import array
import io
import math
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any

# A request: format, seconds, bytes of memory, bytes of the file. The file follows.
REQUEST = struct.Struct("<8sQQQ")
# An answer: outcome, mode, width, height, bytes of the content. The content follows.
ANSWER = struct.Struct("<B8sIIQ")
# The outcomes. Their content: the pixels, the text of the error, nothing.
DECODED = 0
FAILED = 1
TOO_MUCH_MEMORY = 2
# A request to the process of a video: TIMES and the seconds between frames, or FRAME, its time and
# the pixels that it may have. The content of the answer: the times as doubles, or the pixels.
VIDEO_REQUEST = struct.Struct("<BdQ")
TIMES = 0
FRAME = 1

# The memory and the CPU time that a video may take: some, more by the size of its frames, and more
# for each frame.
_VIDEO_BYTES = 512 << 20
_VIDEO_BYTES_PER_PIXEL = 64
_VIDEO_SECONDS = 10
_VIDEO_FILE_PER_SECOND = 10_000_000
_VIDEO_PIXELS_PER_SECOND = 10_000_000
# Two times of a frame differ by rounding, up to so many seconds.
_SAME_TIME = 0.0006
_MOST_TIMES = 1_000_000
# Seconds between two looks at whether the parent process lives.
_PARENT_INTERVAL = 2.0
# The soft limits of this process at its start.
_INITIAL_LIMITS = {
    kind: resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS)
}
_PAGE = resource.getpagesize()


def _main() -> None:
    parent = int(sys.argv[1])
    # "" for images, or the descriptor of a video.
    video = sys.argv[2]
    sys.path[:] = sys.argv[3:]
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

    if video:
        _serve_video(int(video), parent, answers)
    else:
        _serve_images(parent, answers)


def _request(form: struct.Struct, parent: int) -> tuple[Any, ...]:
    """Returns the numbers of the next request. The process ends with its parent."""
    # The pipe doesn't always end with the parent: another process that was forked from it may hold
    # it open.
    while not select.select([0], [], [], _PARENT_INTERVAL)[0]:
        if os.getppid() != parent:
            sys.exit()
    head = sys.stdin.buffer.read(form.size)
    if len(head) < form.size:
        sys.exit()
    return form.unpack(head)


def _serve_images(parent: int, answers: Any) -> None:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    while True:
        kind, seconds, memory, length = _request(REQUEST, parent)
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


def _serve_video(descriptor: int, parent: int, answers: Any) -> None:
    video = None
    while True:
        kind, value, most = _request(VIDEO_REQUEST, parent)
        size = (0, 0)
        outcome = DECODED
        try:
            if video is None:
                video = _Video(descriptor, parent, is_decoded=kind == FRAME)
            if kind == TIMES:
                content = video.times(value)
            else:
                size, content = video.frame(value, most)
        except MemoryError:
            outcome = TOO_MUCH_MEMORY
            content = b""
        except ValueError as error:
            outcome = FAILED
            content = str(error).encode()
        except Exception as error:
            outcome = FAILED
            text = " ".join(f"{type(error).__name__}: {error}".split())
            content = f"can't be read as a video ({text[:160]})".encode(errors="replace")
        answers.write(ANSWER.pack(outcome, b"RGB", *size, len(content)))
        answers.write(content)
        answers.flush()


class _Video:
    """A video that is read once, from its beginning on.

    Args:
        descriptor: of its file.
        parent: the process for which it is read.
        is_decoded: whether frames are wanted, and not the times of the packets alone.
    """

    def __init__(self, descriptor: int, parent: int, is_decoded: bool) -> None:
        import cv2  # pyright: ignore[reportMissingImports]: an extra

        self._cv2 = cv2
        self._parent = parent
        self._used = _used_memory()
        self._seconds = _VIDEO_SECONDS + os.fstat(descriptor).st_size / _VIDEO_FILE_PER_SECOND
        self._start = time.process_time()
        self._limit(0)
        # Opening takes one descriptor. A video that is a list of files or addresses gets no more.
        free = os.dup(descriptor)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))
        options = [cv2.CAP_PROP_N_THREADS, 1]
        if not is_decoded:
            options += [cv2.CAP_PROP_FORMAT, -1]
        self._capture = cv2.VideoCapture(f"/dev/fd/{descriptor}", cv2.CAP_FFMPEG, options)
        if not self._capture.isOpened():
            raise ValueError("can't be read as a video")
        width, height = (
            int(self._capture.get(side))
            for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
        )
        self._size = (width, height)
        self._pixels = width * height if is_decoded else 0
        # The time of the last frame that was read.
        self._time = -math.inf

    def _limit(self, pixels: int) -> None:
        memory = self._used + _VIDEO_BYTES + _VIDEO_BYTES_PER_PIXEL * pixels
        for kind, wanted in (
            (resource.RLIMIT_CPU, int(self._start + self._seconds) + 1),
            (resource.RLIMIT_AS, memory),
        ):
            soft = _lower(_INITIAL_LIMITS[kind], wanted)
            if kind == resource.RLIMIT_CPU or sys.platform == "linux":
                resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))

    def _next(self) -> bool:
        """Reads the next frame; returns whether there is one."""
        if os.getppid() != self._parent:
            sys.exit()
        self._seconds += self._pixels / _VIDEO_PIXELS_PER_SECOND
        self._limit(self._pixels)
        if not self._capture.grab():
            return False
        seconds = self._capture.get(self._cv2.CAP_PROP_POS_MSEC) / 1000
        self._time = max(0.0, seconds) if math.isfinite(seconds) else 0.0
        return True

    def times(self, every: float) -> bytes:
        """Returns the time of the first frame of each ``every`` seconds, in seconds, as doubles."""
        # Packets aren't in the order of their times.
        first: dict[int, float] = {}
        while self._next():
            part = math.floor((self._time + _SAME_TIME) / every)
            first[part] = min(first.get(part, self._time), self._time)
            if len(first) > _MOST_TIMES:
                raise ValueError(f"it has more than {_MOST_TIMES} frames to predict")
        if not first:
            raise ValueError("it has no frames")
        return array.array("d", (first[part] for part in sorted(first))).tobytes()

    def frame(self, seconds: float, most: int) -> tuple[tuple[int, int], bytes]:
        """Returns the (width, height) and the pixels of the frame at a time, in RGB."""
        width, height = self._size
        if width * height > most:
            raise ValueError(f"it has {width} x {height} pixels, DATA.MAX_PIXELS is {most}")
        while self._time < seconds - _SAME_TIME:
            if not self._next():
                raise ValueError("it is damaged: the frame can't be decoded")
        if self._time > seconds + _SAME_TIME:
            raise ValueError("it is damaged: the frame can't be decoded")
        is_there, pixels = self._capture.retrieve()
        if not is_there:
            raise ValueError("it is damaged: the frame can't be decoded")
        return (pixels.shape[1], pixels.shape[0]), pixels[:, :, ::-1].tobytes()


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
        limits[resource.RLIMIT_AS] = _lower(limits[resource.RLIMIT_AS], _used_memory() + memory)
    for kind, soft in limits.items():
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


def _used_memory() -> int:
    """Returns the bytes of this process's address space; 0 where there is no /proc."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * _PAGE


def _lower(initial: int, wanted: int) -> int:
    """Returns the lower one of two limits, of which the first may be infinite."""
    return wanted if initial == resource.RLIM_INFINITY else min(initial, wanted)


if __name__ == "__main__":
    _main()
