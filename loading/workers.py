"""Batches for the device, pass after pass, loaded by worker processes that share their memory with
this one.

``paddle.io.DataLoader``'s own workers sleep half a second before each epoch and lose the errors of
the thread that reads them. They send batches through a pipe or through files in /dev/shm. Such
files outlive a killed run and are often limited to 64 MB. Here the memory is an anonymous mapping
from before the fork. It has no name, needs no /dev/shm, and is gone with its last process.
"""

import collections
import contextlib
import itertools
import math
import mmap
import multiprocessing
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import paddle
from threadpoolctl import threadpool_limits

from errors import InputError, RunError
from launch import progress, stall
from launch.signals import die_with_parent, ignore_signals
from launch.verdict import trouble
from loading.samplers import EvalBatchSampler, TrainBatchSampler
from loading.transforms.bands import pixel_dtype
from settings.options import Configuration, pair
from utils import free_memory, num_gpus

Sampler = TrainBatchSampler | EvalBatchSampler
Draw = Callable[[int, int, int], np.ndarray]


class Loader:
    """Yields this rank's batches on the device: the columns of the dataset's samples by their
    names. Such are "pixels" [B, H, W, C] uint8 or float32 and "labels" [B] int64. Each iteration is
    one pass of ``batch_sampler``, from where that stands.

    At a pass's end the next one is being loaded already. An iteration that is given up costs a new
    start.

    Args:
        draw: (epoch, step of the epoch from 1, samples) -> one more column, "mixed", of a training
            batch.

    Raises:
        RunError: in an iteration: a sample can't be read, or a worker was lost.
        RuntimeError: in an iteration: anything else that went wrong while loading, with its
            traceback.
    """

    def __init__(
        self, config: Configuration, dataset: Any, sampler: Any, draw: Draw | None = None
    ) -> None:
        self.dataset = dataset
        self.batch_sampler = sampler
        self.draw = draw
        self._only_one = config.EVAL
        self._expected: Iterator[Sampler] = iter(())
        self._batches: Iterator[list[paddle.Tensor]] = iter(())

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[dict[str, paddle.Tensor]]:
        following = self._expected
        self._expected = iter(())
        expected = next(following, None)
        if expected is None or expected.place != self.batch_sampler.place:
            self.close()
            self._batches = self._open(itertools.chain.from_iterable(self._passes()))
            following = self._passes()
            next(following)
        for columns in itertools.islice(self._batches, len(self) - self.batch_sampler.first()):
            yield dict(zip(self.columns, columns, strict=True))
        self._expected = following

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the names of a batch's columns."""
        return (*self.dataset.columns, *(("mixed",) if self.draw else ()))

    def _passes(self) -> Iterator[Sampler]:
        return itertools.islice(self.batch_sampler.passes(), 1 if self._only_one else None)

    def _open(self, keys: Iterator[list]) -> Iterator[list[paddle.Tensor]]:
        """Returns the batches of ``keys``, in their order."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives up what was loaded ahead."""


class ProcessLoader(Loader):
    """DATA.NUM_WORKERS processes load, each DATA.PREFETCH batches ahead; without any, this one
    does.

    Args:
        dataset: its items are tuples that begin with pixels [H, W, C], uint8 or float32
            (``pixel_dtype``).
        processes: of the run on this machine: they share its memory.

    Raises:
        InputError: the memory doesn't hold the batches.
    """

    def __init__(
        self,
        config: Configuration,
        dataset: paddle.io.Dataset,
        sampler: Sampler,
        processes: int = 1,
        draw: Draw | None = None,
    ) -> None:
        super().__init__(config, dataset, sampler, draw)
        data = config.DATA
        self.num_workers = min(data.NUM_WORKERS, len(sampler))
        size = pair(data.IMAGE_SIZE)
        self.shape = (*size, data.IMAGE_CHANNELS)
        batches = getattr(sampler, "batches", {size: sampler.batch_size})
        self.room = (
            max(count * math.prod(pair(size)) for size, count in batches.items())
            * data.IMAGE_CHANNELS
        )
        self.slots = self.num_workers * data.PREFETCH + 1
        self._workers: _Workers | None = None
        self.dtype = np.dtype(pixel_dtype(config))
        need = self.room * self.dtype.itemsize * self.slots * processes
        free = free_memory()
        if need > free:
            raise InputError(
                f"{self.slots} batches of {sampler.batch_size} images for each of {processes} processes take"
                f" {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free;"
                " lower DATA.PREFETCH, DATA.NUM_WORKERS or the batch size"
            )

    def _open(self, keys: Iterator[list]) -> Iterator[list[paddle.Tensor]]:
        if self.num_workers:
            self._workers = _Workers(
                self.dataset, self.num_workers, (self.slots, self.room), self.shape, self.dtype
            )
            batches = self._workers.batches(keys)
        else:
            batches = _load_here(self.dataset, keys, self.shape, self.dtype)
        return on_device(with_draws(batches, self._passes(), self.draw))

    def close(self) -> None:
        if self._workers:
            self._workers.kill()
        self._workers, self._batches = None, iter(())


