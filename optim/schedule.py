"""Learning rates as pure functions of the update: nothing to save, nothing that depends on where a run was resumed."""

import math
from collections.abc import Callable

from yacs.config import CfgNode


def warmup_cosine(
    update: int, total: int, warmup: int, base_lr: float, start_lr: float = 0.0, end_lr: float = 0.0
) -> float:
    """Linear from start_lr (update 0) to base_lr (update ``warmup``), then a cosine to end_lr (update ``total``).

    Loshchilov and Hutter 2017 (arXiv:1608.03983), eq. 5 without restarts; PaddleViT's ``warmupcosine``, per update.
    """
    if update < warmup:
        return start_lr + (base_lr - start_lr) * update / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return end_lr + (base_lr - end_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def build_schedule(config: CfgNode, updates_per_epoch: int, effective_batch: int) -> Callable[[int], float]:
    """Returns update (from 0) -> learning rate.

    With LINEAR_SCALED_LR the configured rates are for a batch of that size and scale linearly with
    ``effective_batch`` (Goyal et al. 2017, arXiv:1706.02677).
    """
    train = config.TRAIN
    scale = effective_batch / train.LINEAR_SCALED_LR if train.LINEAR_SCALED_LR else 1.0
    total, warmup = (epochs * updates_per_epoch for epochs in (train.NUM_EPOCHS, train.WARMUP_EPOCHS))
    rates = (train.BASE_LR * scale, train.WARMUP_START_LR * scale, train.END_LR * scale)
    return lambda update: warmup_cosine(update, total, warmup, *rates)
