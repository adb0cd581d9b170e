"""Global response normalisation of ConvNeXt V2."""

import paddle
from paddle import nn
from paddle.nn.initializer import Constant

import ops
from models.layers.linear import in_float32

# The least sum of squares. The root has no gradient at 0, which a channel that is 0 everywhere has.
_LEAST = 1e-30


class GlobalResponseNorm(nn.Layer):
    """x + weight * x * n + bias, where n is the norm of a channel over the mean of all norms.

    The norm of a channel is the Euclidean norm over all places of an image (Woo et al. 2023,
    arXiv:2301.00808). Both parameters start at 0. Under autocast it is computed in float32, as in
    timm.

    Args:
        dim: channels.
        channels_first: whether x is [B, dim, H, W]; otherwise it is [B, H, W, dim].

    Shape: that of x -> the same.
    """

    def __init__(self, dim: int, channels_first: bool = False) -> None:
        super().__init__()
        self.weight = self.create_parameter([dim], default_initializer=Constant(0.0))
        self.bias = self.create_parameter([dim], default_initializer=Constant(0.0))
        if channels_first:
            self.place_axes = [2, 3]
            self.channel_axis = 1
            self.shape = [dim, 1, 1]
        else:
            self.place_axes = [1, 2]
            self.channel_axis = -1
            self.shape = [dim]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = in_float32(x)
        if self.channel_axis == -1 and ops.usable(x):
            return ops.response_norm(x, self.weight, self.bias)
        norm = (x * x).sum(axis=self.place_axes, keepdim=True).clip(min=_LEAST).sqrt()
        norm = norm / (norm.mean(axis=self.channel_axis, keepdim=True) + 1e-6)
        return x * (1 + self.weight.reshape(self.shape) * norm) + self.bias.reshape(self.shape)
