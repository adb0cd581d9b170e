"""Convolution with batch norm, and the scaling of channels that goes with it."""

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
    """Convolution without a bias, batch norm, and ``act`` if any (timm's ``ConvNormAct``).

    Args:
        act: the activation function, such as ``F.relu``; None: none.
        options: of ``nn.Conv2D``: stride, groups.
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
    """Scales each channel by a factor in 0..1 that all channels' means decide (Hu et al. 2018,
    arXiv:1709.01507).
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = Conv2D(dim, hidden_dim, 1)
        self.fc2 = Conv2D(hidden_dim, dim, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        means = mean_of_places(x).unsqueeze([-1, -2])
        return scale_planes(x, F.sigmoid(self.fc2(relu(self.fc1(means)))))
