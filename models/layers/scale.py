"""Layer scale, and element-wise factors and sums, by the compiled operators (ops/) if they can be used."""

import paddle
from paddle import nn
from paddle.nn.initializer import Constant

import ops


def scale_channels(
    x: paddle.Tensor, factors: paddle.Tensor, shift: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Returns x [..., N] times factors [N], plus shift [N] if given."""
    if ops.usable(x):
        return ops.scale_channels(x, factors, shift)
    return x * factors if shift is None else x * factors + shift


def scale_planes(x: paddle.Tensor, factors: paddle.Tensor) -> paddle.Tensor:
    """Returns x [B, C, H, W] times factors [C, 1, 1] or [B, C, 1, 1]."""
    return ops.scale_planes(x, factors) if ops.usable(x) and ops.usable(factors) else x * factors


def times_samples(x: paddle.Tensor, factors: paddle.Tensor) -> paddle.Tensor:
    """Returns x [B, ...] times a factor of each sample [B], in the type of x."""
    return x * factors.reshape([-1] + [1] * (x.ndim - 1)).astype(x.dtype)


def add_branch(
    x: paddle.Tensor, branch: paddle.Tensor, factors: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Returns x + branch, both [B, ...]. If ``factors`` [B] are given, each sample's branch is
    multiplied by its factor first.
    """
    if ops.usable(x) and ops.usable(branch):
        return ops.residual(x, branch, factors)
    if factors is not None:
        branch = times_samples(branch, factors)
    return x + branch


def add_to_all(x: paddle.Tensor, one: paddle.Tensor) -> paddle.Tensor:
    """Returns x [B, ...] + one [1, ...], which is the same for all of the batch."""
    return ops.add_to_all(x, one) if ops.usable(x) and ops.usable(one) else x + one


def multiply(x: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
    """Returns x * y, element by element; both have the same shape."""
    return ops.multiply(x, y) if ops.usable(x) and ops.usable(y) else x * y


class LayerScale(nn.Layer):
    """Multiplies each channel by a learnt factor (CaiT; Touvron et al. 2021). Shape: [..., dim] ->
    the same.
    """

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.gamma = self.create_parameter([dim], default_initializer=Constant(init_value))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return scale_channels(x, self.gamma)
