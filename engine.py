"""The loop: ``fit`` trains and evaluates, ``train_one_epoch`` and ``evaluate`` are its two halves.

One process is N processes with N = 1. Nothing leaves the device between reports: losses and hits are kept there as sums
and counts, reduced over the processes once, and divided once.
"""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle import nn
from yacs.config import CfgNode

from checkpoint import classes_of, load_checkpoint, remove_superseded, save_checkpoint
from datasets import ImageDataset, batches, get_dataloader
from errors import InputError, RunError
from losses import CrossEntropy
from models.layers.batch_norm import hold_frozen_statistics
from optim import clip_gradients
from options import plain
from prepare import Training, load_pretrained, precision, precision_told, prepare
from records import Run, plot_curves
from transforms import Normalize
from utils import all_gather, all_reduce_sum, rank, reduce_dict, seed_step, world_size


def fit(config: CfgNode, network: nn.Layer, train: ImageDataset, val: ImageDataset, run: Run) -> None:
    """Trains ``network`` (a model, or one in ``paddle.DataParallel``) and leaves checkpoints, metrics and a result.

    Raises:
        InputError: batch, accumulation, weights or checkpoint don't fit.
        RunError: on every rank, when the loss is not finite.
    """
    training = prepare(config, network, train, run)
    start, best = _resume(training)
    val_loader = get_dataloader(config, val, "val", rank(), world_size())
    _tell_clamped(config, run)
    steps, epochs = len(training.loader), config.TRAIN.NUM_EPOCHS
    run.start_bar(steps * epochs, steps * start)
    for epoch in range(start + 1, epochs + 1):
        train_one_epoch(training, epoch)
        validated = epoch % config.VALIDATE_FREQ == 0 or epoch == epochs
        metrics: dict[str, dict[str, Any]] = {}
        improved = []
        for split, model in training.evaluated.items() if validated else ():
            metrics[split] = evaluate(config, model, val_loader, len(val))
            shown = {key: value for key, value in metrics[split].items() if key != "class_acc"}
            run.report(split, step=epoch * steps, epoch=epoch, **shown)
            if split not in best or shown["acc1"] > best[split]["acc1"]:
                best[split] = {"epoch": epoch, **shown}
                improved.append(split)
        if rank() == 0 and (improved or epoch % config.SAVE_FREQ == 0 or epoch == epochs):
            state = {"epoch": epoch, "step": epoch * steps, "best": best, "scaler": training.scaler.state_dict()}
            state |= {"model": config.MODEL.NAME, "classes": train.classes, "config": plain(config)}
            parts = (training.model, training.optimizer, training.averaged)
            saved = save_checkpoint(run.checkpoints, *parts, state, improved)
            remove_superseded(run.checkpoints, config.SAVE_FREQ)
    if rank() == 0:
        plot_curves(run.directory / "metrics.jsonl", run.directory / "curves.png")
        for split, record in best.items():
            run.info(f"best {split}: acc1: {record['acc1']:.2f} after epoch {record['epoch']}")
        result = _result(config, metrics["val"], str(saved), val.classes) | {"best": best["val"]}
        if training.ema:
            found = _result(config, metrics["ema"], str(saved / "ema.safetensors"), val.classes)
            result["ema"] = found | {"best": best["ema"]}
        run.result(result)


def _resume(training: Training) -> tuple[int, dict[str, dict[str, Any]]]:
    """Returns (the last epoch done, the best of each split so far), of MODEL.RESUME's checkpoint where there is one."""
    config, best = training.config, {}
    start = config.TRAIN.LAST_EPOCH
    if config.MODEL.RESUME:
        state = load_checkpoint(config.MODEL.RESUME, training.model, training.optimizer, training.averaged)
        training.scaler.load_state_dict(state["scaler"])
        if start not in (0, state["epoch"]):
            raise InputError(
                f"TRAIN.LAST_EPOCH is {start}, the checkpoint's last epoch is {state['epoch']}; leave it out"
            )
        start, best = state["epoch"], state["best"]
        training.run.info(f"resumed after epoch {start} from {config.MODEL.RESUME}")
    if start >= config.TRAIN.NUM_EPOCHS:
        raise InputError(f"epoch {start} is done already and TRAIN.NUM_EPOCHS is {config.TRAIN.NUM_EPOCHS}; raise it")
    return start, best


