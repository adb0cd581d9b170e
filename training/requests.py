"""What signals and the clock ask of a run: about once a second all ranks agree on what any of them
was asked.
"""

import signal
import time
from typing import Any

import paddle

from errors import RunError
from launch import signals
from launch.signals import STOPS
from training.checkpoint import Progress, Saver
from training.window import Window
from utils import all_gather, all_reduce_sum, rank, world_size


class Stopped(RunError):
    """The run was asked to stop: exit status 128 + the signal's number, on every rank."""

    prefix = ""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {message}", shared=True)
        self.exit_status = 128 + number


class Requests:
    """What signals and the clock ask of a run, the same on every rank.

    Ranks meet in one small collective about every SECONDS; how many steps that is, they measure and
    agree on with it.

    Args:
        save_minutes: between two saves; None: no clock asks.

    Attributes:
        save: whether a checkpoint is asked for; whoever saves calls ``record_save``.
        failed: whether any rank gave ``poll`` a failure.
    """

    # between two meetings
    SECONDS = 1.0
    MOST_STEPS = 50

    def __init__(self, save_minutes: float | None) -> None:
        self.save_minutes = save_minutes
        self.steps = 0
        self.until_meeting = 1
        self.met = time.monotonic()
        self.failed = False
        self.record_save()

    def record_save(self) -> None:
        """Records that a checkpoint was saved."""
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
        due = (
            rank() == 0
            and self.save_minutes is not None
            and now - self.last_save >= 60 * self.save_minutes
        )
        saving = due or signals.received.pop(signal.SIGUSR1, None) is not None
        asked = [*(number in signals.received for number in STOPS), saving, failed, now - self.met]
        if world_size() > 1:
            asked = all_reduce_sum(paddle.to_tensor(asked, dtype="float64")).numpy().tolist()
        *stops, saving, failed, seconds = asked
        per_step = seconds / world_size() / self.steps
        self.until_meeting = int(min(self.MOST_STEPS, max(1, self.SECONDS / max(per_step, 1e-9))))
        self.steps = 0
        self.met = now
        self.save, self.failed = self.save or bool(saving), bool(failed)
        return next((number for number, asked in zip(STOPS, stops, strict=True) if asked), None)


class Checkpointing:
    """Saves a run where that is asked for, or due, and ends it, saved, where a signal asks that.

    Every rank calls its methods, equally often: after each step but an epoch's last, at each
    epoch's end, and after evaluated batches.

    Raises:
        Stopped: on every rank, when the run was asked to stop; it is saved.
        RunError: on every rank, when saving failed, or when the loss isn't finite.
    """

    def __init__(self, progress: Progress, saver: Saver, requests: Requests) -> None:
        self.progress = progress
        self.saver = saver
        self.requests = requests
        self.problem = ""  # why the run has to end, saved, if no signal asks for it

    def after_step(
        self, window: Window, statistics: dict[str, paddle.Tensor], updated: bool
    ) -> None:
        """Saves, at the last update, and stops.

        Args:
            statistics: what ``Saver.save`` takes, of the last update.
            updated: whether this step made an update: only there a run saves and goes on.
        """
        stop = self._asked_signal()
        if stop is not None or self.problem or (updated and self.due):
            self._save(stop, statistics=statistics, windows=window.gather())

    def after_epoch(self) -> None:
        """Stops, before the evaluation: what else is asked for comes after it."""
        stop = self._asked_signal()
        if stop is not None or self.problem:
            self._save(stop)

    def in_evaluation(self) -> None:
        """Stops; the evaluation will be done anew."""
        self.after_epoch()

    def end_epoch(
        self, improved: tuple[str, ...], wanted: bool, described: dict[str, dict[str, Any]]
    ) -> None:
        """Saves where the evaluation gave a best one, where that is ``wanted``, asked for, or due."""
        if improved or wanted or self.due:
            self._save(None, improved=improved, described=described)

    @property
    def due(self) -> bool:
        """Returns whether a checkpoint is asked for, or due by the steps."""
        return self.requests.save or self.saver.due(self.progress)

    def _asked_signal(self) -> int | None:
        """The signal that asks the run to stop, if there is one."""
        stop = self.requests.poll(self.saver.failed or bool(self.saver.run.problem))
        if self.requests.failed:
            self.requests.failed = False
            self.saver.wait()
            self.problem = all_gather(self.saver.run.problem)[0]
        return stop

    def conclude(self) -> None:
        """Waits until all is written, at the end of the last epoch."""
        self.saver.wait(last=True)
        if problem := all_gather(self.saver.run.problem)[0]:
            raise RunError(f"{problem}; stopped {self._where()}", shared=True)

    def _where(self) -> str:
        again = f"-resume=auto -output={self.saver.run.directory} goes on from there"
        return f"after step {self.progress.step}, saved in {self.saver.path}; {again}"

    def _save(self, stop: int | None, **state: Any) -> None:
        self.saver.save(self.progress, **state)
        self.requests.record_save()
        if stop is None and not self.problem:
            return
        self.saver.wait(last=True)
        if stop is not None:
            raise Stopped(stop, self._where())
        raise RunError(f"{self.problem}; stopped {self._where()}", shared=True)
