"""Frames of videos, which are decoded in a separate process with limits of time and memory.

OpenCV decodes them, by FFmpeg. A process (``isolated_process``) reads one video, from its beginning
on, so only one frame is in memory. It can't open a second file or a connection, as a playlist would
ask for.

A frame is named by its video and its time in seconds: "clip.mp4#12.0".
"""

import atexit
import contextlib
import os
import re
import signal
import struct
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from errors import InputError, RunError, Unreadable, install, open_file, printable
from loading.transforms import isolated_process
from loading.transforms.formats import check_size
from loading.transforms.isolated_process import (
    ANSWER,
    FAILED,
    FRAME,
    TIMES,
    TOO_MUCH_MEMORY,
    VIDEO_REQUEST,
)

SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
_FRAME = re.compile(
    rf"(.+(?:{'|'.join(map(re.escape, SUFFIXES))}))#([0-9]{{1,9}}\.[0-9]{{1,3}})", re.I
)
# How files of these formats begin.
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
_MATROSKA = b"\x1a\x45\xdf\xa3"


def is_video(path: str) -> bool:
    """Returns whether a file's name ends as that of a video does."""
    return path.lower().endswith(SUFFIXES)


def check_installed() -> None:
    """Raises InputError unless OpenCV is installed."""
    if find_spec("cv2") is None:
        raise InputError(f"frames of videos need OpenCV; {install('video')}")


def frame_name(path: str, seconds: float) -> str:
    """Returns the name of the frame of a video at a time."""
    return f"{path}#{round(float(seconds), 3)}"


def frame_of(name: str) -> tuple[str, float] | None:
    """Returns (the video, the seconds) of a frame's name; None: it isn't one, or a file has it."""
    match = _FRAME.fullmatch(name)
    if match is None or os.path.lexists(name):
        return None
    return match[1], float(match[2])


def frame_times(path: str, every: float) -> np.ndarray:
    """Returns the times of the first frame of each ``every`` seconds of a video, in seconds.

    The times are those in the file, so frames may have any distances. Nothing is decoded.

    Raises:
        Unreadable, OSError, RunError: it can't be read.
    """
    reader = _Reader(path)
    try:
        return np.frombuffer(reader.answer(TIMES, every, 0).content, np.float64)
    finally:
        reader.end()


def frame(path: str, seconds: float, most: int) -> Image.Image:
    """Returns the frame of a video at a time that ``frame_times`` returned.

    A process decodes a video once if its frames are asked for in their order.

    Args:
        most: pixels that it may have (DATA.MAX_PIXELS).

    Raises:
        Unreadable, OSError, RunError: it can't be read.
    """
    reader = _own_reader(path, seconds)
    if reader.problem:
        # The process would be started for each of the frames.
        raise Unreadable(reader.problem)
    reader.seconds = seconds
    answer = reader.answer(FRAME, seconds, most)
    check_size(answer.size, most)
    return Image.frombytes("RGB", answer.size, answer.content)


class _Answer:
    """The size of a frame, (width, height), and its pixels; or the bytes of the times."""

    def __init__(self, size: tuple[int, int], content: bytes) -> None:
        self.size = size
        self.content = content


class _Reader:
    """A process that reads one video.

    Attributes:
        seconds: the time of the last frame that was asked for.
        problem: why the process has ended; "": it runs.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.seconds = 0.0
        self.problem = ""
        with open_file(path) as file:
            _check_format(file.read(12))
            program = isolated_process.__file__
            descriptor = file.fileno()
            folders = filter(None, sys.path)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-IS", program, str(os.getpid()), str(descriptor), *folders],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[descriptor],
                    # As in ``isolated``: this process doesn't get Ctrl-C.
                    start_new_session=True,
                )
            except (OSError, TypeError, ValueError) as error:
                raise RunError(
                    f"a process that decodes videos can't be started ({error})"
                ) from None

    def answer(self, kind: int, value: float, most: int) -> _Answer:
        """Returns the process's answer to a request.

        Raises:
            Unreadable: the video can't be read, or that takes too much time or memory.
            RunError: something else killed the process.
        """
        requests: Any = self._process.stdin
        answers: Any = self._process.stdout
        try:
            with contextlib.suppress(BrokenPipeError):
                requests.write(VIDEO_REQUEST.pack(kind, value, most))
                requests.flush()
            # The kernel limits the process's time, so it needn't be limited here.
            head = answers.read(ANSWER.size)
            outcome, _, width, height, length = ANSWER.unpack(head)
            content = answers.read(length)
            if len(content) < length:
                raise EOFError
        except (EOFError, struct.error):
            status = self._process.wait()
        except BaseException:
            self.end()
            raise
        else:
            if outcome == TOO_MUCH_MEMORY:
                raise Unreadable("decoding it takes too much memory")
            if outcome == FAILED:
                raise Unreadable(printable(content.decode(errors="replace"), 200))
            return _Answer((width, height), content)
        self.end()
        self.problem = f"its decoder crashed (exit status {status})"
        if status == -signal.SIGXCPU:
            self.problem = "decoding it takes too long"
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            name = signal.Signals(-status).name
            raise RunError(f"the process that decodes videos was killed by {name}; out of memory?")
        raise Unreadable(self.problem)

    def end(self) -> None:
        """Kills the process, unless it has ended, and closes its pipes."""
        self._process.kill()
        self._process.communicate()


def _check_format(start: bytes) -> None:
    """Raises Unreadable unless a file begins as a video does that is read here."""
    is_avi = start[:4] == b"RIFF" and start[8:12] == b"AVI "
    if not (is_avi or start[4:8] in _BOXES or start[:4] == _MATROSKA):
        raise Unreadable("it isn't a video; AVI, MKV, MOV, MP4 and WebM are supported")


# The reader of each process, by its id: a forked process inherits its parent's, which isn't its own.
_readers: dict[int, _Reader] = {}


def _own_reader(path: str, seconds: float) -> _Reader:
    """Returns this process's reader of a video, which hasn't passed a time yet."""
    reader = _readers.get(os.getpid())
    if reader and reader.path == path and (reader.problem or reader.seconds <= seconds):
        return reader
    _end_own_reader()
    reader = _Reader(path)
    _readers[os.getpid()] = reader
    return reader


@atexit.register
def _end_own_reader() -> None:
    if reader := _readers.pop(os.getpid(), None):
        reader.end()
