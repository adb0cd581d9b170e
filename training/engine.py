"""The training loop: ``fit`` trains a model, evaluates it and saves it.

``fit`` reads from top to bottom as a run goes: its start, each epoch, its end. ``train_one_epoch``
and ``evaluate`` are the two halves of an epoch, and ``evaluate_only`` is the run of ``-eval``. What
a batch is, its loss, and what an evaluation computes, belongs to the task (``task.Task``).

One process is N processes with N = 1. Between two reports nothing is copied to the host, and no
sums are exchanged. Sums stay on the device, are reduced over the processes once, and divided once.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

from datasets import ImageDataset, get_dataloader
from errors import InputError, RunError
from launch.progress import EVALUATING, beat
from loading.workers import Loader
from models.layers.batch_norm import hold_frozen_statistics
from models.paddle_inference import inference_engine
from ops.device import trim_buffers
from settings.configuration import plain
from training import predictions
from training.checkpoint import Progress, Saver, own_statistics
from training.checkpoint.resume import resume, rewind_folder
from training.checkpoint.storage import BEST, BEST_EMA, check_visible
from training.curves import plot_curves
from training.ending import Ending
from training.live_report import LiveReport
from training.optim import clip_gradients, create_state, set_weight_decay, weight_decay_at
from training.parallel import (
    ShardedOptimizer,
    broadcast_weights,
    free_unowned_weights,
    gathered_weights,
    reduce_gradients,
    unwrapped,
    without_sync,
)
from training.probing.probe import Probe
from training.probing.records import CURVES
from training.profiling import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    REPORT,
    UPDATE,
    Profile,
    span,
)
from training.requests import Checkpointing, Requests, Stopped
from training.run import Run
from training.setup import Training, autocast, load_pretrained, precision_text, prepare
from training.step_settings import begin_step
from training.task import Batch, Metrics, Task, check_values, mask_logits, numbers
from training.window import Window
from utils import rank, reduce_dict, seed_step, world_size


def fit(
    task: Task,
    network: nn.Layer,
    train: ImageDataset,
    val: ImageDataset,
    run: Run,
    live: LiveReport | None = None,
) -> None:
    """Trains ``network`` and writes checkpoints, metrics and the result into the run's folder.

    Args:
        network: the task's, as ``parallel.wrap_model`` returned it.
        live: renews the report after each evaluation; None: it isn't renewed.

    Raises:
        InputError: batch, accumulation, weights or checkpoint don't fit.
        RunError: on every rank, when the loss is not finite.
    """
    config = task.config

    # Everything is built, loaded and checked before anything on the disk changes. So a start that
    # fails leaves a run's folder as it was.
    training, progress, checkpoint = prepare_training(task, network, train, run)
    training.live = live
    if config.PROFILE:
        training.profile = Profile(config.PROFILE, run)
    task.prepare_data(val, "val")
    val_loader = get_dataloader(config, val, "val", rank=rank(), ranks=world_size())
    probe = Probe(config, training.model, train, val_loader)
    if isinstance(training.optimizer, ShardedOptimizer):
        check_visible(run.directory)

    # The run begins: from here on its folder changes, and signals ask it to save or to stop.
    run.begin()
    if config.MODEL.RESUME:
        rewind_folder(training, progress, checkpoint)
    # Today's batch size may not be the one that the checkpoint's steps were counted by.
    progress.count_steps(training.loader)
    saver = Saver(
        config,
        run,
        training.evaluated_models,
        training.optimizer,
        training.scaler,
        training.loader.dataset,
        progress,
    )
    checkpointing = Checkpointing(progress, saver, Requests(config.SAVE_MINUTES))
    for note in filter(None, (task.note, probe.note)):
        run.info(note)
    steps = len(training.loader)
    evaluated = len(val) + probe.images
    ending = Ending(config, progress, run, steps, _evaluation_cost(training, evaluated))
    training.schedule = ending.pace(training.schedule)
    training.share = ending.pace(training.share)
    run.start_steps(ending.epochs, ending.num_steps, progress.step)

    def after_step(window: Window, statistics: dict[str, paddle.Tensor], updated: bool) -> None:
        ending.after_step(updated)
        checkpointing.after_step(window, statistics, updated)

    metrics: dict[str, Metrics] = {}
    if ending.over:
        # The run was stopped after its last epoch. Its result is missing, and perhaps its best
        # checkpoint, if that was lost.
        metrics = _evaluate_models(
            training, val_loader, probe, progress.epoch, ending, checkpointing
        )
        progress.keep_best(_scored(metrics, progress.epoch), task.score)

    while not ending.over:
        epoch = progress.epoch + 1
        train_one_epoch(training, progress, after_step, ending)
        # A run that is stopped here continues with the evaluation.
        checkpointing.stop_if_asked()

        metrics = {}
        if epoch % config.VALIDATE_FREQ == 0 or epoch == ending.epochs:
            metrics = _evaluate_models(training, val_loader, probe, epoch, ending, checkpointing)
            for split, values in metrics.items():
                shown = task.line("val", values)
                run.report(split, shown, step=progress.step, epoch=epoch, **numbers(values))
                _warn(task, values, run)

        # The epoch counts as done once it is evaluated. Then it is decided whether the run is over,
        # because a checkpoint holds that decision.
        progress.end_epoch(epoch)
        scored = _scored(metrics, epoch)
        improved = progress.keep_best(scored, task.score)
        ending.after_epoch({split: task.score(values) for split, values in scored.items()})
        regular = bool(config.SAVE_FREQ) and epoch % config.SAVE_FREQ == 0
        described = {split: task.description_of(values) for split, values in metrics.items()}
        checkpointing.end_epoch(improved, regular or ending.over, described)
        # The last evaluation is in the final report.
        if live and metrics and not ending.over:
            live.renew(progress, metrics, training.predictions)

    if training.profile:
        training.profile.finish()
    # The last checkpoint is whole before the result says that the run is over.
    checkpointing.finish()
    _conclude(training, val, progress, ending, metrics, saver)


def prepare_training(
    task: Task, network: nn.Layer, train: ImageDataset, run: Run
) -> tuple[Training, Progress, Path | None]:
    """Builds a training run and restores the checkpoint of MODEL.RESUME. Nothing on the disk changes.

    Returns:
        (the training; how far the run is; the checkpoint, or None: the run starts afresh).

    Raises:
        InputError: batch, accumulation, weights or checkpoint don't fit.
    """
    training = prepare(task, network, train, run)
    progress, checkpoint = resume(training)
    create_state(unwrapped(training.optimizer))
    for model in training.evaluated_models.values():
        # A checkpoint within an epoch holds batch norm's statistics of each rank: they stay.
        own = own_statistics(model) if checkpoint else ()
        broadcast_weights(model, without=own)
    free_unowned_weights(training.optimizer)
    return training, progress, checkpoint


def _evaluation_cost(training: Training, images: int) -> float:
    """Returns the number of images that an evaluation computes, over those of an update.

    Each image passes through the model and, with MODEL_EMA, through the averaged model.
    """
    config = training.config
    update_images = config.DATA.BATCH_SIZE * world_size() * config.TRAIN.ACCUM_ITER
    return len(training.evaluated_models) * images / update_images


def _evaluate_models(
    training: Training,
    loader: Loader,
    probe: Probe,
    epoch: int,
    ending: Ending,
    checkpointing: Checkpointing,
) -> dict[str, Metrics]:
    """Returns the metrics of the model ("val") and of the averaged model ("ema")."""
    metrics: dict[str, Metrics] = {}
    with span(EVALUATION), ending.evaluating(), gathered_weights(training.optimizer):
        for split, model in training.evaluated_models.items():
            metrics[split] = evaluate(training.task, model, loader, checkpointing.stop_if_asked)
            if kept := training.task.predictions:
                training.predictions[split] = kept
            if probe.is_due(epoch, ending.epochs):
                batches = functools.partial(
                    _evaluated_batches, after_batch=checkpointing.stop_if_asked
                )
                metrics[split] |= probe.measure(model, batches, training.run)
        _draw(training.task, training.model, loader.dataset, training.run)
    return metrics


def _draw(task: Task, model: nn.Layer, dataset: ImageDataset, run: Run) -> None:
    """Draws the task's pictures of an evaluation, on rank 0."""
    if rank() == 0:
        with run.logging_failure("the picture of the evaluation"), paddle.no_grad():
            task.draw(model, dataset, run.directory)


