"""Loaders of batches, whose worker processes share memory with the process that trains.

``paddle.io.DataLoader``'s own workers sleep half a second before each epoch, and lose the errors of
the thread that reads them. They send batches through a pipe, or through files in /dev/shm, which
outlive a killed run and are often limited to 64 MB. Here the memory is an anonymous mapping that is
made before the workers are forked. It needs no /dev/shm, and is freed with its last process.
"""

import collections
import contextlib
import copy
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
from loading.transforms import Size
from settings.configuration import Configuration, pair
from utils import free_memory, num_gpus

Sampler = TrainBatchSampler | EvalBatchSampler
Draw = Callable[[int, int, int], np.ndarray]
# The shape and type of a sample's items, by column.
Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]
# The columns of a slot begin at multiples of so many bytes.
_ALIGNED = 64


class Loader:
    """Yields this rank's batches on the device, as dicts of columns by name.

    The columns are those of the dataset's samples, such as "pixels" [B, H, W, C] uint8 or float32
    and "labels" [B] int64. Each iteration is one pass of ``batch_sampler``, from where that stands.

    While a pass ends, the next one is being loaded already. If an iteration is left early, the
    workers start again.

    Args:
        draw: (epoch, step of the epoch from 1, samples) -> one more column, "mixed", of a training
            batch.

    Raises:
        RunError: during an iteration: a sample can't be read, or a worker was lost.
        RuntimeError: during an iteration: anything else that went wrong while loading, with its
            traceback.
    """

    def __init__(
        self, config: Configuration, dataset: Any, sampler: Any, draw: Draw | None = None
    ) -> None:
        self.dataset = dataset
        self.batch_sampler = sampler
        self.draw = draw
        self._single_pass = config.EVAL
        # The passes whose batches are loaded ahead.
        self._expected: Iterator[Sampler] = iter(())
        self._batches: Iterator[list[paddle.Tensor]] = iter(())

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[dict[str, paddle.Tensor]]:
        following = self._expected
        self._expected = iter(())
        expected = next(following, None)
        # What was loaded ahead is of no use if the sampler has been set to another place.
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
        return itertools.islice(self.batch_sampler.passes(), 1 if self._single_pass else None)

    def _open(self, keys: Iterator[list]) -> Iterator[list[paddle.Tensor]]:
        """Returns the batches of ``keys``, in their order."""
        raise NotImplementedError

    def load_again(self, step: int) -> tuple[list[str], dict[str, np.ndarray]]:
        """Loads a batch that the iteration of this epoch has yielded once more, in this process.

        Args:
            step: of the epoch, from 1.

        Returns:
            (the names of its samples, its columns by name)

        Raises:
            RunError: a sample can't be read any more.
        """
        sampler = copy.copy(self.batch_sampler)
        keys = next(itertools.islice(sampler, step - 1 - sampler.first(), None))
        columns = self._load_batch(keys)
        if self.draw:
            columns.append(self.draw(sampler.epoch, step, len(keys)))
        names = [self.dataset.name(index) for _, index, *_ in keys]
        return names, dict(zip(self.columns, columns, strict=True))

    def _load_batch(self, keys: list) -> list[np.ndarray]:
        """Returns the columns of a training batch, as ``_open`` does, without its workers."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the workers, and drops the batches that were loaded ahead. The next iteration starts them again."""
        self._expected = iter(())


class ProcessLoader(Loader):
    """A loader with DATA.NUM_WORKERS processes, each of which loads DATA.PREFETCH batches ahead.

    Without workers, the samples are loaded in this process.

    Args:
        dataset: its samples are tuples, whose items ``columns`` names. They begin with pixels [H, W,
            C], uint8 or float32. ``shapes(size)`` says which items have one shape, and which.
        processes: of the run on this machine, which share its memory.

    Raises:
        InputError: the free memory doesn't hold the batches.
    """

    def __init__(
        self,
        config: Configuration,
        dataset: Any,
        sampler: Sampler,
        processes: int = 1,
        draw: Draw | None = None,
    ) -> None:
        super().__init__(config, dataset, sampler, draw)
        data = config.DATA
        self.num_workers = min(data.NUM_WORKERS, len(sampler))
        size = pair(data.IMAGE_SIZE)
        if getattr(dataset, "packing", None) is not None:
            size = dataset.packing.size
        self.size = size
        # A sampler of several sizes has another number of images for each.
        batches = getattr(sampler, "batches", {size: sampler.batch_size})
        # The bytes of the largest batch; at least one, because memory can't be empty.
        rooms = [_room(dataset.shapes(pair(size)), count) for size, count in batches.items()]
        self.room = max(1, *rooms)
        self.slots = self.num_workers * data.PREFETCH + 1
        self._workers: _Workers | None = None
        need = self.room * self.slots * processes
        free = free_memory()
        if need > free:
            raise InputError(
                f"{self.slots} batches of {sampler.batch_size} images for each of {processes} processes take"
                f" {need / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB are free;"
                " lower DATA.PREFETCH, DATA.NUM_WORKERS or the batch size"
            )

    def _open(self, keys: Iterator[list]) -> Iterator[list[paddle.Tensor]]:
        if self.num_workers:
            self._workers = _Workers(
                self.dataset,
                self.num_workers,
                slots=self.slots,
                room=self.room,
                size=self.size,
            )
            batches = self._workers.batches(keys)
        else:
            batches = _load_here(self.dataset, keys, self.size)
        return on_device(with_draws(batches, self._passes(), self.draw))

    def _load_batch(self, keys: list) -> list[np.ndarray]:
        return next(_load_here(self.dataset, iter([keys]), self.size))

    def close(self) -> None:
        super().close()
        if self._workers:
            self._workers.kill()
        self._workers = None
        self._batches = iter(())