class _Workers:
    """Forked processes that load batches into ``slots``; batch n is of worker n modulo their
    number.

    Args:
        slots: (their number, the values that each holds).
        shape: of an image [H, W, C]; a batch's keys may tell another size.
        dtype: of its values.
    """

    def __init__(
        self,
        dataset: Any,
        count: int,
        slots: tuple[int, int],
        shape: tuple[int, int, int],
        dtype: np.dtype,
    ) -> None:
        self.slots = np.frombuffer(
            mmap.mmap(-1, int(np.prod(slots)) * dtype.itemsize), dtype
        ).reshape(slots)
        self.shape = shape
        self.dataset = dataset
        # Of each worker, how many samples it has begun, and which is the last of them.
        self.begun = np.frombuffer(mmap.mmap(-1, 16 * count), np.int64).reshape(count, 2)
        self.processes = []
        self.connections = []
        context = multiprocessing.get_context("fork")  # a spawned process would import Paddle anew
        # The workers inherit it: set there, it would start OpenBLAS's threads, and wait for those
        # of OpenCV.
        with threadpool_limits(1), _one_thread_of_opencv():
            for begun in self.begun:
                ours, theirs = context.Pipe()
                self.processes.append(
                    context.Process(
                        target=_work, args=(dataset, self.slots, shape, theirs, begun), daemon=True
                    )
                )
                self.processes[-1].start()
                theirs.close()  # now only the worker holds it, and ``ours`` shows its end
                self.connections.append(ours)
        # and at exit, where Python would wait for them
        self.kill = weakref.finalize(self, _kill, self.processes)

    def batches(self, keys: Iterator[list]) -> Iterator[list[np.ndarray]]:
        """Yields the columns of each batch; the first is its slot, overwritten once the next batch
        is asked for.
        """
        numbered = enumerate(keys)
        sent = collections.deque()
        while True:
            for number, batch in itertools.islice(numbered, len(self.slots) - len(sent)):
                self._ask(number % len(self.processes), (number % len(self.slots), batch))
                sent.append((number, _shape(batch, self.shape)))
            if not sent:
                return
            number, shape = sent.popleft()
            columns = self._ask(number % len(self.processes))
            if isinstance(columns, Exception):
                raise columns
            yield [_view(self.slots[number % len(self.slots)], shape), *columns]

    def _ask(self, worker: int, message: tuple | None = None) -> Any:
        """Sends a message to a worker, or returns its next answer."""
        connection = self.connections[worker]
        process = self.processes[worker]
        try:
            if message:
                return connection.send(message)
            self._wait(worker)
            return connection.recv()
        except (EOFError, OSError):
            process.join(1)
            code = process.exitcode or 0
            how = (
                f"killed by {signal.Signals(-code).name}"
                if code < 0
                else f"lost, with exit status {code}"
            )
            raise RunError(f"loader worker {process.pid} was {how}; is memory short?") from None

    def _wait(self, worker: int) -> None:
        """Waits until a worker answers.

        Raises:
            RunError: it has been reading one sample for too long.
        """
        connection = self.connections[worker]
        process = self.processes[worker]
        waited = 0.0
        before = -1
        while not connection.poll(step := min(0.5, stall.limit / 50)):
            count, index = self.begun[worker].tolist()
            # Not by a clock: this process may have been suspended meanwhile.
            waited = waited + step if count == before else 0.0
            before = count
            problem = trouble(process.pid or 0)
            if waited > stall.limit and not (problem and progress.is_watched()):
                name = f"loader worker {process.pid}"
                raise RunError(
                    f"{name} {problem}" if problem else stall.line(name, self.dataset.name(index))
                )


@contextlib.contextmanager
def _one_thread_of_opencv() -> Iterator[None]:
    """OpenCV has no threads within: Paddle imports it where it is installed, and threadpoolctl
    doesn't know it.
    """
    opencv = sys.modules.get("cv2")
    threads = opencv and opencv.getNumThreads()
    if opencv:
        opencv.setNumThreads(1)
    yield
    if opencv:
        opencv.setNumThreads(threads)


