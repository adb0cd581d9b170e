"""Averages of a model's weights."""

import copy
from typing import Any

from paddle import nn

from models.layers.moving_average import MovingAverage


class ModelEma:
    """An exponential moving average of a model's parameters and buffers (timm's ``ModelEmaV3``).

    At each update, ema = d * ema + (1 - d) * model. Integer buffers are copied. The first update
    has d = 0, so it copies the model; later updates have d = ``decay``. With ``warmup``, update n
    has d = 1 - (1 + n) ** (-2 / 3) as long as that is below ``decay``.

    Args:
        model: a layer that isn't wrapped.
        decay: d, per update.
        warmup: whether d grows to ``decay``, so that the first, poor weights are soon forgotten.

    Attributes:
        model: a copy of the model with the averages, in evaluation mode.
    """

    def __init__(self, model: Any, decay: float, warmup: bool = False) -> None:
        self.model = copy.deepcopy(model)
        self.model.eval()
        for parameter in self.model.parameters():
            parameter.stop_gradient = True
        self.decay = decay
        self.warmup = warmup
        self._paired_with: nn.Layer | None = None

    def decay_at(self, update: int) -> float:
        """Returns d at an update, counted from 0.

        It depends on nothing else, so a checkpoint needn't store it.
        """
        if self.warmup or update == 0:
            return min(self.decay, 1 - (1 + update) ** (-2 / 3))
        return self.decay

    def update(self, model: nn.Layer, update: int) -> None:
        """Adds the model's weights after update number ``update`` (from 0) to the average.

        Args:
            model: the same object at every call. Its tensors are looked up once, so new values have
                to be set in place (``set_value``).
        """
        if self._paired_with is not model:
            # A tensor that the model has under several names is averaged once.
            new = model.state_dict()
            averages = self.model.state_dict().items()
            self._average = MovingAverage((average, new[name]) for name, average in averages)
            self._paired_with = model
        self._average.update(1 - self.decay_at(update))
