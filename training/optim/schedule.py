"""Learning rate schedules.

A learning rate is a pure function of the update. So checkpoints don't store it, and it doesn't
depend on where a run was resumed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from settings.configuration import Configuration
from settings.keys import Count, Factor, Positive, Size
from settings.registry import schedules


class At(NamedTuple):
    """An update after the warm-up, with the lengths and rates that every schedule needs.

    Args:
        update: counted from 0 at the run's start. Where TRAIN.MAX_MINUTES shortens a run, it may
            lie between two updates.
        epoch: the epoch of ``update``, from 0; the one in which COOLDOWN_EPOCHS begin at most.
        warmup: number of updates of the warm-up.
        total: number of updates up to the cool-down.
        per_epoch: number of updates of an epoch.
        base, end: BASE_LR and END_LR, scaled to the batch.
    """

    update: float
    epoch: int
    warmup: float
    total: int
    per_epoch: int
    base: float
    end: float

    def decay(self, after_warmup: bool, left: Callable[[float], float]) -> float:
        """Returns a rate that falls from ``base`` to ``end``.

        Args:
            after_warmup: whether the fall begins after the warm-up, as timm's schedulers do with
                ``warmup_prefix``, or at update 0, as they do by default.
            left: maps the elapsed share of the fall, 0 to 1, to the remaining share of the distance
                between both rates.
        """
        start = self.warmup if after_warmup else 0
        elapsed = min(1.0, (self.update - start) / max(1, self.total - start))
        return self.end + (self.base - self.end) * left(elapsed)


def rate_scale(config: Configuration, effective_batch: int) -> float:
    """Returns the factor on BASE_LR that LINEAR_SCALED_LR and LR_SCALING give for a batch."""
    train = config.TRAIN
    scale = effective_batch / train.LINEAR_SCALED_LR if train.LINEAR_SCALED_LR else 1.0
    return math.sqrt(scale) if train.LR_SCALING == "sqrt" else scale


def build_schedule(
    config: Configuration, updates_per_epoch: int, effective_batch: int
) -> Callable[[float], float]:
    """Returns the function from an update (from 0) to its learning rate.

    The rate rises linearly from WARMUP_START_LR at update 0 to BASE_LR after WARMUP_EPOCHS. After
    that, the schedule LR_SCHEDULER.NAME gives it.

    With LR_SCHEDULER.PER_EPOCH all updates of an epoch have one rate. "start" is the rate at the
    epoch's start, as in timm's script; "end" is the one at its end, as in PaddleViT's schedulers.
    "late" is the rate at the start of the epoch before, because DeiT's script steps to the epoch
    that has ended.

    With LINEAR_SCALED_LR the three rates are meant for a batch of that size. They scale with
    ``effective_batch``: linearly (Goyal et al. 2017, arXiv:1706.02677), or with LR_SCALING "sqrt"
    by the square root of the ratio. LR_SCALED "base" scales BASE_LR alone.
    """
    train = config.TRAIN
    options = config.TRAIN.LR_SCHEDULER
    chosen = schedules.choose(config)
    scale = rate_scale(config, effective_batch)
    # The factor on the other two rates.
    bounds_scale = scale if train.LR_SCALED == "all" else 1.0
    base_lr = train.BASE_LR * scale
    start_lr = train.WARMUP_START_LR * bounds_scale
    end_lr = train.END_LR * bounds_scale
    warmup = train.WARMUP_EPOCHS * updates_per_epoch
    total = (train.NUM_EPOCHS - train.COOLDOWN_EPOCHS) * updates_per_epoch

    def schedule(update: float) -> float:
        if options.PER_EPOCH:
            shift = {"start": 0, "late": -1}.get(options.PER_EPOCH, 1)
            update = max(0, update // updates_per_epoch + shift) * updates_per_epoch
        if update < warmup:
            return start_lr + (base_lr - start_lr) * update / warmup
        epoch = int(min(update, total) // updates_per_epoch)
        return chosen(At(update, epoch, warmup, total, updates_per_epoch, base_lr, end_lr))

    return schedule


def cosine_between(start: float, end: float, share: float) -> float:
    """Returns the value that goes from ``start`` to ``end`` along half a cosine.

    Args:
        share: of the way, from 0 to 1.
    """
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * share))


# The first is PaddleViT's name.
@schedules.register("warmupcosine", "cosine")
def cosine(at: At, *, warmup_prefix: bool) -> float:
    """Falls along a cosine without restarts (Loshchilov and Hutter 2017, arXiv:1608.03983, Eq. 5)."""
    return at.decay(warmup_prefix, lambda share: 0.5 * (1 + math.cos(math.pi * share)))


@schedules.register("linear")
def linear(at: At, *, warmup_prefix: bool) -> float:
    """Falls by the same step each update."""
    return at.decay(warmup_prefix, lambda share: 1 - share)


@schedules.register("poly")
def poly(at: At, *, warmup_prefix: bool, power: Positive = 2.0) -> float:
    """Falls with a power of the remaining share of the schedule.

    Args:
        power: exponent p of the decay (1 - elapsed share) ** p.
    """
    return at.decay(warmup_prefix, lambda share: (1 - share) ** power)


@schedules.register("step")
def step(at: At, *, decay_rate: float, decay_epochs: Size = 30) -> float:
    """Is multiplied by ``decay_rate`` every ``decay_epochs`` epochs, down to END_LR.

    Args:
        decay_epochs: the learning rate is multiplied by DECAY_RATE every so many epochs.
    """
    return max(at.end, at.base * decay_rate ** (at.epoch // decay_epochs))


@schedules.register("multistep", "multi-step")
def multistep(at: At, *, decay_rate: float, milestones: Sequence[Count] = (30, 60, 90)) -> float:
    """Is multiplied by ``decay_rate`` at given epochs, down to END_LR.

    Args:
        milestones: epochs at whose start the learning rate is multiplied by DECAY_RATE.
    """
    passed = sum(at.epoch >= milestone for milestone in milestones)
    return max(at.end, at.base * decay_rate**passed)


@schedules.register("onecycle")
def onecycle(at: At, *, decay_rate: float) -> float:
    """Falls linearly to ``decay_rate`` times BASE_LR, then linearly to END_LR.

    The first fall takes as many updates as the warm-up. This is ConvMixer's form of the one-cycle
    policy (Smith and Topin 2017, arXiv:1708.07120).
    """
    turns = [at.warmup, 2 * at.warmup, at.total]
    return float(np.interp(at.update, turns, [at.base, at.base * decay_rate, at.end]))


@schedules.register("wsd")
def wsd(
    at: At,
    *,
    wsd_decay_epochs: Factor | None = None,
    wsd_decay: Literal["1-sqrt", "linear"] = "1-sqrt",
) -> float:
    """Stays at BASE_LR and falls to END_LR in the last epochs: warm-up, stable, decay.

    Hu et al. 2024, arXiv:2404.06395; Hagele et al. 2024, arXiv:2405.18392. One long run gives runs
    of several lengths: each continues from a checkpoint before its fall.

    Args:
        wsd_decay_epochs: number of epochs at the end in which the learning rate falls. None: a
            fifth of the epochs after warm-up.
        wsd_decay: how the learning rate falls over the last epochs: "1-sqrt", by the square root of
            the elapsed share, or linearly.
    """
    length = 0.2 * (at.total - at.warmup)
    if wsd_decay_epochs is not None:
        length = wsd_decay_epochs * at.per_epoch
    elapsed = min(1.0, max(0.0, at.update - (at.total - length)) / max(1e-9, length))
    fallen = math.sqrt(elapsed) if wsd_decay == "1-sqrt" else elapsed
    return at.end + (at.base - at.end) * (1 - fallen)


@schedules.register("constant")
def constant(at: At) -> float:
    """Stays at BASE_LR."""
    return at.base
