"""The server's life: it listens, loads, answers; a signal lets it answer what it took, and end."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from errors import InputError, one_line
from inference.serve.app import create_app
from inference.serve.batching import Batcher
from inference.serve.gate import Gate, log
from inference.serve.memory import hold_little
from inference.serve.metrics import Metrics
from inference.serve.protocol import Protocol
from inference.serve.settings import LOOPBACK, Settings
from inference.serve.workers import Pool
from launch import startup, streams

_CONNECTIONS = 8192
_RESERVE = 256  # files besides: workers, what is read, connections that are just being refused
_ACCEPTED = 32  # connections that are accepted before others have their turn
_QUEUE = 2048  # connections that wait to be accepted


class Server(uvicorn.Server):
    """uvicorn's, without its handlers of signals."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_QUEUE)  # of asyncio's words, "backlog" is what it accepts at once, too

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: Settings) -> int:
    """Serves until a signal; returns the exit status that tells which.

    Raises:
        InputError: the address can't be listened at, or the weights can't be read.
        RunError: the workers end again and again.
    """
    streams.hurry()
    hold_little()
    listener = _listening(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {settings.path} at http://{shown}:{port}/", flush=True)
    if settings.host not in LOOPBACK and not settings.token:
        log(f"warning: whoever reaches {shown}:{port} may ask; -token_file asks for a token")
    return asyncio.run(
        _serve(dataclasses.replace(settings, path=_real_folder(settings.path)), listener)
    )


def _real_folder(path: str) -> str:
    """Returns the folder of a checkpoint itself: links to it, as "best", lead elsewhere once
    training has gone on.
    """
    # As weights.hub names them; this process imports no Paddle.
    for folder in (os.path.join(path, "checkpoints", "best"), path):
        if os.path.isdir(folder):
            return os.path.realpath(folder)
    return path


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_QUEUE)
        # its connections have it, too
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        said = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    except UnicodeError:  # two dots in a row, or a part that is too long
        said = "this is no host's name"
    raise InputError(f"can't listen at {host}, port {port} ({said}); choose another -host or -port")


def _connections() -> int:
    """Returns how many clients may be connected: each takes a file."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _CONNECTIONS if files < 0 else min(_CONNECTIONS, max(files // 2, files - _RESERVE))


async def _serve(settings: Settings, listener: socket.socket) -> int:
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "python_multipart.multipart"):
        logging.getLogger(name).disabled = True  # the gate tells of requests, and of mistakes
    asyncio.get_running_loop().set_exception_handler(_accept_error_handler())
    metrics = Metrics()
    batcher = Batcher(settings.batch_size, settings.max_delay_ms / 1000, settings.max_queue)
    pool = Pool(settings, batcher, metrics)
    app = create_app(settings, batcher, pool, metrics, lambda: gate.draining)
    gate = Gate(app, settings, metrics, lambda: bool(pool.about))
    server = Server(
        uvicorn.Config(
            gate, http=type("Counted", (Protocol,), {"metrics": metrics, "most": _connections()}), ws="none",
            lifespan="off", loop="asyncio", log_config=None, access_log=False, server_header=False, backlog=_ACCEPTED,
            timeout_keep_alive=5, timeout_graceful_shutdown=3,
        )
    )  # fmt: skip
    stopped = _stop_signal()
    serving = asyncio.ensure_future(server.serve([listener]))
    told = asyncio.ensure_future(_tell(pool))
    try:
        await asyncio.wait({stopped, pool.ended, serving}, return_when=asyncio.FIRST_COMPLETED)
        for ended in (pool.ended, serving):
            if ended.done():
                ended.result()
        log(
            f"stopped by {signal.Signals(stopped.result()).name}: {gate.active} requests are answered first"
        )
        await _drain(gate, settings.timeout)
    finally:
        told.cancel()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=5)
        await pool.close()
    return 128 + stopped.result()


def _accept_error_handler() -> Any:
    """Returns what a loop does with its mistakes: of connections that it can't accept it tells once
    a minute.
    """
    last = -60.0

    def told(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        if "accept()" not in context["message"]:
            loop.default_exception_handler(context)
        elif time.monotonic() - last >= 60:
            last = time.monotonic()
            log(
                f"warning: connections can't be accepted ({one_line(str(context.get('exception')))})"
            )

    return told


def _stop_signal() -> asyncio.Future[int]:
    """Returns what gets the number of the first signal to stop. A second one ends the process at
    once.
    """
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if stopped.done():
            os._exit(128 + number)
        stopped.set_result(number)

    for number in startup.STOP_SIGNALS:
        if number not in startup.IGNORED:
            loop.add_signal_handler(number, stop, number)
    return stopped


async def _tell(pool: Pool) -> None:
    started = time.monotonic()
    while not pool.ready():
        await asyncio.sleep(0.05)
    about = pool.about
    print(
        f"ready after {time.monotonic() - started:.1f} s: {about['model']}, {about['task']}",
        flush=True,
    )


async def _drain(gate: Gate, timeout: float) -> None:
    """Answers what was taken; later requests get the answer that the server is ending."""
    gate.draining = True
    until = time.monotonic() + timeout + 1
    while gate.active and time.monotonic() < until:
        await asyncio.sleep(0.02)
    # the last answers are written; who connected meanwhile is answered, too
    await asyncio.sleep(0.05)
