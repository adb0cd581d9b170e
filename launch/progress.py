"""Reports the progress of a rank to the process that watches it, through shared memory.

Each report is a beat: its time, the rank's step and what the rank does.
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
# Shared numbers for each rank: the time of the last beat (0: none yet), the step, a place in DOING,
# and the number of batches that it has asked its loader for.
FIELDS = 4
_beats: Any = None
# where this rank's numbers begin
_first = 0
_batches = 0
_doing = STARTING


def share_beats(beats: Any, first: int) -> None:
    """Makes ``beat`` write to ``beats[first:first + FIELDS]``, shared with the process that watches
    this one.
    """
    global _beats, _first
    _beats = beats
    _first = first


def is_watched() -> bool:
    """Returns whether another process reads this one's beats."""
    return _beats is not None


def doing() -> int:
    """Returns what this rank was doing at its last beat, as a place in DOING."""
    return _doing


def beat(doing: int, step: int | None = None) -> None:
    """Reports what this rank does, and its step if that has changed.

    Args:
        doing: a place in DOING.
        step: None: the same as before.
    """
    global _batches, _doing
    _doing = doing
    if _beats is None:
        return
    if doing == LOADING:
        _batches += 1
    _beats[_first] = time.monotonic()
    _beats[_first + 2] = doing
    _beats[_first + 3] = _batches
    if step is not None:
        _beats[_first + 1] = step


def pause() -> None:
    """Declares that this rank may take any time until its next beat. To wait for whoever reads its
    output, for example, isn't a stall.
    """
    if _beats is not None:
        _beats[_first] = math.inf


def keep_native_errors(log: Path) -> None:
    """Redirects what C++ code writes to stderr into the rank's log, such as gloo's messages when a
    peer has gone. The process that watches the rank reports the cause. Python's stderr stays. A rank
    that isn't watched keeps both.
    """
    if is_watched():
        sys.stderr = streams.lasting(os.dup(2), lines=True)
        with open_to_append(log) as file:
            os.dup2(file.fileno(), 2)
