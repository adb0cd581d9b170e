"""The loop: ``fit`` trains and evaluates, ``train_one_epoch`` and ``evaluate`` are its two halves.

One process is N processes with N = 1. Nothing leaves the device between reports: losses and hits are kept there as sums
and counts, reduced over the processes once, and divided once.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn
from yacs.config import CfgNode

from checkpoint import classes_of, load_checkpoint, remove_superseded, save_checkpoint
from datasets import ImageDataset, batches, get_dataloader
from errors import InputError, RunError
from losses import CrossEntropy, build_criterion
from optim import build_optimizer, build_schedule, decayed_parameters
from options import plain
from records import Run, plot_curves
from transforms import Normalize
from utils import all_gather, all_reduce_sum, num_gpus, rank, seed_step, world_size
from weights import load_weights


@dataclass
class Training:
    """What a training run is made of; ``network`` is ``model``, or ``model`` wrapped in ``paddle.DataParallel``."""

    config: CfgNode
    model: nn.Layer
    network: nn.Layer
    criterion: nn.Layer
    optimizer: paddle.optimizer.Optimizer
    schedule: Callable[[int], float]
    scaler: paddle.amp.GradScaler
    loader: paddle.io.DataLoader
    run: Run


def fit(config: CfgNode, network: nn.Layer, train: ImageDataset, val: ImageDataset, run: Run) -> None:
    """Trains ``network`` (a model, or one in ``paddle.DataParallel``) and leaves checkpoints, metrics and a result.

    Raises:
        InputError: batch, accumulation or checkpoint don't fit.
        RunError: on every rank, when the loss is not finite.
    """
    training = _prepare(config, network, train, run)
    start, best = config.TRAIN.LAST_EPOCH, {"acc1": -1.0}
    if config.MODEL.RESUME:
        state = load_checkpoint(config.MODEL.RESUME, training.model, training.optimizer)
        if start not in (0, state["epoch"]):
            raise InputError(
                f"TRAIN.LAST_EPOCH is {start}, the checkpoint's last epoch is {state['epoch']}; leave it out"
            )
        start, best = state["epoch"], state["best"]
        run.info(f"resumed after epoch {start} from {config.MODEL.RESUME}")
    if start >= config.TRAIN.NUM_EPOCHS:
        raise InputError(f"epoch {start} is done already and TRAIN.NUM_EPOCHS is {config.TRAIN.NUM_EPOCHS}; raise it")
    val_loader = get_dataloader(config, val, "val", rank(), world_size())
    steps, epochs = len(training.loader), config.TRAIN.NUM_EPOCHS
    run.start_bar(steps * epochs, steps * start)
    for epoch in range(start + 1, epochs + 1):
        train_one_epoch(training, epoch)
        validated = epoch % config.VALIDATE_FREQ == 0 or epoch == epochs
        metrics: dict[str, Any] = {}
        if validated:
            metrics = evaluate(config, training.model, val_loader, len(val))
            run.report("val", step=epoch * steps, epoch=epoch, **metrics)
        improved = validated and metrics["acc1"] > best["acc1"]
        if improved:
            best = {"epoch": epoch, **metrics}
        if rank() == 0 and (improved or epoch % config.SAVE_FREQ == 0 or epoch == epochs):
            state = {"epoch": epoch, "step": epoch * steps, "metrics": metrics, "best": best}
            state |= {"model": config.MODEL.NAME, "classes": train.classes, "config": plain(config)}
            links = ["last", "best"] if improved else ["last"]
            saved = save_checkpoint(run.checkpoints, training.model, training.optimizer, state, links)
            remove_superseded(run.checkpoints, config.SAVE_FREQ)
    if rank() == 0:
        plot_curves(run.directory / "metrics.jsonl", run.directory / "curves.png")
        run.info(f"best: acc1: {best['acc1']:.2f} after epoch {best['epoch']}")
        run.result(_result(config, metrics, str(saved)) | {"best": best})


def train_one_epoch(training: Training, epoch: int) -> None:
    """One pass over the training set (``epoch`` counts from 1), reported every REPORT_FREQ steps and at its end.

    Raises:
        RunError: on every rank, when a loss is not finite; it names the first such step.
    """
    config, network, optimizer, loader = training.config, training.network, training.optimizer, training.loader
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    steps, accum, per_step = len(loader), config.TRAIN.ACCUM_ITER, config.DATA.BATCH_SIZE
    updates = -(-steps // accum)
    loader.batch_sampler.set_epoch(epoch)
    network.train()
    window = _Window(training)
    for index, (pixels, labels, *skipped) in enumerate(window.timed(loader)):
        step = (epoch - 1) * steps + index + 1
        group = index // accum
        # The true number of this rank's samples in the update: the epoch's last group may be short.
        group_samples = min((group + 1) * accum * per_step, loader.batch_sampler.num_samples) - group * accum * per_step
        closes = (index + 1) % accum == 0 or index + 1 == steps
        lr = training.schedule((epoch - 1) * updates + group)
        seed_step(config.SEED, step)
        with contextlib.nullcontext() if closes or network is training.model else network.no_sync():
            with autocast(config):
                logits = network(normalize(pixels))
            losses = training.criterion(logits, labels)
            training.scaler.scale(losses.sum() / group_samples).backward()
        if closes:
            optimizer.set_lr(lr)
            training.scaler.step(optimizer)
            training.scaler.update()
            optimizer.clear_grad()
        window.add(sums(losses.detach(), logits.detach(), labels), skipped)
        if index + 1 == steps or (index + 1) % config.REPORT_FREQ == 0:
            window.report(epoch, step, lr)
        training.run.bar.update()


@paddle.no_grad()
def evaluate(config: CfgNode, model: nn.Layer, loader: paddle.io.DataLoader, num_samples: int) -> dict[str, Any]:
    """Returns ``loss``, ``acc1``, ``acc5`` (percent) and ``num_samples`` over all processes' loaders.

    Every sample counts once, whatever the number of processes and the batch size: sums are reduced, then divided.

    Args:
        model: not wrapped: ranks may take different numbers of batches.
        num_samples: the dataset's length, which the count must meet.

    Raises:
        RunError: on every rank, when the loss is not finite or samples are missing.
    """
    model.eval()
    normalize, criterion = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD), CrossEntropy()
    total = paddle.zeros([4], "float64")
    for pixels, labels in batches(loader):
        with autocast(config):
            logits = model(normalize(pixels))
        total += sums(criterion(logits, labels), logits, labels)
    loss, top1, top5, count = all_reduce_sum(total).tolist()
    if count != num_samples:
        raise RunError(f"evaluation counted {count:.0f} samples, the dataset has {num_samples}", shared=True)
    if not math.isfinite(loss):
        raise RunError(f"the evaluation's loss is {loss}: the weights give no finite logits", shared=True)
    return {"loss": loss / count, "acc1": 100 * top1 / count, "acc5": 100 * top5 / count, "num_samples": int(count)}


def evaluate_only(config: CfgNode, model: nn.Layer, val: ImageDataset, run: Run) -> None:
    """The run of ``-eval``: loads MODEL.PRETRAINED, evaluates, leaves result.json.

    Raises:
        InputError: no weights are given, or they don't fit.
    """
    if not config.MODEL.PRETRAINED:
        raise InputError("-eval needs -pretrained FILE: the weights to evaluate")
    run.info(f"{load_weights(model, config.MODEL.PRETRAINED)}; {precision(config)}")
    trained = classes_of(config.MODEL.PRETRAINED)
    if trained and val.classes and trained != val.classes:
        raise InputError(f"the weights were trained on the classes {_some(trained)}, the data has {_some(val.classes)}")
    loader = get_dataloader(config, val, "val", rank(), world_size())
    _tell_clamped(config, run)
    run.result(_result(config, evaluate(config, model, loader, len(val)), config.MODEL.PRETRAINED))


def sums(losses: paddle.Tensor, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
    """Returns [sum of losses, hits in the first 1, in the first 5 (or all, of fewer classes), samples], float64 [4]."""
    best = paddle.topk(logits.astype("float32"), min(5, logits.shape[1]))[1] == labels.unsqueeze(1)
    hits = best.astype("float64").sum(0)
    count = paddle.full([1], len(labels), "float64")
    return paddle.concat([losses.astype("float64").sum().reshape([1]), hits[:1], hits.sum().reshape([1]), count])


def precision(config: CfgNode) -> str:
    """Returns the forward pass's type: "float32", or with AMP "bfloat16", or "float16" where the GPU has no bfloat16.

    Raises:
        InputError: AMP without a GPU: Paddle's autocast has no effect on a CPU.
    """
    if not config.AMP:
        return "float32"
    if not num_gpus():
        raise InputError("-amp needs a GPU: Paddle's autocast has no effect on a CPU; leave it out")
    return "bfloat16" if paddle.amp.is_bfloat16_supported() else "float16"


def autocast(config: CfgNode) -> contextlib.AbstractContextManager:
    """The forward pass's context: with AMP, level O1 (softmax, norms and losses stay in float32)."""
    return paddle.amp.auto_cast(dtype=precision(config), level="O1") if config.AMP else contextlib.nullcontext()


