"""What a computing process is at, in memory that it shares with the server: it can be read once the
process has died.

A note takes a microsecond. As a message for each image it would take fifty in the process that
speaks HTTP.
"""

import mmap
import os
import struct
import time
from typing import NamedTuple

# what its two threads do
READING = 0
COMPUTING = 1
_NOTE = struct.Struct("=qqd")


class Note(NamedTuple):
    """What a thread is at: an image of a batch, which is 0 for none, since a time (time.monotonic)."""

    batch: int
    place: int
    since: float


class Progress:
    """The notes of one process.

    Args:
        file: the descriptor of the memory; it isn't needed afterwards.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, 2 * _NOTE.size)

    @staticmethod
    def create() -> int:
        """Returns the descriptor of new memory, without a note."""
        file = os.memfd_create("progress")
        os.ftruncate(file, 2 * _NOTE.size)
        return file

    def begin(self, thread: int, batch: int, place: int = 0) -> None:
        """Notes what a thread (READING or COMPUTING) is at from now on."""
        _NOTE.pack_into(self._memory, thread * _NOTE.size, batch, place, time.monotonic())

    def end(self, thread: int) -> None:
        """Notes that a thread waits."""
        _NOTE.pack_into(self._memory, thread * _NOTE.size, 0, 0, 0.0)

    def of(self, thread: int) -> Note:
        """Returns what a thread is at."""
        return Note(*_NOTE.unpack_from(self._memory, thread * _NOTE.size))
