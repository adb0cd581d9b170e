"""What every request goes through before the app sees it, and its answer after: token, limits,
times, log, counts.
"""

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

WORK = ("/predict", "/attention")  # what images are sent to
GUARDED = (*WORK, "/metrics")
FAILED = "the server failed; its log says why"
_OPEN = ("/", "/docs", "/openapi.json", "/health", "/ready")
_BODY = 30.0  # seconds that a body may take
# seconds in which what a refused client still sends is read: it would miss the answer
_LINGER = 10.0
_GONE = 499  # in the log and the counts alone: nobody is there to read it
_CLOSE = [(b"connection", b"close")]


class Gone(Exception):
    """The client has left."""


class Gate:
    """An ASGI application around another one.

    Args:
        app: the application.
        loaded: whether the model was ever loaded.

    Attributes:
        active: requests of WORK that were begun and aren't answered yet.
        draining: no new ones of WORK are taken.
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

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, scope["answering"] = message["status"], True
            await send(message)

        try:
            await self._let_in(scope, receive, noted)
        except Refused as refused:
            await _refuse(refused, scope, receive, noted)
        except Gone:
            pass
        except asyncio.CancelledError:  # uvicorn ends, and would answer in plain text
            if not status:
                await refusal(Refused(503, "the server is ending", 5))(scope, receive, noted)
        except Exception:
            traceback.print_exc()
            if not status:
                await _refuse(Refused(500, FAILED), scope, receive, noted)
        finally:
            self._note(scope, status or _GONE, time.perf_counter() - started)

    def _note(self, scope: Any, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in GUARDED + _OPEN else "other"
        self.metrics.requests.labels(path, status).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        if not self.settings.quiet:
            images = scope.get("images", "")
            asked = f"{scope['client'][0]} {printable(scope['method'], 16)} {printable(scope['path'], 80)}"
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            print(
                one_line(f"{when} {asked} {status} {1000 * seconds:.1f} ms {images}").rstrip(),
                flush=True,
            )

    async def _let_in(self, scope: Any, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        if scope["path"] in WORK:
            self._check_origin(headers)
        if scope["path"] in GUARDED:
            self._check_token(headers.get(b"authorization", b""))
        if scope["path"] not in WORK or scope["method"] != "POST":
            # HEAD is answered as GET; uvicorn, which has the scope itself, leaves out the body.
            asked = "GET" if scope["method"] == "HEAD" else scope["method"]
            await self.app(scope | {"method": asked}, receive, send)
            return
        self._check(headers)
        self.active += 1
        scope["body"], scope["size"] = bytearray(), 0
        try:
            try:
                await asyncio.wait_for(self._read(scope, receive), _BODY)
            except asyncio.TimeoutError:
                raise Refused(408, f"the request's body took more than {_BODY:.0f} s") from None
            scope["read"] = True
            await self._run(scope, receive, send)
        finally:
            self.active -= 1
            self.held -= scope["size"]
            scope.pop("body", None)  # whose request was refused while it came

    def _check_host(self, host: str) -> None:
        """Refuses what a browser asks for a foreign site, whose name was made to lead to this
        machine.
        """
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if self.settings.private and host and name not in LOOPBACK:
            said = f"found the Host {printable(host, 80)}, expected localhost or 127.0.0.1"
            raise Refused(
                403, f"{said}; to be asked by another name, start the server with -host or a token"
            )

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Refuses what a page of a foreign site makes a browser send: such a page could keep the
        model busy.
        """
        origin = headers.get(b"origin", b"")
        own = b"http://" + headers.get(b"host", b"")
        foreign = origin and origin.lower() != own.lower()
        if self.settings.private and (foreign or headers.get(b"sec-fetch-site") == b"cross-site"):
            found = (
                f"found the Origin {printable(origin.decode('latin-1'), 80) or 'of a foreign site'}"
            )
            raise Refused(
                403,
                f"{found}, expected this server's own page; for others, start the server with a token",
            )

    def _check_token(self, given: bytes) -> None:
        kind, _, token = given.partition(b" ")
        if self.token and not (
            hmac.compare_digest(token.strip(), self.token) and kind.lower() == b"bearer"
        ):
            raise Refused(401, "this server needs a token: send Authorization: Bearer TOKEN")

    def _check(self, headers: dict[bytes, bytes]) -> None:
        """Raises Refused for a request whose body needn't be read to know that it isn't taken."""
        if self.draining:
            raise Refused(503, "the server is ending", 5)
        if not self.loaded():
            raise Refused(503, "the model is being loaded", 2)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refused(415, "the body is compressed (Content-Encoding); send it as it is")
        length = headers.get(b"content-length", b"0")  # of which h11 has seen that it is a number
        if int(length) > self.settings.largest_body:
            raise Refused(413, self._too_large(f"{int(length)} bytes"))

    def _too_large(self, found: str) -> str:
        return f"the request has {found}, at most {self.settings.largest_body} are taken"

    async def _read(self, scope: Any, receive: Receive) -> None:
        """Reads the body into the scope, out of which the app takes it: nobody holds it for longer
        than needed.
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
                    "the requests that are being received take all the memory there is for them",
                    1,
                )
            scope["body"] += part
            scope["size"] += len(part)
            self.held += len(part)

    async def _run(self, scope: Any, receive: Receive, send: Send) -> None:
        """Lets the app answer, as long as there is somebody who waits for it."""

        async def given() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        work = asyncio.ensure_future(self.app(scope, given, send))
        left = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not scope.get("answering"):
                raise Gone
            await work
        finally:
            for task in (work, left):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


def _client_of(scope: Any) -> tuple[str, int]:
    """Returns a request's client, whose address may be what a proxy on this machine says
    (X-Forwarded-For).

    uvicorn takes any text from such a proxy. Here one that is no address becomes "-": it would
    forge lines of the log.
    """
    host, port = scope.get("client") or ("-", 0)
    try:
        return str(ipaddress.ip_address(host.partition("%")[0])), port
    except ValueError:
        return "-", port


async def _refuse(refused: Refused, scope: Any, receive: Receive, send: Send) -> None:
    """Sends an answer of one line; where the body hasn't been read, reads it for a while, and
    closes.
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
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


def refusal(refused: Refused) -> JSONResponse:
    """Returns the answer of a request that is refused."""
    headers = {} if refused.retry is None else {"retry-after": str(refused.retry)}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": one_line(str(refused))}, refused.status, headers)


def log(line: str) -> None:
    """Says something of the server's own."""
    print(line, file=sys.stderr, flush=True)
