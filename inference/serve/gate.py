"""The ASGI middleware that every request passes: token, limits, times, log and counts."""

import asyncio
import contextlib
import hmac
import ipaddress
import re
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from errors import one_line, printable
from inference.serve.bodies import Refused
from inference.serve.metrics import Metrics
from inference.serve.settings import HELD, LOOPBACK, Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# The paths to which images are sent, and those that need the token.
WORK = ("/predict", "/attention", "/mask")
GUARDED = (*WORK, "/metrics")
FAILED = "the server failed; see its log"
_OPEN = ("/", "/docs", "/openapi.json", "/health", "/ready")
# Seconds that a body may take.
_BODY_SECONDS = 30.0
# Seconds for which the rest of a refused body is read. Without that, the client may lose the answer.
_LINGER = 10.0
# The status of a client that has left, in the log and the counts.
_GONE = 499
_CLOSE = [(b"connection", b"close")]


class Gone(Exception):
    """The client has left."""


class Gate:
    """An ASGI application around another one.

    Args:
        app: the other application.
        loaded: returns whether a worker has ever loaded the model.

    Attributes:
        active: number of requests to WORK that aren't answered yet.
        held: bytes of their bodies.
        draining: whether new requests to WORK are refused, because the server is shutting down.
    """

    def __init__(
        self, app: Any, settings: Settings, metrics: Metrics, loaded: Callable[[], bool]
    ) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self.loaded = loaded
        self.token = settings.token.encode() if settings.token else None
        self.active = 0
        self.held = 0
        self.draining = False

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        status = 0
        scope["client"] = _client_of(scope)

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                scope["answering"] = True
            await send(message)

        try:
            await self._handle(scope, receive, send_noting_status)
        except Refused as refused:
            await _refuse(refused, scope, receive, send_noting_status)
        except Gone:
            pass
        except asyncio.CancelledError:
            # uvicorn ends, and would answer in plain text.
            if not status:
                response = refusal(Refused(503, "the server is shutting down", 5))
                await response(scope, receive, send_noting_status)
        except Exception:
            traceback.print_exc()
            if not status:
                await _refuse(Refused(500, FAILED), scope, receive, send_noting_status)
        finally:
            self._record(scope, status or _GONE, time.perf_counter() - started)

    def _record(self, scope: Any, status: int, seconds: float) -> None:
        """Counts a request, and logs it unless the server is quiet."""
        path = scope["path"] if scope["path"] in GUARDED + _OPEN else "other"
        self.metrics.requests.labels(path, status).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        if not self.settings.quiet:
            images = scope.get("images", "")
            method = printable(scope["method"], 16)
            request = f"{scope['client'][0]} {method} {printable(scope['path'], 80)}"
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            line = one_line(f"{now} {request} {status} {1000 * seconds:.1f} ms {images}")
            print(line.rstrip(), flush=True)

    async def _handle(self, scope: Any, receive: Receive, send: Send) -> None:
        """Checks a request, reads the body of one to WORK, and lets the app answer.

        Raises:
            Refused: a check fails.
            Gone: the client has left.
        """
        headers = dict(scope["headers"])
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        if scope["path"] in WORK:
            self._check_origin(headers)
        if scope["path"] in GUARDED:
            self._check_token(headers.get(b"authorization", b""))
        if scope["path"] not in WORK or scope["method"] != "POST":
            # HEAD is answered as GET. uvicorn leaves out the body: it has the original scope.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            await self.app(scope | {"method": method}, receive, send)
            return
        self._check_before_body(headers)
        self.active += 1
        scope["body"] = bytearray()
        scope["size"] = 0
        try:
            try:
                await asyncio.wait_for(self._read(scope, receive), _BODY_SECONDS)
            except asyncio.TimeoutError:
                raise Refused(
                    408, f"the request's body took more than {_BODY_SECONDS:.0f} s"
                ) from None
            scope["read"] = True
            await self._run(scope, receive, send)
        finally:
            self.active -= 1
            self.held -= scope["size"]
            # The app has taken it, unless the request was refused while the body came.
            scope.pop("body", None)

    def _check_host(self, host: str) -> None:
        """Refuses a request of a browser for a foreign site whose name resolves to this machine.

        This prevents DNS rebinding, by which a foreign page could read the answers.
        """
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if self.settings.private and host and name not in LOOPBACK:
            raise Refused(
                403,
                f"found the Host {printable(host, 80)}, expected localhost or 127.0.0.1; to use"
                " another name, start the server with -host or a token",
            )

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Refuses a request that a page of a foreign site makes a browser send.

        Such a page could keep the model busy.
        """
        origin = headers.get(b"origin", b"")
        server = b"http://" + headers.get(b"host", b"")
        is_foreign = origin and origin.lower() != server.lower()
        is_foreign = is_foreign or headers.get(b"sec-fetch-site") == b"cross-site"
        if self.settings.private and is_foreign:
            name = printable(origin.decode("latin-1"), 80) or "of a foreign site"
            raise Refused(
                403,
                f"found the Origin {name}, expected this server's own page; for others, start the"
                " server with a token",
            )

    def _check_token(self, authorization: bytes) -> None:
        """Refuses a request without the server's token.

        Args:
            authorization: the request's header of that name.
        """
        if not self.token:
            return
        kind, _, token = authorization.partition(b" ")
        # This takes the same time for every token, so that nobody can find the server's by time.
        is_same = hmac.compare_digest(token.strip(), self.token)
        if not is_same or kind.lower() != b"bearer":
            raise Refused(401, "this server needs a token: send Authorization: Bearer TOKEN")

    def _check_before_body(self, headers: dict[bytes, bytes]) -> None:
        """Refuses a request that can be refused before its body is read."""
        if self.draining:
            raise Refused(503, "the server is shutting down", 5)
        if not self.loaded():
            raise Refused(503, "the model is being loaded", 2)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refused(415, "the body is compressed (Content-Encoding); send it uncompressed")
        # h11 has checked that it is a number.
        length = headers.get(b"content-length", b"0")
        if int(length) > self.settings.largest_body:
            raise Refused(413, self._too_large(f"{int(length)} bytes"))

    def _too_large(self, size: str) -> str:
        return f"the request has {size}, at most {self.settings.largest_body} are allowed"

    async def _read(self, scope: Any, receive: Receive) -> None:
        """Reads the body into ``scope["body"]``.

        The app removes it from there, so that it is kept no longer than needed.
        """
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            more = message.get("more_body", False)
            if scope["size"] + len(part) > self.settings.largest_body:
                raise Refused(413, self._too_large("more bytes than that"))
            if self.held + len(part) > HELD:
                raise Refused(
                    429,
                    "too many large requests are being received; try again later",
                    1,
                )
            scope["body"] += part
            scope["size"] += len(part)
            self.held += len(part)

    async def _run(self, scope: Any, receive: Receive, send: Send) -> None:
        """Lets the app answer, unless the client leaves before that."""

        async def receive_empty_body() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        answering = asyncio.ensure_future(self.app(scope, receive_empty_body, send))
        # After the body, the only message is that the client has disconnected.
        leaving = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and not scope.get("answering"):
                raise Gone
            await answering
        finally:
            for task in (answering, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


def _client_of(scope: Any) -> tuple[str, int]:
    """Returns the address and port of a request's client.

    A proxy on this machine may give the address (X-Forwarded-For). uvicorn takes any text from it.
    Here a text that isn't an address becomes "-", because it could forge lines of the log.
    """
    host, port = scope.get("client") or ("-", 0)
    try:
        return str(ipaddress.ip_address(host.partition("%")[0])), port
    except ValueError:
        return "-", port


async def _refuse(refused: Refused, scope: Any, receive: Receive, send: Send) -> None:
    """Sends the answer of a refused request.

    If its body hasn't been read, some of it is read now, and the connection is closed.
    """
    response = refusal(refused)
    if scope.get("read"):
        await response(scope, receive, send)
        return
    headers = response.raw_headers + _CLOSE
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    names = dict(scope["headers"])
    if names.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in names:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_discard(receive), _LINGER)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    """Reads the rest of a body, and forgets it."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


def refusal(refused: Refused) -> JSONResponse:
    """Returns the response to a refused request."""
    headers = {} if refused.retry is None else {"retry-after": str(refused.retry)}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": one_line(str(refused))}, refused.status, headers)


def log(line: str) -> None:
    """Prints a line about the server itself, to standard error."""
    print(line, file=sys.stderr, flush=True)
