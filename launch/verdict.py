"""Decides why a run ends if ranks fail, are lost or stall: which rank caused it, and a message."""

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

# The least time limit, in seconds, until all ranks have got their first batch.
START_UP = 600.0
# Seconds to wait for the cause after ranks have aborted, which may be because of another one.
GRACE = 2.0
# Seconds without a beat after which a rank counts as the cause of other ranks' failures. gloo gives
# up after 30.
PATIENCE = 20.0
# The signal of each way to end by which a rank was asked to stop.
STOPPED = {f"was stopped by {number.name}": number for number in STOP_SIGNALS}
# gloo and NCCL abort if a peer has gone or doesn't answer.
ABORTED = "was killed by SIGABRT"


@dataclass
class RankState:
    """The state of a rank, as far as the process that watches it knows.

    Attributes:
        place: the rank's number.
        pid: its process's number; 0: unknown.
        host: its machine, if the run may have several.
        time: the time of its last beat, by the clock of the watching process; 0: none yet.
        step: the step that it is in.
        doing: a place in ``progress.DOING``.
        trouble: why it can't continue, such as "is suspended (SIGSTOP, or a debugger)".
        gone: how it ended, if that was an error, such as "was killed by SIGKILL".
        gone_at: when it was found to have ended.
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
    """Why a run ends.

    Attributes:
        status: its exit status.
        text: the message.
        lost: whether ranks were lost, so that a restart may help.
    """

    status: int
    text: str
    lost: bool


def judge(ranks: list[RankState], started: float, timeout: float) -> Verdict | None:
    """Returns why the run has to end; None if it doesn't.

    Args:
        started: when the ranks were started, by ``time.monotonic``.
        timeout: the run ends after this many seconds without progress of any rank. Until all have
            begun, it is at least START_UP.
    """
    now = time.monotonic()
    # Failures that the program foresees come first: they are certain to be causes.
    failures = sorted(
        (state.failure for state in ranks if state.failure), key=lambda failure: failure.unforeseen
    )
    if failures and not failures[0].unforeseen:
        return Verdict(failures[0].status, failures[0].text, lost=False)
    gone = [state for state in ranks if state.gone]
    if stopped := [state for state in gone if state.gone in STOPPED]:
        return _stop_verdict(stopped[0], STOPPED[stopped[0].gone])
    if causes := [state for state in gone if state.gone != ABORTED]:
        return _loss_verdict(causes[0])
    # All that is left are failures and aborts that another rank may have caused by not answering.
    if failures or gone:
        hung = [
            state
            for state in _late(ranks)
            if state.trouble or (state.time and now - state.time > PATIENCE)
        ]
        if hung:
            return Verdict(1, f"error: {hung[0]}, and the other ranks waited for it", lost=True)
        if failures:
            return Verdict(failures[0].status, failures[0].text, lost=True)
        return _abort_verdict(gone) if now - gone[0].gone_at > GRACE else None
    return _stall_verdict(ranks, started, timeout, now)


def _stop_verdict(state: RankState, number: signal.Signals) -> Verdict:
    text = NOT_BEGUN.format(number.name)
    if state.time:
        text = f"stopped by {number.name} at step {state.step:.0f}"
    return Verdict(128 + number, text, lost=False)


def _loss_verdict(state: RankState) -> Verdict:
    name = state.name if state.host else f"rank {state.place}"
    return Verdict(1, f"error: {name} {state.gone} at step {state.step:.0f}", lost=True)


def _abort_verdict(aborted: list[RankState]) -> Verdict:
    """Returns the verdict on ranks that C++ aborted. The cause isn't known; the ends of their logs
    may show it.
    """
    places = " and ".join(str(state.place) for state in aborted)
    ranks = f"ranks {places}" if len(aborted) > 1 else f"rank {places}"
    text = f"error: {ranks} aborted (SIGABRT) at step {aborted[0].step:.0f}"
    # Before the first beat there are no logs.
    if aborted[0].time:
        logs = " and ".join(f"log_{state.place}.txt" for state in aborted)
        text = f"{text}; see the end of {logs}"
    return Verdict(1, text, lost=True)


def _stall_verdict(
    ranks: list[RankState], started: float, timeout: float, now: float
) -> Verdict | None:
    times = [state.time for state in ranks]
    # Until its first batch, a rank reads the data and builds the model, which takes some ranks
    # longer than others.
    if not all(times):
        timeout = max(timeout, START_UP)
    if now - max(started, *times) < timeout:
        return None
    who = "; ".join(map(str, _late(ranks)))
    if not who:
        who = f"{ranks[0]}, like the others" if len(ranks) > 1 else str(ranks[0])
    return Verdict(1, f"error: no progress in {timeout:g} s (DIST.TIMEOUT): {who}", lost=True)


def _late(ranks: list[RankState]) -> list[RankState]:
    """Returns the ranks that the others wait for: those in trouble, or else those that are behind.
    If all are at the same step, it returns [].
    """
    if troubled := [state for state in ranks if state.trouble]:
        return troubled
    slowest = min((state.step, state.doing) for state in ranks)
    behind = [state for state in ranks if (state.step, state.doing) == slowest]
    return behind if len(behind) < len(ranks) else []


def how_it_ended(code: int) -> str:
    """Describes how a process ended with an error.

    Args:
        code: the exit status; negative: the number of the signal that killed it.
    """
    # A program that handles a signal that asks to stop ends with 128 plus the signal's number.
    number = -code if code < 0 else code - 128
    if number in STOP_SIGNALS:
        return f"was stopped by {signal.Signals(number).name}"
    if number == signal.SIGKILL and code < 0:
        return "was killed by SIGKILL (out of memory?)"
    if code < 0:
        return f"was killed by {signal.Signals(number).name}"
    return f"ended with status {code}"


def trouble(pid: int) -> str:
    """Returns why a process of this machine can't continue: it is suspended; "" if it isn't."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The state follows the program's name, which is in parentheses.
    state = status.rpartition(")")[2].split()[0]
    return "is suspended (SIGSTOP, or a debugger)" if state in "tT" else ""


def failure_in(shared: bytes) -> Failure | None:
    """Returns the failure that ``errors.reporting`` left in shared memory, or None."""
    return Failure(*json.loads(shared)) if shared else None
