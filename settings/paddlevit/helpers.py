"""Small parts of PaddleViT's ``utils``, for programs that were written for PaddleViT.

This toolkit itself uses none of them.
"""

import math
from collections.abc import Callable, Sequence

from paddle import nn
from paddle.optimizer.lr import LRScheduler

__all__ = ["WarmupCosineScheduler", "get_exclude_from_weight_decay_fn", "skip_weight_decay_fn"]


class WarmupCosineScheduler(LRScheduler):
    """A schedule that sets a rate for each epoch.

    The rate is linear from ``warmup_start_lr`` to ``start_lr``, and then follows a cosine to
    ``end_lr``. Runs of this toolkit have ``training.optim.build_schedule``, whose rate is a
    function of the update.

    Args:
        learning_rate: has no effect, as in PaddleViT.
        warmup_epochs: number of epochs of the linear part.
        total_epochs: number of epochs of both parts.
        cycles: number of waves of the cosine. With 0.5, it ends at ``end_lr``.
        last_epoch: the last epoch that is done; -1: none.
    """

    def __init__(
        self,
        learning_rate: float,
        warmup_start_lr: float,
        start_lr: float,
        end_lr: float,
        warmup_epochs: int,
        total_epochs: int,
        cycles: float = 0.5,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.warmup_epochs = warmup_epochs
        self.total_epochs = total_epochs
        self.warmup_start_lr = warmup_start_lr
        self.start_lr = start_lr
        self.end_lr = end_lr
        self.cycles = cycles
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        """Returns the rate of the epoch after ``last_epoch``."""
        if self.last_epoch < self.warmup_epochs:
            share = self.last_epoch / self.warmup_epochs
            return self.warmup_start_lr + share * (self.start_lr - self.warmup_start_lr)
        epochs = max(1, self.total_epochs - self.warmup_epochs)
        share = (self.last_epoch - self.warmup_epochs) / epochs
        height = 0.5 * (1 + math.cos(2 * math.pi * self.cycles * share))
        return max(0.0, self.end_lr + height * (self.start_lr - self.end_lr))


def get_exclude_from_weight_decay_fn(
    exclude_list: Sequence[str] = (),
) -> Callable[[str], bool] | None:
    """Returns a function that says by a parameter's name whether it decays.

    A parameter doesn't decay if its name ends with an entry of the list. The names are those of
    ``named_parameters``. AdamW itself asks for other names (``linear_0.b_0``), which only
    ``skip_weight_decay_fn`` knows.

    Returns:
        the function, or None for an empty list.
    """
    endings = tuple(exclude_list)
    if not endings:
        return None
    return lambda name: not name.endswith(endings)


def skip_weight_decay_fn(
    model: nn.Layer, skip_list: Sequence[str] = (), filter_bias_and_bn: bool = True
) -> Callable[[str], bool] | None:
    """Returns AdamW's ``apply_decay_param_fun``, which says whether a parameter decays.

    PaddleViT's function compares names of ``named_parameters`` with Paddle's own
    (``linear_0.b_0``), so that it excludes no parameter. This one knows both.

    Args:
        skip_list: names of parameters that don't decay, as of ``model.named_parameters()``.
        filter_bias_and_bn: whether biases and parameters of one dimension don't decay, either.

    Returns:
        the function, or None if all parameters decay.
    """
    if not skip_list and not filter_bias_and_bn:
        return None
    excluded = set()
    for name, parameter in model.named_parameters():
        is_bias_or_norm = parameter.ndim == 1 or name.endswith(".bias")
        if (filter_bias_and_bn and is_bias_or_norm) or name in skip_list:
            excluded |= {name, parameter.name}
    return lambda name: name not in excluded
