"""CoaT's factorized attention, and its positions (Xu et al. 2021, arXiv:2104.06399)."""

from collections import Counter
from collections.abc import Sequence

import paddle
from paddle import nn

from models.layers.activations import softmax
from models.layers.conv import Conv2D
from models.layers.layout import swap_axes
from models.layers.linear import Linear, matmul


class ConvPosEnc(nn.Layer):
    """Adds a 3 x 3 depthwise convolution of the places, which tells where they are; a class token stays as it is.

    Shape: [B, 1 + rows * columns, D] -> the same.
    """

    def __init__(self, dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.proj = Conv2D(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        places = as_map(x, self.grid)
        return as_tokens(x[:, :1], self.proj(places) + places)


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
        batch, dim, _ = v.shape
        parts = v[:, :, 1:].reshape([batch, dim, *self.grid]).split(self.widths, axis=1)
        around = paddle.concat([conv(parts[i]) for i, conv in enumerate(self.conv_list)], axis=1)
        encoded = q[:, :, 1:] * around.flatten(2)
        return paddle.concat([paddle.zeros_like(encoded[:, :, :1]), encoded], axis=2)


class FactorizedAttention(nn.Layer):
    """Attention whose time is linear in the tokens. A softmax of the keys over all tokens brings the values together to
    one matrix per head, and queries are multiplied by it. Relative positions come from ``ConvRelPosEnc``.

    Shape: [B, N, D] -> the same.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, drop: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = Linear(dim, 3 * dim, bias_attr=None if qkv_bias else False)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop)

    def forward(self, x: paddle.Tensor, crpe: ConvRelPosEnc) -> paddle.Tensor:
        batch, tokens, dim = x.shape
        q, k, v = swap_axes(self.qkv(x)).chunk(3, axis=1)  # each [B, D, N]: each channel's tokens side by side
        heads = [batch, self.num_heads, self.head_dim, tokens]
        brought = matmul(softmax(k).reshape(heads), v.reshape(heads), transpose_y=True)
        attended = matmul(self.scale * brought, q.reshape(heads), transpose_x=True).reshape([batch, dim, tokens])
        return self.proj_drop(self.proj(swap_axes(attended + crpe(q, v))))


def as_map(x: paddle.Tensor, grid: tuple[int, int]) -> paddle.Tensor:
    """Returns the places of tokens [B, 1 + rows * columns, D] as [B, D, rows, columns]."""
    return x[:, 1:].transpose([0, 2, 1]).reshape([x.shape[0], x.shape[2], *grid])


def as_tokens(token: paddle.Tensor, places: paddle.Tensor) -> paddle.Tensor:
    """Is ``as_map``'s inverse; ``token``: [B, 1, D]."""
    return paddle.concat([token, swap_axes(places.flatten(2))], axis=1)
