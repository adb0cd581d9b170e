"""What ends a run: its epochs, a budget of time (TRAIN.MAX_MINUTES), evaluations without gain
(TRAIN.EARLY_STOP).

A rate is a function of the step, so a budget becomes a number of updates: once, early in the run,
by all ranks together. What was decided is in ``Progress``, and so in each checkpoint: a run that
goes on has the same end.
"""

import bisect
import contextlib
import time
from collections.abc import Callable, Iterator

import paddle

from settings.options import Configuration
from training.checkpoint.progress import Progress
from training.run import Run
from utils import all_gather, num_gpus

MEASURED = 0.02  # share of the budget after which the run's length is fixed
RESERVE = 0.03  # share of the budget that stays free: for the last save, and a pace that isn't even
# what evaluating an image costs, where no evaluation was seen yet, in trainings of one
FORWARD = 1 / 3


class Ending:
    """When a run ends. Every rank calls its methods equally often.

    Args:
        steps: of a whole epoch.

    Attributes:
        progress: how far the run is; ``begin`` gives it.
    """

    def __init__(self, config: Configuration, steps: int) -> None:
        train = config.TRAIN
        self.planned = train.NUM_EPOCHS
        self.every = config.VALIDATE_FREQ
        self.patience = train.EARLY_STOP
        self.least = train.EARLY_STOP_MIN
        self.steps = steps
        self.accum = train.ACCUM_ITER
        self.updates = -(-steps // train.ACCUM_ITER)
        self.minutes, self.progress = train.MAX_MINUTES, Progress()

    def begin(self, progress: Progress, run: Run, evaluation: float) -> None:
        """Notes that the run begins, or goes on.

        Args:
            evaluation: images that one has to evaluate, over those of an update.
        """
        self.progress = progress
        self.run = run
        self.evaluation = evaluation
        if self.minutes is None:
            progress.length = []  # nobody but a forger's checkpoint has one
        self.started = time.monotonic() - progress.seconds
        self.first = self.num_updates
        self.mark: tuple[int, float] | None = None  # updates at an early one, and when that was
        self.measured = 0  # updates at the last one where time was taken
        self.evaluations: list[float] = []  # seconds
        self._tell_length()

    def _tell_length(self) -> None:
        whole, rest = divmod(self.total, self.updates)
        self.run.set_length(self.epochs, whole * self.steps + rest * self.accum)

    # ------------------------------------------------------------ the length

    @property
    def total(self) -> int:
        """Returns the run's updates."""
        return (
            round(self.progress.length[1] * self.updates)
            if self.progress.length
            else self.planned * self.updates
        )

    @property
    def epochs(self) -> int:
        """Returns the run's epochs; the last one may be shorter."""
        return -(-self.total // self.updates)

    def steps_of(self, epoch: int) -> int:
        """Returns how many steps an epoch has, from 1."""
        return min(self.steps, (self.total - (epoch - 1) * self.updates) * self.accum)

    def pace(self, schedule: Callable[[float], float]) -> Callable[[int], float]:
        """Returns the schedule of a run that may be shortened. From where its length was fixed, the
        rest of the plan passes in the rest of the run.
        """

        def rate(update: int) -> float:
            where, end = self.progress.length or (self.planned, self.planned)
            gone = update / self.updates - where
            if gone <= 0 or end >= self.planned:
                return schedule(update)
            return schedule((where + gone * (self.planned - where) / (end - where)) * self.updates)

        return rate

    # ------------------------------------------------------------ the budget

    @property
    def num_updates(self) -> int:
        """Updates that were made."""
        progress = self.progress
        return (
            progress.epoch * self.updates
            - (progress.epoch * self.steps - progress.step) // self.accum
        )

    def after_step(self, updated: bool) -> None:
        """Takes the time where a step ``updated``, after 2, 4, 8, ... updates: on a GPU the host
        has to wait there.
        """
        if self.minutes is None or self.progress.length or not updated:
            return
        self.progress.seconds = time.monotonic() - self.started
        if self.num_updates - self.first >= max(2, 2 * self.measured):
            self._measure()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Takes the time of an evaluation within."""
        before = time.monotonic()
        yield
        self.evaluations.append(time.monotonic() - before)

    def _measure(self) -> None:
        """Fixes the length, if enough of the budget is used."""
        if num_gpus():
            paddle.device.cuda.synchronize()
        now = time.monotonic()
        done = self.num_updates
        self.measured = self.num_updates - self.first
        if self.mark is None:
            self.mark = done, now - sum(self.evaluations)
            return
        pace = (now - sum(self.evaluations) - self.mark[1]) / (done - self.mark[0])
        evaluation = max(self.evaluations, default=FORWARD * self.evaluation * pace)
        used, pace, evaluation = map(
            max, zip(*all_gather((now - self.started, pace, evaluation)), strict=True)
        )
        budget = 60 * self.minutes
        if used < MEASURED * budget:
            return
        fits = bisect.bisect_right(
            range(done + 1, self.planned * self.updates + 1),
            budget * (1 - RESERVE) - used,
            key=lambda total: (total - done) * pace + self._evaluations(done, total) * evaluation,
        )
        self.progress.length = [done / self.updates, (done + max(1, fits)) / self.updates]
        self.progress.seconds = used
        self._tell_length()
        takes = "takes" if self.evaluations else "may take"
        self.run.info(
            f"TRAIN.MAX_MINUTES {self.minutes:g}: an update takes {pace:.3g} s, an evaluation {takes} {evaluation:.3g}"
            f" s; the run ends after {self.total} updates, {self.total / self.updates:.4g} of {self.planned} epochs"
        )

    def _evaluations(self, done: int, total: int) -> int:
        """How many evaluations come between two updates, with the run's last."""
        before = done // self.updates
        epochs = -(-total // self.updates)
        return epochs // self.every - before // self.every + (epochs % self.every > 0)

    # ------------------------------------------------------------ evaluations

    def after_epoch(self, scores: dict[str, float]) -> None:
        """Takes in an epoch's end.

        Args:
            scores: by split, how good its evaluation is; none, without one.
        """
        progress = self.progress
        if self.patience and scores:
            marks = progress.marks
            better = {
                split: s
                for split, s in scores.items()
                if split not in marks or s > marks[split] + self.least
            }
            marks |= better
            progress.stale = 0 if better else progress.stale + 1
        if self.minutes is not None and not (progress.length or self.over):
            self._measure()

    @property
    def over(self) -> bool:
        """Returns whether the run is over."""
        return self.progress.epoch >= self.epochs or bool(
            self.patience and self.progress.stale >= self.patience
        )

    @property
    def reason(self) -> str:
        """Returns why a run that is over ended before its time, or ""."""
        progress = self.progress
        if self.patience and progress.stale >= self.patience and progress.epoch < self.epochs:
            return (
                f"TRAIN.EARLY_STOP: {progress.stale} evaluations without gain, the last after epoch {progress.epoch} of"
                f" {self.planned}"
            )
        if self.total < self.planned * self.updates:
            return (
                f"TRAIN.MAX_MINUTES: {self.minutes:g} minutes held {self.total / self.updates:.4g} of the"
                f" {self.planned} epochs"
            )
        return ""
