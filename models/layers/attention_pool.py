"""Pooling by attention."""

import paddle
from paddle import nn
from paddle.nn.initializer import TruncatedNormal

from models.layers.attention import attend_heads
from models.layers.linear import LayerNorm, Linear
from models.layers.mlp import hidden_width, make_mlp


class AttentionPool(nn.Layer):
    """Attention of one learnt query to all tokens, then x + mlp(norm(x)), as in SigLIP.

    The pooling is that of the Set Transformer (Lee et al. 2019, arXiv:1810.00825), and timm's
    ``AttentionPoolLatent`` with one latent.

    Shape: [B, N, D] -> [B, D]. A ``mask`` [B, N] is added to the scores.

    Args:
        dim: channels D.
        num_heads: number of attention heads.
        mlp_ratio: hidden width of the MLP over D.
        epsilon: epsilon of the norm.
        act: activation of the MLP.
    """

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float, epsilon: float, act: str
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.latent = self.create_parameter(
            [1, 1, dim], default_initializer=TruncatedNormal(std=dim**-0.5)
        )
        self.q = Linear(dim, dim)
        self.kv = Linear(dim, 2 * dim)
        self.proj = Linear(dim, dim)
        self.norm = LayerNorm(dim, epsilon=epsilon)
        self.mlp = make_mlp(dim, hidden_width(dim, mlp_ratio), act=act)

    def forward(self, x: paddle.Tensor, mask: paddle.Tensor | None = None) -> paddle.Tensor:
        q = self.q(self.latent.expand([x.shape[0], -1, -1]))
        kv = self.kv(x)
        scale = self.head_dim**-0.5
        x = attend_heads([q, kv], self.num_heads, self.head_dim, scale, mask=mask)[:, 0]
        x = self.proj(x)
        return x + self.mlp(self.norm(x))
