"""What saves cost a training process, and what reading them takes: the part of tools/benchmark.py
that runs in it.

It takes the arguments of ``measure_saves`` as one word of JSON and answers in one line.
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

# steps: at the start; then before each save, and beside the writing
WARM_UP = 2
QUIET = 2
MEANWHILE = 3

Figures = dict[str, list[float]]


def measure_saves(kind: str, cfg: str, options: list[str], saves: int) -> Figures:
    """Trains on synthetic images on the CPU, by the engine's own loop, and saves ``saves`` times.

    Args:
        kind: "Saver" (checkpoint.Saver) or "paddle.save".
        options: alternating keys and values; OUTPUT is among them.

    Returns:
        seconds by what they were spent on; what begins with "memory" is the process's peak so far,
        in MB.
    """
    way_type = {"Saver": BySaver, "paddle.save": ByPaddle}[kind]
    images = get_config(cfg, options).DATA.BATCH_SIZE * (
        WARM_UP + saves * (QUIET + way_type.meanwhile) + 1
    )
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
    """The ``after_step`` of ``engine.train_one_epoch``: QUIET steps, a save, ``way.meanwhile``
    steps, and again.
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
                figures["a step beside the writing"].append(took)
        if place == QUIET - 1:
            # its buffers have to be mapped; the allocator keeps them
            if first := "memory" not in figures:
                figures["memory"].append(peak_memory())
            self.waited = way.save(self.progress, statistics)
            figures[
                "training waits, first save" if first else "training waits, later saves"
            ].append(self.waited)
        if place == QUIET + way.meanwhile - 1:
            way.settle()
            # of this round: a machine's speed drifts
            slower = sum(self.after) - len(self.after) * median(self.quiet)
            figures["training loses"].append(self.waited + slower)
            self.quiet = []
            self.after = []


class BySaver:
    """Saves as the engine does: a copy at the step, which a thread writes and syncs."""

    meanwhile = MEANWHILE

    def __init__(self, training: Any, dataset: ImageDataset, figures: Figures) -> None:
        self.training = training
        self.figures = figures
        parts = (training.evaluated_models, training.optimizer, training.scaler, dataset)
        self.saver = Saver(training.config, training.run, *parts)

    def save(
        self, progress: Progress, statistics: dict[str, paddle.Tensor], written: str = "written"
    ) -> float:
        """Returns the seconds that training waited; a thread notes when the writing ends."""
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
        """Whether the last save is being written, and was all the time since."""
        return self.noting.is_alive()

    def settle(self) -> None:
        """Waits for the writing; raises what it met."""
        self.noting.join()
        self.saver.wait(last=True)

    def readers(self) -> dict[str, Callable[[], Any]]:
        """Saves once more, with no step beside it, and returns the parts of going on from there."""
        self.save(Progress(epoch=1), {}, written="written, no step beside it")
        self.settle()
        path = self.saver.path
        t = self.training
        return {
            "verified": lambda: verify(path),
            "restored": lambda: load_checkpoint(path, t.model, t.optimizer, t.averaged_model),
        }


class ByPaddle:
    """Saves the state dicts by paddle.save at the step, as PaddleViT and PaddleClas do."""

    meanwhile = 0

    def __init__(self, training: Any, dataset: ImageDataset, figures: Figures) -> None:
        self.figures, self.folder = figures, Path(training.run.directory)
        self.parts = {"model": training.model, "optimizer": training.optimizer}
        self.parts |= {"ema": training.averaged_model} if training.ema else {}

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
        """Never beside a step."""
        return False

    def settle(self) -> None:
        """Syncs the files: else the disk would be busy with them in the next steps."""
        started = time.perf_counter()
        for file in self.files.values():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
        self.figures["synced (paddle.save doesn't)"].append(time.perf_counter() - started)

    def readers(self) -> dict[str, Callable[[], Any]]:
        """Returns the parts of going on from the last save."""

        def restore() -> None:
            for name, part in self.parts.items():
                part.set_state_dict(paddle.load(self.files[name]))

        return {"restored": restore}


def main() -> None:
    print(json.dumps(measure_saves(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    with reporting():
        main()
