"""Layer scale."""

import paddle
from paddle import nn
from paddle.nn.initializer import Constant

import ops


def scaled(x: paddle.Tensor, factors: paddle.Tensor) -> paddle.Tensor:
    """Returns x [..., N] times factors [N], by the compiled operator where there is one."""
    return ops.scaled(x, factors) if ops.usable(x) else x * factors


class LayerScale(nn.Layer):
    """Multiplies each channel by a learnt factor (Touvron et al. 2021, CaiT). Shape: [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.gamma = self.create_parameter([dim], default_initializer=Constant(init_value))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return scaled(x, self.gamma)
