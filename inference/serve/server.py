"""Starts the server, and ends it.

After a signal to stop, it answers the requests that it has accepted, then ends.
"""

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

# The largest number of connections.
_CONNECTIONS = 8192
# Open files besides connections: workers, files that are read, connections that are being refused.
_RESERVE = 256
# Connections that are accepted before other tasks have their turn.
_ACCEPTED = 32
# Connections that wait to be accepted.
_QUEUE = 2048


class Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers and with a longer queue of connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio's "backlog" is the length of the queue, and also the number of connections
            # that it accepts at once. So the length is set here.
            listener.listen(_QUEUE)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: Settings) -> int:
    """Serves until a signal to stop; returns the exit status for that signal.

    Raises:
        InputError: the server can't listen at the address, or the weights can't be read.
        RunError: the workers end again and again.
    """
    streams.hurry()
    hold_little()
    listener = _listening(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {settings.path} at http://{shown}:{port}/", flush=True)
    if settings.host not in LOOPBACK and not settings.token:
        reach = f"anyone who reaches {shown}:{port} can use this server"
        log(f"warning: {reach}; use -token_file to require a token")
    settings = dataclasses.replace(settings, path=_real_folder(settings.path))
    return asyncio.run(_serve(settings, listener))


def _real_folder(path: str) -> str:
    """Returns the folder of a checkpoint without links, or the path itself if it is a file.

    A link such as "best" may point to another checkpoint while training continues.
    """
    # Not by weights.hub, which knows these folders, too: this process doesn't import Paddle.
    for folder in (os.path.join(path, "checkpoints", "best"), path):
        if os.path.isdir(folder):
            return os.path.realpath(folder)
    return path


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_QUEUE)
        # Connections inherit the option.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    except UnicodeError:
        # The name has two dots in a row, or a part that is too long.
        problem = "this isn't a host name"
    raise InputError(
        f"can't listen at {host}, port {port} ({problem}); choose another -host or -port"
    )


def _connections() -> int:
    """Returns the most connections of clients, each of which takes a file descriptor."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _CONNECTIONS if files < 0 else min(_CONNECTIONS, max(files // 2, files - _RESERVE))


async def _serve(settings: Settings, listener: socket.socket) -> int:
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "python_multipart.multipart"):
        # The gate logs requests and errors.
        logging.getLogger(name).disabled = True
    asyncio.get_running_loop().set_exception_handler(_accept_error_handler())
    metrics = Metrics()
    batcher = Batcher(settings.batch_size, settings.max_delay_ms / 1000, settings.max_queue)
    pool = Pool(settings, batcher, metrics)
    app = create_app(settings, batcher, pool, metrics, lambda: gate.draining)
    gate = Gate(app, settings, metrics, lambda: bool(pool.about))
    protocol = type("Counted", (Protocol,), {"metrics": metrics, "most": _connections()})
    server = Server(
        uvicorn.Config(
            gate,
            http=protocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_ACCEPTED,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=3,
        )
    )
    stopped = _stop_signal()
    serving = asyncio.ensure_future(server.serve([listener]))
    announcing = asyncio.ensure_future(_announce_ready(pool))
    try:
        await asyncio.wait({stopped, pool.ended, serving}, return_when=asyncio.FIRST_COMPLETED)
        for ended in (pool.ended, serving):
            if ended.done():
                ended.result()
        name = signal.Signals(stopped.result()).name
        log(f"stopped by {name}: {gate.active} requests are finished first")
        await _drain(gate, settings.timeout)
    finally:
        announcing.cancel()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=5)
        await pool.close()
    return 128 + stopped.result()


def _accept_error_handler() -> Any:
    """Returns an exception handler for the event loop.

    It logs at most once a minute that connections can't be accepted.
    """
    last = -60.0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        if "accept()" not in context["message"]:
            loop.default_exception_handler(context)
        elif time.monotonic() - last >= 60:
            last = time.monotonic()
            problem = one_line(str(context.get("exception")))
            log(f"warning: connections can't be accepted ({problem})")

    return handle


def _stop_signal() -> asyncio.Future[int]:
    """Returns a future that gets the number of the first signal to stop.

    A second signal ends the process at once.
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


async def _announce_ready(pool: Pool) -> None:
    """Waits until a worker has loaded the model, and prints that the server is ready."""
    started = time.monotonic()
    while not pool.ready():
        await asyncio.sleep(0.05)
    seconds = time.monotonic() - started
    about = pool.about
    print(f"ready after {seconds:.1f} s: {about['model']}, {about['task']}", flush=True)


async def _drain(gate: Gate, timeout: float) -> None:
    """Waits until accepted requests are answered; later ones are answered that the server is shutting down."""
    gate.draining = True
    deadline = time.monotonic() + timeout + 1
    while gate.active and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    # The last answers are still being written, and clients that connected meanwhile get theirs.
    await asyncio.sleep(0.05)
