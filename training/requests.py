"""Requests to save a run or to stop it, which signals and the clock make.

About once a second all ranks agree on what any of them was asked for.
"""

import signal
import time
from typing import Any

import paddle

from errors import RunError
from launch import signals
from launch.signals import STOP_SIGNALS
from training.checkpoint import Progress, Saver
from training.profiling import SAVE, span
from training.window import Window
from utils import all_gather, all_reduce_sum, rank, world_size


class Stopped(RunError):
    """A signal stopped the run: the exit status is 128 + its number, on every rank."""

    prefix = ""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {message}", shared=True)
        self.exit_status = 128 + number


class Requests:
    """Requests of signals and of the clock to stop or to save, the same on every rank.

    The ranks exchange their requests in one small collective about every SECONDS. They measure how
    many steps that is, and agree on it in the same collective.

    Args:
        save_minutes: the time between two saves; None: the clock asks for none.

    Attributes:
        save: whether a checkpoint is asked for. Whoever saves calls ``record_save``.
        failed: whether any rank reported a failure to ``poll``.
    """

    SECONDS = 1.0
    # The most steps between two exchanges.
    MOST_STEPS = 50

    def __init__(self, save_minutes: float | None) -> None:
        self.save_minutes = save_minutes
        # Steps since the last exchange, and the number of them after which the next one is due.
        self.steps = 0
        self.exchange_after = 1
        self.exchanged_at = time.monotonic()
        self.failed = False
        self.record_save()

    def record_save(self) -> None:
        """Records that a checkpoint was saved."""
        self.save = False
        self.last_save = time.monotonic()

    def poll(self, failed: bool = False) -> int | None:
        """Returns the signal that asks the run to stop, or None. Every rank calls it equally often.

        Args:
            failed: whether something failed on this rank, which all ranks have to know.
        """
        self.steps += 1
        if self.steps < self.exchange_after and world_size() > 1:
            return None
        now = time.monotonic()
        # One clock decides, because those of several machines differ.
        due = (
            rank() == 0
            and self.save_minutes is not None
            and now - self.last_save >= 60 * self.save_minutes
        )
        save = due or signals.received.pop(signal.SIGUSR1, None) is not None
        stop = [number in signals.received for number in STOP_SIGNALS]
        requests = [*stop, save, failed, now - self.exchanged_at]
        if world_size() > 1:
            requests = all_reduce_sum(paddle.to_tensor(requests, dtype="float64")).numpy().tolist()
        *stop, save, failed, seconds = requests
        seconds_per_step = seconds / world_size() / self.steps
        steps = self.SECONDS / max(seconds_per_step, 1e-9)
        self.exchange_after = int(min(self.MOST_STEPS, max(1, steps)))
        self.steps = 0
        self.exchanged_at = now
        self.save = self.save or bool(save)
        self.failed = bool(failed)
        return next(
            (number for number, count in zip(STOP_SIGNALS, stop, strict=True) if count), None
        )


class Checkpointing:
    """Saves a run where that is asked for or due. Where a signal asks it to stop, it ends, saved.

    Every rank calls its methods, equally often: after each step but an epoch's last one, before
    and within evaluations, and at each epoch's end.

    Raises:
        Stopped: on every rank, when a signal asked the run to stop; it is saved.
        RunError: on every rank, when saving failed, or when the loss isn't finite.
    """

    def __init__(self, progress: Progress, saver: Saver, requests: Requests) -> None:
        self.progress = progress
        self.saver = saver
        self.requests = requests
        # Why the run has to end, saved, though no signal asks for it; "": it doesn't.
        self.problem = ""

    def after_step(
        self, window: Window, statistics: dict[str, paddle.Tensor], updated: bool
    ) -> None:
        """Saves the state of the last update if a checkpoint is asked for, and stops if asked.

        Args:
            statistics: what ``Saver.save`` takes, as of the last update.
            updated: whether this step made an update. A run that continues saves only there.
        """
        stop = self._asked_signal()
        if stop is not None or self.problem or (updated and self.due):
            self._save(stop, statistics=statistics, windows=window.gather())

    def stop_if_asked(self) -> None:
        """Ends the run, saved, if a signal asks for it, before an evaluation or within one.

        The resumed run makes the evaluation again. A checkpoint that is asked for waits until the
        epoch's end.
        """
        stop = self._asked_signal()
        if stop is not None or self.problem:
            self._save(stop)

    def end_epoch(
        self, improved: tuple[str, ...], wanted: bool, described: dict[str, dict[str, Any]]
    ) -> None:
        """Saves at an epoch's end, after its evaluation, if there is a reason.

        Args:
            improved: the splits whose best evaluation it was.
            wanted: whether a checkpoint is wanted in any case.
            described: by split, what the evaluation adds to the description of its weights.
        """
        if improved or wanted or self.due:
            self._save(None, improved=improved, described=described)

    @property
    def due(self) -> bool:
        """Returns whether a checkpoint is asked for, or due by the number of steps."""
        return self.requests.save or self.saver.due(self.progress)

    def _asked_signal(self) -> int | None:
        """Returns the signal that asks the run to stop, or None."""
        stop = self.requests.poll(self.saver.failed or bool(self.saver.run.problem))
        if self.requests.failed:
            self.requests.failed = False
            # It raises the error on every rank, unless the run continues without the checkpoint.
            self.saver.wait()
            self.problem = all_gather(self.saver.run.problem)[0]
        return stop

    def finish(self) -> None:
        """Waits until everything is written, after the last epoch."""
        self.saver.wait(last=True)
        if problem := all_gather(self.saver.run.problem)[0]:
            raise RunError(f"{problem}; stopped {self._where()}", shared=True)

    def _where(self) -> str:
        again = f"-resume=auto -output={self.saver.run.directory} continues from there"
        return f"after step {self.progress.step}, saved in {self.saver.path}; {again}"

    def _save(self, stop: int | None, **state: Any) -> None:
        with span(SAVE):
            self.saver.save(self.progress, **state)
        self.requests.record_save()
        if stop is None and not self.problem:
            return
        self.saver.wait(last=True)
        if stop is not None:
            raise Stopped(stop, self._where())
        raise RunError(f"{self.problem}; stopped {self._where()}", shared=True)