def _kill(processes: list[multiprocessing.Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _shape(keys: list, image: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Returns the shape of a batch's pixels, whose images have ``image``'s unless its keys tell
    their size.
    """
    height, width = (
        pair(keys[0][3]) if isinstance(keys[0], tuple) and len(keys[0]) > 3 else image[:2]
    )
    return len(keys), height, width, image[2]


def _view(slot: np.ndarray, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Returns the first values of a slot as a batch's pixels."""
    return slot[: int(np.prod(shape))].reshape(shape)


def _work(
    dataset: Any,
    slots: np.ndarray,
    shape: tuple[int, int, int],
    connection: Connection,
    begun: np.ndarray,
) -> None:
    """What a worker does, as long as its rank lives."""

    def note(index: int) -> None:
        begun[1] = index
        begun[0] += 1

    die_with_parent()
    ignore_signals()
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):  # the rank has gone, or goes
        while True:
            slot, keys = connection.recv()
            connection.send(_load(dataset, keys, _view(slots[slot], _shape(keys, shape)), note))


def _load(
    dataset: Any, keys: list, pixels: np.ndarray, note: Callable[[int], None] = lambda _: None
) -> list[np.ndarray] | Exception:
    """Loads samples: puts their pixels in place and returns their other columns, or what went
    wrong.

    Args:
        note: is called with the index of each sample before that is read.
    """
    others = []
    try:
        for place, key in enumerate(keys):
            note(int(key[1] if isinstance(key, tuple) else key))
            pixels[place], *rest = dataset[key]
            others.append(rest)
    except RunError as error:
        return error
    except Exception:
        return RuntimeError(traceback.format_exc())
    return [np.stack(column) for column in zip(*others, strict=True)]


def _load_here(
    dataset: Any, keys: Iterator[list], shape: tuple[int, int, int], dtype: np.dtype
) -> Iterator[list[np.ndarray]]:
    for batch in keys:
        pixels = np.empty(_shape(batch, shape), dtype)
        if stall.is_watched():
            columns = _load(dataset, batch, pixels, lambda index: stall.note(dataset.name(index)))
        else:
            columns = _load(dataset, batch, pixels)
        stall.note("")
        if isinstance(columns, Exception):
            raise columns
        yield [pixels, *columns]


def with_draws(
    batches: Iterator[list], passes: Iterator[Sampler], draw: Draw | None
) -> Iterator[list]:
    """Adds ``draw``'s column to the batches, which are those of ``passes``."""
    if draw is None:
        yield from batches
        return
    steps = ((own.epoch, step) for own in passes for step in range(own.first() + 1, len(own) + 1))
    for place, batch in zip(steps, batches, strict=True):
        yield [*batch, draw(*place, len(batch[0]))]


def _copied(column: np.ndarray) -> paddle.Tensor:
    # Each call of Paddle 3.3.1's to_tensor leaves a list of 120 bytes behind, which is never freed.
    dtype: Any = str(column.dtype)
    tensor = paddle.empty(column.shape, dtype)
    tensor.set_value(column)
    return tensor


def on_device(
    batches: Iterator[list[np.ndarray]], threaded: bool | None = None
) -> Iterator[list[paddle.Tensor]]:
    """Copies batches to the device; each may be overwritten once the next is asked for.

    On a GPU a thread of ``paddle.io.DataLoader`` does it, by pinned memory and a stream of its own,
    two batches ahead (its ``use_buffer_reader``, with ``places`` this process's device).
    """
    if not (num_gpus() if threaded is None else threaded):
        yield from (list(map(_copied, batch)) for batch in batches)
        return
    source = _Source(batches)
    yield from paddle.io.DataLoader(source, batch_size=None)  # pyright: ignore[reportArgumentType]: None is documented
    if source.error:
        raise source.error


class _Source(paddle.io.IterableDataset):
    """Keeps the error that ends its batches: raised in Paddle's thread, it would be lost and the
    run would hang.
    """

    def __init__(self, batches: Iterator[list[np.ndarray]]) -> None:
        super().__init__()
        self.batches = batches
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[list[paddle.Tensor]]:
        try:
            for batch in self.batches:
                yield [_copy(column) for column in batch]
        except Exception as error:
            self.error = error


def _copy(column: np.ndarray) -> paddle.Tensor:
    """Returns a copy in Paddle's memory on the host, made while other threads run.

    ``paddle.io.DataLoader`` holds the interpreter's lock while it copies an array, which stops the
    step: by 15 ms for 256 pictures. An operator lets the lock go. To hand over the array's own
    memory would be wrong: it is written again, and its end takes the lock, for which Paddle's
    threads could wait without end.
    """
    shared = paddle.Tensor(value=column, place=paddle.CPUPlace(), zero_copy=True)
    return shared.clone()
