"""What the HTTP process and a computing one send each other: a head in JSON, then parts of bytes.
Nothing is unpickled.

On the socket: the length of the head (4 bytes), the head, whose "sizes" are the parts' lengths, and
the parts.
"""

import asyncio
import json
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!I")
Frame = tuple[dict[str, Any], list[bytes]]


def pack(head: dict[str, Any], parts: Sequence[bytes] = ()) -> bytes:
    """Returns a frame as it is sent."""
    text = json.dumps(head | {"sizes": [len(part) for part in parts]}).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def head_of(text: bytes) -> dict[str, Any]:
    """Returns what a process of this same server wrote."""
    return json.loads(text)


async def receive(reader: asyncio.StreamReader) -> Frame:
    """Returns the next frame.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the other end has gone.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    head = head_of(await reader.readexactly(length))
    return head, [await reader.readexactly(size) for size in head["sizes"]]


def read(file: BinaryIO) -> Frame:
    """Returns the next frame, in a process that waits for it.

    Raises:
        EOFError: the other end has gone.
    """
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
    head = head_of(_exactly(file, length))
    return head, [_exactly(file, size) for size in head["sizes"]]


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data
