"""Averages of a model's weights."""

import copy

import paddle
from paddle import nn


class ModelEma:
    """An exponential moving average of a model's parameters and buffers, kept beside it (timm's ``ModelEmaV3``).

    ema = d * ema + (1 - d) * model, where d is 0 at the first update and then ``decay``, or with ``warmup`` at most
    1 - (1 + n) ** (-2 / 3) at update n. Integer buffers are copied.

    Args:
        model: not wrapped.
        decay: d, per update.
        warmup: whether d grows to ``decay``, so that the first, poor weights are soon forgotten.

    Attributes:
        model: the average, in evaluation mode.
    """

    def __init__(self, model: nn.Layer, decay: float, warmup: bool = False) -> None:
        self.model = copy.deepcopy(model)
        self.model.eval()
        for parameter in self.model.parameters():
            parameter.stop_gradient = True
        self.decay, self.warmup = decay, warmup

    def decay_at(self, update: int) -> float:
        """Returns d at an update, counted from 0: a pure function, so that there is nothing to save."""
        warming = 1 - (1 + update) ** (-2 / 3)  # 0 at update 0
        return min(self.decay, warming) if self.warmup or update == 0 else self.decay

    @paddle.no_grad()
    def update(self, model: nn.Layer, update: int) -> None:
        """Takes in the weights that update number ``update`` (from 0) has led to."""
        weight, new = 1 - self.decay_at(update), model.state_dict()
        for name, average in self.model.state_dict().items():
            if average.is_floating_point():
                average.lerp_(new[name], weight)
            else:
                paddle.assign(new[name], average)
