"""The block of a Vision Transformer."""

import paddle
from paddle import nn

from models.layers.drop import DropPath
from models.layers.linear import LayerNorm
from models.layers.mlp import hidden_width, make_mlp
from models.layers.scale import LayerScale


class Block(nn.Layer):
    """A pre-norm transformer block: x + ls1(attn(norm1(x))), then x + ls2(mlp(norm2(x))), each
    branch with drop path.

    Args:
        dim: channels D of the tokens.
        attn: the attention layer.
        mlp_ratio: hidden width of the MLP over D.
        init_values: initial value of layer scale; None: no layer scale.
        drop: dropout in the MLP.
        drop_path: rate of stochastic depth.
        epsilon: epsilon of the layer norms.
        act: activation of the MLP (``make_mlp``).

    Shape: [B, N, D] -> [B, N, D]. With ``tokens``, only so many of the first ones are returned; the
    attention reads all N. A ``mask`` [B, N, N] is added to the scores of an ``Attention``.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Layer,
        mlp_ratio: float,
        init_values: float | None,
        drop: float,
        drop_path: float,
        epsilon: float = 1e-6,
        act: str = "gelu",
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, epsilon=epsilon)
        self.attn = attn
        self.ls1 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = LayerNorm(dim, epsilon=epsilon)
        self.mlp = make_mlp(dim, hidden_width(dim, mlp_ratio), drop, act)
        self.ls2 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path)

    def forward(
        self, x: paddle.Tensor, tokens: int | None = None, mask: paddle.Tensor | None = None
    ) -> paddle.Tensor:
        others = () if mask is None else (mask,)
        branch = self.attn(self.norm1(x), *others)
        if tokens is not None:
            branch = branch[:, :tokens]
            x = x[:, :tokens]
        x = self.drop_path1(self.ls1(branch), onto=x)
        return self.drop_path2(self.ls2(self.mlp(self.norm2(x))), onto=x)
