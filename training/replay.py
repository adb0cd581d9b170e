"""Repeats one step of a run and looks at each layer: what ``tools/replay.py`` runs on each rank.

The run's training is repeated from a checkpoint up to that step. It is exact as a resumed run is:
the learning rate is a function of the step, and the samples and random numbers are functions of the
seed and the step.
"""

import contextlib
import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from tqdm import tqdm

from datasets import ImageDataset
from errors import InputError
from settings.configuration import Configuration
from settings.registry import tasks
from training import engine, parallel
from training.bad_steps import batch_file, read_bad_steps
from training.checkpoint import Progress
from training.checkpoint.storage import write_file
from training.ending import Ending
from training.optim import freeze
from training.run import Run
from training.setup import Training
from training.step_files import (
    STEP,
    batch_name,
    changed_columns,
    write_batch,
    write_weights,
)
from training.task import Batch
from utils import rank, seed_everything, world_size


@dataclass
class Values:
    """A description of tensors: their shapes, their range, and how many values aren't finite.

    Attributes:
        shape: such as "8x16x192"; several tensors are separated by commas.
        low, high: of the finite values; 0 if there are none.
        bad: the number of values that aren't finite.
        total: the number of values.
        rows: the places along the first axis, whose length is that of the batch, that have values
            that aren't finite; empty if the first axis has another length.
    """

    shape: str
    low: float
    high: float
    bad: int
    total: int
    rows: list[int]

    @property
    def largest(self) -> float:
        """Returns the largest magnitude of the finite values."""
        return max(abs(self.low), abs(self.high))

    @classmethod
    def of(cls, found: Any, batch_size: int) -> "Values":
        """Returns the description of the floating-point tensors in a layer's inputs or output."""
        shapes = []
        low, high = np.inf, -np.inf
        bad = total = 0
        rows: set[int] = set()
        for tensor in _tensors(found):
            shapes.append("x".join(map(str, tensor.shape)) or "1")
            array = tensor.detach().astype("float32").numpy()
            finite = np.isfinite(array)
            total += array.size
            if finite.any():
                low = min(low, float(array.min(where=finite, initial=np.inf)))
                high = max(high, float(array.max(where=finite, initial=-np.inf)))
            if finite.all():
                continue
            bad += int(array.size - finite.sum())
            if array.ndim and len(array) == batch_size:
                spoilt = ~finite.reshape(batch_size, -1).all(1)
                rows.update(np.flatnonzero(spoilt).tolist())
        if low > high:
            low = high = 0.0
        return cls(", ".join(shapes), low, high, bad, total, sorted(rows))


@dataclass
class LayerValues:
    """What a layer returned in a step, or the gradient of that.

    Attributes:
        name: the layer's name in the model, such as "blocks.3.attn"; "" is the model itself.
        kind: its class.
        output: the description of its output, or of the output's gradient.
        inputs: the description of the layer's inputs; None for a gradient.
        weights: the description of the layer's own parameters, without those of the layers in it.
    """

    name: str
    kind: str
    output: Values
    inputs: Values | None
    weights: Values | None


