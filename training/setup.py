"""What a training run is made of, built from its configuration, checked and logged: sizes, rates,
what decays.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle import nn

import ops
from config import default_values, is_users, with_values
from datasets import ImageDataset, get_dataloader
from errors import InputError
from loading.label_spaces import some_of
from loading.scales import check_scales
from loading.workers import Loader
from models.base import ImageModel
from models.pretrained import disagreements
from ops.device import float32_text
from settings.options import Configuration, explicit_sources
from training.checkpoint.description import classes_of
from training.ending import Ending
from training.equal_ranks import check_loaded
from training.optim import LossScaler, ModelEma, build_optimizer, build_schedule, decayed_parameters
from training.parallel import ShardedOptimizer, wrap_optimizer
from training.predictions import Predictions
from training.run import Run
from training.task import Task
from utils import num_gpus, rank, world_size
from weights import load_weights

# what config.py's own rates are for: ImageNet from scratch (arXiv:2010.11929, table 3)
_DEFAULT_BATCH = 4096
_FAR = 4  # a batch so many times larger or smaller than the recipe's asks for another rate


@dataclass
class Training:
    """The parts of a training run; ``network`` is ``model``, or what ``parallel`` wrapped it in, as
    the optimizer.
    """

    config: Configuration
    task: Task
    model: ImageModel
    network: nn.Layer
    ema: ModelEma | None
    optimizer: paddle.optimizer.Optimizer
    schedule: Callable[[int], float]
    ending: Ending
    scaler: LossScaler
    loader: Loader
    run: Run
    # of the last evaluation, by split
    predictions: dict[str, Predictions] = field(default_factory=dict)

    @functools.cached_property
    def trained_parameters(self) -> list[paddle.Tensor]:
        """Returns the parameters that aren't frozen; walking the model's layers takes as long as
        measuring their gradients.
        """
        return [parameter for parameter in self.model.parameters() if not parameter.stop_gradient]

    @property
    def averaged_model(self) -> ImageModel | None:
        """Returns the model of averaged weights, where there is one."""
        return self.ema.model if self.ema else None

    @property
    def evaluated_models(self) -> dict[str, nn.Layer]:
        """Returns the models to evaluate, by the name of their split in metrics.jsonl."""
        return {"val": self.model, **({"ema": self.ema.model} if self.ema else {})}


def prepare(task: Task, network: nn.Layer, train: ImageDataset, run: Run) -> Training:
    """Builds what trains, loads MODEL.PRETRAINED, lets the task prepare, and tells what results.

    Raises:
        InputError: weights, batch, accumulation or what the task needs don't fit.
    """
    config = task.config
    model: Any = getattr(network, "_layers", network)
    load_pretrained(config, model, run, strict=False)
    task.prepare(model, train, run)
    check_scales(config, model)
    loader = get_dataloader(config, train, "train", rank=rank(), ranks=world_size())
    steps = len(loader)
    accum = config.TRAIN.ACCUM_ITER
    if accum > steps:
        raise InputError(
            f"TRAIN.ACCUM_ITER is {accum}, but an epoch has {steps} steps: it would end without an update"
        )
    schedule = build_schedule(
        config, -(-steps // accum), config.DATA.BATCH_SIZE * world_size() * accum
    )
    ending = Ending(config, steps)
    scaler = LossScaler(enabled=precision(config) == "float16")
    _tell_model(config, model, run)
    _tell_steps(config, len(train), steps, schedule, run)
    settings = (config.TRAIN.MODEL_EMA_DECAY, config.TRAIN.MODEL_EMA_WARMUP)
    # a copy, made before the model is traced
    ema = ModelEma(model, *settings) if config.TRAIN.MODEL_EMA else None
    if config.TO_STATIC:
        _trace(model)
    optimizer = wrap_optimizer(config, build_optimizer(config, model), model)
    _tell_shares(network, optimizer, run)
    return Training(
        config=config,
        task=task,
        model=model,
        network=network,
        ema=ema,
        optimizer=optimizer,
        schedule=ending.pace(schedule),
        ending=ending,
        scaler=scaler,
        loader=loader,
        run=run,
    )


def _trace(model: nn.Layer) -> None:
    """Makes the model's forward pass a graph, traced at its first batch of a shape. Its random
    operators may draw in another order.
    """
    with contextlib.suppress(ValueError):  # Paddle 2.6 hasn't got it
        # It takes two equal calls of a random operator for one: all drop paths of a rate would drop
        # the same samples.
        paddle.set_flags({"FLAGS_enable_cse_in_dy2st": False})
    paddle.jit.to_static(model, full_graph=True)


def load_pretrained(config: Configuration, model: ImageModel, run: Run, strict: bool) -> None:
    """Loads MODEL.PRETRAINED, if it is set.

    Log lines say what was loaded, and where images are prepared in another way than the weights
    were made for.

    Raises:
        InputError: the weights don't fit, or another rank has loaded other weights, or none.
    """
    settings = config.MODEL
    if not settings.PRETRAINED:
        check_loaded("MODEL.PRETRAINED", "nothing", {})
        return
    allow = settings.PRETRAINED_ALLOW
    order = settings.PRETRAINED_CLASSES
    adapter = settings.PRETRAINED_ADAPTER
    report = load_weights(
        model, settings.PRETRAINED, strict, allow, order, adapter, checksums=world_size() > 1
    )
    files = f"{report.file} and {adapter}" if adapter else report.file
    check_loaded("MODEL.PRETRAINED", files, report.checksums)
    run.info(str(report))
    if report.warning:
        run.info(f"warning: {report.warning}")
    theirs = classes_of(settings.PRETRAINED, adapter)
    if theirs and run.classes and theirs != run.classes and not (strict or report.fresh):
        run.info(
            f"the classifier was trained for the classes {some_of(theirs)}; the training goes on with it for"
            f" {some_of(run.classes)}"
        )
    for warning in disagreements(config, report.config):
        run.info(warning)


def precision(config: Configuration, evaluation: bool = False) -> str:
    """Returns the type of the forward pass's products: "float32", or with AMP "bfloat16".

    On a GPU without bfloat16 that is "float16", on a CPU without it "float32".

    Args:
        evaluation: of an evaluation, within a training as well: float32 unless AMP_EVAL is on.
    """
    if not config.AMP or (evaluation and not config.AMP_EVAL):
        return "float32"
    if not num_gpus():
        return "float32" if _lacks_bfloat16(config) else "bfloat16"
    return "bfloat16" if paddle.amp.is_bfloat16_supported() else "float16"


def precision_text(config: Configuration) -> str:
    """Returns ``precision`` of a training, or with EVAL of an evaluation, with the reason where AMP
    asks for more.
    """
    told = precision(config, config.EVAL)
    reason = ""
    if config.AMP and not num_gpus() and (lacks := _lacks_bfloat16(config)):
        return f"float32 (-amp asks for bfloat16 products: {lacks})"
    if told == "bfloat16" and not num_gpus():
        told = "bfloat16 products in linear, MLP and attention layers, the rest in float32"
    if config.AMP and not config.AMP_EVAL:
        reason = " (-amp is for training; -o AMP_EVAL True for evaluations, too)"
        reason = reason if config.EVAL else f", evaluations in {float32_text()}{reason}"
    return told.replace("float32", float32_text()) + reason


def _lacks_bfloat16(config: Configuration) -> str:
    """Returns why a CPU computes in float32 with AMP, in words; "": it doesn't."""
    return (
        "a CPU has none in a traced graph (TO_STATIC)"
        if config.TO_STATIC
        else ops.why_no_bfloat16()
    )


