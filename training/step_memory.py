"""Measures how much memory a batch takes, in a process of its own.

The process builds what a run builds, and makes real updates with batches of the sizes that it is
asked for. Whatever it leaves in memory ends with it, fragments on a GPU included.
"""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import paddle
from tqdm import tqdm

from config import with_values
from datasets import ImageDataset, get_dataloader
from errors import OutOfMemory, RunError, reporting_memory
from launch import signals
from launch.spawned import SharedObjects, without_current_folder
from ops.device import set_device_flags
from settings.configuration import Configuration
from settings.registry import tasks
from training import engine
from training.checkpoint import Progress
from training.optim import create_state, freeze
from training.setup import autocast, prepare
from training.task import Task
from training.window import NotFinite
from utils import num_gpus, process_memory, seed_everything, within_memory

# Updates with each size. The second one finds the gaps that the first one has left.
_UPDATES = 2
# The share of a GPU's memory that the process holds while it measures, so that a batch that fits
# leaves it free: for the buffers of NCCL, the gaps of a longer run and other programs.
GPU_RESERVE = 0.1
# What a loader's worker takes while it decodes photographs, in bytes.
_WORKER = 64 << 20
# The variables that make a process a rank.
_OF_RANKS = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")


class _Enough(Exception):
    """The updates that are measured have been made."""


class _NoRun:
    """Takes the place of a ``Run``: it logs nothing and writes no file."""

    def __init__(self, classes: list[str]) -> None:
        self.classes = classes
        self.local = logging.getLogger(__name__)
        self.bar = tqdm(disable=True)

    def info(self, message: str) -> None:
        pass

    def report(self, split: str, shown: str, **values: Any) -> None:
        pass

    def record_bad_step(self, step: int, epoch: int, kind: str) -> bool:
        return False


class Ready(NamedTuple):
    """The first message of the process that measures.

    Attributes:
        samples: the number of samples in an epoch, or of the validation images under EVAL.
        gpu_memory: the bytes of the GPU that a batch may take; None: it is a CPU.
    """

    samples: int
    gpu_memory: int | None


class StepMemory:
    """The process that measures, as a context within which it lives.

    ``ready`` is its first message. Calling this object with a batch size returns the bytes that a
    training step (under EVAL a batch of an evaluation) takes in addition to the process itself, or
    None if memory runs out. Sizes have to rise from call to call.

    Args:
        dataset: the training set, or under EVAL the validation set.
        classes: the names of the classes.

    Raises:
        RunError: building the training fails as it would in the run.
    """

    def __init__(self, config: Configuration, dataset: ImageDataset, classes: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        shared = SharedObjects(config, dataset, classes)
        self._process = context.Process(target=_serve, args=(other, shared), daemon=True)
        with without_current_folder():
            self._process.start()
        other.close()

    def __enter__(self) -> "StepMemory":
        try:
            ready = self._received()
            if ready is None:
                raise OutOfMemory(
                    "the model alone needs more memory than there is: use a smaller model, or end"
                    " other processes that use memory"
                )
        except BaseException:
            self._end()
            raise
        self.ready: Ready = ready
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def __call__(self, size: int) -> int | None:
        # The process may have been ended since its last answer.
        with contextlib.suppress(OSError):
            self._connection.send(size)
        return self._received()

    def _received(self) -> Any:
        """Returns the next message; None: memory ran out."""
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            # The kernel kills a process that takes more memory than there is, and C++ ends one.
            if (self._process.exitcode or 0) < 0:
                return None
            raise RunError(
                "the process that measures memory for -batch_size=auto ended; give a number instead"
            ) from None
        if isinstance(answer, OutOfMemory):
            return None
        if isinstance(answer, RunError):
            raise answer
        return answer

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, shared: SharedObjects) -> None:
    """Answers with the memory of each batch size that comes, until this process is ended."""
    signals.die_with_parent()
    paddle.disable_signal_handler()
    signals.stop_at_once()
    # A launched rank starts this process, which is alone.
    for name in _OF_RANKS:
        os.environ.pop(name, None)
    config, dataset, classes = shared.open()
    try:
        with reporting_memory(str), within_memory():
            before = process_memory("VmRSS")
            # As fast as it can be: this machine's other ranks wait.
            set_device_flags(config, 1)
            gpu_memory = None
            if num_gpus():
                total = paddle.device.cuda.get_device_properties().total_memory
                reserve = int(GPU_RESERVE * total)
                gpu_memory = total - reserve
                _held = paddle.empty([reserve], "uint8")
            seed_everything(config.SEED)
            build = _evaluation if config.EVAL else _training
            samples, run_batches = build(_measured(config), dataset, classes)
            connection.send(Ready(samples, gpu_memory))
            while True:
                size = connection.recv()
                room = run_batches(size)
                slots = config.DATA.NUM_WORKERS * config.DATA.PREFETCH + 1
                workers = config.DATA.NUM_WORKERS * _WORKER
                connection.send(process_memory("VmHWM") - before + room * slots + workers)
    except EOFError:
        return
    except RunError as error:
        connection.send(error)


