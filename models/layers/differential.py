"""Differential attention (Ye et al. 2024, arXiv:2410.05258).

The attention weights are the difference of two attention maps, which cancels their common noise.
"""

import math

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Normal

from models.layers.attention import Attention, Heads
from models.layers.linear import in_float32
from models.layers.parallel import ParallelBlock

_LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class RMSNorm(nn.Layer):
    """x / sqrt(mean(x ** 2) + epsilon) * weight, over the last axis (Zhang and Sennrich 2019,
    arXiv:1910.07467).
    """

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = self.create_parameter([dim], default_initializer=Constant(1.0))
        self.epsilon = epsilon

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = in_float32(x)
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + self.epsilon) * self.weight


class DifferentialHeads(Heads):
    """A mixin for a subclass of ``Heads``, whose attention it replaces by differential attention.

    The weights of a head's values are one attention map minus a learnt share of another. An RMS
    norm follows. ``add_lambdas`` has to be called once, after the constructor.
    """

    maps = 2

    def add_lambdas(self, block: int) -> None:
        """Adds the parameters of the share. It starts at 0.8 - 0.6 exp(-0.3 block), as in the
        paper.

        Args:
            block: the index of this layer's block, from 0.
        """
        self.first_share = 0.8 - 0.6 * math.exp(-0.3 * block)
        for name in _LAMBDAS:
            vector = self.create_parameter(
                [self.head_dim // self.maps], default_initializer=Normal(std=0.1)
            )
            self.add_parameter(name, vector)
        self.sub_norm = RMSNorm(self.head_dim, 1e-5)

    def attend(self, qkv: paddle.Tensor) -> paddle.Tensor:
        length = qkv.shape[1]
        heads = self.num_heads
        width = self.head_dim
        qkv = qkv.reshape([-1, length, 3, heads, width])
        # Queries and keys of twice as many heads, two for each map: [2, B, 2 H, N, d / 2].
        qk = qkv[:, :, :2].reshape([-1, length, 2, 2 * heads, width // 2])
        qk = qk.transpose([2, 0, 3, 1, 4])
        weights = self._weights(qk[0], qk[1]).reshape([-1, heads, 2, length, length])
        q1, k1, q2, k2 = (getattr(self, name) for name in _LAMBDAS)
        share = paddle.exp((q1 * k1).sum()) - paddle.exp((q2 * k2).sum()) + self.first_share
        v = qkv[:, :, 2].transpose([0, 2, 1, 3])
        x = paddle.matmul(weights[:, :, 0] - share * weights[:, :, 1], v)
        x = self.sub_norm(x) * (1 - self.first_share)
        return x.transpose([0, 2, 1, 3]).reshape([-1, length, heads * width])

    def _weights(self, q: paddle.Tensor, k: paddle.Tensor) -> paddle.Tensor:
        """Returns the attention maps: q, k [B, 2 H, N, d / 2] -> [B, 2 H, N, N]."""
        scores = paddle.matmul(self.q_norm(q) * self.scale, self.k_norm(k), transpose_y=True)
        return self.attn_drop(F.softmax(scores, axis=-1))


class DifferentialAttention(DifferentialHeads, Attention):
    """``Attention`` with differential heads, as timm's ``DiffAttention``.

    Shape: [B, N, D] -> [B, N, D].
    """


class DifferentialParallelBlock(DifferentialHeads, ParallelBlock):
    """``ParallelBlock`` with differential heads, as timm's block of this name.

    One Linear is the last layer of both branches.
    """

    joined = True
