"""What to say of ranks that fail, are lost or stall, and who is to blame."""

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from errors import Failure
from launch.progress import DOING
from launch.signals import STOPS
from launch.startup import NOT_BEGUN

START_UP = 600.0  # seconds at least until all ranks have begun
GRACE = 2.0  # seconds in which a cause may turn up that explains why others aborted
PATIENCE = 20.0  # seconds without a sign of life after which a rank is why others gave up: gloo's are 30
STOPPED = {f"was stopped by {number.name}": number for number in STOPS}
ABORTED = "was killed by SIGABRT"  # what gloo and NCCL do when a peer is gone or doesn't answer


@dataclass
class Seen:
    """A rank, as the process that watches it sees it.

    Attributes:
        host: its machine, where a run may have several.
        time: of its last beat, by the watcher's clock; 0: none yet.
        trouble: why it can't go on, if that is known: "is suspended (SIGSTOP, or a debugger)".
        gone: how it ended, if not well: "was killed by SIGKILL"; ``gone_at``: when that was seen.
        failure: what it reported.
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
        return f"{self.name} {self.trouble or f'is {DOING[int(self.doing)]}'} at step {self.step:.0f}"


class Verdict(NamedTuple):
    """Why a run ends: its exit status, the line, and whether the same start again may go well."""

    status: int
    text: str
    lost: bool


def judge(ranks: list[Seen], started: float, timeout: float) -> Verdict | None:
    """Returns why the run has to end, or None.

    Args:
        started: by ``time.monotonic``.
        timeout: seconds without any rank's progress that end the run; START_UP, if that is more, until all have begun.
    """
    now = time.monotonic()
    failures = sorted((seen.failure for seen in ranks if seen.failure), key=lambda failure: failure.unforeseen)
    if failures and not failures[0].unforeseen:
        return Verdict(failures[0].status, failures[0].text, lost=False)
    gone = [seen for seen in ranks if seen.gone]
    if stopped := [seen for seen in gone if seen.gone in STOPPED]:
        return _stop_verdict(stopped[0], STOPPED[stopped[0].gone])
    if causes := [seen for seen in gone if seen.gone != ABORTED]:
        return _loss_verdict(causes[0])
    if failures or gone:  # perhaps only because others didn't answer
        hung = [seen for seen in _late(ranks) if seen.trouble or (seen.time and now - seen.time > PATIENCE)]
        if hung:
            return Verdict(1, f"error: {hung[0]}, and the others waited for it in vain", lost=True)
        if failures:
            return Verdict(failures[0].status, failures[0].text, lost=True)
        return _abort_verdict(gone) if now - gone[0].gone_at > GRACE else None
    return _stall_verdict(ranks, started, timeout, now)


def _stop_verdict(seen: Seen, number: signal.Signals) -> Verdict:
    begun = f"stopped by {number.name} at step {seen.step:.0f}"
    return Verdict(128 + number, begun if seen.time else NOT_BEGUN.format(number.name), lost=False)


def _loss_verdict(seen: Seen) -> Verdict:
    name = seen.name if seen.host else f"rank {seen.place}"
    return Verdict(1, f"error: {name} {seen.gone} at step {seen.step:.0f}", lost=True)


def _abort_verdict(aborted: list[Seen]) -> Verdict:
    """Of ranks that C++ ended it isn't known which is to blame; what it said as it ended them may tell."""
    names = " and ".join(str(seen.place) for seen in aborted)
    logs = " and ".join(f"log_{seen.place}.txt" for seen in aborted)
    who = f"rank{'s' * (len(aborted) > 1)} {names} gave up (SIGABRT) at step {aborted[0].step:.0f}"
    return Verdict(1, f"error: {who}; the end of {logs} tells why" if aborted[0].time else f"error: {who}", lost=True)


def _stall_verdict(ranks: list[Seen], started: float, timeout: float, now: float) -> Verdict | None:
    times = [seen.time for seen in ranks]
    # Until each has taken its first batch, they read the data and build the model, at their own pace.
    timeout = timeout if all(times) else max(timeout, START_UP)
    if now - max(started, *times) < timeout:
        return None
    who = "; ".join(map(str, _late(ranks))) or f"{ranks[0]}{', like the others' * (len(ranks) > 1)}"
    return Verdict(1, f"error: no progress in {timeout:g} s (DIST.TIMEOUT): {who}", lost=True)


def _late(ranks: list[Seen]) -> list[Seen]:
    """The ranks that the others wait for: those in trouble, else those that are behind; [] if none is."""
    if troubled := [seen for seen in ranks if seen.trouble]:
        return troubled
    reached = [(seen.step, seen.doing) for seen in ranks]
    behind = [seen for seen in ranks if (seen.step, seen.doing) == min(reached)]
    return behind if len(behind) < len(ranks) else []


def how_it_ended(code: int) -> str:
    """Returns the words for a process's exit code (negative: a signal), of what didn't end well."""
    number = -code if code < 0 else code - 128
    if number in STOPS:
        return f"was stopped by {signal.Signals(number).name}"
    if number == signal.SIGKILL and code < 0:
        return "was killed by SIGKILL (is memory short?)"
    return f"was killed by {signal.Signals(number).name}" if code < 0 else f"ended with status {code}"


def trouble(pid: int) -> str:
    """Returns why a process of this machine can't go on, if that is to be seen: it is suspended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    suspended = status.rpartition(")")[2].split()[0] in "tT"
    return "is suspended (SIGSTOP, or a debugger)" if suspended else ""


def failure_in(shared: bytes) -> Failure | None:
    """Returns what ``errors.reporting`` left in shared memory."""
    return Failure(*json.loads(shared)) if shared else None
