"""The loop: ``fit`` trains and evaluates, ``train_one_epoch`` and ``evaluate`` are its two halves.

One process is N processes with N = 1. Nothing leaves the device between reports: losses and hits are kept there as sums
and counts, reduced over the processes once, and divided once.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn
from yacs.config import CfgNode

from datasets import ImageDataset, get_dataloader
from errors import InputError, RunError
from launch import signals
from launch.progress import EVALUATING, beat
from loading.transforms import Normalize
from loading.workers import Loader
from models.base import ImageModel
from models.inference import inference_engine
from models.layers.batch_norm import hold_frozen_statistics
from options import plain
from training.checkpoint import Progress, Saver, classes_of, own_statistics
from training.checkpoint.resume import resume, settle
from training.losses import CrossEntropy
from training.optim import clip_gradients
from training.parallel import reduce_gradients, without_sync
from training.requests import Requests, Stopped
from training.run import Run, plot_curves
from training.setup import Training, load_pretrained, precision, precision_told, prepare
from training.window import Window
from utils import all_gather, all_reduce_sum, rank, reduce_dict, seed_step, world_size


def fit(config: CfgNode, network: nn.Layer, train: ImageDataset, val: ImageDataset, run: Run) -> None:
    """Trains ``network`` (what ``parallel.wrap_model`` returned) and leaves checkpoints, metrics and a result.

    Raises:
        InputError: batch, accumulation, weights or checkpoint don't fit.
        RunError: on every rank, when the loss is not finite.
    """
    training = prepare(config, network, train, run)
    progress, chosen = resume(training)
    val_loader = get_dataloader(config, val, "val", rank(), world_size())
    signals.begin()
    run.begin()  # all that can be checked was checked: from here on the run's folder changes
    if config.MODEL.RESUME:
        settle(training, progress, chosen)
    saver = Saver(config, run, training.evaluated, training.optimizer, training.scaler, train)
    requests = Requests(config.SAVE_MINUTES)
    heed = functools.partial(_heed, progress, saver, requests)
    _tell_clamped(config, run)
    steps, epochs = len(training.loader), config.TRAIN.NUM_EPOCHS
    # Of this batch size: it may have been another before.
    progress.step = steps * progress.epoch + training.loader.batch_sampler.first(progress.samples)
    saver.begin(progress)
    run.start_bar(steps * epochs, progress.step)
    metrics = {}
    if progress.epoch == epochs:  # all is done but the result
        metrics = _evaluated(training, val_loader, len(val), heed)
        _note_best(config, metrics, progress)  # if there is none: it may have been lost
    for epoch in range(progress.epoch + 1, epochs + 1):
        train_one_epoch(training, progress, heed)
        heed()
        metrics = {}
        if epoch % config.VALIDATE_FREQ == 0 or epoch == epochs:
            metrics = _evaluated(training, val_loader, len(val), heed)
            for split, found in metrics.items():
                run.report(split, step=epoch * steps, epoch=epoch, **_shown(found))
        progress.epoch, progress.samples = epoch, 0
        improved = _note_best(config, metrics, progress)
        kept = config.SAVE_FREQ and epoch % config.SAVE_FREQ == 0
        if improved or kept or epoch == epochs or requests.save or saver.due(progress):
            saver.save(progress, improved=improved)
            requests.saved()
    saver.wait(last=True)
    if rank() == 0:
        plot_curves(run.directory / "metrics.jsonl", run.directory / "curves.png")
        best = progress.best
        for split, record in best.items():
            run.info(f"best {split}: acc1: {record['acc1']:.2f} after epoch {record['epoch']}")
        result = _result(config, metrics["val"], str(saver.path), val.classes) | {"best": best["val"]}
        if training.ema:
            found = _result(config, metrics["ema"], str(saver.path / "ema.safetensors"), val.classes)
            result["ema"] = found | {"best": best["ema"]}
        run.result(result)


def _evaluated(
    training: Training, loader: Loader, num_samples: int, heed: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """The metrics of the model and of the averaged one, by split."""
    models = training.evaluated.items()
    return {split: evaluate(training.config, model, loader, num_samples, heed) for split, model in models}


def _note_best(config: CfgNode, metrics: dict[str, dict[str, Any]], progress: Progress) -> tuple[str, ...]:
    """Keeps the best of BEST_METRIC in ``progress``, which has to be at an epoch's end; returns the splits that are."""
    key = config.BEST_METRIC
    sign = -1 if key == "loss" else 1
    improved = []
    for split, found in metrics.items():
        if split not in progress.best or sign * found[key] > sign * progress.best[split][key]:
            progress.best[split] = {"epoch": progress.epoch, "checkpoint": progress.name, **_shown(found)}
            improved.append(split)
    return tuple(improved)


def _shown(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if key != "class_acc"}


