"""A rank that a launcher started, and the process that watches it: the same lines and statuses as of spawned ranks.

The launcher's process forks before it imports Paddle: the child is the rank, the parent (13 MB) watches it. The parents
tell that of rank 0 once a second, over TCP, what they see; it judges for all, and sends each its verdict. None of this
needs the ranks' threads, which may be suspended, or wait in C++. Where the ranks meet, rank 0 tells the port and a
password; before that, each parent judges its own rank.
"""

import contextlib
import hmac
import json
import math
import multiprocessing
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, NoReturn

from errors import FAILURE, Failure, InputError
from launch import signals
from launch.progress import FIELDS
from launch.spawned import Ranks, leave
from launch.verdict import Seen, Verdict, judge

EVERY = 1.0  # seconds between what parents tell each other
SILENCE = 10.0  # seconds without a word after which a rank counts as not answering
PATIENT = 5.0  # seconds after its own rank's failure in which a parent awaits the verdict of rank 0's
SILENT = "isn't answering (is its machine down, or out of reach?)"
LOST = "was lost (its machine went down, or its launcher killed it)"
_door: Any = None  # shared bytes: JSON [port, password] of rank 0's parent


def watch(target: Callable[..., None], config: Any) -> NoReturn:
    """Calls ``target(failed, beats, config)`` in a child, watches it, and exits with the run's status.

    Nothing in this process may have started threads, nor imported Paddle.

    Raises:
        InputError: DIST.MAX_RESTART is set.
    """
    global _door
    if config.DIST.MAX_RESTART:
        raise InputError("DIST.MAX_RESTART is for ranks that this program spawns; a launcher restarts its own")
    context, rank = multiprocessing.get_context("fork"), int(os.environ["PADDLE_TRAINER_ID"])
    os.environ["LAUNCHER_PID"] = str(os.getppid())
    separate = "PADDLE_LOG_DIR" in os.environ  # Paddle's launcher: each rank's stderr is a file of its own
    if separate:
        signals.die_with_parent()
    failed, beats = context.Array("c", FAILURE), context.Array("d", FIELDS, lock=False)
    _door = context.Array("c", 200)
    signals.hold_signals()
    role = First if rank == 0 else Other
    watcher = role(context.Process(target=target, args=(failed, beats, config)), failed, beats, config.DIST.TIMEOUT)
    verdict = watcher.wait()
    if verdict and (rank == 0 or separate or watcher.alone):
        leave(verdict)
    sys.exit(verdict.status if verdict else 0)


def meet(all_gather: Callable[[Any], list[Any]]) -> None:
    """Tells this rank's parent where rank 0's is; every rank of a run calls it, once collectives work."""
    if _door is not None:
        _door.value = all_gather(_door.value)[0]


class Launched(Ranks):
    """A launched rank, as its parent sees it. What parents tell each other are lines of JSON."""

    alone = True  # whether this process decides by itself

    def __init__(self, process: multiprocessing.Process, failed: Any, beats: Any, timeout: float) -> None:
        process.start()
        super().__init__(SimpleNamespace(processes=[process]), failed, beats, timeout)
        self.own = self.seen[0]
        self.own.place, self.own.host = int(os.environ["PADDLE_TRAINER_ID"]), platform.node()
        self.told = 0.0

    def look(self) -> bool:
        done = super().look()
        self.now = time.monotonic()
        self.exchange(done)
        return done

    def exchange(self, done: bool) -> None:
        """Hears and tells what there is; ``done``: this rank has ended well."""
        raise NotImplementedError

    def due(self) -> bool:
        """Whether it is time to tell something."""
        if due := self.now - self.told > EVERY:
            self.told = self.now
        return due


