"""What signals and the clock ask of a run: about once a second all ranks agree on what any of them was asked."""

import signal
import time

import paddle

from errors import RunError
from launch import signals
from launch.signals import STOPS
from utils import all_reduce_sum, rank, world_size


class Stopped(RunError):
    """The run was asked to stop: exit status 128 + the signal's number, on every rank."""

    prefix = ""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {message}", shared=True)
        self.exit_status = 128 + number


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
        saving = due or signals.noted.pop(signal.SIGUSR1, None) is not None
        asked = [*(number in signals.noted for number in STOPS), saving, failed, now - self.met]
        if world_size() > 1:
            asked = all_reduce_sum(paddle.to_tensor(asked, dtype="float64")).numpy().tolist()
        *stops, saving, failed, seconds = asked
        per_step = seconds / world_size() / self.steps
        self.until_meeting = int(min(self.MOST_STEPS, max(1, self.SECONDS / max(per_step, 1e-9))))
        self.steps, self.met = 0, now
        self.save, self.failed = self.save or bool(saving), bool(failed)
        return next((number for number, asked in zip(STOPS, stops, strict=True) if asked), None)
