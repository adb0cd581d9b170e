"""Learning rates as pure functions of the update: nothing to save, nothing that depends on where a run was resumed."""

import math
from collections.abc import Callable

from yacs.config import CfgNode


def build_schedule(config: CfgNode, updates_per_epoch: int, effective_batch: int) -> Callable[[int], float]:
    """Returns update (from 0) -> learning rate, by LR_SCHEDULER.

    Linear from WARMUP_START_LR at update 0 to BASE_LR after WARMUP_EPOCHS. Then NAME says: warmupcosine (PaddleViT's
    name) or cosine, linear and poly fall to END_LR, where COOLDOWN_EPOCHS begin (timm's schedulers with
    ``warmup_prefix``; the cosine is eq. 5 of Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts); step and
    multistep multiply BASE_LR by DECAY_RATE at epochs that count from the run's start, END_LR being the lowest.

    With PER_EPOCH an epoch's updates all have the rate that its end would have, as PaddleViT's schedulers give.
    With LINEAR_SCALED_LR the three rates are for a batch of that size and scale with ``effective_batch``: linearly
    (Goyal et al. 2017, arXiv:1706.02677), or with LR_SCALING "sqrt" by the square root of the ratio.
    """
    train, options = config.TRAIN, config.TRAIN.LR_SCHEDULER
    scale = effective_batch / train.LINEAR_SCALED_LR if train.LINEAR_SCALED_LR else 1.0
    scale = math.sqrt(scale) if train.LR_SCALING == "sqrt" else scale
    base_lr, start_lr, end_lr = train.BASE_LR * scale, train.WARMUP_START_LR * scale, train.END_LR * scale
    warmup = train.WARMUP_EPOCHS * updates_per_epoch
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
            update += updates_per_epoch - update % updates_per_epoch
        if update < warmup:
            return start_lr + (base_lr - start_lr) * update / warmup
        if options.NAME in falling:
            progress = min(1.0, (update - warmup) / max(1, total - warmup))
            return end_lr + (base_lr - end_lr) * falling[options.NAME](progress)
        if options.NAME == "constant":
            return base_lr
        steps = stepping[options.NAME](min(update, total) // updates_per_epoch)
        return max(end_lr, base_lr * options.DECAY_RATE**steps)

    return schedule
