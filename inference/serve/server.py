"""The server's life: it listens, loads, answers; a signal lets it answer what it took, and end."""

import asyncio
import contextlib
import ctypes
import logging
import os
import platform
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from errors import InputError
from inference.serve.app import create_app
from inference.serve.batching import Batcher
from inference.serve.gate import Gate, log
from inference.serve.metrics import Metrics
from inference.serve.settings import LOOPBACK, Settings
from inference.serve.workers import Pool
from launch import startup, streams

_HEAD = 10.0  # seconds that a request's head may take, and an answer to be read; twice that at most
_LARGEST_HEAD = 16 << 10  # bytes
_CONNECTIONS = 8192
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"


class Protocol(H11Protocol):
    """uvicorn's, which lets clients take as long as they like; here who is slow or silent loses the connection."""

    _seen: Any = None  # the request of the last tick
    _paused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(_HEAD, self._tick)
        if len(self.connections) > _CONNECTIONS:
            transport.write(_FULL)
            transport.close()

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
        self._seen, self._paused = self.cycle, paused
        self._timer = self.loop.call_later(_HEAD, self._tick)


class Server(uvicorn.Server):
    """uvicorn's, without its handlers of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: Settings) -> int:
    """Serves until a signal; returns the exit status that tells which.

    Raises:
        InputError: the address can't be listened at, or the weights can't be read.
        RunError: the workers end again and again.
    """
    for number in startup.STOPS:  # until there is something to drain
        if number not in startup.IGNORED:
            signal.signal(number, lambda number, _: os._exit(128 + number))
    streams.hurry()
    _give_memory_back()
    listener = _listening(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {settings.path} at http://{shown}:{port}/", flush=True)
    if settings.host not in LOOPBACK and not settings.token:
        log(f"warning: whoever reaches {shown}:{port} may ask; -token_file asks for a token")
    return asyncio.run(_serve(settings, listener))


def _give_memory_back() -> None:
    """Tells glibc to return large buffers to the system at once. Left alone, it keeps ever larger ones for itself."""
    if platform.libc_ver()[0] == "glibc":
        mmap_threshold = -3
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 17)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        said = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise InputError(f"can't listen at {host}, port {port} ({said}); choose another -host or -port") from None


async def _serve(settings: Settings, listener: socket.socket) -> int:
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).disabled = True  # the gate tells of requests, and of mistakes
    metrics = Metrics()
    batcher = Batcher(settings.batch_size, settings.max_delay_ms / 1000, settings.max_queue)
    pool = Pool(settings, batcher, metrics)
    app = create_app(settings, batcher, pool, metrics, lambda: gate.draining)
    gate = Gate(app, settings, metrics, lambda: bool(pool.about))
    server = Server(
        uvicorn.Config(
            gate, http=Protocol, ws="none", lifespan="off", loop="asyncio", log_config=None, access_log=False,
            server_header=False, backlog=2048, h11_max_incomplete_event_size=_LARGEST_HEAD,
            timeout_keep_alive=5, timeout_graceful_shutdown=3,
        )
    )  # fmt: skip
    stopped = _stopped()
    serving = asyncio.ensure_future(server.serve([listener]))
    told = asyncio.ensure_future(_tell(pool))
    try:
        await asyncio.wait({stopped, pool.ended, serving}, return_when=asyncio.FIRST_COMPLETED)
        for ended in (pool.ended, serving):
            if ended.done():
                ended.result()
        log(f"stopped by {signal.Signals(stopped.result()).name}: {gate.active} requests are answered first")
        await _drain(gate, settings.timeout)
    finally:
        told.cancel()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=5)
        await pool.close()
    return 128 + stopped.result()


def _stopped() -> asyncio.Future[int]:
    """Returns what gets the number of the first signal to stop. A second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if stopped.done():
            os._exit(128 + number)
        stopped.set_result(number)

    for number in startup.STOPS:
        if number not in startup.IGNORED:
            loop.add_signal_handler(number, stop, number)
    return stopped


async def _tell(pool: Pool) -> None:
    started = time.monotonic()
    while not pool.ready():
        await asyncio.sleep(0.05)
    about = pool.about
    print(f"ready after {time.monotonic() - started:.1f} s: {about['model']}, {about['task']}", flush=True)


async def _drain(gate: Gate, timeout: float) -> None:
    """Answers what was taken; what comes meanwhile is told that the server is ending."""
    gate.draining = True
    until = time.monotonic() + timeout + 1
    while gate.active and time.monotonic() < until:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.05)  # the last answers are written; who connected meanwhile is answered, too