def _warn(task: Task, metrics: Metrics, run: Run) -> None:
    """Logs the task's warning after an evaluation, if it has one."""
    if text := task.warning(metrics):
        run.info(f"warning: {text}")


def _scored(metrics: dict[str, Metrics], epoch: int) -> dict[str, Metrics]:
    """Returns the scores of each split: the metrics that are numbers, and their epoch."""
    return {split: {"epoch": epoch, **numbers(values)} for split, values in metrics.items()}


def _conclude(
    training: Training,
    val: ImageDataset,
    progress: Progress,
    ending: Ending,
    metrics: dict[str, Metrics],
    saver: Saver,
) -> None:
    """Writes the last predictions, the curves and result.json, and logs the best evaluations."""
    run = training.run
    task = training.task
    if training.live:
        # From here on this process writes what the report shows.
        training.live.close()
    # Every rank has a part of the predictions. Rank 0 writes all else.
    predictions.write_tables(run, val, training.predictions)
    if rank():
        return
    with run.logging_failure("curves.png"):
        curves = task.curves | (CURVES if training.config.PROBE.FREQ else {})
        plot_curves(run.directory / "metrics.jsonl", run.directory / "curves.png", curves)
    if training.live:
        training.live.draw_batch()
    titles = {"val": ("best", BEST), "ema": ("best average", BEST_EMA)}
    best_lines = []
    for split, record in progress.best.items():
        title, file = titles[split]
        line = f"{task.line('best', record)} after epoch {record['epoch']}, in checkpoints/{file}"
        run.info(f"best {split}: {line}")
        best_lines.append(f"{title}: {line}")
    weights = {"val": saver.path, "ema": saver.path / "ema.safetensors"}
    results = {}
    for split, values in metrics.items():
        results[split] = _result(task, values, str(weights[split]))
        results[split]["best"] = progress.best[split]
    # The model's metrics are result.json's own; those of the average are its entry "ema".
    result = results.pop("val")
    if reason := ending.reason:
        result["ended"] = reason
        run.info(reason)
    run.result(result | results, "; ".join([task.line("result", result), *best_lines]))


