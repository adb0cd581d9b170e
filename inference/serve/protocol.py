"""HTTP/1.1 of a connection: uvicorn's, as h11 parses it, but strict, and with limits on size and
time.
"""

import json
import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from inference.serve.metrics import Metrics

_HEAD = 10.0  # seconds that a request's head may take, and an answer to be read; twice that at most
_LARGEST_HEAD = 16 << 10  # bytes
_AT_ONCE = 1 << 14  # bytes of a connection that are read before others have their turn
# A body may have _CHUNKS chunks, and one more for each _LEAST_CHUNK bytes.
_CHUNKS = 256
_LEAST_CHUNK = 256
_CHUNK_LINE = 256  # bytes of the line before a chunk, with its extensions
# Forms that are refused in a head, a chunk's line or a trailer, though h11 accepts them: a line that
# doesn't end in CRLF, one that goes on in the next line (obs-fold), and control characters.
_LOOSE = re.compile(rb"(?<!\r)\n|\r[^\n]|\n[ \t]|[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LENGTH = re.compile(rb"content-length:[ \t]*[0-9]{1,20}[ \t]*", re.I)


def _plain(head: str, error: str) -> bytes:
    """Returns an answer to a client that isn't let through to the app."""
    body = json.dumps({"error": error})
    return (
        f"HTTP/1.1 {head}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )


_FULL = _plain(
    "503 Service Unavailable\r\nretry-after: 1",
    "as many clients are connected as may; try again in 1 s",
)
_NO_REQUEST = _plain("400 Bad Request", "this is no HTTP request that can be read")
_CRUMBS = _plain("400 Bad Request", "the body comes in too many small chunks")


class Lines(ReceiveBuffer):
    """h11's buffer, which takes lines that proxies in front of it may read otherwise: here they are
    refused.

    Two readers of one connection that disagree where a request ends let a client smuggle a second
    one past the first.
    """

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Returns the lines of a head or of a trailer, once they are there.

        Raises:
            h11.LocalProtocolError: a line is malformed, all are too long, or there are several
                Content-Length.
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
        """Returns where the lines end, with the mark; what is there so far counts if they don't end
        yet.
        """
        found = self._data.find(mark, start)
        return len(self._data) if found < 0 else found + len(mark)

    def _check(self, start: int, end: int, most: int) -> None:
        """Checks what came since ``start``: before it nothing was found."""
        if end > most or _LOOSE.search(self._data, start, end):
            raise h11.LocalProtocolError("a malformed line, or too long a one")


class Connection(h11.Connection):
    """h11's, which makes an event of each chunk of a body, however small it is: each takes 6 µs."""

    chunks = 0
    size = 0  # bytes

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _LARGEST_HEAD)
        self._receive_buffer = Lines()

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = self.size = 0
            if not _plain_request(event):
                raise h11.RemoteProtocolError("a request of another kind")
        elif isinstance(event, h11.Data):
            self.chunks, self.size = self.chunks + event.chunk_start, self.size + len(event.data)
            if self.crumbs:
                raise h11.RemoteProtocolError("too many chunks")
        return event

    @property
    def crumbs(self) -> bool:
        return self.chunks > _CHUNKS + self.size // _LEAST_CHUNK


def _plain_request(request: h11.Request) -> bool:
    """Whether it is of HTTP/1.0 or 1.1, asks for a path, and says in one way where it ends (RFC
    9112, 6.1).
    """
    names = {name for name, _ in request.headers}
    ends = b"transfer-encoding" not in names or (
        b"content-length" not in names and request.http_version == b"1.1"
    )
    return ends and request.http_version in (b"1.0", b"1.1") and request.target.startswith(b"/")


class Protocol(H11Protocol):
    """uvicorn's, which lets clients take as long as they like; here who is slow or silent loses the
    connection.
    """

    metrics: Metrics
    most: int  # connections
    _seen: Any = None  # the request of the last tick
    _paused = False
    _ended = False  # the client sends nothing more

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.conn: Connection = Connection()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = _AT_ONCE
        self._timer = self.loop.call_later(_HEAD, self._tick)
        if len(self.connections) > self.most:
            self._refuse(503, _FULL)

    def eof_received(self) -> bool:
        """Returns whether the connection stays: a client that closed its side may wait for an
        answer.
        """
        cycle = self.cycle
        self._ended = cycle is not None and not cycle.more_body and not cycle.response_complete
        return self._ended

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The cycle is another one if the client had sent several requests.
        if self._ended and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, _CRUMBS if self.conn.crumbs else _NO_REQUEST)

    def _refuse(self, status: int, answer: bytes) -> None:
        self.metrics.requests.labels("other", status).inc()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # no other answer was begun
            self.transport.write(answer)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _tick(self) -> None:
        paused = self.flow.write_paused
        answering = self.cycle is not None and not self.cycle.response_complete
        unread = self._paused and paused  # it reads nothing of what was sent
        if self.transport.is_closing() or unread or (not answering and self._seen is self.cycle):
            self.transport.abort()
            return
        self._seen = self.cycle
        self._paused = paused
        self._timer = self.loop.call_later(_HEAD, self._tick)
