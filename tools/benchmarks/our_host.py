"""Measures the time of a training step on the host, part by part, for tools/benchmark.py.

The argument is a request as one word of JSON: ``cfg``, ``options`` and ``warm_up`` (steps that
don't count). The answer is one line: {part: [the median over the steps]}. The figures are ms of the
training thread's CPU time, which other programs disturb less. The elapsed time of the whole step is
among them. The steps are those of ``engine.train_one_epoch``. A step lasts from the moment at which
its batch comes to the one at which the next batch is asked for, so the loader isn't included.
"""

import json
import statistics
import sys
import time
import zlib  # noqa: F401  (before Paddle: errors.py says why)
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

WHOLE = "whole step"
WHOLE_WALL = "whole step, by the clock"
REST = "the rest: reports' sums, bar, Python"


class Stopwatch:
    """Measures the parts of each step.

    Attributes:
        steps: {part: CPU seconds} of each step that has ended.
        current: the same of the step that is running.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.current: defaultdict[str, float] = defaultdict(float)

    def wrap(self, what: str, function: Callable) -> Callable:
        """Returns ``function``, whose time is added to ``what``."""

        def call(*args: Any, **options: Any) -> Any:
            begun = time.thread_time()
            found = function(*args, **options)
            self.current[what] += time.thread_time() - begun
            return found

        return call

    def batches(self, loader: Any) -> Iterator:
        """Yields the loader's batches. A step lasts from one batch until the next is asked for."""
        for batch in loader:
            self.current = defaultdict(float)
            begun = time.thread_time()
            wall = time.perf_counter()
            yield batch
            whole = {WHOLE: time.thread_time() - begun, WHOLE_WALL: time.perf_counter() - wall}
            rest = whole[WHOLE] - sum(self.current.values())
            self.steps.append(whole | self.current | {REST: rest})


class Replaced:
    """Replaces an object of the training. It has the attributes that are given, and otherwise those
    of the object.
    """

    def __init__(self, original: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __iter__(self) -> Iterator:
        return self.iterate()

    def __len__(self) -> int:
        return len(self._original)


def watch(training: Any, stopwatch: Stopwatch) -> None:
    """Makes a stopwatch measure the parts of the engine's steps with ``training``."""
    from training import classification, engine, window

    timed = stopwatch.wrap
    scaler = training.scaler
    optimizer = training.optimizer
    loader = training.loader
    task = training.task

    def scale(loss: Any) -> Replaced:
        return Replaced(loss, backward=timed("backward", scaler.scale(loss).backward))

    unscale = timed("clipping", scaler.unscale)
    training.scaler = Replaced(
        scaler, scale=scale, unscale=unscale, step=timed("optimizer", scaler.step)
    )
    calls = {
        name: timed("optimizer", getattr(optimizer, name)) for name in ("set_lr", "clear_grad")
    }
    training.optimizer = Replaced(optimizer, **calls)
    training.loader = Replaced(loader, iterate=lambda: stopwatch.batches(loader))
    training.network = Replaced(training.network, call=timed("forward", training.network))
    task.transform = timed("transform: normalise, erase, mix", task.transform)
    task.criterion = timed("loss", task.criterion)
    if training.ema:
        training.ema.update = timed("average of the weights", training.ema.update)
    engine.clip_gradients = timed("clipping", engine.clip_gradients)
    classification.hits = timed("hits and sums", classification.hits)
    window.sum_of_each = timed("hits and sums", window.sum_of_each)
    engine.seed_step = timed("seeding", engine.seed_step)


def main() -> None:
    import ops
    from config import get_config
    from datasets import get_dataset
    from models import build_model
    from training import engine
    from training.checkpoint import Progress, Saver
    from training.classification import Classification
    from training.optim import freeze
    from training.requests import Checkpointing, Requests
    from training.run import Run
    from training.setup import prepare
    from utils import seed_everything

    request = json.loads(sys.argv[1])
    config = get_config(request["cfg"], request["options"])
    # Without the compiled operators and tune_cpu, this run makes the same calls as one on a GPU.
    ops.enable(False)
    seed_everything(config.SEED)
    dataset = get_dataset(config, "train")
    run = Run(config, [])
    run.begin()
    model = build_model(config)
    freeze(config, model)
    training = prepare(Classification(config), model, dataset, run)
    progress = Progress()
    stopwatch = Stopwatch()
    saver = Saver(
        config, run, training.evaluated_models, training.optimizer, training.scaler, dataset
    )
    checkpointing = Checkpointing(progress, saver, Requests(config.SAVE_MINUTES))
    watch(training, stopwatch)
    engine.train_one_epoch(
        training, progress, stopwatch.wrap("checking signals and clock", checkpointing.after_step)
    )
    steps = stopwatch.steps[request["warm_up"] : -1]
    medians = {part: statistics.median(step[part] for step in steps) for part in steps[0]}
    print(json.dumps({part: [1000 * seconds] for part, seconds in medians.items()}))


if __name__ == "__main__":
    from errors import reporting

    with reporting():
        main()
