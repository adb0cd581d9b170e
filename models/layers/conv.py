"""Convolution, max pooling and average pooling of maps."""

from collections.abc import Sequence
from typing import Any, cast

import paddle
from paddle import nn
from paddle.nn import functional as F

import ops
from models.layers.graph_sizes import means_of_regions
from models.layers.layout import channels_first, channels_last
from models.layers.linear import add_bias, in_float32


class Conv2D(nn.Conv2D):
    """``paddle.nn.Conv2D`` with zero padding, whose output keeps the type of the product
    (``add_bias``).

    Shape: [B, C, H, W] -> [B, D, H', W']; with ``last`` (channels last) [B, H, W, C] -> [B, H', W',
    D].
    """

    def forward(self, x: paddle.Tensor, last: bool = False) -> paddle.Tensor:
        if ops.usable(x) and not isinstance(self._padding, str):
            return self._run_compiled(x, last)
        if last:
            x = channels_first(x)
        # Paddle's stub allows any string as _padding. nn.Conv2D has checked it.
        padding = cast(Any, self._padding)
        product = F.conv2d(
            x, self.weight, None, self._stride, padding, self._dilation, self._groups
        )
        if self.bias is not None:
            product = add_bias(product, self.bias.reshape([1, -1, 1, 1]))
        return channels_last(product) if last else product

    def _run_compiled(self, x: paddle.Tensor, last: bool) -> paddle.Tensor:
        padding: Any = [self._padding] * 2 if isinstance(self._padding, int) else self._padding
        return ops.convolution(
            x, self.weight, self.bias, self._stride, padding, self._dilation, self._groups, last
        )


def depthwise(x: paddle.Tensor, kernels: paddle.Tensor) -> paddle.Tensor:
    """Returns maps, each channel convolved with a kernel of its own, with zeros around the maps.

    Args:
        x: [B, H, W, C].
        kernels: [C, 1, h, w], with odd h and w.
    """
    channels, _, *sides = kernels.shape
    padding = [side // 2 for side in sides]
    if ops.usable(x):
        return ops.convolution(x, kernels, None, [1, 1], padding, [1, 1], channels, True)
    return channels_last(F.conv2d(channels_first(x), kernels, None, 1, padding, 1, channels))


class MaxPool2D(nn.MaxPool2D):
    """``paddle.nn.MaxPool2D``, computed in float32. The output has the type of x.

    With bfloat16, Paddle can't use the gradient of cuDNN, and its own adds in no fixed order, even
    where DETERMINISTIC is set.
    """

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        # Not super(), which Paddle 2.6 can't trace.
        pooled = nn.MaxPool2D.forward(self, in_float32(x))
        return pooled if pooled.dtype == x.dtype else pooled.astype(x.dtype)


class AvgPool2D(nn.AvgPool2D):
    """``paddle.nn.AvgPool2D``, computed in float32 as ``MaxPool2D``."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        # Not super(), which Paddle 2.6 can't trace.
        pooled = nn.AvgPool2D.forward(self, in_float32(x))
        return pooled if pooled.dtype == x.dtype else pooled.astype(x.dtype)


def adaptive_mean(x: paddle.Tensor, size: Sequence[int] | int) -> paddle.Tensor:
    """Returns the means of maps over a grid of regions, computed in float32 as ``MaxPool2D``.

    Args:
        x: [B, D, H, W].
        size: rows and columns of the result; one number for both.
    """
    sides: Any = [size, size] if isinstance(size, int) else size
    if paddle.in_dynamic_mode():
        pooled = F.adaptive_avg_pool2d(in_float32(x), sides)
    else:
        pooled = means_of_regions(in_float32(x), sides)
    return pooled if pooled.dtype == x.dtype else pooled.astype(x.dtype)
