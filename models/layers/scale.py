"""Layer scale."""

import paddle
from paddle import nn
from paddle.nn.initializer import Constant


class LayerScale(nn.Layer):
    """Multiplies each channel by a learnt factor (Touvron et al. 2021, CaiT). Shape: [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.gamma = self.create_parameter([dim], default_initializer=Constant(init_value))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x * self.gamma
