"""CoaT's factorized attention, and its positions (Xu et al. 2021, arXiv:2104.06399)."""

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
    """Adds a 3 x 3 depthwise convolution of the places, which tells where they are; a class token
    stays as it is.

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
    """What the values around each place, weighed by where they are from it, give its query.

    Args:
        windows: side of each head's window; heads of one window share a depthwise convolution.

    Shape: queries and values [B, D, 1 + rows * columns] -> the same; 0 for the class token.
    """

    def __init__(self, dim: int, windows: Sequence[int], grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid, sides = grid, Counter(windows)
        self.widths = [count * dim // len(windows) for count in sides.values()]
        self.conv_list = nn.LayerList(
            Conv2D(width, width, side, padding=side // 2, groups=width)
            for width, side in zip(self.widths, sides, strict=True)
        )

    def forward(self, q: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        batch, dim, tokens = v.shape
        (_, q), (_, v) = [split(x, [1, tokens - 1], axis=2) for x in (q, v)]
        parts = split(v.reshape([batch, dim, *self.grid]), self.widths, axis=1)
        around = concat([conv(parts[i]) for i, conv in enumerate(self.conv_list)], axis=1)
        encoded = multiply(q, around.flatten(2))
        return concat([paddle.zeros_like(encoded[:, :, :1]), encoded], axis=2)


class FactorizedAttention(nn.Layer):
    """Attention whose time is linear in the tokens. A softmax of the keys over all tokens brings
    the values together to one matrix per head, and queries are multiplied by it. Relative positions
    come from ``ConvRelPosEnc``.

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
        # each [B, D, N]: each channel's tokens side by side
        q, k, v = split(swap_axes(self.qkv(x)), [dim] * 3, axis=1)
        heads = [batch, self.num_heads, self.head_dim, tokens]
        brought = matmul(softmax(k).reshape(heads), v.reshape(heads), transpose_y=True)
        attended = matmul(brought, q.reshape(heads), transpose_x=True, scale=self.scale).reshape(
            [batch, dim, tokens]
        )
        return self.proj_drop(self.proj(swap_axes(add_branch(attended, crpe(q, v)))))


def as_map(x: paddle.Tensor, grid: tuple[int, int]) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns of tokens [B, 1 + rows * columns, D] the class token [B, 1, D] and the places [B, D,
    rows, columns].
    """
    token, places = split(x, [1, x.shape[1] - 1], axis=1)
    return token, swap_axes(places).reshape([x.shape[0], x.shape[2], *grid])


def as_tokens(token: paddle.Tensor, places: paddle.Tensor) -> paddle.Tensor:
    """Is ``as_map``'s inverse."""
    return concat([token, swap_axes(places.flatten(2))], axis=1)
