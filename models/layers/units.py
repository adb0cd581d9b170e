"""Mask units: squares of tokens that are attended within, kept and left out together (Hiera,
arXiv:2306.00989).

A unit's tokens lie side by side. Each of its four quarters holds the places of one parity of row
and column, and every quarter is ordered alike. So pooling 2 x 2 neighbours is a maximum over the
quarters.
"""

import paddle

import ops
from models.layers.attention import Attention, attend_heads
from models.layers.layout import split
from models.layers.linear import Linear


def to_units(x: paddle.Tensor, side: int) -> paddle.Tensor:
    """Returns maps [B, H, W, D] as tokens [B, H * W, D], unit by unit, row by row of units.

    Args:
        side: places along a unit's side, a power of 2; H and W are multiples of it.
    """
    height, width, dim = x.shape[1:]
    x = x.reshape([-1, height // side, side, width // side, side, dim]).transpose(
        [0, 1, 3, 2, 4, 5]
    )
    while side > 2:
        side //= 2
        x = x.reshape([-1, side, 2, side, 2, dim]).transpose([0, 2, 4, 1, 3, 5])
    return x.reshape([-1, height * width, dim])


def unit_maps(x: paddle.Tensor, side: int) -> paddle.Tensor:
    """Returns tokens [B, units * side ** 2, D], unit by unit, as a map of each unit: [B, units,
    side, side, D].
    """
    length, dim = x.shape[1:]
    quarter = 1
    while quarter < side:
        x = x.reshape([-1, 2, 2, quarter, quarter, dim]).transpose([0, 3, 1, 4, 2, 5])
        quarter *= 2
    return x.reshape([-1, length // side**2, side, side, dim])


def from_units(x: paddle.Tensor, side: int, units: tuple[int, int]) -> paddle.Tensor:
    """Is ``to_units``'s inverse: tokens [B, N, D] of rows and columns of ``units`` -> [B, H, W, D]."""
    rows, columns = units
    x = unit_maps(x, side).reshape([-1, rows, columns, side, side, x.shape[2]])
    return x.transpose([0, 1, 3, 2, 4, 5]).reshape([-1, rows * side, columns * side, x.shape[5]])


def quarters(x: paddle.Tensor, places: int) -> list[paddle.Tensor]:
    """Returns the four quarters of each unit of so many places: tokens [B, N, D] -> four of [B, N /
    4, D].
    """
    length, dim = x.shape[1:]
    found = x.reshape([-1, 4, places // 4, dim]).unbind(1)
    return [quarter.reshape([-1, length // 4, dim]) for quarter in found]


def pool_units(x: paddle.Tensor, places: int) -> paddle.Tensor:
    """Returns the maximum of 2 x 2 neighbours: tokens [B, N, D], in units of so many places -> [B,
    N / 4, D].

    Equal values share the gradient. In Paddle 2.6 one of them gets it; ``paddle.max`` would give
    all of it to each.
    """
    if ops.usable(x):
        length, dim = x.shape[1:]
        return ops.amax(x.reshape([-1, 4, places // 4, dim])).reshape([-1, length // 4, dim])
    one, two, three, four = quarters(x, places)
    return paddle.maximum(paddle.maximum(one, two), paddle.maximum(three, four))


class MaskUnitAttention(Attention):
    """Attention within each unit, or of all tokens; queries may be pooled.

    Args:
        in_dim, dim, num_heads: channels that are read, and given; heads.
        places: tokens of a unit.
        within: attention is within units.
        pools: a query is the maximum of those of 2 x 2 neighbours.

    Shape: [B, N, in_dim], unit by unit -> [B, N, dim]; with ``pools`` [B, N / 4, dim].
    """

    def __init__(
        self, in_dim: int, dim: int, num_heads: int, places: int, within: bool, pools: bool
    ) -> None:
        super().__init__(dim, num_heads)
        if in_dim != dim:
            self.qkv = Linear(in_dim, 3 * dim)
        self.places = places
        self.within = within
        self.pools = pools

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        length = x.shape[1]
        dim = self.num_heads * self.head_dim
        group = self.places if self.within else length  # tokens that attend to each other
        if not self.pools:
            x = x.reshape([-1, group, x.shape[2]]) if self.within else x
            # (Paddle 2.6 traces no super())
            return Attention.forward(self, x).reshape([-1, length, dim])
        q, kv = split(self.qkv(x), [dim, 2 * dim], axis=2)
        operands = [
            pool_units(q, self.places).reshape([-1, group // 4, dim]),
            kv.reshape([-1, group, 2 * dim]),
        ]
        x = attend_heads(operands, self.num_heads, self.head_dim, self.scale, self.attn_drop)
        return self.proj(x.reshape([-1, length // 4, dim]))
