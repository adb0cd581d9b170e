"""How the processes of a run are stopped and watched.

A rank notes signals and heeds them between two steps: about once a second all ranks agree on what any of them was asked
(``Requests``). The process that spawned them passes signals on, ends them all when one fails, and names the one that
stalls (``Ranks``).
"""

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import paddle

from errors import RunError
from utils import all_reduce_sum, rank, world_size

STOPS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOPS, signal.SIGUSR1)
_noted: dict[int, float] = {}  # signals that came, and when

# ------------------------------------------------------------------- a rank


class Stopped(RunError):
    """The run was asked to stop: exit status 128 + the signal's number, on every rank."""

    prefix = ""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {message}", shared=True)
        self.exit_status = 128 + number


def hold_signals() -> None:
    """SIGTERM, SIGINT and SIGUSR1 wait in the processes that this one starts, until ``catch_signals``; here they are
    noted: threads that libraries have started would let them through.
    """
    for number in SIGNALS:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def catch_signals(handler: Any) -> None:
    """Lets ``handler`` have them."""
    for number in SIGNALS:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def note_signals() -> None:
    """From now on signals are noted, for ``Requests``; where no parent does it, a second SIGINT ends this process."""
    catch_signals(_note)


def ignore_signals() -> None:
    """In a loader's worker: a signal to the whole group is its rank's to heed, which still needs the worker."""
    if signal.getsignal(signal.SIGTERM) is _note:
        catch_signals(signal.SIG_IGN)


def end_workers() -> None:
    """Ends the loaders' workers, at a run's end: Python would send SIGTERM, which they ignore, and wait for ever."""
    catch_signals(signal.SIG_IGN)  # nothing is left to stop, and Python, as it ends, would let them kill this process
    for worker in multiprocessing.active_children():
        worker.kill()


def _note(number: int, _: Any) -> None:
    again = time.monotonic() - _noted.get(number, time.monotonic()) > 0.5  # not the same one by two ways
    if number == signal.SIGINT and again and _beats is None:
        raise KeyboardInterrupt
    _noted.setdefault(number, time.monotonic())


class Requests:
    """What signals and the clock ask of a run, the same on every rank.

    Ranks meet in one small collective about every SECONDS; how many steps that is, they measure and agree on with it.

    Args:
        save_minutes: between two saves; None: no clock asks.

    Attributes:
        save: whether a checkpoint is asked for; whoever saves calls ``saved``.
        failed: whether any rank gave ``poll`` a failure.
    """

    SECONDS, MOST_STEPS = 1.0, 50  # between two meetings

    def __init__(self, save_minutes: float | None) -> None:
        self.save_minutes = save_minutes
        self.steps, self.until_meeting = 0, 1
        self.met, self.failed = time.monotonic(), False
        self.saved()

    def saved(self) -> None:
        """A checkpoint was saved."""
        self.save, self.last_save = False, time.monotonic()

    def poll(self, failed: bool = False) -> int | None:
        """Returns the signal that asks the run to stop, or None; every rank calls it equally often.

        Args:
            failed: whether something failed on this rank, which all ranks have to hear of.
        """
        self.steps += 1
        if self.steps < self.until_meeting and world_size() > 1:
            return None
        now = time.monotonic()
        due = rank() == 0 and self.save_minutes is not None and now - self.last_save >= 60 * self.save_minutes
        saving = due or _noted.pop(signal.SIGUSR1, None) is not None
        asked = [*(number in _noted for number in STOPS), saving, failed, now - self.met]
        if world_size() > 1:
            asked = all_reduce_sum(paddle.to_tensor(asked, dtype="float64")).tolist()
        *stops, saving, failed, seconds = asked
        per_step = seconds / world_size() / self.steps
        self.until_meeting = int(min(self.MOST_STEPS, max(1, self.SECONDS / max(per_step, 1e-9))))
        self.steps, self.met = 0, now
        self.save, self.failed = self.save or bool(saving), bool(failed)
        return next((number for number, asked in zip(STOPS, stops, strict=True) if asked), None)


# ------------------------------------------------------------------ progress

_DOING = ("starting", "waiting for data", "computing", "evaluating")
LOADING, COMPUTING, EVALUATING = range(1, 4)
_beats: Any = None  # shared with the process that spawned this one: [rank][time, step, what it does]


def keep_native_errors(log: Path) -> None:
    """Lets what C++ says on stderr as it goes down (gloo, when a peer is gone) come into the rank's log: the spawner
    tells the cause. Python's stderr stays what it is, and so do both of a rank that wasn't spawned.
    """
    if _beats is not None and world_size() > 1:
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 2)