def _heed(
    progress: Progress,
    saver: Saver,
    requests: Requests,
    window: Window | None = None,
    statistics: dict[str, paddle.Tensor] | None = None,
    closed: bool = False,
) -> None:
    """Saves where it is asked for, or due; every rank calls it, after each step and in evaluations.

    Args:
        window, statistics: within an epoch: what ``Saver.save`` takes besides, at the last update.
        closed: whether this step made an update: only there a run saves and goes on.

    Raises:
        Stopped: on every rank, when the run was asked to stop; it is saved.
        RunError: on every rank, when that failed, or when the loss isn't finite.
    """
    number = requests.poll(saver.failed)
    if requests.failed:
        requests.failed = False
        saver.wait()
    if number is None and not (closed and (requests.save or saver.due(progress))):
        return
    progress.window = all_gather(window.state()) if window else []
    if window and not all(math.isfinite(own["sums"][0]) for own in progress.window):
        window.raise_not_finite()
    saver.save(progress, statistics)
    progress.window = []
    requests.saved()
    if number is not None:
        saver.wait(last=True)
        where = f"-resume=auto -output={saver.run.directory} goes on from there"
        raise Stopped(number, f"after step {progress.step}, saved in {saver.path}; {where}")


def train_one_epoch(training: Training, progress: Progress, heed: Callable[..., None] = lambda *_: None) -> None:
    """The rest of the epoch that ``progress`` is in, reported every REPORT_FREQ steps and at its end.

    Args:
        heed: is called after each step but the last with the window, this rank's statistics and whether the step made
            an update; the state that it may save is that of the last update.

    Raises:
        RunError: on every rank, when a loss is not finite; it names the first such step.
    """
    config, loader, epoch = training.config, training.loader, progress.epoch + 1
    sampler, steps, accum = loader.batch_sampler, len(loader), config.TRAIN.ACCUM_ITER
    updates = -(-steps // accum)
    sampler.set_epoch(epoch, progress.samples)
    first = sampler.first()
    if first == steps:  # only its evaluation is to come
        progress.window = []
        return
    training.network.train()
    hold_frozen_statistics(training.model)
    window = Window(training, epoch, progress)
    statistics = {
        f"{split}/{name}": t for split, model in training.evaluated.items() for name, t in own_statistics(model).items()
    }
    held = _held(statistics, accum)
    for index, batch in enumerate(window.timed(loader, (epoch - 1) * steps + first + 1), first):
        step = (epoch - 1) * steps + index + 1
        group = index // accum
        # This rank's samples in the update: an epoch's last group may be short, and the first after a resume.
        begin, end = max(group * accum, first), min((group + 1) * accum, steps)
        group_samples = (sampler.taken(end) - sampler.taken(begin)) // world_size()
        closes = index + 1 == end
        update = (epoch - 1) * updates + group
        columns = dict(zip(loader.columns, batch, strict=True))
        seed_step(config.SEED, step)
        images, targets = training.transform(columns, epoch)
        window.add(step, _accumulate(training, images, targets, group_samples, closes), columns.get("skipped"))
        if closes:
            window.norms.append(_update(training, update))
        if index + 1 == steps or (index + 1) % config.REPORT_FREQ == 0:
            window.report(training.schedule(update))
        if closes:
            progress.step, progress.samples = step, sampler.taken(end)
            window.mark()
            held = _held(statistics, accum)
        training.run.bar.update()
        if index + 1 < steps:
            heed(window, held, closes)
    for model in training.evaluated.values():
        _average_statistics(model)


def _accumulate(
    training: Training, images: paddle.Tensor, targets: paddle.Tensor, group_samples: int, closes: bool
) -> paddle.Tensor:
    """Adds a batch's gradients to those of its update, of ``group_samples`` on this rank; returns the batch's sums.

    Args:
        closes: the update follows: now the ranks bring their gradients together.
    """
    network = training.network
    with contextlib.nullcontext() if closes else without_sync(network, training.optimizer):
        with autocast(training.config):
            outputs = network(images)
            losses = training.criterion(images, outputs, targets)  # here for the teacher: losses are float32
        training.scaler.scale(losses.sum() / group_samples).backward()
    logits = outputs[0] if isinstance(outputs, tuple | list) else outputs
    return sums(losses.detach(), logits.detach(), targets)


def _held(statistics: dict[str, paddle.Tensor], accum: int) -> dict[str, paddle.Tensor]:
    """The statistics as they are at an update: steps between two change them."""
    return {key: t.clone() for key, t in statistics.items()} if accum > 1 else statistics


def _update(training: Training, update: int) -> paddle.Tensor:
    """Makes one update of the gradients that were accumulated; returns their global norm, before clipping."""
    reduce_gradients(training.optimizer)
    training.scaler.unscale(training.trained)
    norm = clip_gradients(training.config, training.model, training.trained)
    training.optimizer.set_lr(training.schedule(update))
    training.scaler.step(training.optimizer, norm)
    training.optimizer.clear_grad(False)  # zeros would cost each parameter a kernel, and an addition later
    if training.ema:
        training.ema.update(training.model, update)
    return norm


def _average_statistics(model: nn.Layer) -> None:
    """Gives every rank the mean of the ranks' batch norm statistics, as timm's ``--dist-bn reduce`` does: else each
    would evaluate, and the first would save, what it saw alone.
    """
    own = own_statistics(model)
    if own and world_size() > 1:
        for name, mean in reduce_dict(own).items():
            own[name].set_value(mean)


@paddle.no_grad()
def evaluate(
    config: CfgNode,
    model: nn.Layer,
    loader: Loader,
    num_samples: int,
    heed: Callable[[], None] = lambda: None,
    predict: Callable[[paddle.Tensor], paddle.Tensor] | None = None,
) -> dict[str, Any]:
    """Returns ``loss``, ``acc1``, ``acc5``, ``mean_class_acc``, ``class_acc`` (percent) and ``num_samples``.

    Every sample of all processes' loaders counts once, whatever the number of processes and the batch size: sums are
    reduced, then divided. ``class_acc`` is a list by class, with None for one without a sample; ``mean_class_acc`` the
    mean over the others.

    Args:
        model: not wrapped: ranks may take different numbers of batches.
        num_samples: the dataset's length, which the count must meet.
        heed: is called after each batch, equally often on every rank, and may raise.
        predict: what gives the logits of normalised images instead of ``model``.

    Raises:
        RunError: on every rank, when the loss is not finite or samples are missing.
    """
    model.eval()
    forward = predict or model
    normalize, criterion = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD), CrossEntropy()
    total = paddle.zeros([4], "float64")
    per_class = paddle.zeros([config.MODEL.NUM_CLASSES, 2], "float64")  # hits, samples
    common = num_samples // world_size() // loader.batch_sampler.batch_size  # batches that every rank has
    for index, (pixels, labels) in enumerate(loader):
        beat(EVALUATING)
        with autocast(config, evaluation=True):
            logits = forward(normalize(pixels))
        total += sums(criterion(logits, labels), logits, labels)
        hits = (logits.argmax(1) == labels).astype("float64")
        per_class = paddle.index_add(per_class, labels, 0, paddle.stack([hits, paddle.ones_like(hits)], 1))
        if index < common:
            heed()
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