def train_one_epoch(training: Training, epoch: int) -> None:
    """One pass over the training set (``epoch`` counts from 1), reported every REPORT_FREQ steps and at its end.

    Raises:
        RunError: on every rank, when a loss is not finite; it names the first such step.
    """
    config, network, loader = training.config, training.network, training.loader
    steps, accum, per_step = len(loader), config.TRAIN.ACCUM_ITER, config.DATA.BATCH_SIZE
    updates = -(-steps // accum)
    loader.batch_sampler.set_epoch(epoch)
    network.train()
    hold_frozen_statistics(training.model)
    window = _Window(training)
    for index, (pixels, labels, *extra) in enumerate(window.timed(loader)):
        step = (epoch - 1) * steps + index + 1
        group = index // accum
        # The true number of this rank's samples in the update: the epoch's last group may be short.
        group_samples = min((group + 1) * accum * per_step, loader.batch_sampler.num_samples) - group * accum * per_step
        closes = (index + 1) % accum == 0 or index + 1 == steps
        update = (epoch - 1) * updates + group
        erased = extra.pop(0) if config.TRAIN.RANDOM_ERASE_PROB else None
        seed_step(config.SEED, step)
        images, targets = training.transform(pixels, labels, erased, epoch, index + 1)
        with contextlib.nullcontext() if closes or network is training.model else network.no_sync():
            with autocast(config):
                outputs = network(images)
                losses = training.criterion(images, outputs, targets)  # here for the teacher: losses are float32
            training.scaler.scale(losses.sum() / group_samples).backward()
        if closes:
            window.norms.append(_update(training, update))
        logits = outputs[0] if isinstance(outputs, tuple | list) else outputs
        window.add(sums(losses.detach(), logits.detach(), targets), extra)
        if index + 1 == steps or (index + 1) % config.REPORT_FREQ == 0:
            window.report(epoch, step, training.schedule(update))
        training.run.bar.update()
    for model in filter(None, (training.model, training.averaged)):
        _average_statistics(model)


def _update(training: Training, update: int) -> paddle.Tensor:
    """Makes one update of the gradients that were accumulated; returns their global norm, before clipping."""
    training.scaler.unscale(training.model.parameters())
    norm = clip_gradients(training.config, training.model)
    training.optimizer.set_lr(training.schedule(update))
    training.scaler.step(training.optimizer, norm)
    training.optimizer.clear_grad()
    if training.ema:
        training.ema.update(training.model, update)
    return norm


def _average_statistics(model: nn.Layer) -> None:
    """Gives every rank the mean of the ranks' batch norm statistics, as timm's ``--dist-bn reduce`` does: else each
    would evaluate, and the first would save, what it saw alone.
    """
    parameters = {name for name, _ in model.named_parameters()}
    own = {name: t for name, t in model.state_dict().items() if name not in parameters and t.is_floating_point()}
    if own and world_size() > 1:
        for name, mean in reduce_dict(own).items():
            own[name].set_value(mean)


@paddle.no_grad()
def evaluate(config: CfgNode, model: nn.Layer, loader: paddle.io.DataLoader, num_samples: int) -> dict[str, Any]:
    """Returns ``loss``, ``acc1``, ``acc5``, ``mean_class_acc``, ``class_acc`` (percent) and ``num_samples``.

    Every sample of all processes' loaders counts once, whatever the number of processes and the batch size: sums are
    reduced, then divided. ``class_acc`` is a list by class, with None for one without a sample; ``mean_class_acc`` the
    mean over the others.

    Args:
        model: not wrapped: ranks may take different numbers of batches.
        num_samples: the dataset's length, which the count must meet.

    Raises:
        RunError: on every rank, when the loss is not finite or samples are missing.
    """
    model.eval()
    normalize, criterion = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD), CrossEntropy()
    total = paddle.zeros([4], "float64")
    per_class = paddle.zeros([config.MODEL.NUM_CLASSES, 2], "float64")  # hits, samples
    for pixels, labels in batches(loader):
        with autocast(config):
            logits = model(normalize(pixels))
        total += sums(criterion(logits, labels), logits, labels)
        hits = (logits.argmax(1) == labels).astype("float64")
        per_class = paddle.index_add(per_class, labels, 0, paddle.stack([hits, paddle.ones_like(hits)], 1))
    reduced = all_reduce_sum(paddle.concat([total, per_class.flatten()])).numpy()
    (loss, top1, top5, count), (hits, counts) = reduced[:4].tolist(), reduced[4:].reshape(-1, 2).T
    if count != num_samples:
        raise RunError(f"evaluation counted {count:.0f} samples, the dataset has {num_samples}", shared=True)
    if not math.isfinite(loss):
        raise RunError(f"the evaluation's loss is {loss}: the weights give no finite logits", shared=True)
    metrics = {"loss": loss / count, "acc1": 100 * top1 / count, "acc5": 100 * top5 / count}
    class_acc = [100 * float(h / n) if n else None for h, n in zip(hits, counts, strict=True)]
    metrics["mean_class_acc"] = float(np.mean([accuracy for accuracy in class_acc if accuracy is not None]))
    return metrics | {"num_samples": int(count), "class_acc": class_acc}


