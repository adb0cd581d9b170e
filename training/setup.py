"""Builds a training run from its configuration, checks it, and logs its sizes and rates."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle import nn

import ops
from config import default_values, is_users, with_values
from datasets import ImageDataset, check_batch_size, get_dataloader
from errors import InputError
from loading.label_spaces import some_of
from loading.scales import check_scales
from loading.workers import Loader
from models.base import ImageModel
from models.layers.sync_batch_norm import SyncBatchNorm1D
from models.pretrained import disagreements, patch_size_warning
from ops.device import float32_text
from settings.configuration import Configuration, explicit_sources
from training.bad_steps import LossHistory
from training.checkpoint.description import classes_of
from training.equal_ranks import check_loaded
from training.live_report import LiveReport
from training.optim import LossScaler, ModelEma, build_optimizer, build_schedule, decayed_parameters
from training.parallel import ShardedOptimizer, wrap_optimizer
from training.predictions import Predictions
from training.profiling import Profile
from training.run import Run
from training.step_settings import changing_layers
from training.task import Task
from utils import num_gpus, rank, world_size
from weights import load_weights

# The batch that config.py's own rates are for: ImageNet from scratch (arXiv:2010.11929, table 3).
_DEFAULT_BATCH = 4096
# A batch so many times larger or smaller than the recipe's needs another learning rate.
_FAR = 4


@dataclass
class Training:
    """The objects of a training run, its latest losses, and the predictions of its last evaluation
    by split. ``live`` renews the report; None: nothing does.

    ``schedule`` maps an update, from 0, to its learning rate, and ``share`` to the share of the
    run's updates before it. ``network`` is ``model``, or what ``parallel.wrap_model`` made of it.
    ``optimizer`` is what ``parallel.wrap_optimizer`` returned.
    """

    config: Configuration
    task: Task
    model: ImageModel
    network: nn.Layer
    ema: ModelEma | None
    optimizer: paddle.optimizer.Optimizer
    schedule: Callable[[float], float]
    share: Callable[[float], float]
    scaler: LossScaler
    loader: Loader
    run: Run
    losses: LossHistory = field(default_factory=LossHistory)
    profile: Profile | None = None
    predictions: dict[str, Predictions] = field(default_factory=dict)
    live: LiveReport | None = None

    @functools.cached_property
    def trained_parameters(self) -> list[paddle.Tensor]:
        """Returns the parameters that aren't frozen.

        They are found once: walking the model's layers takes as long as the norm of the gradients.
        """
        return [parameter for parameter in self.model.parameters() if not parameter.stop_gradient]

    @functools.cached_property
    def changing_layers(self) -> list[nn.Layer]:
        """Returns the model's layers that are set before each step."""
        return changing_layers(self.model)

    @property
    def averaged_model(self) -> ImageModel | None:
        """Returns the model of averaged weights (MODEL_EMA), or None."""
        return self.ema.model if self.ema else None

    @property
    def evaluated_models(self) -> dict[str, nn.Layer]:
        """Returns the models to evaluate, by the name of their split in metrics.jsonl."""
        models: dict[str, nn.Layer] = {"val": self.model}
        if self.ema:
            models["ema"] = self.ema.model
        return models


