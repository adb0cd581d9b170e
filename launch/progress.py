"""What a rank reports to the process that watches it: the time of its last report (a beat), its
step, what it does.
"""

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from launch import streams
from launch.files import open_to_append

DOING = ("starting", "waiting for data", "computing", "evaluating")
STARTING, LOADING, COMPUTING, EVALUATING = range(4)
# shared doubles per rank: time of the last beat (0: none yet), step, what it does, batches asked
# for
FIELDS = 4
_beats: Any = None
_first = 0
_asked = 0
_doing = STARTING


def share_beats(beats: Any, first: int) -> None:
    """Makes ``beat`` write to ``beats[first:first + FIELDS]``, which the process that watches this
    one reads.
    """
    global _beats, _first
    _beats = beats
    _first = first


def is_watched() -> bool:
    """Returns whether another process reads this one's beats."""
    return _beats is not None


def doing() -> int:
    """Returns what this rank does, by its last beat."""
    return _doing


def beat(doing: int, step: int | None = None) -> None:
    """Reports what this rank does, and its step if that has changed.

    Args:
        doing: a place in DOING.
        step: None: the same as before.
    """
    global _asked, _doing
    _doing = doing
    if _beats is None:
        return
    _asked += doing == LOADING
    _beats[_first], _beats[_first + 2], _beats[_first + 3] = time.monotonic(), doing, _asked
    if step is not None:
        _beats[_first + 1] = step


def pause() -> None:
    """Reports that this rank computes nothing until its next beat: waiting for a reader, say, is no
    stall.
    """
    if _beats is not None:
        _beats[_first] = math.inf


def keep_native_errors(log: Path) -> None:
    """Redirects what C++ code writes to stderr to the rank's log, such as gloo's when a peer is
    gone. The process that watches the rank reports the cause. Python's stderr stays. A rank that
    isn't watched keeps both.
    """
    if is_watched():
        sys.stderr = streams.lasting(os.dup(2), lines=True)
        with open_to_append(log) as file:
            os.dup2(file.fileno(), 2)
