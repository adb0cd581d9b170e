"""The training process of tools/benchmark.py checkpoint. It measures what saves cost it, and how
long it takes to read them.

The argument is one word of JSON with the arguments of ``measure_saves``. The answer is one line.
"""

import json
import os
import sys
import threading
import time
import zlib  # noqa: F401  (before Paddle: errors.py says why)
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import paddle

from config import get_config
from datasets import ImageDataset, get_dataset
from errors import reporting
from models import build_model
from ops.device import tune_cpu
from training.checkpoint import Progress, Saver
from training.checkpoint.restore import load_checkpoint
from training.checkpoint.storage import verify
from training.classification import Classification
from training.engine import train_one_epoch
from training.optim import freeze
from training.run import Run
from training.setup import prepare
from training.window import peak_memory
from utils import seed_everything

# Steps that don't count at the start.
WARM_UP = 2
# Steps before each save.
QUIET = 2
# Steps after each save, while it is written.
MEANWHILE = 3

Figures = dict[str, list[float]]


def measure_saves(kind: str, cfg: str, options: list[str], saves: int) -> Figures:
    """Trains on synthetic images on the CPU, by the engine's own loop, and saves ``saves`` times.

    Returns the seconds of each part. A name that begins with "memory" has the peak memory of the
    process so far, in MB.

    Args:
        kind: "Saver" (checkpoint.Saver) or "paddle.save".
        options: alternating keys and values; OUTPUT is among them.
    """
    way_type = {"Saver": BySaver, "paddle.save": ByPaddle}[kind]
    steps = WARM_UP + saves * (QUIET + way_type.meanwhile) + 1
    images = steps * get_config(cfg, options).DATA.BATCH_SIZE
    config = get_config(cfg, [*options, "DATA.SYNTHETIC_SIZE", str(images)])
    tune_cpu(1)
    seed_everything(config.SEED)
    dataset = get_dataset(config, "train")
    run = Run(config, [])
    run.begin()
    model = build_model(config)
    freeze(config, model)
    training = prepare(Classification(config), model, dataset, run)
    progress = Progress()
    figures = defaultdict(list)
    way = way_type(training, dataset, figures)
    train_one_epoch(training, progress, Rounds(way, progress, figures))
    figures["memory with saves"].append(peak_memory())
    for part, read in way.readers().items():
        for _ in range(2):
            started = time.perf_counter()
            read()
            figures[part].append(time.perf_counter() - started)
    return dict(figures)


class Rounds:
    """The ``after_step`` of ``engine.train_one_epoch``. Each round is QUIET steps, a save, and
    ``way.meanwhile`` steps.
    """

    def __init__(self, way: "BySaver | ByPaddle", progress: Progress, figures: Figures) -> None:
        self.way = way
        self.progress = progress
        self.figures = figures
        self.count = -WARM_UP
        self.quiet = []
        self.after = []
        self.left = time.perf_counter()

    def __call__(self, window: Any, statistics: dict[str, paddle.Tensor], updated: bool) -> None:
        if self.count >= 0:
            self._step(time.perf_counter() - self.left, statistics)
        self.count += 1
        self.left = time.perf_counter()

    def _step(self, took: float, statistics: dict[str, paddle.Tensor]) -> None:
        way = self.way
        figures = self.figures
        place = self.count % (QUIET + self.way.meanwhile)
        if place < QUIET:
            figures["a step"].append(took)
            self.quiet.append(took)
        else:
            self.after.append(took)
            if way.writing():
                figures["a step during the writing"].append(took)
        if place == QUIET - 1:
            # The first save maps the memory of its buffers, which the allocator keeps.
            part = "training waits, later saves"
            if "memory" not in figures:
                part = "training waits, first save"
                figures["memory"].append(peak_memory())
            self.waited = way.save(self.progress, statistics)
            figures[part].append(self.waited)
        if place == QUIET + way.meanwhile - 1:
            way.settle()
            # Compared with steps of the same round, because a machine's speed changes.
            slower = sum(self.after) - len(self.after) * median(self.quiet)
            figures["training loses"].append(self.waited + slower)
            self.quiet = []
            self.after = []


class BySaver:
    """Saves as the engine does: it copies the tensors at the step, and a thread writes and syncs
    them.
    """

    meanwhile = MEANWHILE

    def __init__(self, training: Any, dataset: ImageDataset, figures: Figures) -> None:
        self.training = training
        self.figures = figures
        self.saver = Saver(
            training.config,
            training.run,
            training.evaluated_models,
            training.optimizer,
            training.scaler,
            dataset,
        )

    def save(
        self, progress: Progress, statistics: dict[str, paddle.Tensor], written: str = "written"
    ) -> float:
        """Returns the seconds that training waited. A thread notes when the writing ends."""
        started = time.perf_counter()
        self.saver.save(progress, statistics)
        begun = time.perf_counter()
        writer = self.saver.thread
        assert writer

        def note() -> None:
            writer.join()
            self.figures[written].append(time.perf_counter() - begun)

        self.noting = threading.Thread(target=note)
        self.noting.start()
        return begun - started

    def writing(self) -> bool:
        """Returns whether the last save is still being written."""
        return self.noting.is_alive()

    def settle(self) -> None:
        """Waits for the writing, and raises its error if it failed."""
        self.noting.join()
        self.saver.wait(last=True)

    def readers(self) -> dict[str, Callable[[], Any]]:
        """Saves once more, without a step meanwhile, and returns functions that read the save."""
        self.save(Progress(epoch=1), {}, written="written, no step at the same time")
        self.settle()
        path = self.saver.path
        training = self.training

        def restore() -> None:
            load_checkpoint(path, training.model, training.optimizer, training.averaged_model)

        return {"verified": lambda: verify(path), "restored": restore}


class ByPaddle:
    """Saves the state dicts by paddle.save at the step, as PaddleViT and PaddleClas do."""

    meanwhile = 0

    def __init__(self, training: Any, dataset: ImageDataset, figures: Figures) -> None:
        self.figures = figures
        self.folder = Path(training.run.directory)
        self.parts = {"model": training.model, "optimizer": training.optimizer}
        if training.ema:
            self.parts["ema"] = training.averaged_model

    def save(self, progress: Progress, statistics: dict[str, paddle.Tensor]) -> float:
        """Returns the seconds that training waited."""
        for old in self.folder.glob("*.pd"):
            old.unlink()
        started = time.perf_counter()
        self.files = {name: str(self.folder / f"{name}_{progress.step}.pd") for name in self.parts}
        for name, part in self.parts.items():
            paddle.save(part.state_dict(), self.files[name])
        return time.perf_counter() - started

    def writing(self) -> bool:
        """Returns False: the file is complete when ``save`` returns."""
        return False

    def settle(self) -> None:
        """Syncs the files. Otherwise the disk would be busy with them during the next steps."""
        started = time.perf_counter()
        for file in self.files.values():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
        self.figures["synced (paddle.save doesn't)"].append(time.perf_counter() - started)

    def readers(self) -> dict[str, Callable[[], Any]]:
        """Returns the function that reads the last save."""

        def restore() -> None:
            for name, part in self.parts.items():
                part.set_state_dict(paddle.load(self.files[name]))

        return {"restored": restore}


def main() -> None:
    print(json.dumps(measure_saves(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    with reporting():
        main()
