"""Factorized attention and position encodings of CoaT (Xu et al. 2021, arXiv:2104.06399)."""

from collections import Counter
from collections.abc import Sequence

import paddle
from paddle import nn

from models.layers.activations import softmax
from models.layers.conv import Conv2D
from models.layers.layout import concat, split, swap_axes
from models.layers.linear import Linear, matmul
from models.layers.scale import add_branch, multiply


class ConvPosEnc(nn.Layer):
    """Convolutional position encoding: x + depthwise_3x3(x) for the places.

    The class token stays as it is.

    Shape: [B, 1 + rows * columns, D] -> the same.
    """

    def __init__(self, dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.proj = Conv2D(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        token, places = as_map(x, self.grid)
        return as_tokens(token, add_branch(self.proj(places), places))


class ConvRelPosEnc(nn.Layer):
    """Convolutional relative position encoding: q * depthwise(v) for the places.

    The kernel of the depthwise convolution holds the relative positions. The output for the class
    token is 0.

    Args:
        dim: channels D.
        windows: side of the window of each head. Heads with the same side share a convolution.
        grid: (rows, columns) of the places.

    Shape: queries and values [B, D, 1 + rows * columns] -> the same.
    """

    def __init__(self, dim: int, windows: Sequence[int], grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        heads_by_side = Counter(windows)
        self.widths = [heads * dim // len(windows) for heads in heads_by_side.values()]
        self.conv_list = nn.LayerList(
            Conv2D(width, width, side, padding=side // 2, groups=width)
            for width, side in zip(self.widths, heads_by_side, strict=True)
        )

    def forward(self, q: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        batch, dim, tokens = v.shape
        _, q = split(q, [1, tokens - 1], axis=2)
        _, v = split(v, [1, tokens - 1], axis=2)
        parts = split(v.reshape([batch, dim, *self.grid]), self.widths, axis=1)
        convolved = concat([conv(parts[i]) for i, conv in enumerate(self.conv_list)], axis=1)
        encoded = multiply(q, convolved.flatten(2))
        return concat([paddle.zeros_like(encoded[:, :, :1]), encoded], axis=2)


class FactorizedAttention(nn.Layer):
    """Attention whose cost is linear in the number of tokens: q (softmax(k)^T v) for each head.

    The softmax is over all tokens. The output of a ``ConvRelPosEnc`` is added.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        qkv_bias: whether the queries, keys and values have a bias.
        drop: dropout of the output.

    Shape: [B, N, D] -> the same.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, drop: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = Linear(dim, 3 * dim, bias_attr=None if qkv_bias else False)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop)

    def forward(self, x: paddle.Tensor, crpe: ConvRelPosEnc) -> paddle.Tensor:
        batch, tokens, dim = x.shape
        # Each is [B, D, N]: the tokens of a channel lie side by side.
        q, k, v = split(swap_axes(self.qkv(x)), [dim, dim, dim], axis=1)
        by_head = [batch, self.num_heads, self.head_dim, tokens]
        # [B, H, head_dim, head_dim]
        context = matmul(softmax(k).reshape(by_head), v.reshape(by_head), transpose_y=True)
        attended = matmul(context, q.reshape(by_head), transpose_x=True, scale=self.scale)
        attended = attended.reshape([batch, dim, tokens])
        return self.proj_drop(self.proj(swap_axes(add_branch(attended, crpe(q, v)))))


def as_map(x: paddle.Tensor, grid: tuple[int, int]) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns the class token and the places of tokens.

    Shape: [B, 1 + rows * columns, D] -> [B, 1, D] and [B, D, rows, columns].
    """
    token, places = split(x, [1, x.shape[1] - 1], axis=1)
    return token, swap_axes(places).reshape([x.shape[0], x.shape[2], *grid])


def as_tokens(token: paddle.Tensor, places: paddle.Tensor) -> paddle.Tensor:
    """Returns the class token and the places as tokens. It inverts ``as_map``."""
    return concat([token, swap_axes(places.flatten(2))], axis=1)
