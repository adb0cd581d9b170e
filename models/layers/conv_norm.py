"""Convolution with batch norm, and squeeze and excitation."""

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from models.layers.activations import relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.layout import mean_of_places
from models.layers.scale import scale_planes


class ConvNorm(nn.Layer):
    """A convolution without a bias, batch norm, and an activation if one is given (timm's
    ``ConvNormAct``).

    Args:
        in_dim: channels of the input.
        dim: channels of the output.
        kernel_size: side of the kernels.
        act: the activation function, such as ``relu``; None: there is none.
        options: other arguments of ``Conv2D``: ``stride``, ``groups``.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        kernel_size: int,
        act: Callable[[paddle.Tensor], paddle.Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.conv = Conv2D(
            in_dim, dim, kernel_size, padding=kernel_size // 2, bias_attr=False, **options
        )
        self.bn = BatchNorm2D(dim)
        self.act = act

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.bn(self.conv(x), self.act)


class SqueezeExcite(nn.Layer):
    """Multiplies each channel by a factor in 0..1, computed from the means of all channels (Hu et
    al. 2018, arXiv:1709.01507).

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = Conv2D(dim, hidden_dim, 1)
        self.fc2 = Conv2D(hidden_dim, dim, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return scale_planes(x, self.factors(x))

    def factors(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the factors [B, dim, 1, 1] of x [B, dim, H, W]."""
        means = mean_of_places(x).unsqueeze([-1, -2])
        return F.sigmoid(self.fc2(relu(self.fc1(means))))