@dataclass
class StepValues:
    """What a rank saw of a step.

    Attributes:
        step, epoch: from 1.
        names: of the samples, in the batch's order.
        losses: of the samples.
        spoilt_weights: names of parameters and buffers that weren't finite before the step.
        batch: the description of each floating-point column of the batch, by name.
        forward: of the layers, in the order in which they returned.
        backward: of the gradients, in the order in which they were computed.
        scaled: whether the loss was scaled for float16, whose gradients may overflow: such an update
            is skipped.
        lr: the learning rate of the step's update.
        changed: the batch's columns that aren't those that the run saved.
    """

    step: int
    epoch: int
    names: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    spoilt_weights: list[str] = field(default_factory=list)
    batch: dict[str, Values] = field(default_factory=dict)
    forward: list[LayerValues] = field(default_factory=list)
    backward: list[LayerValues] = field(default_factory=list)
    scaled: bool = False
    lr: float = 0.0
    changed: list[str] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Returns whether the batch, all layers, the losses and the gradients are finite."""
        layers = self.forward if self.scaled else self.forward + self.backward
        return bool(
            np.isfinite(self.losses).all()
            and not any(values.bad for values in self.batch.values())
            and not any(layer.output.bad for layer in layers)
        )


class Replayed(Exception):
    """The step was reached. It ends the training that repeats the run."""


class _Unwritten:
    """Takes the place of a ``Run``: it has no folder and writes nothing.

    Args:
        directory: the replayed run's.
        classes: the names of the classes.
    """

    def __init__(self, directory: Path, classes: list[str]) -> None:
        self.directory = directory
        # No run has checkpoints there: those of the replayed run are only read.
        self.checkpoints = directory / "no checkpoints"
        self.classes = classes
        self.bar = tqdm(disable=True)

    def info(self, message: str) -> None:
        """Ignores a message, which the run has in its log."""

    def report(self, split: str, shown: str, **values: Any) -> None:
        """Ignores a report, which the run has in metrics.jsonl."""

    def record_bad_step(self, step: int, epoch: int, kind: str) -> bool:
        """Ignores it: the run has recorded it."""
        return False

    @property
    def local(self) -> "_Unwritten":
        """Returns the log of this rank alone."""
        return self

    warning = info


class _Watch:
    """Takes the place of a run's task: it looks at the layers in the steps that it is asked for.

    Args:
        training: the training that is repeated.
        progress: how far it is.
        step: the number of the step to look at, after which training ends. The steps of the update
            before it are looked at, too: they show what spoilt the weights.
        output: the folder into which that step is written; None: it isn't.
    """

    def __init__(
        self, training: Training, progress: Progress, step: int, output: Path | None
    ) -> None:
        self.training = training
        self.output = output
        self.saved = _saved_batch(training.run.directory, step)
        self.task = training.task
        self.step_wanted = step
        self.number = progress.step
        self.first_seen = step - 2 * training.config.TRAIN.ACCUM_ITER + 1
        self.seen: list[StepValues] = []
        self.batches: Iterator[list[tuple[int, ...]]] = iter(())
        self.epoch = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def step(self, network: Any, batch: Batch, epoch: int) -> Batch:
        """Returns the task's values of a step, and looks at it if it is one of those wanted."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches = iter(copy.copy(self.training.loader.batch_sampler))
        self.number += 1
        keys = next(self.batches)
        if self.number < self.first_seen:
            return self.task.step(network, batch, epoch)

        training = self.training
        dataset = training.loader.dataset
        seen = StepValues(self.number, epoch, scaled=training.scaler.enabled)
        seen.lr = self._lr(epoch)
        self.seen.append(seen)
        seen.names = [dataset.name(index) for _, index, *_ in keys]
        size = len(batch["pixels"])
        model = training.model
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if Values.of(tensor, 0).bad:
                seen.spoilt_weights.append(name)
        for name, column in batch.items():
            if column.is_floating_point():
                seen.batch[name] = Values.of(column, size)
        output = self.output if self.number == self.step_wanted else None
        columns = {name: column.numpy() for name, column in batch.items()}
        if self.number == self.step_wanted and self.saved:
            seen.changed = changed_columns(self.saved, columns)
        inputs: list[paddle.Tensor] = []
        if output:
            # The forward pass changes batch norm's statistics.
            if rank() == 0:
                write_weights(output, training)
            model.register_forward_pre_hook(_keeper(inputs))
        with _watching(model, seen, size):
            values = self.task.step(network, batch, epoch)
        if output:
            # The network was given images that are normalised, and perhaps mixed.
            arrays = {f"input_{place}": tensor.numpy() for place, tensor in enumerate(inputs)}
            write_batch(output / batch_name(rank()), seen.names, columns | arrays)
        seen.losses = values["loss"].detach().astype("float32").numpy().tolist()
        if self.number == self.step_wanted:
            training.scaler.scale(values["loss"].mean()).backward()
            raise Replayed
        return values

    def _lr(self, epoch: int) -> float:
        """Returns the learning rate of the update that this step belongs to."""
        steps = len(self.training.loader)
        accum = self.training.config.TRAIN.ACCUM_ITER
        index = self.number - 1 - (epoch - 1) * steps
        updates_of_epoch = -(-steps // accum)
        return self.training.schedule((epoch - 1) * updates_of_epoch + index // accum)


def replay(
    config: Configuration,
    train: ImageDataset,
    directory: Path,
    step: int,
    output: Path | None = None,
) -> list[StepValues]:
    """Trains from MODEL.RESUME, or from the beginning, up to a step, and looks at it.

    Every rank calls it.

    Args:
        directory: the run's folder. Nothing is written into it.
        step: the number of the step, from 1.
        output: a new folder, which gets the step's batch and the weights before it
            (``step_files``); None: nothing is written.

    Returns:
        The steps that were looked at. The last one is ``step``; before it come those of the update
        before it.

    Raises:
        InputError: as at a run's start; the run has no such step, or its length was measured.
        RunError: an earlier step isn't finite.
    """
    seed_everything(config.SEED)
    task = tasks.choose(config)(config, train.classes)
    network = task.build_network()
    freeze(config, network)
    run: Any = _Unwritten(directory, train.classes)
    network = parallel.wrap_model(config, network)
    training, progress, _ = engine.prepare_training(task, network, train, run)
    try:
        return _replay(training, progress, run, step, output)
    finally:
        training.loader.close()


def _replay(
    training: Training, progress: Progress, run: Run, step: int, output: Path | None
) -> list[StepValues]:
    config = training.config
    progress.count_steps(training.loader)
    if config.TRAIN.MAX_MINUTES is not None and not progress.length:
        raise InputError(
            "TRAIN.MAX_MINUTES shortened this run by a length that it measured, and no checkpoint"
            " before this step holds it; choose a later step"
        )
    ending = Ending(config, progress, run, len(training.loader), 0.0)
    training.schedule = ending.pace(training.schedule)
    training.share = ending.pace(training.share)
    if not progress.step < step <= ending.num_steps:
        raise InputError(
            f"-step is {step}, expected {progress.step + 1} to {ending.num_steps}: the steps of the"
            " run after its checkpoint"
        )
    watch: Any = _Watch(training, progress, step, output)
    training.task = watch
    try:
        while True:
            engine.train_one_epoch(training, progress, ending=ending)
            progress.end_epoch(progress.epoch + 1)
    except Replayed:
        return watch.seen


def _saved_batch(run: Path, step: int) -> Path | None:
    """Returns the file with this rank's batch of a step, if the run saved it with as many ranks."""
    for record in read_bad_steps(run):
        file = batch_file(run, step, rank())
        if record["step"] == step and record["ranks"] == world_size() and file.exists():
            return file
    return None


@contextlib.contextmanager
def _watching(model: nn.Layer, seen: StepValues, size: int) -> Iterator[None]:
    """Describes what each layer returns within the body, and later the gradients of that.

    Args:
        model: not wrapped.
        seen: gets the descriptions; those of gradients when the backward pass computes them.
        size: the number of the batch's samples.
    """
    hooks = [
        layer.register_forward_post_hook(_observer(name, seen, size))
        for name, layer in model.named_sublayers(include_self=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _observer(name: str, seen: StepValues, size: int) -> Callable[..., Any]:
    """Returns the hook that describes what the layer of this name returns."""

    def observe(layer: nn.Layer, inputs: Any, output: Any) -> None:
        described = Values.of(output, size)
        if isinstance(layer, nn.Identity) or not described.total:
            return
        kind = type(layer).__name__
        own = layer.parameters(include_sublayers=False)
        weights = Values.of(own, 0) if own else None
        given = Values.of(inputs, size)
        seen.forward.append(LayerValues(name, kind, described, given, weights))

        def observe_gradient(gradient: paddle.Tensor) -> None:
            described = Values.of(gradient, size)
            seen.backward.append(LayerValues(name, kind, described, None, weights))

        for tensor in _tensors(output):
            if not tensor.stop_gradient:
                tensor.register_hook(observe_gradient)

    return observe


def _tensors(found: Any) -> Iterator[paddle.Tensor]:
    """Yields the floating-point tensors in nested tuples, lists and dicts."""
    if isinstance(found, paddle.Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
    elif isinstance(found, (tuple, list)):
        yield from itertools.chain.from_iterable(map(_tensors, found))


def _keeper(inputs: list[paddle.Tensor]) -> Callable[..., Any]:
    """Returns the hook that adds copies of the tensors that a network is given to ``inputs``."""

    def keep(layer: nn.Layer, given: tuple[Any, ...]) -> None:
        inputs.extend(
            tensor.detach().clone() for tensor in given if isinstance(tensor, paddle.Tensor)
        )

    return keep


def write_findings(folder: Path, config: Configuration, ranks: list[list[StepValues]]) -> None:
    """Writes step.json: the step's place in the run, its losses, and the lines of its report.

    A loss that isn't finite is a text, "nan", "inf" or "-inf": JSON has no such numbers.

    Args:
        folder: a new folder.
        ranks: what ``replay`` returned on each rank.
    """
    last = ranks[0][-1]
    content = {
        "step": last.step,
        "epoch": last.epoch,
        "seed": config.SEED,
        "ranks": len(ranks),
        "lr": last.lr,
        # Of the samples, by rank.
        "losses": [
            [loss if math.isfinite(loss) else str(loss) for loss in steps[-1].losses]
            for steps in ranks
        ],
        "report": list(report(ranks)),
    }
    write_file(folder / STEP, json.dumps(content, indent=2).encode() + b"\n")


# ------------------------------------------------------------ the report


# The most samples that a report names.
_NAMED = 5


def report(ranks: list[list[StepValues]]) -> Iterator[str]:
    """Yields the lines that describe a replayed step.

    Args:
        ranks: what ``replay`` returned on each rank.
    """
    number, seen = _chosen(ranks)
    last = ranks[number][-1]
    losses = np.array(seen.losses)
    everywhere = [
        loss for steps in ranks for one in steps if one.step == seen.step for loss in one.losses
    ]
    yield (
        f"step {seen.step} (epoch {seen.epoch}): loss {np.mean(everywhere):.6g} of"
        f" {len(everywhere)} samples; rank {number}, shown here: {losses.mean():.6g} of {len(losses)}"
    )
    if seen is not last:
        yield (
            f"before step {last.step} the weights aren't finite ({some(last.spoilt_weights)});"
            f" step {seen.step} is shown, whose update made them so"
        )
    if changed := sorted({name for steps in ranks for name in steps[-1].changed}):
        yield (
            f"the run had another batch: {some(changed)} aren't those that it saved, so its data or"
            " its configuration has changed since"
        )
    yield from _table("forward", seen.forward)
    if first := _first_bad(seen.forward):
        yield f"first non-finite output: {_finding(first, seen)}"
        yield from _bad_samples(first.output.rows, seen)
        return
    if not np.isfinite(losses).all():
        yield "all layers are finite, but the loss isn't: the task computes it from finite outputs"
        yield from _bad_samples(np.flatnonzero(~np.isfinite(losses)).tolist(), seen)
        return
    yield from _table("backward", seen.backward)
    if first := _first_bad(seen.backward):
        name = first.name or "the model"
        yield (
            f"first non-finite gradient: of the output of {name} ({first.kind}),"
            f" {first.output.bad} of {first.output.total} values"
        )
        if seen.scaled:
            yield "in float16 a gradient may overflow: such an update is skipped"
        yield from _bad_samples(first.output.rows, seen)
        return
    if seen is not last:
        yield "its outputs and gradients are finite: the update itself overflowed"
        return
    yield "everything is finite"
    yield "samples with the largest losses:"
    for place in np.argsort(-losses, kind="stable")[:_NAMED].tolist():
        yield f"  {losses[place]:.4g}  {seen.names[place]}"


def _chosen(ranks: list[list[StepValues]]) -> tuple[int, StepValues]:
    """Returns the step to describe, and its rank: the first rank that has something non-finite.

    If all are finite, it is the rank with the sample of the largest loss.
    """
    spoilt = any(steps[-1].spoilt_weights for steps in ranks)
    for place in range(len(ranks[0]) if spoilt else 0):
        for number, steps in enumerate(ranks):
            if not (steps[place].is_finite or steps[place].spoilt_weights):
                return number, steps[place]
    if spoilt and len(ranks[0]) > 1:
        return 0, ranks[0][-2]
    # The gradients of all ranks meet in the weights, but a layer's are its rank's own.
    for number, steps in enumerate(ranks):
        if not steps[-1].is_finite:
            return number, steps[-1]
    number = max(range(len(ranks)), key=lambda number: max(ranks[number][-1].losses))
    return number, ranks[number][-1]


def _first_bad(layers: list[LayerValues]) -> LayerValues | None:
    return next((layer for layer in layers if layer.output.bad), None)


def _finding(layer: LayerValues, seen: StepValues) -> str:
    """Returns which layer's output isn't finite first, and what it was computed from."""
    assert layer.inputs is not None
    columns = [name for name, values in seen.batch.items() if values.bad]
    before = ""
    # A layer may compute more than the layers in it: attention multiplies queries by keys.
    within = layer.name
    while layer.inputs.bad and not columns and within:
        within = within.rpartition(".")[0]
        around = next((other for other in seen.forward if other.name == within), None)
        if around and around.inputs and not around.inputs.bad:
            before = f" before its layer {layer.name}"
            layer = around
            break
    assert layer.inputs is not None
    text = (
        f"{layer.name or 'the model'} ({layer.kind}){before}, {layer.output.bad} of"
        f" {layer.output.total} values"
    )
    if layer.inputs.bad and columns:
        text += f", because the batch isn't finite ({some(columns)})"
    elif layer.inputs.bad:
        reach = [f"{name} reach {values.largest:.3g}" for name, values in seen.batch.items()]
        held = f" ({some(reach)})" if reach else ""
        text += f", because {layer.inputs.bad} of the model's inputs aren't finite{held}"
    else:
        text += f", from finite inputs (largest {layer.inputs.largest:.3g})"
    if layer.weights and layer.weights.bad:
        text += f" and weights of which {layer.weights.bad} aren't finite"
    elif layer.weights:
        text += f" and finite weights (largest {layer.weights.largest:.3g})"
    return text


def _bad_samples(rows: list[int], seen: StepValues) -> Iterator[str]:
    """Yields a line that names the samples in these places of the batch; none without a place."""
    if rows and len(rows) < len(seen.names):
        yield f"samples: {some([seen.names[row] for row in rows])}"
    elif rows:
        yield f"samples: all {len(rows)} of the batch"


def some(names: list[str]) -> str:
    """Returns the first names of a list, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _table(title: str, layers: list[LayerValues]) -> Iterator[str]:
    """Yields a table of layers, up to the first one that isn't finite."""
    rows = [(title, "type", "shape", "min", "max", "not finite")]
    for layer in layers:
        values = layer.output
        name = layer.name or "the model"
        ends = f"{values.low:.4g}", f"{values.high:.4g}"
        rows.append((name, layer.kind, values.shape, *ends, str(values.bad)))
        if values.bad:
            break
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if place < 3 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells)
