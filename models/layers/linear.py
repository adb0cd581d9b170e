"""Linear and LayerNorm, by the compiled operators (ops/) where there are any."""

import paddle
from paddle import nn
from paddle.nn import functional as F

import ops


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """x [..., K] weight [K, N] + bias [N] -> [..., N]."""
    return (ops.linear if ops.usable(x) else F.linear)(x, weight, bias)


class Linear(nn.Linear):
    """x [..., in_features] -> [..., out_features], as ``paddle.nn.Linear``."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """Normalises over the last axis, as ``paddle.nn.LayerNorm``."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if ops.usable(x):
            return ops.layer_norm(x, self.weight, self.bias, self._epsilon)
        return F.layer_norm(x, self._normalized_shape, self.weight, self.bias, self._epsilon)


def set_norm_eps(model: nn.Layer, epsilon: float | None) -> None:
    """Gives every layer norm of ``model`` this epsilon; None leaves them as they are."""
    for layer in model.sublayers() if epsilon is not None else ():
        if isinstance(layer, LayerNorm):
            layer._epsilon = epsilon
