"""A rank that a launcher started, and the process that watches it. Messages and statuses equal
those of spawned ranks.

The launcher's processes meet (``meet``), then fork before they import Paddle: the child
is the rank, the parent (13 MB) watches it. Once a second each parent reports to rank 0's parent
what it sees, over the connections of the meeting. Rank 0's parent decides for all whether the run
ends, and sends them its verdict. None of this needs the ranks' threads, which may be suspended, or
wait in C++.
"""

import contextlib
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, NoReturn

from errors import Failure, InputError
from launch import devices, launchers, rendezvous, secret, sharing, signals
from launch.channel import Channel
from launch.rendezvous import Meeting
from launch.spawned import Ranks, leave, shared_arrays
from launch.verdict import RankState, Verdict, judge

EVERY = 1.0  # seconds between two reports of a parent
SILENCE = 10.0  # seconds without a report after which a rank counts as not answering
PATIENT = 5.0  # seconds that a parent whose rank failed waits for the verdict of rank 0's parent
SILENT = "isn't answering (is its machine down, or out of reach?)"
LOST = "was lost (its machine went down, or its launcher killed it)"
# what a rank waits for before Paddle's start: its data, the others, nothing
READING, READY, GO = range(3)
_stage: Any = None  # a shared number, one of these


def watch(target: Callable[..., None], config: Any) -> NoReturn:
    """Calls ``target(failed, beats, config)`` in a child, watches it, and exits with the run's
    status.

    Nothing in this process may have started threads, nor imported Paddle.

    Raises:
        InputError: DIST.MAX_RESTART is set.
        InputError, RunError: as ``meet``.
    """
    global _stage
    if config.DIST.MAX_RESTART:
        raise InputError(
            "DIST.MAX_RESTART restarts only ranks that this program starts; set it to 0 under a launcher"
        )
    context = multiprocessing.get_context("fork")
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    os.environ["LAUNCHER_PID"] = str(os.getppid() if launchers.set_by_launcher() else os.getpid())
    # Paddle's launcher: each rank's stderr is a file of its own
    separate = "PADDLE_LOG_DIR" in os.environ
    # but a shell may end, and leave its ranks at work
    if separate or "TORCHELASTIC_RUN_ID" in os.environ:
        signals.die_with_parent(signal.SIGTERM)
    failed, beats = shared_arrays(context, 1)
    _stage = context.Array("b", [READING], lock=False)
    meeting = meet(config.DIST.INIT_TIMEOUT)
    signals.hold_signals()
    process = context.Process(target=_become_rank, args=(meeting, target, failed, beats, config))
    watcher = (First if rank == 0 else Other)(meeting, process, failed, beats, config.DIST.TIMEOUT)
    verdict = watcher.wait()
    if verdict and (rank == 0 or separate or watcher.alone):
        leave(verdict)
    sys.exit(verdict.status if verdict else 0)


def meet(limit: float) -> Meeting:
    """Waits until all ranks of a launched run are there, for ``limit`` seconds at most. ``ready``
    of the returned meeting waits until they have read their data, too.

    Between machines, it tells gloo and NCCL to use the network interface that reaches rank 0. By
    itself gloo takes the address that the machine's own name stands for. In many an /etc/hosts that
    is 127.0.1.1, where no other machine finds it. NCCL takes the first interface, which may lead
    nowhere.

    Raises:
        InputError, RunError: as ``rendezvous.meet``.
    """
    rank = launchers.read_number("PADDLE_TRAINER_ID")
    ranks = launchers.read_number("PADDLE_TRAINERS_NUM")
    local_ranks = launchers.read_number("PADDLE_LOCAL_SIZE", default=1)
    master = launchers.master_address()
    # torchrun's number of local ranks is a guess without LOCAL_WORLD_SIZE.
    is_guess = os.environ.get("RANK") and not os.environ.get("LOCAL_WORLD_SIZE")
    if local_ranks == ranks > 1 and not is_guess:
        _, port = rendezvous.parse_address(master)
        master = os.environ["PADDLE_MASTER"] = f"{rendezvous.LOOPBACK}:{port}"
        rendezvous.use_loopback()
    gpu = ""
    if devices.num_gpus_of_paddle() and os.environ.get("PADDLE_DISTRI_BACKEND") != "gloo":
        with launchers.telling_others(launchers.RANKS, launchers.SIZES):
            gpu = devices.selected_gpu()
    meeting = rendezvous.meet(
        master,
        rank,
        ranks,
        limit,
        job=launchers.job(),
        here=local_ranks,
        first=launchers.read_number("PADDLE_LOCAL_RANK", default=0) == 0,
        seat=gpu,
    )
    if ranks > 1:
        secret.take_run(meeting.run_key)
    interfaces = {address: name for name, address in rendezvous.addresses().items()}
    interface = interfaces.get(meeting.own_address)
    if ranks > local_ranks and interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # "=": this name, not any that begins with it
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    return meeting


def _become_rank(meeting: Meeting, target: Callable[..., None], *args: Any) -> None:
    meeting.close()  # only the parent keeps the connections: the others then notice its end
    target(*args)


def wait_for_all() -> None:
    """Returns when every launched rank has called it: Paddle alone would wait only 900 s for one
    that reads data.
    """
    _stage[0] = READY
    while _stage[0] != GO:
        sharing.answer()
        time.sleep(0.02)
    sharing.close()


