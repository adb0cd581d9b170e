"""What the training loop reports: sums over the steps since the last report, reduced and divided once."""

import math
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import paddle

from errors import RunError
from launch.progress import COMPUTING, LOADING, beat
from training.checkpoint import Progress
from training.setup import Training
from utils import all_gather, all_reduce_sum, num_gpus, rank, world_size


class Window:
    """The steps since the last report: their sums stay on the device until they are reported.

    Args:
        epoch: the one that is trained.
        progress: where it begins; ``window`` holds what ``state`` returned when the run was saved within a window.
    """

    def __init__(self, training: Training, epoch: int, progress: Progress) -> None:
        self.training, self.epoch, self.step = training, epoch, progress.step
        self._restart()
        if progress.window:
            carried = progress.window[rank()]
            progress.window = []
            self.sums, self.skips = np.array(carried["sums"]), carried["skips"]
            self.norm_sum, self.finite, self.updates = (carried[key] for key in ("norm_sum", "finite", "updates"))
            self.carried_count = self.sums[3]
        self.mark()

    def _restart(self) -> None:
        self.rows: list[paddle.Tensor] = []
        self.norms: list[paddle.Tensor] = []  # of the gradients, per update; the same on every rank
        self.skipped: list[paddle.Tensor] = []
        # What was carried over from before a resume.
        self.sums, self.skips, self.carried_count = np.zeros(4), 0, 0.0
        self.norm_sum, self.finite, self.updates = 0.0, 0, 0
        self.wait, self.start = 0.0, time.perf_counter()

    def timed(self, loader: Iterable, step: int) -> Iterator:
        """Yields the loader's batches and keeps the time spent waiting for them; the first is of ``step``."""
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

    def add(self, step: int, row: paddle.Tensor, skipped: paddle.Tensor | None = None) -> None:
        """Takes in a step: ``engine.sums`` of its batch, and with SKIP_BROKEN which of its images were skipped."""
        self.step = step
        self.rows.append(row)
        if skipped is not None:
            self.skipped.append(skipped)

    def mark(self) -> None:
        """Remembers the window as it is, for ``state``."""
        self.marked = self._now()

    def _now(self) -> tuple:
        carried = (self.sums, self.skips, self.norm_sum, self.finite, self.updates)
        return (carried, *((part, len(part)) for part in (self.rows, self.norms, self.skipped)))

    def state(self) -> dict[str, Any]:
        """Returns this rank's sums at the last mark, as plain numbers."""
        return self._summed(self.marked)

    @staticmethod
    def _summed(marked: tuple) -> dict[str, Any]:
        (sums, skips, norm_sum, finite, updates), *parts = marked
        rows, norms, skipped = (part[:length] for part, length in parts)
        total, numbers = _added(sums, rows), _finite(norms)
        return {
            "sums": total.tolist(),
            "skips": skips + len(_listed(skipped)),
            "norm_sum": float(_added(norm_sum, numbers)),
            "finite": finite + len(numbers),
            "updates": updates + len(norms),
        }

    def report(self, lr: float) -> None:
        """Reports what all ranks have summed up, and begins anew.

        Raises:
            RunError: on every rank, when a loss is not finite.
        """
        state, elapsed = self._summed(self._now()), time.perf_counter() - self.start
        self._list_skipped()
        own = [*state["sums"], self.wait / elapsed, state["skips"], state["sums"][3] - self.carried_count]
        reduced = all_reduce_sum(paddle.to_tensor([*own, *_peaks()], dtype="float64")).numpy().tolist()
        loss, top1, top5, count, wait, skipped, fresh, *peaks = reduced
        if not math.isfinite(loss):
            self.raise_not_finite()
        values = {"step": self.step, "epoch": self.epoch, "samples": int(count), "lr": lr, "loss": loss / count}
        values |= {"acc1": 100 * top1 / count, "acc5": 100 * top5 / count}
        values |= self._gradients(state)
        values |= {"images_per_s": fresh / elapsed, "data_wait": wait / world_size()}
        values |= {"peak_memory": max(peaks[: world_size()])}
        if len(peaks) > world_size():
            values |= {"peak_memory_gpu": max(peaks[world_size() :])}
        self.training.run.report("train", **values)
        if skipped:
            images = "unreadable image was" if skipped == 1 else "unreadable images were"
            self.training.run.info(f"{skipped:.0f} {images} skipped; log_<rank>.txt lists each rank's")
        self._restart()

    def _gradients(self, state: dict[str, Any]) -> dict[str, float]:
        """The mean norm of the updates' gradients (of those that float16 held), and in float16 the loss scale."""
        scaler, finite = self.training.scaler, state["finite"]
        values = {"grad_norm": state["norm_sum"] / finite} if finite else {}
        if scaler.enabled:
            values |= {"loss_scale": scaler.loss_scale, "skipped_updates": state["updates"] - finite}
        return values

    def raise_not_finite(self) -> None:
        """Raises RunError that names the first step of this window whose loss isn't finite; every rank calls it."""
        losses = [float(row[0]) for row in self.rows]
        bad = next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), None)
        first = None if bad is None else (self.step - len(losses) + 1 + bad, rank(), losses[bad])
        at, where, value = min(found for found in all_gather(first) if found)
        raise RunError(
            f"the loss is {value} at step {at} (epoch {self.epoch}, rank {where});"
            " lower TRAIN.BASE_LR, or set TRAIN.GRAD_CLIP, and go on from a checkpoint before it went wrong",
            shared=True,
        )

    def _list_skipped(self) -> None:
        """Lists the images that DATA.SKIP_BROKEN replaced in this rank's log."""
        for index in _listed(self.skipped):
            name = self.training.loader.dataset.name(index)
            self.training.run.local.warning(f"epoch {self.epoch}: unreadable, replaced by the next image: {name}")


def peak_memory() -> float:
    """The most memory that this process has held at a time, in MB, its loader workers not counted."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _peaks() -> list[float]:
    """This rank's peak of memory in MB, and on a GPU its peak there, each among zeros for the other ranks: in the sum
    over the ranks each has its own place, so that one collective serves sums and maxima.
    """
    found = [peak_memory()]
    if num_gpus():
        found.append(paddle.device.cuda.max_memory_allocated() / 1e6)
    return [peak * (place == rank()) for peak in found for place in range(world_size())]


def _added(total: np.ndarray | float, rows: list[paddle.Tensor] | np.ndarray) -> np.ndarray:
    """``total`` and the rows, added one after the other: the same bits wherever the sum was interrupted."""
    if not len(rows):
        return np.asarray(total)
    numbers = rows if isinstance(rows, np.ndarray) else paddle.stack(rows).numpy()
    return np.cumsum(np.concatenate([np.asarray(total)[None], numbers]), axis=0)[-1]


def _listed(skipped: list[paddle.Tensor]) -> list[int]:
    """The images that were skipped, of all the steps at once."""
    return [index for index in (paddle.concat(skipped).numpy().tolist() if skipped else []) if index >= 0]


def _finite(norms: list[paddle.Tensor]) -> np.ndarray:
    numbers = paddle.stack(norms).numpy().astype(np.float64) if norms else np.zeros(0)
    return numbers[np.isfinite(numbers)]
