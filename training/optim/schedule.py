"""Learning rates as pure functions of the update: nothing to save, nothing that depends on where a
run was resumed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from settings.keys import Count, Factor, Positive, Size
from settings.options import Configuration
from settings.registry import schedules


class At(NamedTuple):
    """What every schedule gets: an update after warm-up, and the rates between which it moves.

    Args:
        update: from 0 on, as the run counts them; between two where TRAIN.MAX_MINUTES shortens a
            run.
        epoch: that of ``update``, from 0, and at most the one in which COOLDOWN_EPOCHS begin.
        warmup: updates of the warm-up.
        total: updates up to the cool-down.
        per_epoch: updates of an epoch.
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
        """Returns the rate on the way from ``base`` to ``end``: ``left`` gives, of the share of the
        way, what is left.

        The way begins after warm-up (timm's schedulers with ``warmup_prefix``), or at update 0
        (timm's default).
        """
        began = self.warmup if after_warmup else 0
        return self.end + (self.base - self.end) * left(
            min(1.0, (self.update - began) / max(1, self.total - began))
        )


def rate_scale(config: Configuration, effective_batch: int) -> float:
    """Returns the factor on BASE_LR, by LINEAR_SCALED_LR and LR_SCALING."""
    train = config.TRAIN
    scale = effective_batch / train.LINEAR_SCALED_LR if train.LINEAR_SCALED_LR else 1.0
    return math.sqrt(scale) if train.LR_SCALING == "sqrt" else scale


def build_schedule(
    config: Configuration, updates_per_epoch: int, effective_batch: int
) -> Callable[[float], float]:
    """Returns update (from 0) -> learning rate, by LR_SCHEDULER.

    Linear from WARMUP_START_LR at update 0 to BASE_LR after WARMUP_EPOCHS; then as the schedule
    NAME says.

    With PER_EPOCH all updates of an epoch have one rate: that of its "start" (timm's own script),
    or of its "end" (PaddleViT's schedulers). "late" is that of the start of the epoch before:
    DeiT's script steps to the epoch that is over. With LINEAR_SCALED_LR the three rates are for a
    batch of that size and scale with ``effective_batch``. They scale linearly (Goyal et al. 2017,
    arXiv:1706.02677), or with LR_SCALING "sqrt" by the square root of the ratio. LR_SCALED "base"
    scales BASE_LR alone.
    """
    train = config.TRAIN
    options = config.TRAIN.LR_SCHEDULER
    chosen = schedules.choose(config)
    scale = rate_scale(config, effective_batch)
    bounds = scale if train.LR_SCALED == "all" else 1.0
    base_lr = train.BASE_LR * scale
    start_lr = train.WARMUP_START_LR * bounds
    end_lr = train.END_LR * bounds
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


@schedules.register("warmupcosine", "cosine")  # the first is PaddleViT's name
def cosine(at: At, *, warmup_prefix: bool) -> float:
    """Falls along a cosine: Eq. 5 of Loshchilov and Hutter 2017, arXiv:1608.03983, without
    restarts.
    """
    return at.decay(warmup_prefix, lambda share: 0.5 * (1 + math.cos(math.pi * share)))


@schedules.register("linear")
def linear(at: At, *, warmup_prefix: bool) -> float:
    """Falls by the same step each update."""
    return at.decay(warmup_prefix, lambda share: 1 - share)


@schedules.register("poly")
def poly(at: At, *, warmup_prefix: bool, power: Positive = 2.0) -> float:
    """Falls with a power of what is left of the way.

    Args:
        power: its exponent.
    """
    return at.decay(warmup_prefix, lambda share: (1 - share) ** power)


@schedules.register("step")
def step(at: At, *, decay_rate: float, decay_epochs: Size = 30) -> float:
    """Is multiplied by ``decay_rate`` again and again; END_LR is the lowest.

    Args:
        decay_epochs: epochs between two such steps, from the run's start.
    """
    return max(at.end, at.base * decay_rate ** (at.epoch // decay_epochs))


@schedules.register("multistep", "multi-step")
def multistep(at: At, *, decay_rate: float, milestones: Sequence[Count] = (30, 60, 90)) -> float:
    """Is multiplied by ``decay_rate`` at given epochs; END_LR is the lowest.

    Args:
        milestones: these epochs, from the run's start.
    """
    return max(
        at.end, at.base * decay_rate ** sum(at.epoch >= milestone for milestone in milestones)
    )


@schedules.register("onecycle")
def onecycle(at: At, *, decay_rate: float) -> float:
    """Falls linearly to ``decay_rate`` of BASE_LR in as many updates as it rose, then linearly to
    END_LR: ConvMixer's form of Smith and Topin 2017, arXiv:1708.07120.
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
    """Stays at BASE_LR and falls to END_LR at the end: warm-up, stable, decay (Hu et al. 2024,
    arXiv:2404.06395; Hagele et al. 2024, arXiv:2405.18392). One long run serves several lengths:
    each goes on from a checkpoint before its fall.

    Args:
        wsd_decay_epochs: the last epochs, in which the rate falls; None: a fifth of what follows
            the warm-up.
        wsd_decay: what is taken away: the square root of the share of the fall, or the share.
    """
    length = (
        0.2 * (at.total - at.warmup)
        if wsd_decay_epochs is None
        else wsd_decay_epochs * at.per_epoch
    )
    gone = min(1.0, max(0.0, at.update - (at.total - length)) / max(1e-9, length))
    return at.end + (at.base - at.end) * (1 - (math.sqrt(gone) if wsd_decay == "1-sqrt" else gone))


@schedules.register("constant")
def constant(at: At) -> float:
    """Stays at BASE_LR."""
    return at.base
