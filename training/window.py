"""The reports of training: sums over the steps since the last one, reduced over the ranks.

The steps since the last report are a ``Window``. Their sums stay on the device until the report.
"""

import itertools
import math
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle

from errors import RunError, one_line
from launch.progress import COMPUTING, LOADING, beat
from training.bad_steps import batch_file
from training.checkpoint.kept import keep_checkpoint
from training.profiling import LOADER, span
from training.setup import Training
from training.step_files import write_batch
from training.task import Batch, check_names, sum_of_each
from utils import all_gather, all_reduce_sum, num_gpus, rank, world_size


class NotFinite(RunError):
    """The loss isn't finite."""


class Record:
    """The sums of a rank since the last report, by name.

    ``means`` holds [sum, count] of what is reported as a mean, and ``totals`` holds sums that are
    reported as they are. The ranks' records add up. So a number that all ranks have (the norm of an
    update's gradients) is in rank 0's record alone.

    Args:
        state: what ``state`` returned, or what a release of format 1 wrote; None: an empty record.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        if state is None:
            state = {"means": {}, "totals": {}}
        elif "sums" in state:
            state = _record_by_name(state)
        self.means = {name: tuple(pair) for name, pair in state["means"].items()}
        self.totals = dict(state["totals"])

    @classmethod
    def of_rank(cls, states: list[dict[str, Any]]) -> "Record":
        """Returns the record that this rank continues with after a resume.

        If the number of ranks has changed, rank 0 continues with the sum of all records.

        Args:
            states: the records of all ranks, as plain numbers, by rank.
        """
        if states and "sums" in states[0]:
            # In format 1 each rank had the norms of the gradients, which are the same on all.
            first, *others = states
            none = {"norm_sum": 0.0, "finite": 0, "updates": 0}
            states = [first, *({**state, **none} for state in others)]
        records = [cls(state) for state in states]
        if len(records) == world_size():
            return records[rank()]
        whole = cls()
        for record in records:
            # On the other ranks the same names stand for zeros, as all ranks need the same ones.
            share = 1 if rank() == 0 else 0
            for name, (total, count) in record.means.items():
                whole.add_mean(name, [total * share], count * share)
            for name, number in record.totals.items():
                whole.add_total(name, number * share)
        return whole

    def add_mean(self, name: str, numbers: Iterable[float], count: float) -> None:
        """Adds to a value that is reported as a mean: the sum of all numbers over all counts.

        ``add_mean("loss", [sum of a step's losses], its samples)`` makes the report's "loss" the
        mean over all samples. ``add_total`` is for a value that is reported as a sum. The numbers
        are added one after the other, so that the bits don't depend on where a run was interrupted.

        Args:
            numbers: sums, each of some of the ``count`` values.
            count: how many values the numbers are the sums of.
        """
        total, count_before = self.means.get(name, (0.0, 0))
        total = float(np.cumsum([total, *numbers])[-1])
        self.means[name] = total, count_before + count

    def add_total(self, name: str, number: float) -> None:
        """Adds to a value that is reported as a sum over steps and ranks, such as "samples".

        ``add_mean`` is for a value that is reported as a mean.
        """
        self.totals[name] = self.totals.get(name, 0) + number

    def state(self) -> dict[str, Any]:
        """Returns the record as plain numbers."""
        return {"means": self.means, "totals": self.totals}

    def over_ranks(self, highest: dict[str, float]) -> dict[str, float]:
        """Returns the report of all ranks' records, by one collective.

        Args:
            highest: values of this rank, of which the report has the highest of all ranks.

        Returns:
            means (unless their count is 0), totals and the highest values, by name.
        """
        numbers = [number for pair in self.means.values() for number in pair]
        numbers += self.totals.values()
        # A sum isn't a maximum. So each rank's value has a place of its own among zeros, and the
        # same collective serves both.
        for value in highest.values():
            numbers += [value if place == rank() else 0.0 for place in range(world_size())]
        reduced = iter(all_reduce_sum(paddle.to_tensor(numbers, dtype="float64")).numpy().tolist())
        pairs = {name: (next(reduced), next(reduced)) for name in self.means}
        report = {name: total / count for name, (total, count) in pairs.items() if count}
        for name in self.totals:
            report[name] = next(reduced)
        for name in highest:
            report[name] = max(itertools.islice(reduced, world_size()))
        return report


def _record_by_name(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a record of format 1, which had classification's values by position, with names."""
    loss, top_1, top_5, samples = state["sums"]
    return {
        "means": {
            "loss": (loss, samples),
            "acc1": (100 * top_1, samples),
            "acc5": (100 * top_5, samples),
            "grad_norm": (state["norm_sum"], state["finite"]),
        },
        "totals": {
            "samples": samples,
            "skipped": state["skips"],
            "skipped_updates": state["updates"] - state["finite"],
        },
    }


class Step(NamedTuple):
    """The results of a step, which stay on the device until the report.

    Args:
        number: the step's number in the run, from 1.
        samples: the number of its samples on this rank.
        sums: of what ``Task.step`` returned, [values] float64.
        norm: of the update's gradients; None: the step made no update.
        skipped: with SKIP_BROKEN the indices of images that were skipped, -1 for the others; of
            any shape.
    """

    number: int
    samples: int
    sums: paddle.Tensor
    norm: paddle.Tensor | None
    skipped: paddle.Tensor | None


class Window:
    """The steps since the last report.

    To report one more value, return it for each sample from ``Task.step``, or add it in
    ``_record``: by ``Record.add_mean`` or ``Record.add_total``.

    Args:
        epoch: the epoch that is trained.
        step: the number of steps that were made before.
        states: what ``gather`` returned when the run was saved within a window.
    """

    def __init__(
        self, training: Training, epoch: int, step: int, states: list[dict[str, Any]]
    ) -> None:
        self.training = training
        self.epoch = epoch
        self.step = step
        # Whether no step has been added since the epoch began, or was resumed.
        self.is_first = True
        self._restart(Record.of_rank(states) if states else Record())
        self.mark()

    def _restart(self, carried: Record) -> None:
        """Begins a new window.

        Args:
            carried: what was summed up before a resume; an empty record otherwise.
        """
        self.carried = carried
        self.steps: list[Step] = []
        self.names: tuple[str, ...] = ()
        # Seconds of waiting for batches, and the time at which the window began.
        self.wait = 0.0
        self.start = time.perf_counter()

    def timed_batches(self, loader: Iterable, step: int) -> Iterator:
        """Yields the loader's batches, and measures the time spent waiting for them.

        Args:
            step: the number of the first batch's step.
        """
        source = iter(loader)
        while True:
            began = time.perf_counter()
            beat(LOADING, step)
            with span(LOADER):
                batch = next(source, None)
            beat(COMPUTING, step)
            self.wait += time.perf_counter() - began
            if batch is None:
                return
            yield batch
            step += 1

    def add(
        self,
        step: int,
        values: Batch,
        norm: paddle.Tensor | None = None,
        skipped: paddle.Tensor | None = None,
    ) -> None:
        """Adds a step.

        Args:
            step: its number in the run.
            values: what ``Task.step`` returned.
            norm, skipped: as in ``Step``.
        """
        self.step = step
        names = tuple(values)
        if self.is_first:
            _check_names_of_ranks(names)
            self.is_first = False
        check_names(names, self.names or names)
        self.names = names
        self.steps.append(Step(step, len(values["loss"]), sum_of_each(values), norm, skipped))

    def mark(self) -> None:
        """Remembers the window as it is at an update, for ``gather``."""
        self.marked = self.carried, self.names, self.steps, len(self.steps)

    def gather(self) -> list[dict[str, Any]]:
        """Returns the records of all ranks at the last mark, as plain numbers, by rank.

        Every rank calls it.

        Raises:
            RunError: on every rank, when a loss is not finite.
        """
        carried, names, steps, count = self.marked
        states = all_gather(self._record(carried, names, steps[:count]).state())
        losses = [state["means"].get("loss", (0.0,))[0] for state in states]
        if not all(map(math.isfinite, losses)):
            self._raise_not_finite()
        return states

    def _record(self, carried: Record, names: tuple[str, ...], steps: list[Step]) -> Record:
        """Returns the record of these steps, added to the record that was carried over."""
        record = Record(carried.state())
        if steps:
            samples = sum(step.samples for step in steps)
            sums_by_step = _fetch([step.sums for step in steps])
            for name, sums in zip(names, sums_by_step.T, strict=True):
                record.add_mean(name, sums, samples)
            record.add_total("samples", samples)
        # The gradients of an update are the same on all ranks: rank 0 alone counts them.
        norms = np.zeros(0)
        if rank() == 0:
            norms = _fetch([step.norm for step in steps if step.norm is not None])
        # float16 skips an update whose gradients overflow.
        finite = norms[np.isfinite(norms)]
        record.add_mean("grad_norm", finite, len(finite))
        record.add_total("skipped_updates", len(norms) - len(finite))
        record.add_total("skipped", len(_skipped_images(steps)))
        return record

    def report(self, lr: float) -> None:
        """Reports the sums of all ranks, and begins a new window.

        Args:
            lr: the learning rate of the last update.

        Raises:
            RunError: on every rank, when a loss is not finite.
        """
        run = self.training.run
        task = self.training.task
        scaler = self.training.scaler
        elapsed = time.perf_counter() - self.start
        record = self._record(self.carried, self.names, self.steps)
        record.add_mean("data_wait", [self.wait / elapsed], 1)
        # Speed is measured on the samples of this process, without those from before a resume.
        record.add_total("fresh", sum(step.samples for step in self.steps))
        highest = {"outlier": self._first_outlier(), **_peak_memories()}
        reduced = record.over_ranks(highest)
        if not math.isfinite(reduced["loss"]):
            self._raise_not_finite()
        values = {
            "step": self.step,
            "epoch": self.epoch,
            "samples": int(reduced.pop("samples")),
            "lr": lr,
        }
        skipped_images = reduced.pop("skipped")
        skipped_updates = reduced.pop("skipped_updates")
        outlier = int(reduced.pop("outlier"))
        images_per_s = reduced.pop("fresh") / elapsed
        values |= reduced
        values["images_per_s"] = images_per_s
        if scaler.enabled:
            values["loss_scale"] = scaler.loss_scale
            values["skipped_updates"] = int(skipped_updates)
        run.report("train", task.line("train", values), **values)
        if outlier:
            self._record_bad_step(outlier, "outlier")
        if skipped_images:
            were = "unreadable image was" if skipped_images == 1 else "unreadable images were"
            run.info(
                f"{skipped_images:.0f} {were} skipped; log_<rank>.txt lists those of each rank"
            )
        for index in _skipped_images(self.steps):
            name = self.training.loader.dataset.name(index)
            run.local.warning(
                f"epoch {self.epoch}: unreadable image, replaced by the next one: {name}"
            )
        self._restart(Record())

    def _first_outlier(self) -> float:
        """Returns the number of this rank's first step whose loss is out of proportion, or 0."""
        place = self.names.index("loss")
        sums = _fetch([step.sums for step in self.steps])
        losses = [
            (step.number, float(total[place]) / step.samples)
            for step, total in zip(self.steps, sums, strict=True)
        ]
        return float(self.training.losses.first_outlier(losses))

    def _record_bad_step(self, number: int, kind: str) -> None:
        """Records a step, keeps the checkpoint before it, and saves each rank's batch.

        Every rank calls it.
        """
        run = self.training.run
        recorded = run.record_bad_step(number, self.epoch, kind)
        if recorded:
            keep_checkpoint(run.directory, run.checkpoints, number)
        if all_gather(recorded)[0]:
            self._save_batch(number)

    def _save_batch(self, number: int) -> None:
        """Saves this rank's batch of a step of this epoch. Training continues if that fails."""
        run = self.training.run
        loader = self.training.loader
        try:
            names, columns = loader.load_again(number - (self.epoch - 1) * len(loader))
            write_batch(batch_file(run.directory, number, rank()), names, columns)
        except Exception as error:
            run.local.warning(one_line(f"the batch of step {number} can't be saved: {error}"))

    def _raise_not_finite(self) -> None:
        """Raises ``NotFinite``, which names the first step whose loss isn't finite on any rank.

        Every rank calls it.
        """
        place = self.names.index("loss")
        losses = ((step.number, rank(), float(step.sums[place])) for step in self.steps)
        first = next((loss for loss in losses if not math.isfinite(loss[-1])), None)
        number, on_rank, value = min(loss for loss in all_gather(first) if loss)
        self._record_bad_step(number, "not finite")
        raise NotFinite(
            f"the loss is {value} at step {number} (epoch {self.epoch}, rank {on_rank});"
            " lower TRAIN.BASE_LR, or set TRAIN.GRAD_CLIP,"
            " and resume from a checkpoint before it went wrong",
            shared=True,
        )


def _check_names_of_ranks(names: tuple[str, ...]) -> None:
    """Checks that a step's values have the same names on all ranks. Every rank calls it.

    Raises:
        RunError: on every rank, when they haven't.
    """
    for number, others in enumerate(all_gather(names)):
        if others != names:
            raise RunError(
                f"the task's step returned {', '.join(names)} on rank {rank()} and"
                f" {', '.join(others)} on rank {number}, expected the same names on all ranks"
            )


def peak_memory() -> float:
    """Returns the most memory that this process has held, in MB, without its loader's workers."""
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _peak_memories() -> dict[str, float]:
    """Returns this rank's peak of memory in MB and, on a GPU, its peak there."""
    peaks = {"peak_memory": peak_memory()}
    if num_gpus():
        peaks["peak_memory_gpu"] = paddle.device.cuda.max_memory_allocated() / 1e6
    return peaks


def _fetch(tensors: list[paddle.Tensor]) -> np.ndarray:
    """Returns the tensors' values in float64, by one copy from the device."""
    return paddle.stack(tensors).numpy().astype(np.float64) if tensors else np.zeros(0)


def _skipped_images(steps: list[Step]) -> list[int]:
    """Returns the indices of the images that were skipped in all the steps."""
    columns = [step.skipped.flatten() for step in steps if step.skipped is not None]
    if not columns:
        return []
    return [index for index in paddle.concat(columns).numpy().tolist() if index >= 0]