def _tell_model(config: Configuration, model: nn.Layer, run: Run) -> None:
    trained = {name: p for name, p in model.named_parameters() if not p.stop_gradient}
    decayed = len(set(decayed_parameters(config, model)) & trained.keys())
    frozen = [p.size for p in model.parameters() if p.stop_gradient]
    count = sum(p.size for p in trained.values()) + sum(frozen)
    run.info(
        f"{config.MODEL.NAME}: {count:,} parameters, {precision_text(config)}; {config.TRAIN.OPTIMIZER.NAME},"
        f" weight decay on {decayed} tensors, off on {len(trained) - decayed}"
        + (f"; frozen: {len(frozen)} tensors ({sum(frozen):,} parameters)" if frozen else "")
    )


def _tell_shares(
    network: nn.Layer, optimizer: paddle.optimizer.Optimizer | ShardedOptimizer, run: Run
) -> None:
    if getattr(network, "shared", None):
        run.info("gradients are averaged in memory that the ranks share")
    if isinstance(optimizer, ShardedOptimizer):
        shares = ", ".join(f"{size:,}" for size in optimizer.sizes)
        run.info(
            f"fleet, sharding stage {optimizer.stage}: the optimizer's state by rank is of {shares} parameters"
        )


def share_batch(config: Configuration, ranks: int) -> Configuration:
    """Returns the configuration whose DATA.BATCH_SIZE is one of ``ranks`` shares of
    DATA.GLOBAL_BATCH, if that is set.

    Raises:
        InputError: it can't be shared out equally.
    """
    batch = config.DATA.GLOBAL_BATCH
    if batch is None:
        return config
    if batch % ranks:
        raise InputError(
            f"DATA.GLOBAL_BATCH is {batch}, found {ranks} processes; make it a multiple of their number"
        )
    return with_values(
        config, f"DATA.GLOBAL_BATCH, shared by {ranks}", DATA__BATCH_SIZE=batch // ranks
    )