class _Window:
    """The steps since the last report: their sums stay on the device until they are reported."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._restart()

    def _restart(self) -> None:
        self.rows: list[paddle.Tensor] = []
        self.skipped: list[paddle.Tensor] = []
        self.wait, self.start = 0.0, time.perf_counter()

    def timed(self, loader: Iterable) -> Iterator:
        """Yields the loader's batches and keeps the time spent waiting for them."""
        source = batches(loader)
        while True:
            asked = time.perf_counter()
            batch = next(source, None)
            self.wait += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def add(self, row: paddle.Tensor, skipped: list[paddle.Tensor]) -> None:
        self.rows.append(row)
        self.skipped += skipped

    def report(self, epoch: int, step: int, lr: float) -> None:
        rows = paddle.stack(self.rows)
        elapsed = time.perf_counter() - self.start
        skipped = self._list_skipped(epoch)
        own = paddle.concat([rows.sum(0), paddle.to_tensor([self.wait / elapsed, skipped], dtype="float64")])
        loss, top1, top5, count, wait, skipped = all_reduce_sum(own).tolist()
        if not math.isfinite(loss):
            self._raise_not_finite(rows[:, 0].numpy(), epoch, step)
        values = {"step": step, "epoch": epoch, "samples": int(count), "lr": lr, "loss": loss / count}
        values |= {"acc1": 100 * top1 / count, "acc5": 100 * top5 / count}
        values |= {"images_per_s": count / elapsed, "data_wait": wait / world_size()}
        self.training.run.report("train", **values)
        if skipped:
            self.training.run.info(f"{skipped:.0f} unreadable images were skipped; log_<rank>.txt lists each rank's")
        self._restart()

    def _raise_not_finite(self, losses: np.ndarray, epoch: int, step: int) -> None:
        bad = np.flatnonzero(~np.isfinite(losses))
        first = (step - len(losses) + 1 + int(bad[0]), rank(), float(losses[bad[0]])) if len(bad) else None
        at, where, value = min(found for found in all_gather(first) if found)
        raise RunError(
            f"the loss is {value} at step {at} (epoch {epoch}, rank {where});"
            " lower TRAIN.BASE_LR, or set TRAIN.GRAD_CLIP",
            shared=True,
        )

    def _list_skipped(self, epoch: int) -> int:
        """Lists the images that DATA.SKIP_BROKEN replaced in this rank's log and returns their number."""
        indices = [int(index) for tensor in self.skipped for index in tensor.tolist() if index >= 0]
        for index in indices:
            name = self.training.loader.dataset.dataset.name(index)
            self.training.run.local.warning(f"epoch {epoch}: unreadable, replaced by the next image: {name}")
        return len(indices)