def _measured(config: Configuration) -> Configuration:
    """Returns the configuration as it is measured: with the largest images and without workers."""
    data = config.DATA
    values: dict[str, Any] = {
        "DATA__NUM_WORKERS": 0,
        # A second step finds the gradients of the first one in memory, and so does any further one.
        "TRAIN__ACCUM_ITER": min(2, config.TRAIN.ACCUM_ITER),
        "REPORT": False,
        "RETRIEVAL": None,
    }
    if data.MULTI_SCALE and data.SCALE_SCHEDULE == "mixed":
        # A batch has fewer images of this size.
        values["DATA__MULTI_SCALE"] = [max(data.MULTI_SCALE)]
    elif data.MULTI_SCALE:
        # All images of the last epoch, which is measured, have the last size.
        values["DATA__MULTI_SCALE"] = sorted(data.MULTI_SCALE)
        values["DATA__SCALE_SPREAD"] = 0.0
        values["DATA__SCALE_RANDOM"] = 0.0
    if data.TOKEN_LENGTHS:
        values["DATA__TOKEN_LENGTHS"] = [max(data.TOKEN_LENGTHS)]
    last = config.MODEL.get("PATCH_DROP_END")
    if last is not None:
        values["MODEL__PATCH_DROP"] = min(config.MODEL.PATCH_DROP, last)
        values["MODEL__PATCH_DROP_END"] = None
    return with_values(config, "-batch_size=auto", **values)


def with_size(config: Configuration, size: int) -> Configuration:
    """Returns the configuration with a batch of ``size``, for which few classes suffice."""
    values = {"DATA__BATCH_SIZE": size, "DATA__BATCH_SIZE_EVAL": size}
    if config.DATA.SAMPLER == "per_class":
        values["DATA__PER_CLASS"] = max(2, size // 2)
    return with_values(config, "-batch_size=auto", **values)


def _training(
    config: Configuration, train: ImageDataset, classes: list[str]
) -> tuple[int, Callable[[int], int]]:
    """Returns (samples of an epoch, a function that makes updates with batches of a size).

    The function returns the bytes of a batch in the loader's memory.
    """
    config = with_size(config, 2 if len(train) > 1 else 1)
    task: Task = tasks.choose(config)(config, classes)
    model: Any = task.build_network()
    freeze(config, model)
    run: Any = _NoRun(classes)
    training = prepare(task, model, train, run)
    create_state(training.optimizer)
    samples = training.loader.dataset
    # In the first epochs of some trainings, parts of the network are frozen or images are smaller.
    last_epoch = max(0, config.TRAIN.NUM_EPOCHS - 1)

    def run_batches(size: int) -> int:
        sized = with_size(config, size)
        loader = get_dataloader(sized, samples, "train")
        updates = 0

        def after_step(_window: Any, _statistics: Any, updated: bool) -> None:
            nonlocal updates
            updates += updated
            if updates == _UPDATES:
                raise _Enough

        measured = dataclasses.replace(training, config=sized, loader=loader)
        # Memory doesn't depend on the loss.
        with contextlib.suppress(_Enough, NotFinite):
            engine.train_one_epoch(measured, Progress(epoch=last_epoch), after_step)
        loader.close()
        return getattr(loader, "room", 0)

    return len(samples), run_batches


def _evaluation(
    config: Configuration, val: ImageDataset, classes: list[str]
) -> tuple[int, Callable[[int], int]]:
    """Returns (the number of images, a function that evaluates a batch), as ``_training`` does."""
    config = with_size(config, 1)
    task: Task = tasks.choose(config)(config, classes)
    model: Any = task.build_network()
    model.eval()
    task.prepare_data(val, "val")

    def forward(*inputs: Any) -> Any:
        with autocast(config, evaluation=True):
            return model(*inputs)

    def run_batches(size: int) -> int:
        loader = get_dataloader(with_size(config, size), val, "val")
        with paddle.no_grad():
            task.evaluate(forward, iter([next(iter(loader))]))
        loader.close()
        return getattr(loader, "room", 0)

    return len(val), run_batches
