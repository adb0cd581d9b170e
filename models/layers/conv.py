"""Convolution and max pooling."""

from typing import Any, cast

import paddle
from paddle import nn
from paddle.nn import functional as F

import ops
from models.layers.layout import channels_first, channels_last
from models.layers.linear import add_bias, in_float32


class Conv2D(nn.Conv2D):
    """``paddle.nn.Conv2D``, padded by zeros, whose bias keeps the product's type: see ``add_bias``.

    Shape: [B, C, H, W] -> [B, D, H', W'], or, with ``last``, [B, H, W, C] -> [B, H', W', D].
    """

    def forward(self, x: paddle.Tensor, last: bool = False) -> paddle.Tensor:
        if ops.usable(x) and not isinstance(self._padding, str):
            return self._run_compiled(x, last)
        x = channels_first(x) if last else x
        # Paddle's stub lets _padding be any string; it is what nn.Conv2D checked.
        padding = cast(Any, self._padding)
        product = F.conv2d(
            x, self.weight, None, self._stride, padding, self._dilation, self._groups
        )
        product = (
            product if self.bias is None else add_bias(product, self.bias.reshape([1, -1, 1, 1]))
        )
        return channels_last(product) if last else product

    def _run_compiled(self, x: paddle.Tensor, last: bool) -> paddle.Tensor:
        padding: Any = [self._padding] * 2 if isinstance(self._padding, int) else self._padding
        return ops.convolution(
            x, self.weight, self.bias, self._stride, padding, self._dilation, self._groups, last
        )


class MaxPool2D(nn.MaxPool2D):
    """``paddle.nn.MaxPool2D``, in float32 whatever the type of x. For bfloat16 cuDNN has no
    gradient in Paddle. Paddle's own gradient adds in no fixed order, also where DETERMINISTIC is
    set.
    """

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        pooled = nn.MaxPool2D.forward(self, in_float32(x))  # (Paddle 2.6 traces no super())
        return pooled if pooled.dtype == x.dtype else pooled.astype(x.dtype)


class AvgPool2D(nn.AvgPool2D):
    """``paddle.nn.AvgPool2D``, in float32 whatever the type of x, as ``MaxPool2D``."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        pooled = nn.AvgPool2D.forward(self, in_float32(x))  # (Paddle 2.6 traces no super())
        return pooled if pooled.dtype == x.dtype else pooled.astype(x.dtype)
