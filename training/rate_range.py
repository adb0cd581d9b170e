"""The learning rate range test (Smith 2017, arXiv:1506.01186).

The learning rate rises from update to update. The loss shows at which rates the model learns.
"""

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from config import with_values
from datasets import ImageDataset
from errors import RunError
from launch.files import removing_if_stopped
from settings.configuration import Configuration
from settings.registry import tasks
from training import engine, parallel
from training.checkpoint import Progress
from training.optim import freeze
from training.setup import prepare
from training.task import Task
from training.window import NotFinite
from utils import seed_everything, writing_whole

# The test ends when the loss is so many times the lowest one.
_DIVERGED = 4
# The standard deviation of the Gaussian that smooths the losses, as a share of the test's updates.
_SMOOTH = 0.02


class _Finished(Exception):
    """The test has made its updates, or the loss has diverged."""


class _Curve:
    """Takes the place of a ``Run``: it records each update's rate and loss, and writes no file."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.local = logging.getLogger(__name__)
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.recent = self.lowest = math.inf
        self.bar = tqdm(total=updates, unit="update", disable=None, dynamic_ncols=True)

    def info(self, message: str) -> None:
        print(message, flush=True)

    def record_bad_step(self, step: int, epoch: int, kind: str) -> bool:
        """Records nothing: rates that are too high are part of the test."""
        return False

    def report(self, split: str, shown: str, **values: Any) -> None:
        loss = values["loss"]
        self.rates.append(values["lr"])
        self.losses.append(loss)
        if len(self.losses) == 1:
            self.recent = loss
        else:
            self.recent = 0.9 * self.recent + 0.1 * loss
        self.lowest = min(self.lowest, self.recent)
        if len(self.losses) > self.updates or self.recent > _DIVERGED * self.lowest:
            raise _Finished


class RateRange(NamedTuple):
    """The result of a learning rate range test.

    Attributes:
        rates: [n], the learning rate of each update.
        losses: [n], the loss of the batch after each update.
        smooth: [n], the losses, smoothed.
        steepest: the rate at which the loss falls fastest.
        lowest: the rate at which the loss is lowest.
    """

    rates: np.ndarray
    losses: np.ndarray
    smooth: np.ndarray
    steepest: float
    lowest: float


def range_test(
    config: Configuration, train: ImageDataset, updates: int, low: float, high: float
) -> RateRange:
    """Trains as a run of this configuration does, while the rate rises from ``low`` to ``high``.

    The rate rises exponentially. The test ends early if the loss isn't finite, or rises to four
    times its lowest.

    Args:
        updates: number of updates to make.

    Raises:
        InputError: as at a run's start.
        RunError: too few updates were made, or a sample can't be read.
    """
    config = with_values(
        config,
        "the sweep of rates",
        TRAIN__MODEL_EMA=False,
        TRAIN__MAX_MINUTES=None,
        # Each epoch has one update at least.
        TRAIN__NUM_EPOCHS=max(config.TRAIN.NUM_EPOCHS, updates + 1),
        # Every update is reported.
        REPORT_FREQ=config.TRAIN.ACCUM_ITER,
    )
    seed_everything(config.SEED)
    task: Task = tasks.choose(config)(config, train.classes)
    model = task.build_network()
    freeze(config, model)
    curve: Any = _Curve(updates)
    training = prepare(task, parallel.wrap_model(config, model), train, curve)
    ratio = math.log(high / low) / max(1, updates - 1)
    training = dataclasses.replace(
        training, schedule=lambda update: low * math.exp(ratio * min(update, updates - 1))
    )
    progress = Progress()
    try:
        while True:
            engine.train_one_epoch(training, progress)
            progress.end_epoch(progress.epoch + 1)
    except (_Finished, NotFinite):
        pass
    finally:
        training.loader.close()
        curve.bar.close()
    return find_rates(np.array(curve.rates[:-1]), np.array(curve.losses[1:]), updates)


def find_rates(rates: np.ndarray, losses: np.ndarray, updates: int) -> RateRange:
    """Returns the rates at which the loss falls fastest and is lowest.

    Args:
        rates: [n], the learning rate of each update.
        losses: [n], the loss after each update.
        updates: number of updates that the test was to make.

    Raises:
        RunError: there are fewer than ten.
    """
    if len(rates) < 10:
        raise RunError(f"the loss diverged after {len(rates)} of {updates} updates; lower -low")
    width = max(1.0, _SMOOTH * updates)
    reach = round(3 * width)
    gaussian = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    total = np.convolve(losses, gaussian)[reach:-reach]
    # At both ends, part of the Gaussian has no loss.
    weight = np.convolve(np.ones(len(losses)), gaussian)[reach:-reach]
    smooth = total / weight
    lowest = int(smooth.argmin())
    # Only up to the lowest loss: after it, training diverges.
    slopes = np.gradient(smooth, np.log(rates))[: max(2, lowest + 1)]
    return RateRange(rates, losses, smooth, float(rates[slopes.argmin()]), float(rates[lowest]))


def write(result: RateRange, table: Path, picture: Path) -> None:
    """Writes a test's values to ``table``, a CSV, and its curve to ``picture``, a PNG next to it."""
    # Matplotlib's import takes a third of a second.
    from training.pages.plotting import figure, figure_png, set_log_scale

    rows = zip(result.rates.tolist(), result.losses.tolist(), result.smooth.tolist(), strict=True)
    drawn = figure(8, 4)
    axis = drawn.add_subplot()
    axis.plot(result.rates, result.losses, alpha=0.3)
    axis.plot(
        result.rates,
        result.smooth,
        color="C0",
        label="loss after an update with this learning rate",
    )
    axis.axvline(result.steepest, color="C1", label=f"steepest: {result.steepest:.3g}")
    axis.axvline(result.lowest, color="C2", linestyle="--", label=f"lowest: {result.lowest:.3g}")
    axis.axvline(result.lowest / 10, color="C2", label=f"a tenth of that: {result.lowest / 10:.3g}")
    axis.set(xlabel="learning rate", ylabel="loss")
    set_log_scale(axis)
    axis.set_ylim(0.9 * result.smooth.min(), 1.5 * result.smooth[0])
    axis.grid(alpha=0.3)
    axis.legend()
    with removing_if_stopped(None if table.parent.exists() else table.parent):
        table.parent.mkdir(parents=True, exist_ok=True)
        with writing_whole(table) as csv_file, writing_whole(picture, "wb") as png_file:
            csv_file.write("rate,loss,smooth\n")
            csv_file.writelines(f"{rate:.9g},{loss:.9g},{mean:.9g}\n" for rate, loss, mean in rows)
            png_file.write(figure_png(drawn, dpi=120))
