"""Runs a rank that a launcher started, and watches it. Messages and exit statuses equal those of
spawned ranks.

The processes that a launcher started meet (``meet``) and then fork, before they import Paddle. The
child is the rank, and the parent (13 MB) watches it. Once a second each parent sends the state of
its rank to rank 0's parent, over the connections of the meeting. Rank 0's parent decides for all
whether the run ends, and sends its verdict to the other parents. So a run also ends if a rank is
suspended or waits in C++, where none of its threads could report anything.
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
from launch.spawned import Watcher, exit_with, shared_arrays
from launch.verdict import RankState, Verdict, judge

# seconds between two reports of a parent
REPORT_INTERVAL = 1.0
# seconds without a report after which a rank counts as not answering
REPORT_TIMEOUT = 10.0
# seconds that a parent whose rank failed waits for the verdict of rank 0's parent
VERDICT_TIMEOUT = 5.0
SILENT = "isn't answering (is its machine down, or out of reach?)"
LOST = "was lost (its machine is down, or its launcher killed it)"
# The stages of a rank before it trains: it reads its data, it waits for the other ranks, and all
# are ready.
READING, READY, GO = range(3)
# The rank's stage, in memory that it shares with its parent.
_stage: Any = None


def watch(target: Callable[..., None], config: Any) -> NoReturn:
    """Calls ``target(failed, beats, config)`` in a child process, watches it, and exits with the
    run's status.

    This process must not have started threads or imported Paddle, because it forks.

    Raises:
        InputError: DIST.MAX_RESTART is set.
        InputError, RunError: as ``meet``.
    """
    global _stage
    if config.DIST.MAX_RESTART:
        raise InputError(
            "DIST.MAX_RESTART restarts only ranks that this program starts;"
            " set it to 0 under a launcher"
        )
    context = multiprocessing.get_context("fork")
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    os.environ["LAUNCHER_PID"] = str(os.getppid() if launchers.set_by_launcher() else os.getpid())
    # Paddle's launcher writes each rank's stderr to a file of its own.
    has_own_stderr = "PADDLE_LOG_DIR" in os.environ
    # If one of these launchers is killed, its ranks shall end, too. A shell, in contrast, may end
    # and leave its ranks running.
    if has_own_stderr or "TORCHELASTIC_RUN_ID" in os.environ:
        signals.die_with_parent(signal.SIGTERM)
    failed, beats = shared_arrays(context, 1)
    _stage = context.Array("b", [READING], lock=False)
    meeting = meet(config.DIST.INIT_TIMEOUT)
    signals.hold_signals()
    process = context.Process(target=_become_rank, args=(meeting, target, failed, beats, config))
    watcher_class = DecidingWatcher if rank == 0 else ReportingWatcher
    watcher = watcher_class(meeting, process, failed, beats, config.DIST.TIMEOUT)
    verdict = watcher.wait()
    # One message is enough where all ranks share stderr.
    if verdict and (rank == 0 or has_own_stderr or watcher.decides_alone):
        exit_with(verdict)
    sys.exit(verdict.status if verdict else 0)


def meet(limit: float) -> Meeting:
    """Waits until all ranks of a launched run have connected to rank 0, ``limit`` seconds at most.

    If the run has several machines, gloo and NCCL get the network interface that reaches rank 0. By
    default gloo listens at the address that the machine's own name stands for. In many an
    /etc/hosts that is 127.0.1.1, which no other machine can reach. NCCL uses the first interface,
    which may not reach the other machines.

    Raises:
        InputError, RunError: as ``rendezvous.meet``.
    """
    rank = launchers.read_number("PADDLE_TRAINER_ID")
    ranks = launchers.read_number("PADDLE_TRAINERS_NUM")
    local_ranks = launchers.read_number("PADDLE_LOCAL_SIZE", default=1)
    master = launchers.master_address()
    # Without LOCAL_WORLD_SIZE, the number of torchrun's local ranks is a guess.
    is_guess = os.environ.get("RANK") and not os.environ.get("LOCAL_WORLD_SIZE")
    if local_ranks == ranks > 1 and not is_guess:
        # All ranks are on this machine, so they need no other interface than loopback.
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
        local_ranks=local_ranks,
        prints_error=launchers.read_number("PADDLE_LOCAL_RANK", default=0) == 0,
        gpu=gpu,
    )
    if ranks > 1:
        secret.set_run_key(meeting.run_key)
    interfaces = {address: name for name, address in rendezvous.addresses().items()}
    interface = interfaces.get(meeting.own_address)
    if ranks > local_ranks and interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # With "=", NCCL takes this name alone, otherwise any that begins with it.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    return meeting


def _become_rank(meeting: Meeting, target: Callable[..., None], *args: Any) -> None:
    # The parent alone keeps the connections: they end with it, which the other parents notice.
    meeting.close()
    target(*args)


def wait_for_all() -> None:
    """Returns when every launched rank has called it.

    A rank may take longer to read its data than the 900 s that Paddle would wait for it.
    """
    _stage[0] = READY
    while _stage[0] != GO:
        # Other ranks of this machine may still need the data that this one has read.
        sharing.answer()
        time.sleep(0.02)
    sharing.close()


class LaunchedWatcher(Watcher):
    """Watches a launched rank, which is a child process of this one.

    Attributes:
        own_state: the state of this rank.
        decides_alone: whether this parent decides by itself when the run ends.
    """

    decides_alone = True

    def __init__(
        self, process: multiprocessing.Process, failed: Any, beats: Any, timeout: float
    ) -> None:
        process.start()
        super().__init__(SimpleNamespace(processes=[process]), failed, beats, timeout)
        self.own_state = self.states[0]
        self.own_state.place = int(os.environ["PADDLE_TRAINER_ID"])
        self.own_state.host = platform.node()
        self.last_report = 0.0

    def check(self) -> bool:
        done = super().check()
        self.now = time.monotonic()
        self.exchange(done)
        return done

    def exchange(self, done: bool) -> None:
        """Exchanges reports with the other parents.

        Args:
            done: whether this rank has ended without an error.
        """
        raise NotImplementedError

    def is_report_due(self) -> bool:
        """Returns whether it is time for the next report, which then counts as sent."""
        is_due = self.now - self.last_report > REPORT_INTERVAL
        if is_due:
            self.last_report = self.now
        return is_due


class DecidingWatcher(LaunchedWatcher):
    """The parent of rank 0: it receives the reports of the other parents and decides for all.

    Attributes:
        all_states: the states of all ranks.
        peers: the connections to the other parents, and the numbers of their ranks.
        ready: the ranks that have read their data.
        ended: the ranks that have ended without an error, or were lost.
        beats_received: the time of each other rank's last beat, by the clock of its own machine.
    """

    def __init__(self, meeting: Meeting, *args: Any) -> None:
        super().__init__(*args)
        self.all_states = [self.own_state, *map(RankState, range(1, len(meeting.guests)))]
        self.peers = {Peer(guest): place for place, guest in meeting.guests.items() if place}
        self.ready: set[int] = set()
        self.ended: set[int] = set()
        self.beats_received: dict[int, float] = {}

    def exchange(self, done: bool) -> None:
        is_due = self.is_report_due()
        for peer, place in list(self.peers.items()):
            for message in peer.receive():
                with peer.closing_on_error():
                    self._take_report(place, message)
            if peer.closed:
                del self.peers[peer]
                if place not in self.ended:
                    self._lose(self.all_states[place])
                continue
            if not self.all_states[place].trouble and self.now - peer.heard > REPORT_TIMEOUT:
                self.all_states[place].trouble = SILENT
            if is_due:
                # An empty message shows the other parent that this one is there.
                peer.send({})
        if _stage[0] == READY and len(self.ready) == len(self.all_states) - 1:
            _stage[0] = GO
            for peer in self.peers:
                peer.send({"go": True})
        if done:
            self._send_last({"parted": True})

    def _take_report(self, place: int, message: dict[str, Any]) -> None:
        """Takes the report of another rank's parent. Raises any error if it isn't one."""
        state = RankState(**message["seen"])
        known = self.all_states[place]
        failure = None
        if state.failure:
            failure = Failure(*state.failure)
        # Without a failure, all attributes have the types of a new state's.
        state.failure = None
        types = [type(value) for value in vars(state).values()]
        expected = [type(value) for value in vars(RankState(0)).values()]
        if state.place != place or types != expected:
            raise ValueError("not a report of one of our ranks")
        state.failure = failure
        # Machines have different clocks: a new beat gets the time at which its report came.
        has_new_beat = self.beats_received.get(place, 0.0) != state.time
        self.beats_received[place] = state.time
        state.time = self.now if has_new_beat else known.time
        state.gone_at = known.gone_at
        if state.gone and not state.gone_at:
            state.gone_at = self.now
        self.all_states[place] = state
        if message["ready"]:
            self.ready.add(place)
        if message["done"]:
            self.ended.add(place)

    def _lose(self, state: RankState) -> None:
        """Notes that the connection to a rank's parent has ended."""
        self.ended.add(state.place)
        if not state.gone and not state.failure:
            state.gone = LOST
            state.gone_at = self.now

    def verdict(self) -> Verdict | None:
        return judge(self.all_states, self.started, self.timeout)

    def end(self, verdict: Verdict) -> None:
        super().end(verdict)
        self._send_last({"verdict": verdict})

    def _send_last(self, message: dict[str, Any]) -> None:
        """Sends a last message to the others, and reads until they close their connections. If this
        process ended with unread data, they might lose the message.
        """
        until = time.monotonic() + 1
        for peer in self.peers:
            peer.send(message)
        while time.monotonic() < until and not all(peer.closed for peer in self.peers):
            for peer in self.peers:
                peer.receive()
            time.sleep(0.02)