class First(Launched):
    """Rank 0's parent: it hears the others and judges for all."""

    def __init__(self, *args: Any) -> None:
        self.listener = socket.create_server(("", 0), backlog=1024)
        self.password = secrets.token_hex(8)
        _door.value = json.dumps([self.listener.getsockname()[1], self.password]).encode()
        super().__init__(*args)
        self.listener.setblocking(False)
        self.all = [self.own, *map(Seen, range(1, int(os.environ["PADDLE_TRAINERS_NUM"])))]
        self.lines: dict[Line, int | None] = {}  # to the others; whose (None: of somebody who hasn't told)
        self.over: set[int] = set()  # whose rank has ended well, or was lost
        self.beat: dict[int, float] = {}  # when the others' last ones were, by their clocks

    def exchange(self, done: bool) -> None:
        self._accept()
        due = self.due()
        for line in list(self.lines):
            for message in line.receive():
                self._hear(line, message)
            place = self.lines[line]
            if line.closed:
                del self.lines[line]
                if place is not None and place not in self.over:
                    self._lose(self.all[place])
            elif place is not None:
                self.all[place].trouble = self.all[place].trouble or SILENT * (self.now - line.heard > SILENCE)
                if due:
                    line.send({})
        if done:
            self._part({"parted": True})

    def _hear(self, line: "Line", message: dict[str, Any]) -> None:
        password = message.get("password") if isinstance(message, dict) else ""  # strangers send anything
        if not hmac.compare_digest(str(password).encode(errors="replace"), self.password.encode()):
            line.close()
            return
        seen = Seen(**message["seen"])
        place = self.lines[line] = seen.place
        known, self.all[place] = self.all[place], seen
        moved = self.beat.get(place, 0.0) != seen.time
        self.beat[place], seen.time = seen.time, self.now if moved else known.time
        seen.gone_at = known.gone_at or self.now * bool(seen.gone)
        seen.failure = seen.failure and Failure(*seen.failure)
        if message["done"]:
            self.over.add(place)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.lines[Line(self.listener.accept()[0])] = None

    def _lose(self, seen: Seen) -> None:
        self.over.add(seen.place)
        if not seen.gone and not seen.failure:
            seen.gone, seen.gone_at = LOST, self.now

    def verdict(self) -> Verdict | None:
        return judge(self.all, self.started, self.timeout)

    def end(self, verdict: Verdict) -> None:
        super().end(verdict)
        self._part({"verdict": verdict})

    def _part(self, message: dict[str, Any]) -> None:
        """Tells the others, also those that are about to connect; unless all they sent is read, they might lose it."""
        until, told = time.monotonic() + 1, set()
        while time.monotonic() < until:
            self._accept()
            for line in self.lines:
                if line not in told:
                    line.send(message)
                    told.add(line)
                line.receive()
            if len(told) + len(self.over) >= len(self.all) - 1 and all(line.closed for line in self.lines):
                break
            time.sleep(0.02)


class Other(Launched):
    """The parent of another rank: it tells rank 0's what it sees, and does what that decides."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.host = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].rpartition(":")[0]
        self.line: Line  # since it isn't alone any more
        self.decided: Verdict | None = None
        self.failed_at = 0.0

    def exchange(self, done: bool) -> None:
        if self.alone and _door.value:
            self._connect(*json.loads(_door.value))
        if self.alone:
            return
        for message in self.line.receive():
            self.decided = self.decided or (message.get("verdict") and Verdict(*message["verdict"]))
            if message.get("parted"):
                self.alone = True
                self.line.close()
        if self.due() or done or self.own.gone or self.own.failure:
            self.line.send({"password": self.password, "seen": asdict(self.own), "done": done})

    def _connect(self, port: int, password: str) -> None:
        _door.value, self.password = b"", password
        try:
            self.line = Line(socket.create_connection((self.host, port), timeout=5))
            self.alone = False
        except ConnectionRefusedError:  # it has ended, and told all that had connected
            pass
        except OSError as error:
            what = f"{self.own.name} can't reach {self.host}:{port} ({error}), where rank 0 watches all"
            print(f"note: {what}: other ranks won't hear what happens to it", file=sys.stderr, flush=True)

    def verdict(self) -> Verdict | None:
        if self.decided or self.alone:
            return self.decided or judge([self.own], self.started, self.timeout)
        own = judge([self.own], self.started, math.inf)
        self.failed_at = self.failed_at or self.now * bool(own)
        silent = self.now - self.line.heard
        self.alone = self.line.closed or silent > (SILENCE if own else max(SILENCE, self.timeout))
        if self.alone and (own is None or own.lost):  # this one may have gone because of rank 0
            how = LOST if self.line.closed else f"{SILENT} for {silent:.0f} s"
            return Verdict(1, f"error: rank 0 on {self.host} {how}", lost=True)
        return own if own and (self.alone or self.now - self.failed_at > PATIENT) else None


class Line:
    """A connection over which lines of JSON go.

    Attributes:
        heard: when something came the last time.
    """

    LONGEST = 1 << 20

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.rest, self.closed, self.heard = connection, b"", False, time.monotonic()

    def send(self, message: dict[str, Any]) -> None:
        with self._closing():
            self.connection.settimeout(1)
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come, without waiting."""
        with self._closing(), contextlib.suppress(BlockingIOError):
            while not self.closed:
                self.connection.settimeout(0)
                data = self.connection.recv(1 << 16)
                self.rest, self.heard = self.rest + data, time.monotonic()
                if not data or len(self.rest) > self.LONGEST:
                    self.close()
        *lines, self.rest = self.rest.split(b"\n")
        with self._closing():
            return [json.loads(line) for line in lines]
        return []

    def close(self) -> None:
        self.closed = True
        self.connection.close()

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # the other end is gone, or isn't one of ours
            self.close()