def share_beats(beats: Any) -> None:
    """Lets ``beat`` tell the process that spawned this rank."""
    global _beats
    _beats = beats


def beat(doing: int, step: int | None = None) -> None:
    """Tells what this rank does, at ``step`` if that is another one."""
    if _beats is not None:
        place = 3 * rank()
        _beats[place], _beats[place + 2] = time.monotonic(), doing
        if step is not None:
            _beats[place + 1] = step


# --------------------------------------------------------------- the spawner


class Ranks:
    """Spawned ranks, as their parent sees them.

    Args:
        context: what ``paddle.distributed.spawn(join=False)`` returned.
        failed: the shared integer that the ranks' ``errors.reported`` was given.
        beats: shared doubles, three per rank (``beat``).
        timeout: seconds without any rank's progress that end the run; START_UP, if that is more, until all have begun.
    """

    START_UP = 600.0

    def __init__(self, context: Any, failed: Any, beats: Any, timeout: float) -> None:
        self.processes, self.failed, self.beats, self.timeout = context.processes, failed, beats, timeout
        self.started, self.asked, self.asked_at = time.monotonic(), 0, 0.0  # by which signal to stop, and when

    def wait(self) -> None:
        """Waits for the ranks and passes signals on; when one fails or stalls, ends all and exits with its status."""
        catch_signals(self._pass_on)
        for number in list(_noted):  # while the ranks were started
            self._pass_on(number, None)
        while running := [process.sentinel for process in self.processes if process.exitcode is None]:
            wait(running, timeout=0.2)
            if self.failed.value:
                self._end(self.failed.value)
            self._check_exits()
            self._check_progress()
        self._check_exits()
        if self.failed.value:
            sys.exit(self.failed.value)

    def _pass_on(self, number: int, _: Any) -> None:
        if number == self.asked == signal.SIGINT and time.monotonic() - self.asked_at > 0.5:
            self._end(128 + number, "interrupted")  # Ctrl-C once more: at once
        if number in STOPS and not self.asked:
            self.asked, self.asked_at = number, time.monotonic()
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def _check_exits(self) -> None:
        """Ends the run when a rank was killed, or left without a word."""
        codes = {place: process.exitcode for place, process in enumerate(self.processes) if process.exitcode}
        if not codes or self.failed.value:
            return
        # A rank that aborted because a peer was gone, or didn't answer, isn't the cause if there is another.
        causes = {place: code for place, code in codes.items() if code != -signal.SIGABRT} or codes
        stalled = [place for place in range(len(self.processes)) if self._is_stopped(place)]
        if set(causes.values()) == {-signal.SIGABRT} and stalled:
            self._end(1, f"error: {self._place(stalled[0])}, and the others waited for it in vain")
        place, code = next(iter(causes.items()))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self._end(1, f"error: rank {place} {how} at step {self._beat(place)[1]:.0f}")

    def _check_progress(self) -> None:
        times = [self._beat(place)[0] for place in range(len(self.processes))]
        # Until each has taken its first batch, they read the data and build the model, at their own pace.
        timeout = self.timeout if all(times) else max(self.timeout, self.START_UP)
        if time.monotonic() - max(self.started, *times) < timeout:
            return
        late = self._late()
        who = "; ".join(map(self._place, late)) if late else f"{self._place(0)}, as do the others"
        self._end(1, f"error: no progress in {timeout:g} s (DIST.TIMEOUT): {who}")

    def _late(self) -> list[int]:
        """The ranks that the others wait for: stopped processes, else those that are behind; [] if none is."""
        places = range(len(self.processes))
        if stopped := [place for place in places if self._is_stopped(place)]:
            return stopped
        reached = {place: self._beat(place)[1:] for place in places}
        behind = [place for place in places if reached[place] == min(reached.values())]
        return behind if len(behind) < len(reached) else []

    def _is_stopped(self, place: int) -> bool:
        try:
            status = Path(f"/proc/{self.processes[place].pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in "tT"

    def _beat(self, place: int) -> list[float]:
        return self.beats[3 * place : 3 * place + 3]

    def _place(self, place: int) -> str:
        _, step, doing = self._beat(place)
        state = "is suspended (SIGSTOP, or a debugger)" if self._is_stopped(place) else f"is {_DOING[int(doing)]}"
        return f"rank {place} (process {self.processes[place].pid}) {state} at step {step:.0f}"

    def _end(self, status: int, message: str = "") -> None:
        for process in self.processes:
            process.kill()  # SIGTERM would ask them to save
        for process in self.processes:
            process.join()
        if message:
            print(message, file=sys.stderr, flush=True)
        sys.exit(status)
