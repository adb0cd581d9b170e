"""The learning rate range test (Smith 2017, arXiv:1506.01186). The rate rises from update to
update. The loss tells where learning begins, is fastest, and ends.
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
from models import build_model
from settings.options import Configuration
from settings.registry import tasks
from training import engine, parallel
from training.checkpoint import Progress
from training.optim import freeze
from training.setup import prepare
from training.task import Task
from training.window import NotFinite
from utils import seed_everything, writing_whole

_DIVERGED = 4  # times the lowest loss
_SMOOTH = 0.02  # of the sweep's updates: the width of the bell that the losses are averaged by


class _Enough(Exception):
    """The sweep is at its end."""


class _Curve:
    """Takes a run's place: it keeps each update's rate and loss, and leaves nothing behind."""

    def __init__(self, updates: int) -> None:
        self.updates, self.local = updates, logging.getLogger(__name__)
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.recent = self.lowest = math.inf
        self.bar = tqdm(total=updates, unit="update", disable=None, dynamic_ncols=True)

    def info(self, message: str) -> None:
        print(message, flush=True)

    def report(self, split: str, shown: str, **values: Any) -> None:
        self.rates.append(values["lr"])
        self.losses.append(values["loss"])
        self.recent = (
            values["loss"] if len(self.losses) == 1 else 0.9 * self.recent + 0.1 * values["loss"]
        )
        self.lowest = min(self.lowest, self.recent)
        if len(self.losses) > self.updates or self.recent > _DIVERGED * self.lowest:
            raise _Enough


class RateRange(NamedTuple):
    """What a sweep tells.

    Args:
        rates, losses, smooth: of each update, [n]: its rate, the loss of the batch that follows it,
            that loss averaged over its neighbours.
        steepest: rate at which the loss falls fastest.
        lowest: rate at which it is lowest.
    """

    rates: np.ndarray
    losses: np.ndarray
    smooth: np.ndarray
    steepest: float
    lowest: float


def range_test(
    config: Configuration, train: ImageDataset, updates: int, low: float, high: float
) -> RateRange:
    """Trains as a run of this configuration does, by rates that rise exponentially from ``low`` to
    ``high``.

    It ends early where the loss isn't finite, or rises to four times its lowest.

    Raises:
        InputError: as a run's start.
        RunError: no update was made, or a sample can't be read.
    """
    # each has an update at least
    accum = config.TRAIN.ACCUM_ITER
    epochs = max(config.TRAIN.NUM_EPOCHS, updates + 1)
    off = {
        "TRAIN__MODEL_EMA": False,
        "TRAIN__MAX_MINUTES": None,
        "TRAIN__NUM_EPOCHS": epochs,
        "REPORT_FREQ": accum,
    }
    config = with_values(config, "the sweep of rates", **off)
    seed_everything(config.SEED)
    model = build_model(config)
    freeze(config, model)
    curve: Any = _Curve(updates)
    task: Task = tasks.choose(config)(config, train.classes)
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
    except (_Enough, NotFinite):
        pass
    finally:
        training.loader.close()
        curve.bar.close()
    return find_rates(np.array(curve.rates[:-1]), np.array(curve.losses[1:]), updates)


def find_rates(rates: np.ndarray, losses: np.ndarray, updates: int) -> RateRange:
    """Returns what rates and the losses after them tell.

    Raises:
        RunError: they are too few.
    """
    if len(rates) < 10:
        raise RunError(
            f"the loss went out of bounds after {len(rates)} of {updates} updates; give a lower -low"
        )
    width = max(1.0, _SMOOTH * updates)
    reach = round(3 * width)
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    total, weight = (
        np.convolve(values, bell)[reach:-reach] for values in (losses, np.ones(len(losses)))
    )
    smooth = total / weight
    lowest = int(smooth.argmin())
    slopes = np.gradient(smooth, np.log(rates))[: max(2, lowest + 1)]
    return RateRange(rates, losses, smooth, float(rates[slopes.argmin()]), float(rates[lowest]))


def write(found: RateRange, table: Path, picture: Path) -> None:
    """Writes the sweep's values to ``table``, as CSV, and its curve to ``picture``, a PNG beside
    it.
    """
    # takes a third of a second to import
    from training.pages.plotting import figure, figure_png, set_log_scale

    rows = zip(found.rates.tolist(), found.losses.tolist(), found.smooth.tolist(), strict=True)
    drawn = figure(8, 4)
    axis = drawn.add_subplot()
    axis.plot(found.rates, found.losses, alpha=0.3)
    axis.plot(found.rates, found.smooth, color="C0", label="loss after an update of this rate")
    axis.axvline(found.steepest, color="C1", label=f"steepest: {found.steepest:.3g}")
    axis.axvline(found.lowest, color="C2", linestyle="--", label=f"lowest: {found.lowest:.3g}")
    axis.axvline(found.lowest / 10, color="C2", label=f"a tenth of that: {found.lowest / 10:.3g}")
    axis.set(xlabel="learning rate", ylabel="loss")
    set_log_scale(axis)
    axis.set_ylim(0.9 * found.smooth.min(), 1.5 * found.smooth[0])
    axis.grid(alpha=0.3)
    axis.legend()
    with removing_if_stopped(None if table.parent.exists() else table.parent):
        table.parent.mkdir(parents=True, exist_ok=True)
        with writing_whole(table) as values, writing_whole(picture, "wb") as image:
            values.write("rate,loss,smooth\n")
            values.writelines(f"{rate:.9g},{loss:.9g},{mean:.9g}\n" for rate, loss, mean in rows)
            image.write(figure_png(drawn, dpi=120))
