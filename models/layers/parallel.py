"""The parallel block of ViT-22B (Dehghani et al. 2023, arXiv:2302.05442).

Its attention and its MLP read the same normalised tokens.
"""

import paddle
from paddle import nn
from paddle.nn.initializer import Constant

from models.layers.attention import Heads
from models.layers.drop import DropPath
from models.layers.linear import LayerNorm, Linear
from models.layers.mlp import ACTIVATIONS, hidden_width
from models.layers.scale import LayerScale


class ParallelBlock(Heads):
    """x + ls(attention + mlp), both of in_norm(x), as timm's ``ParallelScalingBlock``.

    One Linear is the first layer of both branches.

    Args:
        dim: channels D of the tokens.
        num_heads: heads H.
        head_dim: channels of a head; None: D / H.
        qkv_bias: whether the queries, keys and values have a bias; the MLP always has one.
        qk_norm: whether queries and keys are normalised within each head.
        attn_drop: dropout rate of the attention weights.
        mlp_ratio: hidden width of the MLP over D.
        init_values: initial value of layer scale; None: no layer scale.
        drop: dropout within the MLP.
        drop_path: rate of stochastic depth.
        epsilon: epsilon of the layer norm.
        act: activation of the MLP.

    Attributes:
        joined: whether one Linear is the last layer of both branches, too.

    Shape: [B, N, D] -> [B, N, D].
    """

    joined = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None,
        qkv_bias: bool,
        qk_norm: bool,
        attn_drop: float,
        mlp_ratio: float,
        init_values: float | None,
        drop: float,
        drop_path: float,
        epsilon: float,
        act: str,
    ) -> None:
        super().__init__(num_heads, head_dim or dim // num_heads, qk_norm, attn_drop)
        self.hidden = hidden_width(dim, mlp_ratio)
        inner = num_heads * self.head_dim
        self.in_norm = LayerNorm(dim, epsilon=epsilon)
        self.in_proj = Linear(dim, self.hidden + 3 * inner, bias_attr=None if qkv_bias else False)
        if not qkv_bias:
            self.mlp_bias = self.create_parameter([self.hidden], default_initializer=Constant(0.0))
        self.mlp_act = ACTIVATIONS[act]()
        self.mlp_drop = nn.Dropout(drop)
        if self.joined:
            self.out_proj = Linear(inner + self.hidden, dim)
        else:
            self.attn_out_proj = Linear(inner, dim)
            self.mlp_out_proj = Linear(self.hidden, dim)
        self.ls = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path = DropPath(drop_path)

    @property
    def norm1(self) -> LayerNorm:
        """The norm before the attention, by its name in ``Block``."""
        return self.in_norm

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = self.in_proj(self.in_norm(x))
        mlp = y[:, :, : self.hidden]
        qkv = y[:, :, self.hidden :]
        if "mlp_bias" in self._parameters:
            mlp = mlp + self.mlp_bias
        mlp = self.mlp_drop(self.mlp_act(mlp))
        attended = self.attend(qkv)
        if self.joined:
            y = self.out_proj(paddle.concat([attended, mlp], axis=-1))
        else:
            y = self.attn_out_proj(attended) + self.mlp_out_proj(mlp)
        return self.drop_path(self.ls(y), onto=x)
