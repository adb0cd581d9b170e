"""Decides why a run ends if ranks fail, are lost or stall: which rank caused it, and the message."""

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from errors import Failure
from launch.progress import DOING
from launch.signals import STOP_SIGNALS
from launch.startup import NOT_BEGUN

START_UP = 600.0  # seconds, at least, until all ranks have taken a batch
GRACE = 2.0  # seconds to wait for the cause, after ranks aborted because of another
# seconds without a beat after which a rank counts as the cause; gloo gives up after 30
PATIENCE = 20.0
STOPPED = {f"was stopped by {number.name}": number for number in STOP_SIGNALS}
ABORTED = "was killed by SIGABRT"  # gloo and NCCL abort if a peer is gone or doesn't answer


@dataclass
class RankState:
    """A rank, as the process that watches it sees it.

    Attributes:
        host: its machine, if the run may have several.
        time: the time of its last beat, by the watching process's clock; 0: none yet.
        trouble: why it can't go on, if that is known: "is suspended (SIGSTOP, or a debugger)".
        gone: how it ended, if with an error: "was killed by SIGKILL".
        gone_at: when that was seen.
        failure: the error that it reported.
    """

    place: int
    pid: int = 0
    host: str = ""
    time: float = 0.0
    step: float = 0.0
    doing: float = 0.0
    trouble: str = ""
    gone: str = ""
    gone_at: float = 0.0
    failure: Failure | None = None

    @property
    def name(self) -> str:
        at = f" on {self.host}" if self.host else ""
        return f"rank {self.place} (process {self.pid}{at})" if self.pid else f"rank {self.place}"

    def __str__(self) -> str:
        return (
            f"{self.name} {self.trouble or f'is {DOING[int(self.doing)]}'} at step {self.step:.0f}"
        )


class Verdict(NamedTuple):
    """Why a run ends: its exit status, the message, and whether a restart may help (``lost``)."""

    status: int
    text: str
    lost: bool


def judge(ranks: list[RankState], started: float, timeout: float) -> Verdict | None:
    """Returns why the run has to end, or None.

    Args:
        started: by ``time.monotonic``.
        timeout: the run ends after this many seconds without progress of any rank. Until all have
            begun, it is at least START_UP.
    """
    now = time.monotonic()
    failures = sorted(
        (seen.failure for seen in ranks if seen.failure), key=lambda failure: failure.unforeseen
    )
    if failures and not failures[0].unforeseen:
        return Verdict(failures[0].status, failures[0].text, lost=False)
    gone = [seen for seen in ranks if seen.gone]
    if stopped := [seen for seen in gone if seen.gone in STOPPED]:
        return _stop_verdict(stopped[0], STOPPED[stopped[0].gone])
    if causes := [seen for seen in gone if seen.gone != ABORTED]:
        return _loss_verdict(causes[0])
    if failures or gone:  # perhaps because another rank didn't answer
        hung = [
            seen
            for seen in _late(ranks)
            if seen.trouble or (seen.time and now - seen.time > PATIENCE)
        ]
        if hung:
            return Verdict(1, f"error: {hung[0]}, and the others waited for it in vain", lost=True)
        if failures:
            return Verdict(failures[0].status, failures[0].text, lost=True)
        return _abort_verdict(gone) if now - gone[0].gone_at > GRACE else None
    return _stall_verdict(ranks, started, timeout, now)


def _stop_verdict(seen: RankState, number: signal.Signals) -> Verdict:
    begun = f"stopped by {number.name} at step {seen.step:.0f}"
    return Verdict(128 + number, begun if seen.time else NOT_BEGUN.format(number.name), lost=False)


def _loss_verdict(seen: RankState) -> Verdict:
    name = seen.name if seen.host else f"rank {seen.place}"
    return Verdict(1, f"error: {name} {seen.gone} at step {seen.step:.0f}", lost=True)


def _abort_verdict(aborted: list[RankState]) -> Verdict:
    """Returns the verdict on ranks that C++ aborted. The cause isn't known; the ends of their logs
    may show it.
    """
    names = " and ".join(str(seen.place) for seen in aborted)
    logs = " and ".join(f"log_{seen.place}.txt" for seen in aborted)
    who = f"rank{'s' * (len(aborted) > 1)} {names} gave up (SIGABRT) at step {aborted[0].step:.0f}"
    return Verdict(
        1,
        f"error: {who}; the end of {logs} tells why" if aborted[0].time else f"error: {who}",
        lost=True,
    )


def _stall_verdict(
    ranks: list[RankState], started: float, timeout: float, now: float
) -> Verdict | None:
    times = [seen.time for seen in ranks]
    # Until each has taken its first batch, they read the data and build the model, at their own
    # pace.
    timeout = timeout if all(times) else max(timeout, START_UP)
    if now - max(started, *times) < timeout:
        return None
    who = "; ".join(map(str, _late(ranks))) or f"{ranks[0]}{', like the others' * (len(ranks) > 1)}"
    return Verdict(1, f"error: no progress in {timeout:g} s (DIST.TIMEOUT): {who}", lost=True)


def _late(ranks: list[RankState]) -> list[RankState]:
    """Returns the ranks that the others wait for: those in trouble, else those that are behind; []
    if none is.
    """
    if troubled := [seen for seen in ranks if seen.trouble]:
        return troubled
    reached = [(seen.step, seen.doing) for seen in ranks]
    behind = [seen for seen in ranks if (seen.step, seen.doing) == min(reached)]
    return behind if len(behind) < len(ranks) else []


def how_it_ended(code: int) -> str:
    """Describes the exit code of a process that ended with an error (negative: by a signal)."""
    number = -code if code < 0 else code - 128
    if number in STOP_SIGNALS:
        return f"was stopped by {signal.Signals(number).name}"
    if number == signal.SIGKILL and code < 0:
        return "was killed by SIGKILL (is memory short?)"
    return (
        f"was killed by {signal.Signals(number).name}" if code < 0 else f"ended with status {code}"
    )


def trouble(pid: int) -> str:
    """Returns why a process of this machine can't continue: it is suspended; "" if it isn't."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    suspended = status.rpartition(")")[2].split()[0] in "tT"
    return "is suspended (SIGSTOP, or a debugger)" if suspended else ""


def failure_in(shared: bytes) -> Failure | None:
    """Returns what ``errors.reporting`` left in shared memory."""
    return Failure(*json.loads(shared)) if shared else None