def evaluate_only(config: CfgNode, model: ImageModel, val: ImageDataset, run: Run) -> None:
    """The run of ``-eval``: loads MODEL.PRETRAINED, evaluates, leaves result.json.

    Raises:
        InputError: no weights are given, or they don't fit.
    """
    if not config.MODEL.PRETRAINED:
        raise InputError("-eval needs -pretrained FILE: the weights to evaluate")
    load_pretrained(config, model, run, strict=True)
    if config.EVAL_ENGINE == "inference":
        predict = inference_engine(config, model, run.info)
    else:
        predict = None
        run.info(precision_told(config))
    trained = classes_of(config.MODEL.PRETRAINED)
    if trained and val.classes and trained != val.classes:
        raise InputError(f"the weights were trained on the classes {_some(trained)}, the data has {_some(val.classes)}")
    loader = get_dataloader(config, val, "val", rank(), world_size())
    signals.begin()
    run.begin()
    _tell_clamped(config, run)
    requests = Requests(None)

    def heed() -> None:
        if (number := requests.poll()) is not None:
            raise Stopped(number, "in the evaluation")

    metrics = evaluate(config, model, loader, len(val), heed, predict)
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


def autocast(config: CfgNode, evaluation: bool = False) -> contextlib.AbstractContextManager:
    """The forward pass's context: level O1 (softmax, norms and losses stay in float32), or none for float32."""
    dtype: Any = precision(config, evaluation)
    return contextlib.nullcontext() if dtype == "float32" else paddle.amp.auto_cast(dtype=dtype, level="O1")


def _tell_clamped(config: CfgNode, run: Run) -> None:
    if config.MODEL.NUM_CLASSES < 5:
        run.info(f"acc5 counts the first {config.MODEL.NUM_CLASSES}: there are no five classes")


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' * (len(names) > 5)} ({len(names)})"


def _result(config: CfgNode, metrics: dict[str, Any], weights: str, classes: list[str]) -> dict[str, Any]:
    names = classes or map(str, range(len(metrics["class_acc"])))
    result = {**metrics, "class_acc": dict(zip(names, metrics["class_acc"], strict=False))}
    return {**result, "model": config.MODEL.NAME, "weights": weights, "config": plain(config)}
