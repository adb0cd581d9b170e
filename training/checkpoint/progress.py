"""How far a run is: written here alone, by what has happened."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from loading.workers import Loader
from training.checkpoint import storage


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        epoch: epochs done, their evaluation included.
        samples: of the epoch after it that all processes together have taken; all of them: the
            evaluation is to come.
        step: steps done.
        best: the best evaluation of each split, and the checkpoint's name.
        stale: evaluations since the last one that gained (TRAIN.EARLY_STOP).
        marks: by split, how good that one was.
        seconds: that training took, evaluations among it, until ``length`` is fixed
            (TRAIN.MAX_MINUTES).
        length: [epochs after which the run's length was fixed, its length in epochs]; empty: it
            isn't shortened.
        window: by rank, what a checkpoint holds of the steps since the last report, until
            ``take_window``.
    """

    epoch: int = 0
    samples: int = 0
    step: int = 0
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    stale: int = 0
    marks: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    length: list[float] = field(default_factory=list)
    window: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Returns the name of its checkpoint's folder."""
        return storage.checkpoint_name(self.epoch, self.samples)

    def count_steps(self, loader: Loader) -> None:
        """Counts the steps anew, of ``loader``'s batches: before, they may have been of another
        size.
        """
        loader.batch_sampler.set_epoch(self.epoch + 1, self.samples)
        self.step = len(loader) * self.epoch + loader.batch_sampler.first()

    def take_window(self) -> list[dict[str, Any]]:
        """Returns ``window``, which nobody gets a second time."""
        window = self.window
        self.window = []
        return window

    def record_update(self, step: int, samples: int) -> None:
        """Records that an update was made at ``step``, after ``samples`` of its epoch."""
        self.step = step
        self.samples = samples

    def end_epoch(self, epoch: int) -> None:
        """Records that an epoch is done, with its evaluation."""
        self.epoch = epoch
        self.samples = 0

    def keep_best(
        self, metrics: dict[str, dict[str, Any]], score: Callable[[dict[str, Any]], float]
    ) -> tuple[str, ...]:
        """Keeps the best of each split's metrics, at an epoch's end; returns the splits that are
        better than before.
        """
        improved = []
        for split, found in metrics.items():
            if split not in self.best or score(found) > score(self.best[split]):
                self.best[split] = {"epoch": self.epoch, "checkpoint": self.name, **found}
                improved.append(split)
        return tuple(improved)

    def forget_best(self, splits: Iterable[str]) -> None:
        """Notes that the best checkpoints of these splits are lost: the next ones take their
        places.
        """
        for split in splits:
            del self.best[split]
