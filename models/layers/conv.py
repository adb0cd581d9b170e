"""Convolution."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from models.layers.linear import add_bias


class Conv2D(nn.Conv2D):
    """``paddle.nn.Conv2D`` of [B, C, H, W], padded by zeros, whose bias keeps the product's type: see ``add_bias``."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        product = F.conv2d(x, self.weight, None, self._stride, self._padding, self._dilation, self._groups)
        return product if self.bias is None else add_bias(product, self.bias.reshape([1, -1, 1, 1]))
