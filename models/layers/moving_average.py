"""Moving averages of tensors: averaged weights, and teachers that follow their student."""

from collections.abc import Iterable

import paddle
from paddle import _C_ops


class MovingAverage:
    """Tensors that follow others: average = (1 - weight) * average + weight * new, in place.

    A tensor that isn't of floats becomes a copy of the new one.

    Args:
        pairs: (average, new) tensors of the same shape and type. They are looked up once, so new
            values have to be set in place (``set_value``). An average that comes several times
            is moved once.
    """

    def __init__(self, pairs: Iterable[tuple[paddle.Tensor, paddle.Tensor]]) -> None:
        self._floating: dict[paddle.dtype, list[tuple[paddle.Tensor, paddle.Tensor]]] = {}
        self._others: list[tuple[paddle.Tensor, paddle.Tensor]] = []
        for average, new in {id(average): (average, new) for average, new in pairs}.values():
            if average.is_floating_point():
                self._floating.setdefault(average.dtype, []).append((average, new))
            else:
                self._others.append((average, new))

    @paddle.no_grad()
    def update(self, weight: float) -> None:
        """Moves each average towards its new value.

        Args:
            weight: share of the new value, from 0 to 1.
        """
        for dtype, pairs in self._floating.items():
            # One tensor for all: Paddle would make a new tensor of a number at each call.
            share = paddle.full([], weight, dtype)
            for average, new in pairs:
                _C_ops.lerp_(average, new, share)
        for average, new in self._others:
            paddle.assign(new, average)
