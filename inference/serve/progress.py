"""The progress of a worker, in memory that it shares with the HTTP process.

It can still be read once the worker has died. Recording it takes a microsecond. A message for each
image would take fifty in the HTTP process.
"""

import mmap
import os
import struct
import time
from typing import NamedTuple

# The two threads of a worker.
READING = 0
COMPUTING = 1
_NOTE = struct.Struct("=qqd")


class Note(NamedTuple):
    """What a thread is working on.

    Attributes:
        batch: the batch's number; 0: the thread waits.
        place: index of the image in the batch.
        since: when it began, by ``time.monotonic``.
    """

    batch: int
    place: int
    since: float


class Progress:
    """The notes of one worker, one for each thread.

    Args:
        file: descriptor of the memory. It may be closed afterwards.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, 2 * _NOTE.size)

    @staticmethod
    def create() -> int:
        """Returns the descriptor of new memory, which says that both threads wait."""
        file = os.memfd_create("progress")
        os.ftruncate(file, 2 * _NOTE.size)
        return file

    def begin(self, thread: int, batch: int, place: int = 0) -> None:
        """Records what a thread (READING or COMPUTING) works on from now on."""
        _NOTE.pack_into(self._memory, thread * _NOTE.size, batch, place, time.monotonic())

    def end(self, thread: int) -> None:
        """Records that a thread waits."""
        _NOTE.pack_into(self._memory, thread * _NOTE.size, 0, 0, 0.0)

    def of(self, thread: int) -> Note:
        """Returns what a thread works on."""
        return Note(*_NOTE.unpack_from(self._memory, thread * _NOTE.size))
