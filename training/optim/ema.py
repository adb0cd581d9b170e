"""Averages of a model's weights."""

import copy
from typing import Any

import paddle
from paddle import _C_ops, nn


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

    @paddle.no_grad()
    def update(self, model: nn.Layer, update: int) -> None:
        """Adds the model's weights after update number ``update`` (from 0) to the average.

        Args:
            model: the same object at every call. Its tensors are looked up once, so new values have
                to be set in place (``set_value``).
        """
        if self._paired_with is not model:
            self._pair(model)
        weight = 1 - self.decay_at(update)
        for dtype, pairs in self._floating.items():
            # One tensor for all: Paddle would make a new tensor of a number at each call.
            share = paddle.full([], weight, dtype)
            for average, new in pairs:
                _C_ops.lerp_(average, new, share)
        for average, new in self._others:
            paddle.assign(new, average)

    def _pair(self, model: nn.Layer) -> None:
        """Pairs each average with the model's tensor.

        A tensor that the model has under several names is averaged once.
        """
        new = model.state_dict()
        pairs = {
            id(average): (average, new[name]) for name, average in self.model.state_dict().items()
        }
        self._floating: dict[paddle.dtype, list[tuple[paddle.Tensor, paddle.Tensor]]] = {}
        for average, tensor in pairs.values():
            if average.is_floating_point():
                self._floating.setdefault(average.dtype, []).append((average, tensor))
        self._others = [pair for pair in pairs.values() if not pair[0].is_floating_point()]
        self._paired_with = model
