"""Learning rates as pure functions of the update: nothing to save, nothing that depends on where a run was resumed."""

import math
from collections.abc import Callable

import numpy as np
from yacs.config import CfgNode


def build_schedule(config: CfgNode, updates_per_epoch: int, effective_batch: int) -> Callable[[int], float]:
    """Returns update (from 0) -> learning rate, by LR_SCHEDULER.

    Linear from WARMUP_START_LR at update 0 to BASE_LR after WARMUP_EPOCHS. Then NAME says: warmupcosine (PaddleViT's
    name) or cosine, linear and poly fall to END_LR, where COOLDOWN_EPOCHS begin (timm's schedulers with
    ``warmup_prefix``; the cosine is eq. 5 of Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts); step and
    multistep multiply BASE_LR by DECAY_RATE at epochs that count from the run's start, END_LR being the lowest;
    onecycle falls linearly to DECAY_RATE * BASE_LR in as many epochs as it rose, then linearly to END_LR (ConvMixer's
    form of Smith and Topin 2017, arXiv:1708.07120).

    Without WARMUP_PREFIX the falling ones began at update 0, and warm-up covers their beginning (timm's default).
    With PER_EPOCH an epoch's updates all have the rate of its "start" (timm's own script), of its "end" (PaddleViT's
    schedulers), or "late", of the start of the epoch before: DeiT's script steps to the epoch that is over.
    With LINEAR_SCALED_LR the three rates are for a batch of that size and scale with ``effective_batch``: linearly
    (Goyal et al. 2017, arXiv:1706.02677), or with LR_SCALING "sqrt" by the square root of the ratio. LR_SCALED "base"
    scales BASE_LR alone.
    """
    train, options = config.TRAIN, config.TRAIN.LR_SCHEDULER
    scale = effective_batch / train.LINEAR_SCALED_LR if train.LINEAR_SCALED_LR else 1.0
    scale = math.sqrt(scale) if train.LR_SCALING == "sqrt" else scale
    bounds = scale if train.LR_SCALED == "all" else 1.0
    base_lr, start_lr, end_lr = train.BASE_LR * scale, train.WARMUP_START_LR * bounds, train.END_LR * bounds
    warmup = train.WARMUP_EPOCHS * updates_per_epoch
    began = warmup if options.WARMUP_PREFIX else 0
    total = (train.NUM_EPOCHS - train.COOLDOWN_EPOCHS) * updates_per_epoch
    falling = {
        "warmupcosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": lambda progress: 1 - progress,
        "poly": lambda progress: (1 - progress) ** options.POWER,
    }
    stepping = {
        "step": lambda epoch: epoch // options.DECAY_EPOCHS,
        "multistep": lambda epoch: sum(epoch >= milestone for milestone in options.MILESTONES),
    }
    falling["cosine"], stepping["multi-step"] = falling["warmupcosine"], stepping["multistep"]

    def schedule(update: int) -> float:
        if options.PER_EPOCH:
            shift = {"start": 0, "late": -1}.get(options.PER_EPOCH, 1)
            update = max(0, update // updates_per_epoch + shift) * updates_per_epoch
        if update < warmup:
            return start_lr + (base_lr - start_lr) * update / warmup
        if options.NAME in falling:
            progress = min(1.0, (update - began) / max(1, total - began))
            return end_lr + (base_lr - end_lr) * falling[options.NAME](progress)
        if options.NAME == "constant":
            return base_lr
        if options.NAME == "onecycle":
            turns = [warmup, 2 * warmup, total]
            return float(np.interp(update, turns, [base_lr, base_lr * options.DECAY_RATE, end_lr]))
        steps = stepping[options.NAME](min(update, total) // updates_per_epoch)
        return max(end_lr, base_lr * options.DECAY_RATE**steps)

    return schedule
