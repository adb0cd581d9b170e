"""The base class of a task, which is a kind of training.

A task builds its network, and defines a step's loss and an evaluation's metrics. The loop
(``engine``) does the rest: updates, reports, evaluations, checkpoints. A task with a loss alone
(pre-training) needs no more than ``step``.

A task is registered in a file below ``training/``. ``settings.tasks`` has what it declares there:

    @tasks.register("mae", columns="")
    class MaskedAutoencoding(Task):

TASK then takes the name. The keyword arguments of the constructor are keys in the section METHOD.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from datasets import ImageDataset
from errors import InputError, RunError
from loading.transforms import ViewTransform
from models import build_model
from models.layers.naflex import packed_coordinates
from settings.configuration import Configuration
from training.predictions import Predictions
from training.probing.records import probed_text
from training.run import Run
from utils import all_gather

Batch = dict[str, paddle.Tensor]
Metrics = dict[str, Any]

# A report has values of these names beside those of a task.
NAMES_OF_REPORTS = {
    "split", "step", "epoch", "samples", "num_samples", "lr", "grad_norm", "loss_scale",
    "skipped", "skipped_updates", "fresh", "images_per_s", "data_wait", "peak_memory",
    "peak_memory_gpu",
}  # fmt: skip

# Subtracted from a logit, it leaves a probability of 0. Infinity would make NaN of a sum.
MASK = 1e30


class Task:
    """A kind of training.

    Args:
        classes: the names of the model's outputs; empty: none are known.

    Attributes:
        best: the metric by which the best checkpoint is chosen if BEST_METRIC is auto.
        lines: the formats in which metrics are shown: "train" in a report, "val" for an evaluation
            within a run, "best", and "result".
        curves: the metrics that curves.png draws over the steps, with the labels of their axes.
        note: a line that a run logs at its beginning; "": none.
        predictions: what the last ``evaluate`` kept of this rank's samples; None: nothing.
        views: what ``prepare_data`` gives to a dataset as its ``views``; {}: an image has one view.
        average: in a training with TRAIN.MODEL_EMA, the model of the averaged weights, in evaluation
            mode, before the first step; None: there is none.
    """

    lines: ClassVar[dict[str, str]] = dict.fromkeys(
        ("train", "val", "best", "result"), "loss: {loss:.4f}"
    )
    curves: ClassVar[dict[str, str]] = {"loss": "loss", "lr": "learning rate"}
    best = "loss"
    note = ""

    def __init__(self, config: Configuration, classes: Sequence[str] = ()) -> None:
        self.config = config
        self.classes = classes
        self.predictions: Predictions | None = None
        self.views: dict[str, list[ViewTransform]] = {}
        self.average: Any = None

    def build_network(self) -> nn.Layer:
        """Returns the network with fresh weights: the model of the configuration.

        A task whose training needs further layers, such as a decoder, returns a
        ``models.pretraining.network.PretrainingNetwork`` around the model.

        Raises:
            InputError: the architecture can't serve the task.
        """
        return build_model(self.config)

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        """Prepares a dataset before its loader is made.

        It gets the task's views. A task that draws random numbers for each sample, such as a mask,
        adds a function to ``dataset.draws``.

        Args:
            mode: "train" or "val".
        """
        dataset.views = self.views

    def prepare(self, model: nn.Layer, train: ImageDataset, run: Run) -> None:
        """Builds what a training needs besides the network. An evaluation does without.

        Args:
            model: the network, not wrapped.
            train: the training set.
            run: logs what was built.
        """

    def samples(self, train: ImageDataset) -> ImageDataset:
        """Returns the dataset that the training reads: the training set, unless a sample of the task
        has several images.

        It is called after ``prepare`` and ``prepare_data``.
        """
        return train

    def step(self, network: Any, batch: Batch, epoch: int) -> Batch:
        """Returns the values of a batch's samples by name, each [B] float32.

        "loss" is the loss to minimise. The means of the other values over the samples are reported
        in addition. The method is called within autocast, and may not wait for the device.

        Args:
            network: what ``build_network`` returned, wrapped for several processes.
            batch: the loader's columns by name.
            epoch: the epoch, from 1.
        """
        raise NotImplementedError

    def before_update(self, model: nn.Layer, epoch: int) -> None:
        """Changes gradients before they are clipped, such as those of a layer that isn't trained
        yet.

        Args:
            model: the network, not wrapped. Its gradients are those of all processes.
            epoch: the epoch, from 1.
        """

    def after_update(self, model: nn.Layer, share: float) -> None:
        """Updates tensors that aren't trained by gradients, such as a moving average of weights.

        All of it belongs to the network's frozen parameters, so that checkpoints hold it. What a
        step learns of a batch waits for this method. Otherwise a run that was stopped between two
        updates would continue with it.

        Args:
            model: the network, not wrapped, after the optimizer's step.
            share: of the run's updates, how many were made before this one, from 0 to below 1. A
                schedule is a function of it. TRAIN.MAX_MINUTES shortens it as the learning rate's.
        """

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns the metrics of all ranks' batches, with ``loss`` (a mean) and ``num_samples``.

        Numbers are reported. Other values are for result.json alone. Unless a task defines this
        method, the metrics are the means of what ``step`` returns.

        Args:
            forward: calls the network within autocast.
            batches: this rank's. Ranks may have different numbers of batches, so call a collective
                only after all of them.
        """
        names: list[str] = []
        total: Any = 0
        for batch in batches:
            values = self.step(forward, batch, epoch=0)
            check_values(batch, values)
            check_names(list(values), names or list(values))
            names = list(values)
            values["num_samples"] = paddle.ones_like(values["loss"])
            total = total + sum_of_each(values)
        own = dict(zip([*names, "num_samples"], total.tolist(), strict=True)) if names else {}
        # A rank without a batch doesn't know the names.
        sums: Counter[str] = Counter()
        for of_rank in all_gather(own):
            sums.update(of_rank)
        count = sums.pop("num_samples")
        means = {name: value / count for name, value in sums.items()}
        return {**means, "num_samples": int(count)}

    def draw(self, model: nn.Layer, dataset: ImageDataset, folder: Path) -> None:
        """Draws pictures of an evaluation into the run's folder. Rank 0 calls it.

        Args:
            model: the network, not wrapped, in evaluation mode.
            dataset: the validation set.
        """

    def score(self, metrics: Metrics) -> float:
        """Returns how good metrics are: the best checkpoint has the highest score.

        Args:
            metrics: the numbers of an evaluation, and "epoch", after which it was.
        """
        key = self.best if self.config.BEST_METRIC == "auto" else self.config.BEST_METRIC
        return -metrics[key] if key == "loss" else metrics[key]

    def description_of(self, metrics: Metrics) -> dict[str, Any]:
        """Returns the results of an evaluation that are stored with the evaluated weights.

        They are entries of the weights' ``Description``.
        """
        return {}

    def warning(self, metrics: Metrics) -> str:
        """Returns a warning for the log after an evaluation with these metrics; "": no warning."""
        return ""

    def line(self, place: str, metrics: Metrics) -> str:
        """Returns metrics in one of the formats ``lines``, followed by those of a probe."""
        return self.lines[place].format(**metrics) + probed_text(metrics)


