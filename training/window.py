"""What the training loop reports: sums over the steps since the last report, reduced and divided
once.
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

from errors import RunError
from launch.progress import COMPUTING, LOADING, beat
from training.setup import Training
from training.task import Batch, sum_of_each
from utils import all_gather, all_reduce_sum, num_gpus, rank, world_size


class NotFinite(RunError):
    """The loss isn't finite."""


class Record:
    """What a rank has summed up since the last report, by name: ``means`` as [sum, count],
    ``totals`` as a sum.

    The ranks' records add up: what is the same on all ranks (an update's gradients) is in rank 0's,
    beside zeros.

    Args:
        state: what ``state`` returned, or what a release of format 1 wrote.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = (
            _record_by_name(state)
            if state and "sums" in state
            else state or {"means": {}, "totals": {}}
        )
        self.means = {name: tuple(pair) for name, pair in state["means"].items()}
        self.totals = dict(state["totals"])

    @classmethod
    def of_rank(cls, states: list[dict[str, Any]]) -> "Record":
        """Returns the record that this rank goes on with, from those of all ranks. If their number
        was another one, the sum goes on at rank 0.
        """
        if states and "sums" in states[0]:  # format 1: each rank had the gradients'
            states = [
                states[0],
                *({**own, "norm_sum": 0.0, "finite": 0, "updates": 0} for own in states[1:]),
            ]
        records = [cls(state) for state in states]
        if len(records) == world_size():
            return records[rank()]
        whole = cls()
        here = rank() == 0
        for own in records:
            for name, (total, count) in own.means.items():
                whole.add_mean(name, [total * here], count * here)
            for name, number in own.totals.items():
                whole.add_total(name, number * here)
        return whole

    def add_mean(self, name: str, numbers: Iterable[float], count: float) -> None:
        """Takes in the sums of ``count`` things, one after the other: the same bits wherever that
        was interrupted.
        """
        total, before = self.means.get(name, (0.0, 0))
        self.means[name] = float(np.cumsum([total, *numbers])[-1]), before + count

    def add_total(self, name: str, number: float) -> None:
        """Takes in a number of what is reported as a sum."""
        self.totals[name] = self.totals.get(name, 0) + number

    def state(self) -> dict[str, Any]:
        """Returns the record as plain numbers."""
        return {"means": self.means, "totals": self.totals}

    def over_ranks(self, highest: dict[str, float]) -> dict[str, float]:
        """Returns what all ranks' records come to, by one collective: means (of a count that isn't
        0), totals, and the ranks' ``highest``.
        """
        own = [number for pair in self.means.values() for number in pair] + list(
            self.totals.values()
        )
        # Each rank's has its own place among zeros: one collective serves sums and maxima.
        own += [
            high * (place == rank()) for high in highest.values() for place in range(world_size())
        ]
        reduced = iter(all_reduce_sum(paddle.to_tensor(own, dtype="float64")).numpy().tolist())
        pairs = {name: (next(reduced), next(reduced)) for name in self.means}
        found = {name: total / count for name, (total, count) in pairs.items() if count}
        found |= {name: next(reduced) for name in self.totals}
        return found | {name: max(itertools.islice(reduced, world_size())) for name in highest}


def _record_by_name(state: dict[str, Any]) -> dict[str, Any]:
    """A record of format 1, which knew classification alone, by position: with names."""
    loss, first, five, samples = state["sums"]
    means = {"loss": (loss, samples), "acc1": (100 * first, samples), "acc5": (100 * five, samples)}
    means |= {"grad_norm": (state["norm_sum"], state["finite"])}
    skipped = {"skipped": state["skips"], "skipped_updates": state["updates"] - state["finite"]}
    return {"means": means, "totals": {"samples": samples, **skipped}}


class Step(NamedTuple):
    """Holds what a step leaves on the device until the report. These are sums by name, the norm of
    an update's gradients, and with SKIP_BROKEN which images were skipped.
    """

    number: int
    samples: int
    sums: paddle.Tensor
    norm: paddle.Tensor | None
    skipped: paddle.Tensor | None


class Window:
    """The steps since the last report. A value more to report is an entry more of what
    ``Task.step`` returns, for each sample, or of ``_record``.

    Args:
        epoch: the one that is trained.
        step: where it begins.
        states: what ``gather`` returned when the run was saved within a window.
    """

    def __init__(
        self, training: Training, epoch: int, step: int, states: list[dict[str, Any]]
    ) -> None:
        self.training = training
        self.epoch = epoch
        self.step = step
        self._restart(Record.of_rank(states) if states else Record())
        self.mark()

    def _restart(self, carried: Record) -> None:
        """Begins anew, with what is carried over from before a resume."""
        self.carried = carried
        self.steps = []
        self.names = ()
        self.wait, self.start = 0.0, time.perf_counter()

    def timed_batches(self, loader: Iterable, step: int) -> Iterator:
        """Yields the loader's batches and keeps the time spent waiting for them; the first is of
        ``step``.
        """
        source = iter(loader)
        while True:
            asked = time.perf_counter()
            beat(LOADING, step)
            batch = next(source, None)
            beat(COMPUTING, step)
            self.wait += time.perf_counter() - asked
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
        """Takes in a step: what ``Task.step`` returned, and what ``Step`` says."""
        self.step, self.names = step, tuple(values)
        self.steps.append(Step(step, len(values["loss"]), sum_of_each(values), norm, skipped))

    def mark(self) -> None:
        """Remembers the window as it is, for ``gather``."""
        self.marked = self.carried, self.names, self.steps, len(self.steps)

    def gather(self) -> list[dict[str, Any]]:
        """Returns every rank's record at the last mark, as plain numbers, by rank; every rank calls
        it.

        Raises:
            RunError: on every rank, when a loss is not finite.
        """
        carried, names, steps, count = self.marked
        states = all_gather(self._record(carried, names, steps[:count]).state())
        if not all(math.isfinite(state["means"].get("loss", (0.0,))[0]) for state in states):
            self._raise_not_finite()
        return states

    def _record(self, carried: Record, names: tuple[str, ...], steps: list[Step]) -> Record:
        """What was carried over, and these steps."""
        record = Record(carried.state())
        if steps:
            samples = sum(step.samples for step in steps)
            for name, sums in zip(names, _fetch([step.sums for step in steps]).T, strict=True):
                record.add_mean(name, sums, samples)
            record.add_total("samples", samples)
        norms = (
            _fetch([step.norm for step in steps if step.norm is not None])
            if rank() == 0
            else np.zeros(0)
        )
        finite = norms[np.isfinite(norms)]  # those that float16 held
        record.add_mean("grad_norm", finite, len(finite))
        record.add_total("skipped_updates", len(norms) - len(finite))
        record.add_total("skipped", len(_skipped_images(steps)))
        return record

    def report(self, lr: float) -> None:
        """Reports what all ranks have summed up, and begins anew.

        Raises:
            RunError: on every rank, when a loss is not finite.
        """
        run = self.training.run
        task = self.training.task
        scaler = self.training.scaler
        elapsed = time.perf_counter() - self.start
        record = self._record(self.carried, self.names, self.steps)
        record.add_mean("data_wait", [self.wait / elapsed], 1)
        record.add_total("fresh", sum(step.samples for step in self.steps))
        found = record.over_ranks(_peaks())
        if not math.isfinite(found["loss"]):
            self._raise_not_finite()
        values = {
            "step": self.step,
            "epoch": self.epoch,
            "samples": int(found.pop("samples")),
            "lr": lr,
        }
        images, updates, fresh = (
            found.pop(name) for name in ("skipped", "skipped_updates", "fresh")
        )
        values |= found | {"images_per_s": fresh / elapsed}
        if scaler.enabled:
            values |= {"loss_scale": scaler.loss_scale, "skipped_updates": int(updates)}
        run.report("train", task.line("train", values), **values)
        if images:
            were = "unreadable image was" if images == 1 else "unreadable images were"
            run.info(f"{images:.0f} {were} skipped; log_<rank>.txt lists each rank's")
        for index in _skipped_images(self.steps):
            name = self.training.loader.dataset.name(index)
            run.local.warning(f"epoch {self.epoch}: unreadable, replaced by the next image: {name}")
        self._restart(Record())

    def _raise_not_finite(self) -> None:
        """Raises RunError that names the first step of this window whose loss isn't finite; every
        rank calls it.
        """
        place = self.names.index("loss")
        losses = [(step.number, rank(), float(step.sums[place])) for step in self.steps]
        first = next((own for own in losses if not math.isfinite(own[-1])), None)
        at, where, value = min(found for found in all_gather(first) if found)
        raise NotFinite(
            f"the loss is {value} at step {at} (epoch {self.epoch}, rank {where});"
            " lower TRAIN.BASE_LR, or set TRAIN.GRAD_CLIP, and go on from a checkpoint before it went wrong",
            shared=True,
        )


def peak_memory() -> float:
    """The most memory that this process has held at a time, in MB, its loader workers not counted."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _peaks() -> dict[str, float]:
    """This rank's peak of memory in MB, and on a GPU its peak there."""
    on_gpu = (
        {"peak_memory_gpu": paddle.device.cuda.max_memory_allocated() / 1e6} if num_gpus() else {}
    )
    return {"peak_memory": peak_memory(), **on_gpu}


def _fetch(tensors: list[paddle.Tensor]) -> np.ndarray:
    """The tensors' values in float64, all at once; none of an empty list."""
    return paddle.stack(tensors).numpy().astype(np.float64) if tensors else np.zeros(0)


def _skipped_images(steps: list[Step]) -> list[int]:
    """The images that were skipped, of all the steps at once."""
    columns = [step.skipped for step in steps if step.skipped is not None]
    return [
        index
        for index in (paddle.concat(columns).numpy().tolist() if columns else [])
        if index >= 0
    ]
