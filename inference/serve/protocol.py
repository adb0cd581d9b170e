"""Speaks HTTP/1.1 with a client: uvicorn's protocol on h11, but strict and with limits."""

import json
import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from inference.serve.metrics import Metrics

# The seconds that a request's head may take, and that a client may read nothing of an answer. The
# checks are that far apart, so it may be up to twice as long.
_INTERVAL = 10.0
# The bytes of a request's head.
_LARGEST_HEAD = 16 << 10
# The bytes of a connection that are read before others have their turn.
_AT_ONCE = 1 << 14
# A body may have _CHUNKS chunks, and one more for each _LEAST_CHUNK bytes.
_CHUNKS = 256
_LEAST_CHUNK = 256
# The bytes of the line before a chunk, with its extensions.
_CHUNK_LINE = 256
# What h11 accepts in a head, in a chunk's line or in a trailer, but is refused here: a line that
# doesn't end in CRLF, one that continues in the next line (obs-fold), and control characters.
_LOOSE = re.compile(rb"(?<!\r)\n|\r[^\n]|\n[ \t]|[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LENGTH = re.compile(rb"content-length:[ \t]*[0-9]{1,20}[ \t]*", re.I)


def _response(head: str, error: str) -> bytes:
    """Returns the whole response to a client whose request doesn't reach the app."""
    body = json.dumps({"error": error})
    return (
        f"HTTP/1.1 {head}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )


_FULL = _response(
    "503 Service Unavailable\r\nretry-after: 1",
    "too many clients are connected; try again in 1 s",
)
_NO_REQUEST = _response("400 Bad Request", "this isn't a valid HTTP request")
_SMALL_CHUNKS = _response("400 Bad Request", "the body arrives in too many small chunks")


class StrictBuffer(ReceiveBuffer):
    """h11's buffer of received bytes, which refuses lines that a proxy may read otherwise than h11.

    If a proxy and the server disagree where a request ends, a client can hide a second request in
    the first (request smuggling).
    """

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Returns the lines of a head or of a trailer, once all of them are there.

        Raises:
            h11.LocalProtocolError: a line is malformed, the lines are too long, or there are
                several Content-Length.
        """
        start = max(0, self._multiple_lines_search - 1)
        if self._data.startswith(b"\r\n"):
            self._check(0, 2, _LARGEST_HEAD)
        else:
            self._check(start, self._end(b"\r\n\r\n", start), _LARGEST_HEAD)
        lines = super().maybe_extract_lines()
        lengths = [line for line in lines or () if line.lower().startswith(b"content-length:")]
        if len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
            raise h11.LocalProtocolError("a Content-Length that isn't one number")
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """Returns the line before a chunk, once it is there.

        Raises:
            h11.LocalProtocolError: it is malformed, or too long.
        """
        start = max(0, self._next_line_search - 1)
        self._check(start, self._end(b"\r\n", start), _CHUNK_LINE)
        return super().maybe_extract_next_line()

    def _end(self, mark: bytes, start: int) -> int:
        """Returns where the lines end, behind ``mark``, or the end of the data."""
        place = self._data.find(mark, start)
        return len(self._data) if place < 0 else place + len(mark)

    def _check(self, start: int, end: int, most: int) -> None:
        """Checks the data from ``start`` to ``end``. What is before it was checked already."""
        if end > most or _LOOSE.search(self._data, start, end):
            raise h11.LocalProtocolError("a malformed or too long line")


class Connection(h11.Connection):
    """h11's connection, with a limit on small chunks.

    h11 makes an event of each chunk of a body, however small it is. An event takes 6 µs.

    Attributes:
        chunks: the number of chunks of the request's body.
        size: the bytes of the body.
    """

    chunks = 0
    size = 0

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _LARGEST_HEAD)
        self._receive_buffer = StrictBuffer()

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
            self.size = 0
            if not _is_plain(event):
                raise h11.RemoteProtocolError("a request of another kind")
        elif isinstance(event, h11.Data):
            self.chunks += event.chunk_start
            self.size += len(event.data)
            if self.has_small_chunks:
                raise h11.RemoteProtocolError("too many chunks")
        return event

    @property
    def has_small_chunks(self) -> bool:
        """Returns whether the body has too many chunks for its size."""
        return self.chunks > _CHUNKS + self.size // _LEAST_CHUNK


def _is_plain(request: h11.Request) -> bool:
    """Returns whether a request is of HTTP/1.0 or 1.1, is for a path, and says in a single way
    where it ends (RFC 9112, 6.1).
    """
    if request.http_version not in (b"1.0", b"1.1") or not request.target.startswith(b"/"):
        return False
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return True
    return b"content-length" not in names and request.http_version == b"1.1"


class Protocol(H11Protocol):
    """uvicorn's protocol, which closes the connection of a client that is slow or silent.

    Attributes:
        metrics: the counts of the server.
        most: the largest number of connections.
    """

    metrics: Metrics
    most: int
    # The request at the last check.
    _last_cycle: Any = None
    # Whether writing was paused at the last check, because the client doesn't read.
    _was_paused = False
    # Whether the client has closed its side of the connection.
    _half_closed = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.conn: Connection = Connection()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = _AT_ONCE
        self._timer = self.loop.call_later(_INTERVAL, self._close_if_idle)
        if len(self.connections) > self.most:
            self._refuse(503, _FULL)

    def eof_received(self) -> bool:
        """Returns whether the connection stays open: a client that has closed its side may wait for
        an answer.
        """
        cycle = self.cycle
        self._half_closed = cycle is not None and not (cycle.more_body or cycle.response_complete)
        return self._half_closed

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # If the client had sent several requests, ``cycle`` is the next one now.
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, _SMALL_CHUNKS if self.conn.has_small_chunks else _NO_REQUEST)

    def _refuse(self, status: int, response: bytes) -> None:
        """Closes the connection, with a response unless another one has begun."""
        self.metrics.requests.labels("other", status).inc()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(response)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self) -> None:
        """Closes the connection if nothing has happened since the last check, and plans the next.

        Nothing has happened if the request is still the same and no answer is due, or if the client
        reads nothing of what was sent.
        """
        is_paused = self.flow.write_paused
        is_answering = self.cycle is not None and not self.cycle.response_complete
        is_unread = self._was_paused and is_paused
        is_silent = not is_answering and self._last_cycle is self.cycle
        if self.transport.is_closing() or is_unread or is_silent:
            self.transport.abort()
            return
        self._last_cycle = self.cycle
        self._was_paused = is_paused
        self._timer = self.loop.call_later(_INTERVAL, self._close_if_idle)
