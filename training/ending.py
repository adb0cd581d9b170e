"""When a run ends: after its epochs, at the end of a budget of time (TRAIN.MAX_MINUTES), or early
because evaluations don't improve (TRAIN.EARLY_STOP).

The learning rate is a function of the step. So a budget of time becomes a number of updates, on
which all ranks agree once, early in the run. That number is in ``Progress`` and so in each checkpoint,
and a run that is resumed has the same end.
"""

import bisect
import contextlib
import time
from collections.abc import Callable, Iterator

import paddle

from settings.configuration import Configuration
from training.checkpoint.progress import Progress
from training.run import Run
from utils import all_gather, num_gpus

# The share of the budget after which the run's length is fixed.
MEASURED = 0.02
# The share of the budget that stays free, for the last save and for a speed that isn't constant.
RESERVE = 0.03
# How long the evaluation of an image takes, over training on one, until an evaluation is measured.
FORWARD = 1 / 3


class Ending:
    """Decides when a run ends. Every rank calls its methods equally often.

    It is made when training begins, or continues: the budget's clock starts then.

    Args:
        progress: how far the run is. The decisions are stored there.
        run: is told the length of a run that is shortened.
        steps: the number of steps of a whole epoch.
        evaluation_cost: the number of images that an evaluation computes, over those of an update.
    """

    def __init__(
        self,
        config: Configuration,
        progress: Progress,
        run: Run,
        steps: int,
        evaluation_cost: float,
    ) -> None:
        self.progress = progress
        self.run = run
        self.planned = config.TRAIN.NUM_EPOCHS
        self.minutes = config.TRAIN.MAX_MINUTES
        self.patience = config.TRAIN.EARLY_STOP
        self.min_gain = config.TRAIN.EARLY_STOP_MIN
        self.validate_freq = config.VALIDATE_FREQ
        self.accum = config.TRAIN.ACCUM_ITER
        self.steps = steps
        # Updates of a whole epoch, whose last one may be of fewer steps.
        self.updates = -(-steps // self.accum)
        self.evaluation_cost = evaluation_cost
        if self.minutes is None:
            # A run without a budget stores no length. A forged checkpoint may hold one.
            progress.length = []
        self.started = time.monotonic() - progress.seconds
        self.first = self.num_updates
        # The update at which the first time was taken, and that time without evaluations.
        self.reference: tuple[int, float] | None = None
        # Updates of this process until the time was taken last.
        self.measured = 0
        self.evaluation_seconds: list[float] = []

    # ------------------------------------------------------------ the length

    @property
    def total(self) -> int:
        """Returns the number of the run's updates."""
        epochs = self.progress.length[1] if self.progress.length else self.planned
        return round(epochs * self.updates)

    @property
    def epochs(self) -> int:
        """Returns the number of the run's epochs; the last one may be shorter."""
        return -(-self.total // self.updates)

    @property
    def num_steps(self) -> int:
        """Returns the number of the run's steps."""
        epochs, rest = divmod(self.total, self.updates)
        return epochs * self.steps + rest * self.accum

    def steps_of(self, epoch: int) -> int:
        """Returns the number of steps of an epoch, which are counted from 1."""
        return min(self.steps, (self.total - (epoch - 1) * self.updates) * self.accum)

    def pace(self, schedule: Callable[[float], float]) -> Callable[[float], float]:
        """Returns the schedule of a run that may be shortened.

        From the update at which its length was fixed, what is left of the planned schedule passes
        in what is left of the run.
        """

        def rate(update: float) -> float:
            fixed_at, end = self.progress.length or (self.planned, self.planned)
            since = update / self.updates - fixed_at
            if since <= 0 or end >= self.planned:
                return schedule(update)
            factor = (self.planned - fixed_at) / (end - fixed_at)
            return schedule((fixed_at + since * factor) * self.updates)

        return rate

    # ------------------------------------------------------------ the budget of time

    @property
    def num_updates(self) -> int:
        """Returns the number of updates that were made."""
        progress = self.progress
        missing = (progress.epoch * self.steps - progress.step) // self.accum
        return progress.epoch * self.updates - missing

    def after_step(self, updated: bool) -> None:
        """Takes the time after 2, 4, 8, ... updates: on a GPU the host has to wait for that.

        Args:
            updated: whether the step made an update.
        """
        if self.minutes is None or self.progress.length or not updated:
            return
        self.progress.seconds = time.monotonic() - self.started
        if self.num_updates - self.first >= max(2, 2 * self.measured):
            self._measure()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Measures the time of an evaluation, which is done within this context."""
        before = time.monotonic()
        yield
        self.evaluation_seconds.append(time.monotonic() - before)

    def _measure(self) -> None:
        """Fixes the run's length, once enough of the budget is used."""
        if num_gpus():
            paddle.device.cuda.synchronize()
        now = time.monotonic()
        done = self.num_updates
        self.measured = done - self.first
        training_time = now - sum(self.evaluation_seconds)
        if self.reference is None:
            # The first updates are slower than later ones: they only serve as the reference.
            self.reference = done, training_time
            return

        first_update, first_time = self.reference
        per_update = (training_time - first_time) / (done - first_update)
        estimate = FORWARD * self.evaluation_cost * per_update
        per_evaluation = max(self.evaluation_seconds, default=estimate)
        # The slowest rank counts, so that all fix the same length.
        measured = all_gather((now - self.started, per_update, per_evaluation))
        used, per_update, per_evaluation = map(max, zip(*measured, strict=True))
        budget = 60 * self.minutes
        if used < MEASURED * budget:
            return

        def seconds_until(total: int) -> float:
            evaluations = self._evaluations(done, total)
            return (total - done) * per_update + evaluations * per_evaluation

        totals = range(done + 1, self.planned * self.updates + 1)
        fitting = bisect.bisect_right(totals, budget * (1 - RESERVE) - used, key=seconds_until)
        # One more update is made even if the time is over.
        total = done + max(1, fitting)
        self.progress.length = [done / self.updates, total / self.updates]
        self.progress.seconds = used
        self.run.set_length(self.epochs, self.num_steps)
        takes = "takes" if self.evaluation_seconds else "may take"
        self.run.info(
            f"TRAIN.MAX_MINUTES {self.minutes:g}: an update takes {per_update:.3g} s,"
            f" an evaluation {takes} {per_evaluation:.3g} s; the run ends after {self.total}"
            f" updates, {self.total / self.updates:.4g} of {self.planned} epochs"
        )

    def _evaluations(self, done: int, total: int) -> int:
        """Returns the number of evaluations between two updates, with the one at the run's end."""
        epochs_before = done // self.updates
        epochs = -(-total // self.updates)
        regular = epochs // self.validate_freq - epochs_before // self.validate_freq
        ends_with_another = epochs % self.validate_freq > 0
        return regular + ends_with_another

    # ------------------------------------------------------------ evaluations

    def after_epoch(self, scores: dict[str, float]) -> None:
        """Records an epoch's end.

        Args:
            scores: by split, how good its evaluation is; empty: the epoch wasn't evaluated.
        """
        progress = self.progress
        if self.patience and scores:
            marks = progress.marks
            better = {
                split: score
                for split, score in scores.items()
                if split not in marks or score > marks[split] + self.min_gain
            }
            marks |= better
            progress.stale = 0 if better else progress.stale + 1
        if self.minutes is not None and not (progress.length or self.over):
            self._measure()

    @property
    def _stopped_early(self) -> bool:
        return bool(self.patience) and self.progress.stale >= self.patience

    @property
    def over(self) -> bool:
        """Returns whether the run is over."""
        return self.progress.epoch >= self.epochs or self._stopped_early

    @property
    def reason(self) -> str:
        """Returns why a run that is over ended before its planned epochs; "": it didn't."""
        progress = self.progress
        if self._stopped_early and progress.epoch < self.epochs:
            return (
                f"TRAIN.EARLY_STOP: {progress.stale} evaluations without improvement,"
                f" the last after epoch {progress.epoch} of {self.planned}"
            )
        if self.total < self.planned * self.updates:
            return (
                f"TRAIN.MAX_MINUTES: {self.minutes:g} minutes were enough for"
                f" {self.total / self.updates:.4g} of the {self.planned} epochs"
            )
        return ""