def evaluate_only(config: CfgNode, model: nn.Layer, val: ImageDataset, run: Run) -> None:
    """The run of ``-eval``: loads MODEL.PRETRAINED, evaluates, leaves result.json.

    Raises:
        InputError: no weights are given, or they don't fit.
    """
    if not config.MODEL.PRETRAINED:
        raise InputError("-eval needs -pretrained FILE: the weights to evaluate")
    load_pretrained(config, model, run, strict=True)
    run.info(precision_told(config))
    trained = classes_of(config.MODEL.PRETRAINED)
    if trained and val.classes and trained != val.classes:
        raise InputError(f"the weights were trained on the classes {_some(trained)}, the data has {_some(val.classes)}")
    loader = get_dataloader(config, val, "val", rank(), world_size())
    _tell_clamped(config, run)
    metrics = evaluate(config, model, loader, len(val))
    run.result(_result(config, metrics, config.MODEL.PRETRAINED, val.classes))


def sums(losses: paddle.Tensor, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
    """Returns [sum of losses, hits in the first 1, in the first 5 (or all, of fewer classes), samples], float64 [4].

    Args:
        targets: labels [B], or distributions [B, K], whose largest share counts as the label.
    """
    labels = targets if targets.ndim == 1 else targets.argmax(1)
    best = paddle.topk(logits.astype("float32"), min(5, logits.shape[1]))[1] == labels.unsqueeze(1)
    hits = best.astype("float64").sum(0)
    count = paddle.full([1], len(labels), "float64")
    return paddle.concat([losses.astype("float64").sum().reshape([1]), hits[:1], hits.sum().reshape([1]), count])


def autocast(config: CfgNode) -> contextlib.AbstractContextManager:
    """The forward pass's context: level O1 (softmax, norms and losses stay in float32), or none for float32."""
    dtype = precision(config)
    return contextlib.nullcontext() if dtype == "float32" else paddle.amp.auto_cast(dtype=dtype, level="O1")


class _Window:
    """The steps since the last report: their sums stay on the device until they are reported."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._restart()

    def _restart(self) -> None:
        self.rows: list[paddle.Tensor] = []
        self.norms: list[paddle.Tensor] = []  # of the gradients, per update; the same on every rank
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
        values |= self._gradients()
        values |= {"images_per_s": count / elapsed, "data_wait": wait / world_size()}
        self.training.run.report("train", **values)
        if skipped:
            self.training.run.info(f"{skipped:.0f} unreadable images were skipped; log_<rank>.txt lists each rank's")
        self._restart()

    def _gradients(self) -> dict[str, float]:
        """The mean norm of the updates' gradients (of those that float16 held), and in float16 the loss scale."""
        norms = paddle.stack(self.norms).numpy() if self.norms else np.zeros(0)
        finite = norms[np.isfinite(norms)]
        scaler = self.training.scaler
        values = {"grad_norm": float(finite.mean())} if len(finite) else {}
        if scaler.enabled:
            values |= {"loss_scale": scaler.loss_scale, "skipped_updates": len(norms) - len(finite)}
        return values

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


def _tell_clamped(config: CfgNode, run: Run) -> None:
    if config.MODEL.NUM_CLASSES < 5:
        run.info(f"acc5 counts the first {config.MODEL.NUM_CLASSES}: there are no five classes")


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' * (len(names) > 5)} ({len(names)})"


def _result(config: CfgNode, metrics: dict[str, Any], weights: str, classes: list[str]) -> dict[str, Any]:
    names = classes or map(str, range(len(metrics["class_acc"])))
    result = {**metrics, "class_acc": dict(zip(names, metrics["class_acc"], strict=False))}
    return {**result, "model": config.MODEL.NAME, "weights": weights, "config": plain(config)}
