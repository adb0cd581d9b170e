"""The block of a Vision Transformer."""

from typing import Any

import paddle
from paddle import nn

from models.layers.drop import DropPath
from models.layers.linear import LayerNorm
from models.layers.merging import log_sizes, match_tokens, merge_tokens
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

    def merging(
        self, x: paddle.Tensor, sizes: paddle.Tensor | None, prefix: int, merged: int
    ) -> tuple[paddle.Tensor, ...]:
        """Returns the output of the block with ``merged`` patches less, and the fields of its
        ``Match``.

        Args:
            x: [B, N, D].
            sizes: patches that each token stands for, [B, N]; None: one each. Tokens are attended
                to in proportion.
            prefix: number of tokens before the patches.
        """
        attn: Any = self.attn
        mask = None if sizes is None else log_sizes(sizes)
        qkv = attn.qkv(self.norm1(x))
        branch, keys, offset = attn.attend_with_keys(qkv, mask)
        branch = attn.proj_drop(attn.proj(branch))
        x = self.drop_path1(self.ls1(branch), onto=x)
        match = match_tokens(
            keys, sizes, offset, attn.num_heads, attn.head_dim, prefix=prefix, merged=merged
        )
        x = merge_tokens(x, match, x.shape[1] - merged)
        x = self.drop_path2(self.ls2(self.mlp(self.norm2(x))), onto=x)
        return x, match.targets, match.weights, match.sizes
