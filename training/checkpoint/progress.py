"""The progress of a run. The methods of ``Progress`` record what has happened."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from loading.workers import Loader
from training.checkpoint import storage


@dataclass
class Progress:
    """The progress of a run. A checkpoint's state.json holds it.

    Attributes:
        epoch: the number of epochs that are done, their evaluation included.
        samples: how many samples of the next epoch all processes together have taken. If it is all
            of them, the epoch's evaluation is to come.
        step: the number of steps that are done.
        best: by split, the metrics of the best evaluation and the name of its checkpoint.
        stale: the number of evaluations since the last one that was better (TRAIN.EARLY_STOP).
        marks: by split, the score of that evaluation.
        seconds: how long training and evaluations took, until ``length`` is fixed
            (TRAIN.MAX_MINUTES).
        length: [epochs after which the run's length was fixed, its length in epochs]; empty: the
            run isn't shortened.
        window: by rank, what a checkpoint holds of the steps since the last report, until
            ``take_window`` is called.
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
        """Returns the name of the folder of its checkpoint."""
        return storage.checkpoint_name(self.epoch, self.samples)

    def count_steps(self, loader: Loader) -> None:
        """Sets ``step`` to the number of today's batches that were trained on.

        Earlier ones may have been of another size.
        """
        loader.batch_sampler.set_epoch(self.epoch + 1, self.samples)
        self.step = len(loader) * self.epoch + loader.batch_sampler.first()

    def take_window(self) -> list[dict[str, Any]]:
        """Returns ``window`` and empties it."""
        window = self.window
        self.window = []
        return window

    def record_update(self, step: int, samples: int) -> None:
        """Records an update.

        Args:
            step: the number of steps that are done.
            samples: how many samples of the epoch all processes together have taken.
        """
        self.step = step
        self.samples = samples

    def end_epoch(self, epoch: int) -> None:
        """Records that an epoch is done, with its evaluation."""
        self.epoch = epoch
        self.samples = 0

    def keep_best(
        self, metrics: dict[str, dict[str, Any]], score: Callable[[dict[str, Any]], float]
    ) -> tuple[str, ...]:
        """Keeps the best evaluation of each split, at an epoch's end.

        Args:
            metrics: by split.
            score: returns how good a split's metrics are.

        Returns:
            The splits whose evaluation is the best so far.
        """
        improved = []
        for split, values in metrics.items():
            if split not in self.best or score(values) > score(self.best[split]):
                self.best[split] = {"epoch": self.epoch, "checkpoint": self.name, **values}
                improved.append(split)
        return tuple(improved)

    def forget_best(self, splits: Iterable[str]) -> None:
        """Records that the best checkpoints of these splits are lost.

        Their next evaluations take the places.
        """
        for split in splits:
            del self.best[split]