class Launched(Ranks):
    """A launched rank, as its parent sees it. Parents send each other lines of JSON."""

    alone = True  # whether this parent decides by itself when the run ends

    def __init__(
        self, process: multiprocessing.Process, failed: Any, beats: Any, timeout: float
    ) -> None:
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
        """Exchanges reports with the other parents; ``done``: this rank has ended without an error."""
        raise NotImplementedError

    def due(self) -> bool:
        """Returns whether it is time for the next report."""
        if due := self.now - self.told > EVERY:
            self.told = self.now
        return due


class First(Launched):
    """Rank 0's parent: it receives the other parents' reports and decides for all."""

    def __init__(self, meeting: Meeting, *args: Any) -> None:
        super().__init__(*args)
        self.all = [self.own, *map(RankState, range(1, len(meeting.guests)))]
        self.lines = {Line(guest): place for place, guest in meeting.guests.items() if place}
        self.ready: set[int] = set()  # the ranks that have read their data
        self.over: set[int] = set()  # the ranks that have ended without an error, or were lost
        # the time of each other rank's last beat, by its own clock
        self.beat: dict[int, float] = {}

    def exchange(self, done: bool) -> None:
        due = self.due()
        for line, place in list(self.lines.items()):
            for message in line.receive():
                with line.closing():
                    self._hear(place, message)
            if line.closed:
                del self.lines[line]
                if place not in self.over:
                    self._lose(self.all[place])
                continue
            self.all[place].trouble = self.all[place].trouble or SILENT * (
                self.now - line.heard > SILENCE
            )
            if due:
                line.send({})
        if _stage[0] == READY and len(self.ready) == len(self.all) - 1:
            _stage[0] = GO
            for line in self.lines:
                line.send({"go": True})
        if done:
            self._part({"parted": True})

    def _hear(self, place: int, message: dict[str, Any]) -> None:
        seen = RankState(**message["seen"])
        known = self.all[place]
        seen.failure, failure = None, seen.failure and Failure(*seen.failure)
        if seen.place != place or [*map(type, vars(seen).values())] != [
            *map(type, vars(RankState(0)).values())
        ]:
            raise ValueError("not a report of one of our ranks")
        seen.failure = failure
        moved = self.beat.get(place, 0.0) != seen.time
        self.beat[place], seen.time = seen.time, self.now if moved else known.time
        seen.gone_at = known.gone_at or self.now * bool(seen.gone)
        self.all[place] = seen
        if message["ready"]:
            self.ready.add(place)
        if message["done"]:
            self.over.add(place)

    def _lose(self, seen: RankState) -> None:
        self.over.add(seen.place)
        if not seen.gone and not seen.failure:
            seen.gone = LOST
            seen.gone_at = self.now

    def verdict(self) -> Verdict | None:
        return judge(self.all, self.started, self.timeout)

    def end(self, verdict: Verdict) -> None:
        super().end(verdict)
        self._part({"verdict": verdict})

    def _part(self, message: dict[str, Any]) -> None:
        """Sends a last message to the others, and reads until they close: unread data might make
        them lose it.
        """
        until = time.monotonic() + 1
        for line in self.lines:
            line.send(message)
        while time.monotonic() < until and not all(line.closed for line in self.lines):
            for line in self.lines:
                line.receive()
            time.sleep(0.02)


class Other(Launched):
    """The parent of another rank: it reports to rank 0's parent, and does what that decides."""

    alone = False

    def __init__(self, meeting: Meeting, *args: Any) -> None:
        super().__init__(*args)
        self.host = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].rpartition(":")[0]
        self.line = Line(meeting.connection)
        self.decided: Verdict | None = None
        self.failed_at = 0.0

    def exchange(self, done: bool) -> None:
        for message in self.line.receive():
            self.decided = self.decided or (message.get("verdict") and Verdict(*message["verdict"]))
            if message.get("go"):
                _stage[0] = GO
            if message.get("parted"):
                self.alone = True
                self.line.close()
        ready = _stage[0] == READY
        if not self.alone and (self.due() or done or ready or self.own.gone or self.own.failure):
            self.line.send({"seen": asdict(self.own), "ready": ready, "done": done})

    def verdict(self) -> Verdict | None:
        if self.decided or self.alone:
            return self.decided or judge([self.own], self.started, self.timeout)
        own = judge([self.own], self.started, math.inf)
        self.failed_at = self.failed_at or self.now * bool(own)
        silent = self.now - self.line.heard
        self.alone = self.line.closed or silent > (SILENCE if own else max(SILENCE, self.timeout))
        if self.alone and (own is None or own.lost):  # perhaps this rank ended because rank 0 did
            how = LOST if self.line.closed else f"{SILENT} for {silent:.0f} s"
            return Verdict(1, f"error: rank 0 on {self.host} {how}", lost=True)
        return own if own and (self.alone or self.now - self.failed_at > PATIENT) else None


class Line:
    """An authenticated connection for JSON, one message per line.

    Attributes:
        heard: when something came the last time.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    @property
    def closed(self) -> bool:
        return self.channel.closed

    @property
    def heard(self) -> float:
        return self.channel.heard

    def send(self, message: dict[str, Any]) -> None:
        # Where the other end is gone, receive finds that, after what it said last.
        with self.closing(), contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(json.dumps(message))

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come, without waiting."""
        if not self.closed:
            with self.closing():
                return [json.loads(line) for line in self.channel.receive()]
        return []

    def close(self) -> None:
        self.channel.close()

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Closes the connection on any error: the other end is gone, or its message is wrong.
        Nothing else ends.
        """
        try:
            yield
        except Exception:
            self.close()
