"""Class attention (Touvron et al. 2021, CaiT, arXiv:2103.17239)."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from models.layers.linear import Linear


class ClassAttention(nn.Layer):
    """Multi-head attention of the class token to all tokens, itself among them (timm's ``ClassAttn``).

    Args:
        dim, num_heads: channels D, heads.
        qkv_bias: whether the queries, keys and values have a bias.
        attn_drop, proj_drop: dropout of the attention weights and of the output.

    Attributes:
        projections: names of the Linears that give queries, keys and values.

    Shape: [B, 1 + N, D], the class token first -> [B, 1, D].
    """

    projections = ("q", "k", "v")

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = True, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        bias = None if qkv_bias else False
        for name in self.projections:
            setattr(self, name, Linear(dim, dim, bias_attr=bias))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        _, length, dim = x.shape
        heads = [self.num_heads, self.head_dim]
        query, key, value = [getattr(self, name) for name in self.projections]
        q = query(x[:, :1]).reshape([-1, 1, *heads]).transpose([0, 2, 1, 3])
        k, v = (layer(x).reshape([-1, length, *heads]).transpose([0, 2, 1, 3]) for layer in (key, value))
        attn = F.softmax(paddle.matmul(q * self.scale, k, transpose_y=True), axis=-1)  # [B, heads, 1, 1 + N]
        x = paddle.matmul(self.attn_drop(attn), v).transpose([0, 2, 1, 3]).reshape([-1, 1, dim])
        return self.proj_drop(self.proj(x))
