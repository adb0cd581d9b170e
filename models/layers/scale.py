"""Layer scale, and element-wise products and sums, by the compiled operators (ops/) if they can be
used.
"""

from collections.abc import Sequence

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
    if ops.usable(x) and ops.usable(factors):
        return ops.scale_planes(x, factors)
    return x * factors


def weighted_sum(tensors: Sequence[paddle.Tensor], weights: paddle.Tensor) -> paddle.Tensor:
    """Returns the sum of three tensors [B, N, D], each times its weights [B, D]; they are given as
    [3, B, D].
    """
    if ops.usable(weights) and all(map(ops.usable, tensors)):
        return ops.weighted_sum(tensors, weights)
    h, w, c = tensors
    of_h, of_w, of_c = weights.unsqueeze(2)
    return h * of_h + w * of_w + c * of_c


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


def add_to_all(x: paddle.Tensor, addend: paddle.Tensor) -> paddle.Tensor:
    """Returns x [B, ...] + addend [1, ...], which is added to each item of the batch."""
    if ops.usable(x) and ops.usable(addend):
        return ops.add_to_all(x, addend)
    return x + addend


def multiply(x: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
    """Returns the element-wise product of two tensors of the same shape."""
    if ops.usable(x) and ops.usable(y):
        return ops.multiply(x, y)
    return x * y


class LayerScale(nn.Layer):
    """Multiplies each channel by a learnt factor (CaiT; Touvron et al. 2021, arXiv:2103.17239).

    Shape: [..., dim] -> the same.
    """

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.gamma = self.create_parameter([dim], default_initializer=Constant(init_value))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return scale_channels(x, self.gamma)
