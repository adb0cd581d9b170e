"""Pooling by attention."""

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import TruncatedNormal

from models.layers.linear import LayerNorm, Linear
from models.layers.mlp import hidden_width, make_mlp


class AttentionPool(nn.Layer):
    """A learnt query attends to all tokens, then x + mlp(norm(x)) (Lee et al. 2019, arXiv:1810.00825, as SigLIP's).

    It is timm's ``AttentionPoolLatent`` with one latent. Shape: [B, N, D] -> [B, D].

    Args:
        dim: channels D.
        num_heads: heads of the attention.
        mlp_ratio, act: of the MLP.
        epsilon: of the norm.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, epsilon: float, act: str) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.latent = self.create_parameter([1, 1, dim], default_initializer=TruncatedNormal(std=dim**-0.5))
        self.q = Linear(dim, dim)
        self.kv = Linear(dim, 2 * dim)
        self.proj = Linear(dim, dim)
        self.norm = LayerNorm(dim, epsilon=epsilon)
        self.mlp = make_mlp(dim, hidden_width(dim, mlp_ratio), act=act)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, _ = x.shape
        q = self.q(self.latent).reshape([1, 1, self.num_heads, self.head_dim]).transpose([0, 2, 1, 3])
        kv = self.kv(x).reshape([batch, length, 2, self.num_heads, self.head_dim])
        k, v = kv.transpose([2, 0, 3, 1, 4]).unbind(0)  # each [B, H, N, head_dim]
        attn = F.softmax(paddle.matmul(q * self.head_dim**-0.5, k, transpose_y=True), axis=-1)
        x = self.proj(paddle.matmul(attn, v).reshape([batch, -1]))
        return x + self.mlp(self.norm(x))
