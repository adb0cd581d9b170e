"""The loop: ``fit`` trains and evaluates, ``train_one_epoch`` and ``evaluate`` are its two halves.

What a batch is, its loss, and what an evaluation computes, is the task's (``task.Task``). One
process is N processes with N = 1. Nothing leaves the device between reports: sums are kept there,
reduced over the processes once, and divided once.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle import nn

import ops
from datasets import ImageDataset, get_dataloader
from errors import InputError, RunError
from launch import signals
from launch.progress import EVALUATING, beat
from loading.workers import Loader
from models.base import ImageModel
from models.layers.batch_norm import hold_frozen_statistics
from models.paddle_inference import inference_engine
from ops.device import trim_buffers
from settings.options import Configuration, plain
from settings.registry import tasks
from training import predictions
from training.among import among
from training.checkpoint import Progress, Saver, check_task, own_statistics
from training.checkpoint.folder import BEST, BEST_EMA, check_shared
from training.checkpoint.resume import resume, settle
from training.curves import plot_curves
from training.optim import clip_gradients
from training.parallel import (
    ShardedOptimizer,
    broadcast_weights,
    gathered,
    reduce_gradients,
    share_out,
    without_sync,
)
from training.requests import Keeper, Requests, Stopped
from training.run import Run
from training.setup import Training, load_pretrained, precision, precision_text, prepare
from training.task import Batch, Metrics, Task, numbers
from training.window import Window
from utils import num_gpus, rank, reduce_dict, seed_step, world_size


def fit(
    config: Configuration,
    network: nn.Layer,
    train: ImageDataset,
    val: ImageDataset,
    run: Run,
    kind: type[Task] | None = None,
) -> None:
    """Trains ``network`` (what ``parallel.wrap_model`` returned) and leaves checkpoints, metrics
    and a result.

    Args:
        kind: of training; None: what TASK names.

    Raises:
        InputError: batch, accumulation, weights or checkpoint don't fit.
        RunError: on every rank, when the loss is not finite.
    """
    task: Task = (kind or tasks.choose(config))(config, val.classes)
    training = prepare(task, network, train, run)
    (progress, chosen), ending = resume(training), training.ending
    # Everything is loaded now. A checkpoint within an epoch has statistics of batch norm for each
    # rank: they stay.
    for model in training.evaluated_models.values():
        broadcast_weights(model, without=own_statistics(model) if chosen else ())
    share_out(training.optimizer)
    val_loader = get_dataloader(config, val, "val", rank=rank(), ranks=world_size())
    if isinstance(training.optimizer, ShardedOptimizer):
        check_shared(run.directory)
    signals.begin()
    run.begin()  # all that can be checked was checked: from here on the run's folder changes
    if config.MODEL.RESUME:
        settle(training, progress, chosen)
    progress.count_steps(training.loader)
    saver = Saver(
        config, run, training.evaluated_models, training.optimizer, training.scaler, train
    )
    saver.begin(progress)
    keeper = Keeper(progress, saver, Requests(config.SAVE_MINUTES))
    if task.note:
        run.info(task.note)
    run.start_bar(config.TRAIN.NUM_EPOCHS * len(training.loader), progress.step)
    ending.begin(progress, run, _evaluation_cost(training, len(val)))

    def after_step(window: Window, held: dict[str, paddle.Tensor], updated: bool) -> None:
        ending.after_step(updated)
        keeper.after_step(window, held, updated)

    metrics: dict[str, Metrics] = {}
    if ending.over:  # all is done but the result
        metrics = _evaluate_models(training, val_loader, keeper)
        _keep_best(task, progress, metrics)  # if there is none: it may have been lost
    while not ending.over:
        epoch = progress.epoch + 1
        train_one_epoch(training, progress, after_step)
        keeper.after_epoch()
        metrics = {}
        if epoch % config.VALIDATE_FREQ == 0 or epoch == ending.epochs:
            metrics = _evaluate_models(training, val_loader, keeper)
            for split, found in metrics.items():
                run.report(
                    split,
                    task.line("val", found),
                    step=progress.step,
                    epoch=epoch,
                    **numbers(found),
                )
        progress.end_epoch(epoch)
        improved = _keep_best(task, progress, metrics)
        ending.after_epoch({split: task.score(found) for split, found in metrics.items()})
        nth = config.SAVE_FREQ and epoch % config.SAVE_FREQ == 0
        described = {split: task.description_of(found) for split, found in metrics.items()}
        keeper.end_epoch(improved, nth or ending.over, described)
    keeper.conclude()
    _conclude(training, val, progress, metrics, saver)


def _evaluation_cost(training: Training, images: int) -> float:
    """What an evaluation has to do, over an update: images that pass through the model and its
    average.
    """
    batch = training.config.DATA.BATCH_SIZE * world_size() * training.config.TRAIN.ACCUM_ITER
    return len(training.evaluated_models) * images / batch


def _evaluate_models(training: Training, loader: Loader, keeper: Keeper) -> dict[str, Metrics]:
    """The metrics of the model and of the averaged one, by split."""
    found: dict[str, Metrics] = {}
    with training.ending.evaluating(), gathered(training.optimizer):
        for split, model in training.evaluated_models.items():
            found[split] = evaluate(training.task, model, loader, keeper.in_evaluation)
            if kept := training.task.predictions:
                training.predictions[split] = kept
    return found


def _keep_best(task: Task, progress: Progress, metrics: dict[str, Metrics]) -> tuple[str, ...]:
    """Keeps the best evaluations; returns the splits whose best it is."""
    return progress.keep_best(
        {split: numbers(found) for split, found in metrics.items()}, task.score
    )


def _conclude(
    training: Training,
    val: ImageDataset,
    progress: Progress,
    metrics: dict[str, Metrics],
    saver: Saver,
) -> None:
    """Leaves the last predictions, draws the curves, tells the best evaluations, and writes the
    result.
    """
    run = training.run
    task = training.task
    predictions.leave(run, val, training.predictions)
    if rank():
        return
    with run.logging_failure("curves.png"):
        plot_curves(run.directory / "metrics.jsonl", run.directory / "curves.png", task.curves)
    best_lines = []
    for split, record in progress.best.items():
        file, title = (BEST, "best") if split == "val" else (BEST_EMA, "best average")
        line = f"{task.line('best', record)} after epoch {record['epoch']}, in checkpoints/{file}"
        run.info(f"best {split}: {line}")
        best_lines.append(f"{title}: {line}")
    weights = {"val": saver.path, "ema": saver.path / "ema.safetensors"}
    results = {
        split: _result(task, found, str(weights[split])) | {"best": progress.best[split]}
        for split, found in metrics.items()
    }
    result = results.pop("val")
    if reason := training.ending.reason:
        result["ended"] = reason
        run.info(reason)
    run.result(result | results, "; ".join([task.line("result", result), *best_lines]))


def train_one_epoch(
    training: Training,
    progress: Progress,
    after_step: Callable[[Window, dict, bool], None] = lambda *_: None,
) -> None:
    """Trains the rest of the epoch that ``progress`` is in, reported every REPORT_FREQ steps and at
    its end.

    Args:
        after_step: is called after each step but the last with the window, this rank's statistics
            and whether the step made an update. The state that it may save is that of the last
            update.

    Raises:
        RunError: on every rank, when a loss is not finite; it names the first such step.
    """
    config = training.config
    loader = training.loader
    epoch = progress.epoch + 1
    sampler = loader.batch_sampler
    steps = len(loader)
    accum = config.TRAIN.ACCUM_ITER
    ending = training.ending
    updates = -(-steps // accum)
    sampler.set_epoch(epoch, progress.samples)
    first = sampler.first()
    window = Window(training, epoch, progress.step, progress.take_window())
    if first >= ending.steps_of(epoch):  # only its evaluation is to come
        return
    training.network.train()
    hold_frozen_statistics(training.model)
    statistics = {
        f"{split}/{name}": t
        for split, model in training.evaluated_models.items()
        for name, t in own_statistics(model).items()
    }
    held = _copy_statistics(statistics, accum)
    for index, batch in enumerate(
        window.timed_batches(loader, (epoch - 1) * steps + first + 1), first
    ):
        step = (epoch - 1) * steps + index + 1
        last = ending.steps_of(epoch)  # a budget may be fixed within the epoch
        group = index // accum
        # This rank's samples in the update: an epoch's last group may be short, and the first after
        # a resume.
        begin, end = max(group * accum, first), min((group + 1) * accum, last)
        group_samples = (sampler.samples_taken(end) - sampler.samples_taken(begin)) // world_size()
        closes = index + 1 == end
        update = (epoch - 1) * updates + group
        seed_step(config.SEED, step)
        values = _accumulate(training, batch, epoch, group_samples, closes)
        norm = _update(training, update) if closes else None
        window.add(step, values, norm, batch.get("skipped"))
        if index + 1 == last or (index + 1) % config.REPORT_FREQ == 0:
            window.report(training.schedule(update))
        if closes:
            progress.record_update(step, sampler.samples_taken(end))
            window.mark()
            held = _copy_statistics(statistics, accum)
        training.run.bar.update()
        if index + 1 < last:
            after_step(window, held, closes)
        elif last < steps:
            break
    for model in training.evaluated_models.values():
        _average_statistics(model)


def _accumulate(
    training: Training, batch: Batch, epoch: int, group_samples: int, closes: bool
) -> Batch:
    """Adds a batch's gradients to those of its update, of ``group_samples`` on this rank; returns
    what the task's ``step`` gave.

    Args:
        closes: the update follows: now the ranks bring their gradients together.
    """
    network = training.network
    with contextlib.nullcontext() if closes else without_sync(network, training.optimizer):
        with autocast(training.config):
            values = training.task.step(network, batch, epoch)
        training.scaler.scale(values["loss"].sum() / group_samples).backward()
    return {name: value.detach() for name, value in values.items()}


def _copy_statistics(statistics: dict[str, paddle.Tensor], accum: int) -> dict[str, paddle.Tensor]:
    """The statistics as they are at an update: steps between two change them."""
    return {key: t.clone() for key, t in statistics.items()} if accum > 1 else statistics


def _update(training: Training, update: int) -> paddle.Tensor:
    """Makes one update of the gradients that were accumulated; returns their global norm, before
    clipping.
    """
    reduce_gradients(training.network, training.optimizer)
    training.scaler.unscale(training.trained_parameters)
    norm = clip_gradients(training.config, training.model, training.trained_parameters)
    training.optimizer.set_lr(training.schedule(update))
    training.scaler.step(training.optimizer, norm)
    # zeros would cost each parameter a kernel, and an addition later
    training.optimizer.clear_grad(False)
    if training.ema:
        training.ema.update(training.model, update)
    trim_buffers()
    return norm


def _average_statistics(model: nn.Layer) -> None:
    """Gives every rank the mean of the ranks' batch norm statistics, as timm's ``--dist-bn reduce``
    does: else each would evaluate, and the first would save, what it saw alone.
    """
    own = own_statistics(model)
    if own and world_size() > 1:
        for name, mean in reduce_dict(own).items():
            own[name].set_value(mean)


def evaluate(
    task: Task,
    model: Callable[..., Any],
    loader: Loader,
    after_batch: Callable[[], None] = lambda: None,
) -> Metrics:
    """Returns the task's metrics of ``model``, in evaluation mode if it is a layer.

    Every sample of all processes' loaders counts once, whatever the number of processes and the
    batch size: sums are reduced, then divided.

    Args:
        model: not wrapped: ranks may take different numbers of batches.
        after_batch: is called after each batch, equally often on every rank, and may raise.

    Raises:
        RunError: on every rank, when the loss is not finite or samples are missing.
    """
    if isinstance(model, nn.Layer):
        model.eval()

    def forward(*inputs: Any) -> Any:
        with autocast(task.config, evaluation=True):
            return model(*inputs)

    with paddle.no_grad():
        metrics = task.evaluate(forward, _watch(loader, after_batch))
    found = metrics["num_samples"]
    expected = len(loader.dataset)
    if found != expected:
        raise RunError(
            f"evaluation counted {found} samples, the dataset has {expected}", shared=True
        )
    if not math.isfinite(metrics["loss"]):
        raise RunError(
            f"the evaluation's loss is {metrics['loss']}: the weights give no finite logits",
            shared=True,
        )
    return metrics


def _watch(loader: Loader, after_batch: Callable[[], None]) -> Iterator[Batch]:
    """Yields the batches; ``after_batch`` is called after those that every rank has."""
    common = len(loader.dataset) // world_size() // loader.batch_sampler.batch_size
    for index, batch in enumerate(loader):
        beat(EVALUATING)
        yield batch
        trim_buffers()
        if index < common:
            after_batch()


def evaluate_only(
    config: Configuration,
    model: ImageModel,
    val: ImageDataset,
    run: Run,
    kind: type[Task] | None = None,
) -> None:
    """Does the run of ``-eval``: loads MODEL.PRETRAINED, evaluates, leaves result.json.

    Raises:
        InputError: no weights are given, they don't fit, or are of another task.
    """
    if not config.MODEL.PRETRAINED:
        # It raises an error if another rank has weights.
        load_pretrained(config, model, run, strict=True)
        raise InputError("-eval needs -pretrained FILE: the weights to evaluate")
    check_task(config.MODEL.PRETRAINED, config.TASK, config.MODEL.PRETRAINED_ADAPTER)
    load_pretrained(config, model, run, strict=True)
    broadcast_weights(model)
    trim_buffers()
    if config.EVAL_ENGINE == "inference":
        predictor = inference_engine(config, model, run.info)
    else:
        predictor = model
        run.info(precision_text(config))
    if val.compared is not None:
        predictor = among(predictor, val.compared, config.MODEL.NUM_CLASSES)
    task: Task = (kind or tasks.choose(config))(config, val.classes)
    loader = get_dataloader(config, val, "val", rank=rank(), ranks=world_size())
    signals.begin()
    run.begin()
    if task.note:
        run.info(task.note)
    requests = Requests(None)

    def stop() -> None:
        if (number := requests.poll()) is not None:
            raise Stopped(number, "in the evaluation")

    metrics = evaluate(task, predictor, loader, stop)
    predictions.leave(run, val, {"val": task.predictions} if task.predictions else {})
    run.result(_result(task, metrics, config.MODEL.PRETRAINED), task.line("result", metrics))


def _result(task: Task, metrics: Metrics, weights: str) -> dict[str, Any]:
    return {
        **metrics,
        "model": task.config.MODEL.NAME,
        "weights": weights,
        "config": plain(task.config),
    }


def autocast(config: Configuration, evaluation: bool = False) -> contextlib.AbstractContextManager:
    """Returns the forward pass's context: level O1 (softmax, norms and losses stay in float32), or
    none for float32. On a CPU the compiled operators have it instead of Paddle's autocast, which
    does nothing there.
    """
    dtype: Any = precision(config, evaluation)
    if not num_gpus():
        return ops.bfloat16_products(enabled=dtype == "bfloat16")
    return (
        contextlib.nullcontext()
        if dtype == "float32"
        else paddle.amp.auto_cast(dtype=dtype, level="O1")
    )