class _Workers:
    """Forked processes that load batches into slots of shared memory.

    Of N workers, batch n is loaded by worker n % N. Each slot holds those columns of a batch whose
    items have one shape (``shapes`` of the dataset), the pixels among them.

    Args:
        count: N.
        slots: their number.
        room: the bytes of a slot.
        size: of the images, unless a batch's keys give another one.
    """

    def __init__(self, dataset: Any, count: int, slots: int, room: int, size: Size) -> None:
        memory = mmap.mmap(-1, slots * room)
        self.slots = np.frombuffer(memory, np.uint8).reshape(slots, room)
        self.size = size
        self.dataset = dataset
        # For each worker: how many samples it has begun to read, and the index of the last one.
        self.begun = np.frombuffer(mmap.mmap(-1, 16 * count), np.int64).reshape(count, 2)
        self.processes = []
        self.connections = []
        # A spawned process would import Paddle again.
        context = multiprocessing.get_context("fork")
        with one_thread():
            for begun in self.begun:
                connection, workers_end = context.Pipe()
                arguments = (dataset, self.slots, size, workers_end, begun)
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                self.processes.append(process)
                # Only the worker holds its end now, so the connection is closed when it ends.
                workers_end.close()
                self.connections.append(connection)
        # Called at exit, too, where Python would wait for the workers to end.
        self.kill = weakref.finalize(self, _kill, self.processes)

    def batches(self, keys: Iterator[list]) -> Iterator[list[np.ndarray]]:
        """Yields the columns of each batch.

        Some of them are in the batch's slot, which is overwritten once the next batch is taken.
        """
        numbered = enumerate(keys)
        sent = collections.deque()
        while True:
            for number, batch in itertools.islice(numbered, len(self.slots) - len(sent)):
                self._ask(number % len(self.processes), (number % len(self.slots), batch))
                sent.append((number, batch))
            if not sent:
                return
            number, batch = sent.popleft()
            others = self._ask(number % len(self.processes))
            if isinstance(others, Exception):
                raise others
            slot = self.slots[number % len(self.slots)]
            columns = _views(slot, self.dataset, batch, self.size) | others
            yield [columns[name] for name in self.dataset.columns]

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
            how = f"lost, with exit status {code}"
            if code < 0:
                how = f"killed by {signal.Signals(-code).name}"
            raise RunError(f"loader worker {process.pid} was {how}; out of memory?") from None

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
            # The steps are counted: by a clock, the time in which this process was suspended would
            # count, too.
            waited = waited + step if count == before else 0.0
            before = count
            problem = trouble(process.pid or 0)
            if waited > stall.limit and not (problem and progress.is_watched()):
                name = f"loader worker {process.pid}"
                if problem:
                    raise RunError(f"{name} {problem}")
                raise RunError(stall.line(name, self.dataset.name(index)))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits libraries to one thread within a ``with`` statement, in which processes are forked.

    The forks inherit the limit. To set it in a fork would start OpenBLAS's threads there, and wait
    for those of OpenCV. Paddle imports OpenCV where it is installed, and threadpoolctl doesn't know
    it.
    """
    opencv = sys.modules.get("cv2")
    threads = opencv and opencv.getNumThreads()
    if opencv:
        opencv.setNumThreads(1)
    with threadpool_limits(1):
        yield
    if opencv:
        opencv.setNumThreads(threads)


def _kill(processes: list[multiprocessing.Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _shapes(dataset: Any, keys: list, size: Size) -> Shapes:
    """Returns the shape and type of a batch's items that are in its slot.

    Args:
        keys: of the batch, which may end with a size of its images.
        size: of the images otherwise.
    """
    if isinstance(keys[0], tuple) and len(keys[0]) > 3:
        size = pair(keys[0][3])
    return dataset.shapes(size)


def _room(shapes: Shapes, count: int) -> int:
    """Returns the bytes of a slot that holds ``count`` samples."""
    return sum(_aligned(count * _bytes(*shape)) for shape in shapes.values())


def _bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def _views(slot: np.ndarray, dataset: Any, keys: list, size: Size) -> dict[str, np.ndarray]:
    """Returns the columns of a batch that are in its slot.

    Args:
        slot: [room] uint8.
        keys, size: as of ``_shapes``.
    """
    views = {}
    start = 0
    for name, (shape, dtype) in _shapes(dataset, keys, size).items():
        length = len(keys) * _bytes(shape, dtype)
        views[name] = slot[start : start + length].view(dtype).reshape(len(keys), *shape)
        start += _aligned(length)
    return views


def _work(
    dataset: Any, slots: np.ndarray, size: Size, connection: Connection, begun: np.ndarray
) -> None:
    """Loads batches in a worker, until the process that started it ends."""

    def note(index: int) -> None:
        begun[1] = index
        begun[0] += 1

    die_with_parent()
    ignore_signals()
    # These errors mean that the process that started this one has ended.
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            slot, keys = connection.recv()
            views = _views(slots[slot], dataset, keys, size)
            connection.send(_load(dataset, keys, views, note))


def _load(
    dataset: Any,
    keys: list,
    views: dict[str, np.ndarray],
    note: Callable[[int], None] = lambda _: None,
) -> dict[str, np.ndarray] | Exception:
    """Loads a batch: writes columns into ``views``, and returns the others.

    An error is returned, not raised, so that a worker can send it.

    Args:
        note: is called with the index of each sample before it is read.
    """
    names = dataset.columns
    others: dict[str, list] = {name: [] for name in names if name not in views}
    try:
        for place, key in enumerate(keys):
            note(int(key[1] if isinstance(key, tuple) else key))
            for name, item in zip(names, dataset[key], strict=True):
                if name in views:
                    views[name][place] = item
                else:
                    others[name].append(item)
        return {name: np.stack(column) for name, column in others.items()}
    except RunError as error:
        return error
    except Exception:
        return RuntimeError(traceback.format_exc())


def _load_here(dataset: Any, keys: Iterator[list], size: Size) -> Iterator[list[np.ndarray]]:
    for batch in keys:
        slot = np.empty(_room(_shapes(dataset, batch, size), len(batch)), np.uint8)
        views = _views(slot, dataset, batch, size)
        if stall.is_watched():
            others = _load(dataset, batch, views, lambda index: stall.note(dataset.name(index)))
        else:
            others = _load(dataset, batch, views)
        stall.note("")
        if isinstance(others, Exception):
            raise others
        columns = views | others
        yield [columns[name] for name in dataset.columns]


def with_draws(
    batches: Iterator[list], passes: Iterator[Sampler], draw: Draw | None
) -> Iterator[list]:
    """Adds the column that ``draw`` returns to each of the batches.

    Args:
        passes: the samplers of these batches, one for each epoch.
    """
    if draw is None:
        yield from batches
        return
    steps = (
        (sampler.epoch, step)
        for sampler in passes
        for step in range(sampler.first() + 1, len(sampler) + 1)
    )
    for (epoch, step), batch in zip(steps, batches, strict=True):
        yield [*batch, draw(epoch, step, len(batch[0]))]


def _copied(column: np.ndarray) -> paddle.Tensor:
    # Each call of Paddle 3.3.1's to_tensor leaves a list of 120 bytes behind, which is never freed.
    dtype: Any = str(column.dtype)
    tensor = paddle.empty(column.shape, dtype)
    tensor.set_value(column)
    return tensor


def on_device(
    batches: Iterator[list[np.ndarray]], threaded: bool | None = None
) -> Iterator[list[paddle.Tensor]]:
    """Copies batches to the device, so that their arrays may be overwritten.

    On a GPU a thread of ``paddle.io.DataLoader`` does this, two batches ahead, through pinned
    memory and on a stream of its own (its ``use_buffer_reader``).

    Args:
        threaded: whether to use that thread; None: on a GPU.
    """
    if not (num_gpus() if threaded is None else threaded):
        yield from (list(map(_copied, batch)) for batch in batches)
        return
    source = _Source(batches)
    yield from paddle.io.DataLoader(source, batch_size=None)  # pyright: ignore[reportArgumentType]: None is documented
    if source.error:
        raise source.error


class _Source(paddle.io.IterableDataset):
    """The batches as Paddle's loader takes them.

    An error is kept in ``error``. Raised in Paddle's thread, it would be lost, and the run would
    hang.
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

    ``paddle.io.DataLoader`` holds the interpreter's lock while it copies an array, which delays the
    training step by 15 ms for 256 images. An operator releases the lock, so the copy is made by
    one. The array's own memory can't be handed over, because it is overwritten by a later batch.
    Also, freeing it takes the lock, for which Paddle's threads could wait forever.
    """
    shared = paddle.Tensor(value=column, place=paddle.CPUPlace(), zero_copy=True)
    return shared.clone()