def _tell_steps(
    config: Configuration, images: int, steps: int, schedule: Callable[[int], float], run: Run
) -> None:
    train = config.TRAIN
    accum = config.TRAIN.ACCUM_ITER
    batch = config.DATA.BATCH_SIZE
    updates = -(-steps // accum)
    effective = batch * world_size() * accum
    rates = [
        f"{schedule(epoch * updates):.3g}" for epoch in (0, train.WARMUP_EPOCHS, train.NUM_EPOCHS)
    ]
    kept = "GLOBAL_BATCH" if config.DATA.GLOBAL_BATCH else "BATCH_SIZE"
    how = {"linear": "linearly", "sqrt": "by the square root"}[train.LR_SCALING]
    which = "the rates scale" if train.LR_SCALED == "all" else "BASE_LR scales"
    scaled = (
        f"{which} {how} from a batch of {train.LINEAR_SCALED_LR}"
        if train.LINEAR_SCALED_LR
        else "the rates stay"
    )
    run.info(
        f"{images:,} images, {steps} steps an epoch, the tail {'dropped' if config.DATA.DROP_LAST else 'padded'};"
        f" global batch {batch} x {world_size()} = {batch * world_size()}, accumulation {accum},"
        f" effective batch {effective};"
        f" learning rate {rates[0]}, after warm-up {rates[1]}, at the end {rates[2]};"
        f" on another number of processes DATA.{kept} is kept and {scaled}"
    )
    for warning in filter(None, (far_batch(config, effective), rising(config, effective))):
        run.info(warning)


def far_batch(config: Configuration, effective: int) -> str:
    """Returns a warning if the rates are for a batch that is far from the effective one, else ""."""
    batch = recipe_batch(config)
    rate = config.TRAIN.BASE_LR
    if batch is None or batch / _FAR <= effective <= batch * _FAR:
        return ""
    return (
        f"warning: the recipe's rates are for a batch of {batch}, the effective batch is {effective}: BASE_LR {rate:g}"
        f" would scale to {rate * effective / batch:.3g}; set TRAIN.BASE_LR, or TRAIN.LINEAR_SCALED_LR {batch}, which"
        " scales the rates"
    )


def rising(config: Configuration, effective: int) -> str:
    """Returns a warning if BASE_LR, which alone scales, is below END_LR for the effective batch,
    else "".
    """
    train = config.TRAIN
    if (
        not train.LINEAR_SCALED_LR
        or train.LR_SCALED == "all"
        or train.LR_SCHEDULER.NAME == "constant"
    ):
        return ""
    ratio = effective / train.LINEAR_SCALED_LR
    rate = train.BASE_LR * (ratio**0.5 if train.LR_SCALING == "sqrt" else ratio)
    if rate >= train.END_LR * (1 - 1e-9):
        return ""
    return (
        f"warning: for the effective batch of {effective} BASE_LR scales to {rate:.3g}, below END_LR {train.END_LR:g},"
        " which doesn't scale: the rate rises; take a larger batch, or set TRAIN.END_LR"
    )


def recipe_batch(config: Configuration) -> int | None:
    """Returns the batch that rates which don't scale are for; None where they do, or where nobody
    said it.

    A rate that the user wrote is the user's: for the batch at hand.
    """
    train = config.TRAIN
    if train.LINEAR_SCALED_LR or is_users(config, "TRAIN.BASE_LR"):
        return None
    from_recipe = (
        "TRAIN.BASE_LR" in explicit_sources(config)
        or default_values()["TRAIN.BASE_LR"] != train.BASE_LR
    )
    return train.RECIPE_BATCH or (None if from_recipe else _DEFAULT_BATCH)