def check_no_average(config: Configuration, own: str) -> None:
    """Checks that a run keeps no average of its weights, for a task whose network has one itself.

    Args:
        own: the network's own average.

    Raises:
        InputError: it keeps one.
    """
    if config.TRAIN.MODEL_EMA:
        raise InputError(
            f"TRAIN.MODEL_EMA is True, but {own} of TASK {config.TASK} is the average of the weights;"
            " set it False"
        )


def inputs_of(images: paddle.Tensor, batch: Batch) -> tuple[paddle.Tensor, ...]:
    """Returns the arguments of a network: a batch's images, or the patches of packed ones.

    Args:
        images: normalised, [B, C, H, W]; packed ones [B, C, N, P * P].
        batch: the loader's columns; packed images have "grid" (``ImageDataset.pack``).
    """
    if "grid" not in batch:
        return (images,)
    patches = images.transpose([0, 2, 3, 1]).flatten(2)
    return (patches, *packed_coordinates(batch["grid"], patches.shape[1]))


def check_values(batch: Batch, values: Any) -> None:
    """Checks what a task's ``step`` returned for a batch.

    Raises:
        RunError: it isn't what ``Task.step`` says.
    """
    expected = [len(batch["pixels"])]
    found = ""
    if not isinstance(values, dict):
        found = f"a value of type {type(values).__name__}, expected a dict with the entry loss"
    elif "loss" not in values:
        found = f"a dict of {', '.join(values) or 'nothing'}, expected the entry loss in it"
    elif taken := NAMES_OF_REPORTS.intersection(values):
        found = f"an entry {min(taken)}, a name that reports use themselves; choose another one"
    else:
        for name, value in values.items():
            kind = type(value).__name__
            if isinstance(value, paddle.Tensor):
                if list(value.shape) == expected and value.is_floating_point():
                    continue
                kind = f"{str(value.dtype).removeprefix('paddle.')} {list(value.shape)}"
            found = f"{name} as {kind}, expected a float tensor {expected}: one value per sample"
            break
    if found:
        raise RunError(f"the task's step returned {found}")


def check_names(names: Sequence[str], before: Sequence[str]) -> None:
    """Checks that a step's values have the same names, in the same order, as those of steps before.

    Raises:
        RunError: they haven't.
    """
    if names != before:
        raise RunError(
            f"the task's step returned {', '.join(names)} after {', '.join(before)}, expected the same"
            " names at each step"
        )


def numbers(metrics: Metrics) -> dict[str, float]:
    """Returns those of the metrics that are numbers."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def sum_of_each(values: Batch) -> paddle.Tensor:
    """Returns the sum of each of the values [B]: [len(values)] float64, on the device."""
    return paddle.stack(list(values.values())).astype("float64").sum(1)


def mask_logits(
    model: Callable[..., Any], outputs: np.ndarray, count: int
) -> Callable[..., paddle.Tensor]:
    """Returns ``model`` in evaluation mode, with the logits of all other classes masked.

    Its answers are those of a model that has ``outputs`` alone (DATA.CLASSES): the other classes
    are never chosen, and their probability is 0.

    Args:
        outputs: [k], the classes that the evaluated images may have.
        count: the number of classes of the model, whose logits are [B, count] float32.
    """
    if isinstance(model, nn.Layer):
        model.eval()
    mask = np.full(count, -MASK, np.float32)
    mask[outputs] = 0
    added = paddle.to_tensor(mask)
    return lambda *inputs: model(*inputs).astype("float32") + added