def prepare(task: Task, network: nn.Layer, train: ImageDataset, run: Run) -> Training:
    """Builds a training run, loads MODEL.PRETRAINED, and logs what results.

    Args:
        network: what ``parallel.wrap_model`` returned.

    Raises:
        InputError: weights, batch, accumulation or what the task needs don't fit.
    """
    config = task.config
    model: Any = getattr(network, "_layers", network)
    check_batch_size(config, "train")
    load_pretrained(config, model, run, strict=False)
    task.prepare(model, train, run)
    check_scales(config, model)
    task.prepare_data(train, "train")
    samples = task.samples(train)
    loader = get_dataloader(config, samples, "train", rank=rank(), ranks=world_size())

    steps = len(loader)
    accum = config.TRAIN.ACCUM_ITER
    if accum > steps:
        raise InputError(
            f"TRAIN.ACCUM_ITER is {accum}, but an epoch has only {steps} steps,"
            " too few for an update"
        )
    # The last update of an epoch may be of fewer steps.
    updates = -(-steps // accum)
    effective_batch = config.DATA.BATCH_SIZE * world_size() * accum
    schedule = build_schedule(config, updates, effective_batch)
    planned = updates * config.TRAIN.NUM_EPOCHS
    scaler = LossScaler(enabled=precision(config) == "float16")
    _log_model(config, model, run)
    _log_steps(config, len(train), steps, schedule, run)

    # The average is a copy of the model, which has to be made before the model is traced.
    ema = None
    if config.TRAIN.MODEL_EMA:
        ema = ModelEma(model, config.TRAIN.MODEL_EMA_DECAY, config.TRAIN.MODEL_EMA_WARMUP)
        task.average = ema.model
    if config.TO_STATIC:
        _trace(model)
    optimizer = wrap_optimizer(config, build_optimizer(config, model), model)
    _log_sharing(network, optimizer, run)
    return Training(
        config=config,
        task=task,
        model=model,
        network=network,
        ema=ema,
        optimizer=optimizer,
        schedule=schedule,
        share=lambda update: update / planned,
        scaler=scaler,
        loader=loader,
        run=run,
    )


def _trace(model: nn.Layer) -> None:
    """Makes the model's forward pass a graph, which is traced at its first batch of a shape.

    The graph's random operators may draw in another order.

    Raises:
        InputError: several processes, and batch norms over the images of all of them. A graph runs
            its operators in no fixed order, so the ranks' exchanges wouldn't match.
    """
    if world_size() > 1 and any(isinstance(layer, SyncBatchNorm1D) for layer in model.sublayers()):
        raise InputError(
            f"TO_STATIC is True, but the heads of {type(model).__name__} have batch norms over the images"
            f" of all {world_size()} processes, which a graph can't contain; set it to False"
        )
    # Common subexpression elimination takes two equal calls of a random operator for one: all drop
    # paths of a rate would drop the same samples. Paddle 2.6 doesn't have this flag.
    with contextlib.suppress(ValueError):
        paddle.set_flags({"FLAGS_enable_cse_in_dy2st": False})
    paddle.jit.to_static(model, full_graph=True)


def load_pretrained(config: Configuration, model: ImageModel, run: Run, strict: bool) -> None:
    """Loads MODEL.PRETRAINED, if it is set.

    It logs what was loaded, and where images are prepared otherwise than the weights were made for.

    Args:
        strict: whether all of the model's tensors have to be there, as for an evaluation.

    Raises:
        InputError: the weights don't fit, or another rank has loaded other weights, or none.
    """
    settings = config.MODEL
    if not settings.PRETRAINED:
        check_loaded("MODEL.PRETRAINED", "nothing", {})
        return
    adapter = settings.PRETRAINED_ADAPTER
    report = load_weights(
        model,
        settings.PRETRAINED,
        strict,
        settings.PRETRAINED_ALLOW,
        settings.PRETRAINED_CLASSES,
        adapter,
        checksums=world_size() > 1,
    )
    files = f"{report.file} and {adapter}" if adapter else report.file
    check_loaded("MODEL.PRETRAINED", files, report.checksums)
    run.info(str(report))
    if report.warning:
        run.info(f"warning: {report.warning}")
    # A training learns the rest.
    if strict and (warning := patch_size_warning(config, report)):
        run.info(f"warning: {warning}")
    classes = classes_of(settings.PRETRAINED, adapter)
    keeps_classifier = not (strict or report.fresh)
    if classes and run.classes and classes != run.classes and keeps_classifier:
        run.info(
            f"the classifier was trained for the classes {some_of(classes)};"
            f" it is trained further for {some_of(run.classes)}"
        )
    for warning in disagreements(config, report.config):
        run.info(warning)


def precision(config: Configuration, evaluation: bool = False) -> str:
    """Returns the type of the forward pass's products: "float32", or with AMP "bfloat16".

    A GPU without bfloat16 computes in "float16" with AMP, and a CPU without it in "float32".

    Args:
        evaluation: whether it is an evaluation's, within a training as well: it is in float32
            unless AMP_EVAL is set.
    """
    if not config.AMP or (evaluation and not config.AMP_EVAL):
        return "float32"
    if not num_gpus():
        return "float32" if _no_bfloat16_reason(config) else "bfloat16"
    return "bfloat16" if paddle.amp.is_bfloat16_supported() else "float16"


def autocast(config: Configuration, evaluation: bool = False) -> contextlib.AbstractContextManager:
    """Returns the context of a forward pass: autocast of level O1, or none for float32.

    Softmax, norms and losses stay in float32. On a CPU Paddle's autocast does nothing; there the
    compiled operators compute products in bfloat16.
    """
    dtype: Any = precision(config, evaluation)
    if not num_gpus():
        return ops.bfloat16_products(enabled=dtype == "bfloat16")
    if dtype == "float32":
        return contextlib.nullcontext()
    return paddle.amp.auto_cast(dtype=dtype, level="O1")


def precision_text(config: Configuration) -> str:
    """Returns the precision of a training, or with EVAL of an evaluation, in words.

    The text says why it is less than what AMP asks for.
    """
    on_cpu = not num_gpus()
    if config.AMP and on_cpu and (reason := _no_bfloat16_reason(config)):
        return f"{float32_text()} (-amp asks for bfloat16 products: {reason})"
    text = precision(config, config.EVAL).replace("float32", float32_text())
    if text == "bfloat16" and on_cpu:
        text = (
            f"bfloat16 products in linear, MLP and attention layers, the rest in {float32_text()}"
        )
    if not config.AMP or config.AMP_EVAL:
        return text
    advice = " (-amp only affects training; set -o AMP_EVAL True for evaluations)"
    if config.EVAL:
        return f"{text}{advice}"
    return f"{text}, evaluations in {float32_text()}{advice}"


def _no_bfloat16_reason(config: Configuration) -> str:
    """Returns why a CPU computes in float32 with AMP, in words; "": it doesn't."""
    if config.TO_STATIC:
        return "not available in a traced graph on a CPU (TO_STATIC)"
    return ops.why_no_bfloat16()


def _log_model(config: Configuration, model: nn.Layer, run: Run) -> None:
    """Logs the numbers of parameters, trained and frozen, and where weight decay is on."""
    trained = {name: p for name, p in model.named_parameters() if not p.stop_gradient}
    frozen = [p.size for p in model.parameters() if p.stop_gradient]
    decayed = len(set(decayed_parameters(config, model)) & trained.keys())
    count = sum(p.size for p in trained.values()) + sum(frozen)
    course = ""
    if config.TRAIN.WEIGHT_DECAY_END is not None:
        course = f" {config.TRAIN.WEIGHT_DECAY:g} to {config.TRAIN.WEIGHT_DECAY_END:g}"
    line = (
        f"{config.MODEL.NAME}: {count:,} parameters, {precision_text(config)};"
        f" {config.TRAIN.OPTIMIZER.NAME}, weight decay{course} on {decayed} tensors,"
        f" off on {len(trained) - decayed}"
    )
    if config.MODEL.get("PATCH_DROP_END") is not None:
        line += f"; patch dropout {config.MODEL.PATCH_DROP:g} to {config.MODEL.PATCH_DROP_END:g}"
    if frozen:
        line += f"; frozen: {len(frozen)} tensors ({sum(frozen):,} parameters)"
    run.info(line)


def _log_sharing(
    network: nn.Layer, optimizer: paddle.optimizer.Optimizer | ShardedOptimizer, run: Run
) -> None:
    """Logs the resources that ranks share: memory for gradients, or the optimizer's state."""
    if getattr(network, "shared", None):
        run.info("gradients are averaged in shared memory")
    if isinstance(optimizer, ShardedOptimizer):
        sizes = ", ".join(f"{size:,}" for size in optimizer.sizes)
        run.info(
            f"fleet, sharding stage {optimizer.stage}: parameters per rank in the optimizer's"
            f" state: {sizes}"
            ""
        )


def share_batch(config: Configuration, ranks: int) -> Configuration:
    """Returns the configuration with each rank's share of DATA.GLOBAL_BATCH as DATA.BATCH_SIZE.

    Without DATA.GLOBAL_BATCH, and in an evaluation, which doesn't read it, it is returned as it is.

    Raises:
        InputError: the batch can't be divided by ``ranks``.
    """
    batch = config.DATA.GLOBAL_BATCH
    if batch is None or config.EVAL:
        return config
    if batch % ranks:
        raise InputError(
            f"DATA.GLOBAL_BATCH is {batch}, expected a multiple of the number of processes,"
            f" {ranks}; change one of the two"
        )
    origin = f"DATA.GLOBAL_BATCH, shared by {ranks}"
    return with_values(config, origin, DATA__BATCH_SIZE=batch // ranks)


def _log_steps(
    config: Configuration, images: int, steps: int, schedule: Callable[[int], float], run: Run
) -> None:
    """Logs the sizes of an epoch and of a batch, the learning rates, and warnings about them."""
    train = config.TRAIN
    accum = train.ACCUM_ITER
    updates = -(-steps // accum)
    batch = config.DATA.BATCH_SIZE
    global_batch = batch * world_size()
    effective = global_batch * accum
    tail = "dropped" if config.DATA.DROP_LAST else "padded"
    begin, warmed_up, end = (
        f"{schedule(epoch * updates):.3g}" for epoch in (0, train.WARMUP_EPOCHS, train.NUM_EPOCHS)
    )
    kept = "GLOBAL_BATCH" if config.DATA.GLOBAL_BATCH else "BATCH_SIZE"
    scaling = "the rates stay"
    if train.LINEAR_SCALED_LR:
        how = {"linear": "linearly", "sqrt": "by the square root"}[train.LR_SCALING]
        which = "the rates scale" if train.LR_SCALED == "all" else "BASE_LR scales"
        scaling = f"{which} {how} from a batch of {train.LINEAR_SCALED_LR}"
    run.info(
        f"{images:,} images, {steps} steps an epoch, the tail {tail};"
        f" global batch {batch} x {world_size()} = {global_batch}, accumulation {accum},"
        f" effective batch {effective};"
        f" learning rate {begin}, after warm-up {warmed_up}, at the end {end};"
        f" on another number of processes DATA.{kept} is kept and {scaling}"
    )
    for warning in (batch_size_warning(config, effective), rising_rate_warning(config, effective)):
        if warning:
            run.info(warning)


def batch_size_warning(config: Configuration, effective: int) -> str:
    """Returns a warning if the rates are for a batch that is far from the effective one, else ""."""
    batch = recipe_batch(config)
    rate = config.TRAIN.BASE_LR
    if batch is None or batch / _FAR <= effective <= batch * _FAR:
        return ""
    return (
        f"warning: the recipe's rates are for a batch of {batch}, the effective batch is"
        f" {effective}: BASE_LR {rate:g} would scale to {rate * effective / batch:.3g}; set"
        f" TRAIN.BASE_LR, or TRAIN.LINEAR_SCALED_LR {batch}, which scales the rates"
    )


def rising_rate_warning(config: Configuration, effective: int) -> str:
    """Returns a warning if the scaled BASE_LR is below END_LR, which doesn't scale, else ""."""
    train = config.TRAIN
    if not train.LINEAR_SCALED_LR or train.LR_SCALED == "all":
        return ""
    if train.LR_SCHEDULER.NAME == "constant":
        return ""
    ratio = effective / train.LINEAR_SCALED_LR
    rate = train.BASE_LR * (ratio**0.5 if train.LR_SCALING == "sqrt" else ratio)
    # Equal but for rounding isn't a rise.
    if rate >= train.END_LR * (1 - 1e-9):
        return ""
    return (
        f"warning: for the effective batch of {effective} BASE_LR scales to {rate:.3g}, below"
        f" END_LR {train.END_LR:g}, which doesn't scale: the rate rises; use a larger batch, or"
        " set TRAIN.END_LR"
    )


def recipe_batch(config: Configuration) -> int | None:
    """Returns the batch that the recipe's rates are for.

    It is None if the rates scale with the batch, or if no recipe says it. It is None, too, if the
    user wrote the rate, which is for the batch at hand.
    """
    train = config.TRAIN
    if train.LINEAR_SCALED_LR or is_users(config, "TRAIN.BASE_LR"):
        return None
    if train.RECIPE_BATCH:
        return train.RECIPE_BATCH
    written = "TRAIN.BASE_LR" in explicit_sources(config)
    changed = default_values()["TRAIN.BASE_LR"] != train.BASE_LR
    return None if written or changed else _DEFAULT_BATCH