def train_one_epoch(
    training: Training,
    progress: Progress,
    after_step: Callable[[Window, dict, bool], None] = lambda *_: None,
    ending: Ending | None = None,
) -> None:
    """Trains the rest of the epoch that ``progress`` is in.

    It is reported every REPORT_FREQ steps and at its end.

    Args:
        after_step: is called after each step but the last one, with the window, this rank's
            statistics and whether the step made an update. The state that it may save is that of
            the last update.
        ending: may end the run within the epoch; None: the epoch is trained as a whole.

    Raises:
        RunError: on every rank, when a loss is not finite; it names the first such step.
    """
    config = training.config
    loader = training.loader
    sampler = loader.batch_sampler
    epoch = progress.epoch + 1
    steps = len(loader)
    steps_before = (epoch - 1) * steps
    accum = config.TRAIN.ACCUM_ITER
    updates = -(-steps // accum)
    # A run that is resumed within an epoch begins with the first batch that it hasn't trained on.
    sampler.set_epoch(epoch, progress.samples)
    first = sampler.first()
    window = Window(training, epoch, progress.step, progress.take_window())
    last = ending.steps_of(epoch) if ending else steps
    if first >= last:
        # Only the epoch's evaluation is to come.
        return

    training.network.train()
    hold_frozen_statistics(training.model)
    statistics = {
        f"{split}/{name}": tensor
        for split, model in training.evaluated_models.items()
        for name, tensor in own_statistics(model).items()
    }
    held_statistics = _copy_statistics(statistics, accum)
    batches = window.timed_batches(loader, steps_before + first + 1)
    for index, batch in enumerate(batches, first):
        step = steps_before + index + 1
        # TRAIN.MAX_MINUTES may have been measured, and the run shortened, within this epoch.
        last = ending.steps_of(epoch) if ending else steps

        # The update that this step belongs to, and this rank's samples in it. The last update of an
        # epoch may be of fewer steps, and so may the first one after a resume.
        group = index // accum
        begin = max(group * accum, first)
        end = min((group + 1) * accum, last)
        group_samples = (sampler.samples_taken(end) - sampler.samples_taken(begin)) // world_size()
        updates_now = index + 1 == end
        update = (epoch - 1) * updates + group

        if index == first and training.live:
            training.live.keep_batch(batch, epoch)
        seed_step(config.SEED, step)
        begin_step(training.changing_layers, _passed(training, update), (config.SEED, step))
        values = _accumulate(training, batch, epoch, group_samples, updates_now)
        norm = _update(training, update, epoch) if updates_now else None

        window.add(step, values, norm, batch.get("skipped"))
        if index + 1 == last or (index + 1) % config.REPORT_FREQ == 0:
            with span(REPORT):
                window.report(training.schedule(update))
        if updates_now:
            # What a checkpoint may hold from here on, until the next update.
            progress.record_update(step, sampler.samples_taken(end))
            window.mark()
            held_statistics = _copy_statistics(statistics, accum)
        training.run.bar.update()
        if training.profile:
            training.profile.end_step()
        if index + 1 < last:
            after_step(window, held_statistics, updates_now)
        elif last < steps:
            break
    for model in training.evaluated_models.values():
        _average_statistics(model)


def _passed(training: Training, update: int) -> float:
    """Returns the share of the way from the run's first update to its last one, from 0 to 1."""
    share = training.share(update)
    # The last update begins where a step is missing to the end.
    left = 1 - (training.share(update + 1) - share)
    return min(1.0, share / left) if left > 0 else 0.0


def _accumulate(
    training: Training, batch: Batch, epoch: int, group_samples: int, updates_now: bool
) -> Batch:
    """Adds a batch's gradients to those of its update; returns what the task's ``step`` returned.

    Args:
        group_samples: this rank's samples in the update, by which the loss is divided.
        updates_now: the update follows: the ranks' gradients are averaged in this backward pass.
    """
    network = training.network
    sync = contextlib.nullcontext()
    if not updates_now:
        sync = without_sync(network, training.optimizer)
    with sync:
        with span(FORWARD), autocast(training.config):
            values = training.task.step(network, batch, epoch)
        check_values(batch, values)
        if values["loss"].stop_gradient:
            raise RunError("the task's step returned a loss without gradients; don't detach it")
        with span(BACKWARD):
            training.scaler.scale(values["loss"].sum() / group_samples).backward()
    return {name: value.detach() for name, value in values.items()}


def _copy_statistics(statistics: dict[str, paddle.Tensor], accum: int) -> dict[str, paddle.Tensor]:
    """Returns batch norm's statistics as they are at an update.

    With accumulation they are copied, because each step between two updates changes them.
    """
    if accum == 1:
        return statistics
    return {key: tensor.clone() for key, tensor in statistics.items()}


def _update(training: Training, update: int, epoch: int) -> paddle.Tensor:
    """Makes one update by the accumulated gradients; returns their global norm before clipping.

    Args:
        update: its number in the run, from 0.
        epoch: the epoch, from 1.
    """
    reduce_gradients(training.network, training.optimizer)
    with span(UPDATE):
        return _step_optimizer(training, update, epoch)


def _step_optimizer(training: Training, update: int, epoch: int) -> paddle.Tensor:
    """Makes the update once the gradients are those of all ranks; arguments as for ``_update``."""
    training.scaler.unscale(training.trained_parameters)
    training.task.before_update(training.model, epoch)
    norm = clip_gradients(training.config, training.model, training.trained_parameters)
    training.optimizer.set_lr(training.schedule(update))
    if training.config.TRAIN.WEIGHT_DECAY_END is not None:
        weight_decay = weight_decay_at(training.config, training.share(update))
        set_weight_decay(unwrapped(training.optimizer), weight_decay)
    training.scaler.step(training.optimizer, norm)
    # Gradients are freed. Setting them to zero would cost each parameter a kernel now and an
    # addition later.
    training.optimizer.clear_grad(False)
    training.task.after_update(training.model, training.share(update))
    if training.ema:
        training.ema.update(training.model, update)
    trim_buffers()
    return norm


def _average_statistics(model: nn.Layer) -> None:
    """Sets batch norm's statistics to their mean over the ranks, as timm's ``--dist-bn reduce``.

    Otherwise each rank would evaluate by what it saw alone, and rank 0's would be saved.
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

    Each sample of all processes' loaders counts once, whatever the number of processes and the
    batch size: sums are reduced, then divided.

    Args:
        model: not wrapped, because ranks may take different numbers of batches.
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
        metrics = task.evaluate(forward, _evaluated_batches(loader, after_batch))
    counted = metrics["num_samples"]
    expected = len(loader.dataset)
    if counted != expected:
        raise RunError(
            f"the evaluation counted {counted} samples, but the dataset has {expected}", shared=True
        )
    if not math.isfinite(metrics["loss"]):
        raise RunError(
            f"the evaluation's loss is {metrics['loss']}: the outputs of the model aren't finite",
            shared=True,
        )
    return metrics


def _evaluated_batches(loader: Loader, after_batch: Callable[[], None]) -> Iterator[Batch]:
    """Yields the batches, and calls ``after_batch`` after those that every rank has."""
    common = len(loader.dataset) // world_size() // loader.batch_sampler.batch_size
    for index, batch in enumerate(loader):
        beat(EVALUATING)
        yield batch
        trim_buffers()
        if index < common:
            after_batch()


def evaluate_only(
    task: Task,
    model: Any,
    val: ImageDataset,
    run: Run,
) -> None:
    """Runs ``-eval``: loads MODEL.PRETRAINED, evaluates it and writes result.json.

    Args:
        model: the task's network, not wrapped.

    Raises:
        InputError: no weights are given, or they don't fit.
    """
    config = task.config
    if not config.MODEL.PRETRAINED:
        # If another rank has weights, this call says so.
        load_pretrained(config, model, run, strict=True)
        raise InputError("-eval needs -pretrained FILE: the weights to evaluate")
    load_pretrained(config, model, run, strict=True)
    broadcast_weights(model)
    trim_buffers()
    if config.EVAL_ENGINE == "inference":
        predictor = inference_engine(config, model, run.info)
    else:
        predictor = model
        run.info(precision_text(config))
    if val.compared is not None:
        predictor = mask_logits(predictor, val.compared, config.MODEL.NUM_CLASSES)
    task.prepare_data(val, "val")
    loader = get_dataloader(config, val, "val", rank=rank(), ranks=world_size())

    run.begin()
    if task.note:
        run.info(task.note)
    requests = Requests(save_minutes=None)

    def stop_if_asked() -> None:
        if (number := requests.poll()) is not None:
            raise Stopped(number, "in the evaluation")

    metrics = evaluate(task, predictor, loader, stop_if_asked)
    predictions.write_tables(run, val, {"val": task.predictions} if task.predictions else {})
    _draw(task, model, val, run)
    _warn(task, metrics, run)
    run.result(_result(task, metrics, config.MODEL.PRETRAINED), task.line("result", metrics))


def _result(task: Task, metrics: Metrics, weights: str) -> dict[str, Any]:
    """Returns the record of an evaluation in result.json: its metrics and its subject."""
    return {
        **metrics,
        "model": task.config.MODEL.NAME,
        "weights": weights,
        "config": plain(task.config),
    }