class ReportingWatcher(LaunchedWatcher):
    """The parent of another rank: it reports to rank 0's parent, which decides when the run ends.

    Attributes:
        host: the machine of rank 0.
        peer: the connection to rank 0's parent.
        decided: the verdict of rank 0's parent; None: none has come yet.
        failed_at: when this rank failed; 0: it didn't.
    """

    decides_alone = False

    def __init__(self, meeting: Meeting, *args: Any) -> None:
        super().__init__(*args)
        self.host = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].rpartition(":")[0]
        self.peer = Peer(meeting.connection)
        self.decided: Verdict | None = None
        self.failed_at = 0.0

    def exchange(self, done: bool) -> None:
        for message in self.peer.receive():
            if message.get("verdict") and not self.decided:
                self.decided = Verdict(*message["verdict"])
            if message.get("go"):
                _stage[0] = GO
            if message.get("parted"):
                # Rank 0 has ended without an error.
                self.decides_alone = True
                self.peer.close()
        if self.decides_alone:
            return
        is_ready = _stage[0] == READY
        has_news = done or is_ready or self.own_state.gone or self.own_state.failure
        if self.is_report_due() or has_news:
            self.peer.send({"seen": asdict(self.own_state), "ready": is_ready, "done": done})

    def verdict(self) -> Verdict | None:
        if self.decided:
            return self.decided
        if self.decides_alone:
            return judge([self.own_state], self.started, self.timeout)
        # Without a time limit: only rank 0's parent can see whether the run stalls.
        own_verdict = judge([self.own_state], self.started, math.inf)
        if own_verdict and not self.failed_at:
            self.failed_at = self.now
        silent = self.now - self.peer.heard
        limit = REPORT_TIMEOUT if own_verdict else max(REPORT_TIMEOUT, self.timeout)
        self.decides_alone = self.peer.closed or silent > limit
        # If this rank was lost, rank 0's loss may be the cause.
        if self.decides_alone and (own_verdict is None or own_verdict.lost):
            how = LOST if self.peer.closed else f"{SILENT} for {silent:.0f} s"
            return Verdict(1, f"error: rank 0 on {self.host} {how}", lost=True)
        if self.decides_alone or self.now - self.failed_at > VERDICT_TIMEOUT:
            return own_verdict
        return None


class Peer:
    """A connection to another rank's parent, for messages in JSON.

    Attributes:
        closed: whether this end is closed.
        heard: when bytes last came from the other end.
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
        # If the other end has gone, ``receive`` still returns its last messages, and then closes.
        with self.closing_on_error(), contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(json.dumps(message))

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come, without waiting."""
        if not self.closed:
            with self.closing_on_error():
                return [json.loads(line) for line in self.channel.receive()]
        return []

    def close(self) -> None:
        """Closes this end."""
        self.channel.close()

    @contextlib.contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Closes the connection if the body raises: the other end has gone, or its message is
        wrong. The error is suppressed.
        """
        try:
            yield
        except Exception:
            self.close()