def _prepare(config: CfgNode, network: nn.Layer, train: ImageDataset, run: Run) -> Training:
    """Builds what trains, loads MODEL.PRETRAINED, and tells the sizes and rates that result."""
    model = getattr(network, "_layers", network)
    if config.MODEL.PRETRAINED:
        run.info(str(load_weights(model, config.MODEL.PRETRAINED)))
    loader = get_dataloader(config, train, "train", rank(), world_size())
    steps, accum = len(loader), config.TRAIN.ACCUM_ITER
    if accum > steps:
        raise InputError(f"TRAIN.ACCUM_ITER is {accum}, but an epoch has {steps} steps: it would end without an update")
    global_batch, updates = config.DATA.BATCH_SIZE * world_size(), -(-steps // accum)
    schedule = build_schedule(config, updates, global_batch * accum)
    decayed, parameters = len(decayed_parameters(model)), model.parameters()
    rates = [f"{schedule(epoch * updates):.3g}" for epoch in (0, config.TRAIN.WARMUP_EPOCHS, config.TRAIN.NUM_EPOCHS)]
    count = sum(p.size for p in parameters)
    run.info(
        f"{config.MODEL.NAME}: {count:,} parameters, {precision(config)}; weight decay on {decayed} tensors,"
        f" off on {len(parameters) - decayed}"
    )
    run.info(
        f"{len(train):,} images, {steps} steps an epoch, the tail {'dropped' if config.DATA.DROP_LAST else 'padded'};"
        f" global batch {config.DATA.BATCH_SIZE} x {world_size()} = {global_batch}, accumulation {accum},"
        f" effective batch {global_batch * accum};"
        f" learning rate {rates[0]}, after warm-up {rates[1]}, at the end {rates[2]}"
    )
    scaler = paddle.amp.GradScaler(enable=precision(config) == "float16")
    if train.classes and len(train.classes) < config.MODEL.NUM_CLASSES:
        run.info(
            f"the model has {config.MODEL.NUM_CLASSES} outputs, the data {len(train.classes)} classes: NUM_CLASSES?"
        )
    _tell_clamped(config, run)
    return Training(
        config, model, network, build_criterion(config), build_optimizer(config, model), schedule, scaler, loader, run
    )


def _tell_clamped(config: CfgNode, run: Run) -> None:
    if config.MODEL.NUM_CLASSES < 5:
        run.info(f"acc5 counts the first {config.MODEL.NUM_CLASSES}: there are no five classes")


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' * (len(names) > 5)} ({len(names)})"


def _result(config: CfgNode, metrics: dict[str, Any], weights: str) -> dict[str, Any]:
    return {**metrics, "model": config.MODEL.NAME, "weights": weights, "config": plain(config)}
