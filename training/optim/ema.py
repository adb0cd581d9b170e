"""Averages of a model's weights."""

import copy
from typing import Any

import paddle
from paddle import _C_ops, nn


class ModelEma:
    """An exponential moving average of a model's parameters and buffers, kept beside it (timm's
    ``ModelEmaV3``).

    ema = d * ema + (1 - d) * model. d is 0 at the first update and then ``decay``. With ``warmup``
    d is at most 1 - (1 + n) ** (-2 / 3) at update n. Integer buffers are copied.

    Args:
        model: a layer, not wrapped.
        decay: d, per update.
        warmup: whether d grows to ``decay``, so that the first, poor weights are soon forgotten.

    Attributes:
        model: the average, in evaluation mode.
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
        """Returns d at an update, counted from 0: a pure function, so that there is nothing to
        save.
        """
        warming = 1 - (1 + update) ** (-2 / 3)  # 0 at update 0
        return min(self.decay, warming) if self.warmup or update == 0 else self.decay

    @paddle.no_grad()
    def update(self, model: nn.Layer, update: int) -> None:
        """Takes in the weights that update number ``update`` (from 0) has led to.

        Args:
            model: the same every time, with the tensors that it had at first; new values come by
                ``set_value``.
        """
        if self._paired_with is not model:
            self._pair(model)
        weight = 1 - self.decay_at(update)
        for dtype, pairs in self._floating.items():
            # one for all: a number would become a tensor for each
            share = paddle.full([], weight, dtype)
            for average, new in pairs:
                _C_ops.lerp_(average, new, share)
        for average, new in self._others:
            paddle.assign(new, average)

    def _pair(self, model: nn.Layer) -> None:
        """Finds the model's tensor of each average; a tensor of several names is averaged once."""
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
