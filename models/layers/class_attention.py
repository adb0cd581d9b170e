"""Class attention (Touvron et al. 2021, CaiT, arXiv:2103.17239)."""

import paddle
from paddle import nn

from models.layers.attention import attend_heads
from models.layers.linear import Linear


class ClassAttention(nn.Layer):
    """Multi-head attention of the class token to all tokens, itself among them (timm's
    ``ClassAttn``).

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        qkv_bias: whether the queries, keys and values have a bias.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout of the output.

    Attributes:
        projections: names of the Linears of queries, keys and values.

    Shape: [B, 1 + N, D], the class token first -> [B, 1, D].
    """

    projections = ("q", "k", "v")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        bias = None if qkv_bias else False
        for name in self.projections:
            setattr(self, name, Linear(dim, dim, bias_attr=bias))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        query, key, value = [getattr(self, name) for name in self.projections]
        qkv = [query(x[:, :1]), key(x), value(x)]
        x = attend_heads(qkv, self.num_heads, self.head_dim, self.scale, self.attn_drop)
        return self.proj_drop(self.proj(x))
