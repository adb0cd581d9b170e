"""Messages between the HTTP process and its workers.

A message is a head in JSON and any number of parts, which are bytes. Nothing is unpickled. On the
socket it is the length of the head (4 bytes, big-endian), the head, and the parts. The head's
"sizes" are the lengths of the parts.
"""

import asyncio
import json
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!I")
Message = tuple[dict[str, Any], list[bytes]]


def pack(head: dict[str, Any], parts: Sequence[bytes] = ()) -> bytes:
    """Returns a message as it is sent."""
    text = json.dumps(head | {"sizes": [len(part) for part in parts]}).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def head_of(text: bytes) -> dict[str, Any]:
    """Returns a head, which a process of this same server wrote."""
    return json.loads(text)


async def receive(reader: asyncio.StreamReader) -> Message:
    """Returns the next message.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the other process has ended.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    head = head_of(await reader.readexactly(length))
    return head, [await reader.readexactly(size) for size in head["sizes"]]


def read(file: BinaryIO) -> Message:
    """Returns the next message, and blocks until it has come.

    Raises:
        EOFError: the other process has ended.
    """
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
    head = head_of(_exactly(file, length))
    return head, [_exactly(file, size) for size in head["sizes"]]


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data
