"""Global response normalisation."""

import paddle
from paddle import nn
from paddle.nn.initializer import Constant

import ops
from models.layers.linear import in_float32

# of a sum of squares: the root has no gradient at 0, where a channel may be on every place
_LEAST = 1e-30


class GlobalResponseNorm(nn.Layer):
    """Channels that respond more than the others of an image are raised (Woo et al. 2023,
    arXiv:2301.00808).

    x + weight * x * n + bias, where n is a channel's Euclidean norm over the places over the
    channels' mean of it. Both parameters start at 0. It computes in float32 under autocast, as timm
    does.

    Args:
        dim: channels.
        channels_first: Shape [B, dim, H, W] -> the same; else [B, H, W, dim] -> the same.
    """

    def __init__(self, dim: int, channels_first: bool = False) -> None:
        super().__init__()
        self.weight = self.create_parameter([dim], default_initializer=Constant(0.0))
        self.bias = self.create_parameter([dim], default_initializer=Constant(0.0))
        self.places, self.channels = ([2, 3], 1) if channels_first else ([1, 2], -1)
        self.shape = [dim, 1, 1] if channels_first else [dim]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = in_float32(x)
        if self.channels == -1 and ops.usable(x):
            return ops.response_norm(x, self.weight, self.bias)
        norm = (x * x).sum(axis=self.places, keepdim=True).clip(min=_LEAST).sqrt()
        norm = norm / (norm.mean(axis=self.channels, keepdim=True) + 1e-6)
        return x * (1 + self.weight.reshape(self.shape) * norm) + self.bias.reshape(self.shape)
