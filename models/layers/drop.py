"""Stochastic depth."""

import paddle
from paddle import nn


class DropPath(nn.Layer):
    """Drops a residual branch per sample with probability ``drop_prob`` (Huang et al. 2016) and rescales the rest."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1.0 - self.drop_prob
        mask = paddle.bernoulli(paddle.full([x.shape[0]] + [1] * (x.ndim - 1), keep, dtype="float32"))
        return x * (mask / keep).astype(x.dtype)
