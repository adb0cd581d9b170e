"""Mask units of Hiera (Ryali et al. 2023, arXiv:2306.00989).

A mask unit is a square of tokens. The tokens of a unit may attend to each other alone, and they are
kept or left out together.

The tokens of a unit lie side by side, in four quarters. A quarter holds the places whose row is
even (or odd) and whose column is even (or odd), and it is ordered by the same rule again. So the
four tokens at the same index of the quarters are 2 x 2 neighbours, and pooling them is a maximum
over the quarters.
"""

import paddle

import ops
from models.layers.attention import Attention, attend_heads
from models.layers.layout import split
from models.layers.linear import Linear


def to_units(x: paddle.Tensor, side: int) -> paddle.Tensor:
    """Returns maps as tokens, unit by unit: [B, H, W, D] -> [B, H * W, D]. Units are row by row.

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
    """Returns a map of each unit: tokens [B, units * side ** 2, D] -> [B, units, side, side, D]."""
    length, dim = x.shape[1:]
    quarter = 1
    while quarter < side:
        x = x.reshape([-1, 2, 2, quarter, quarter, dim]).transpose([0, 3, 1, 4, 2, 5])
        quarter *= 2
    return x.reshape([-1, length // side**2, side, side, dim])


def from_units(x: paddle.Tensor, side: int, units: tuple[int, int]) -> paddle.Tensor:
    """Returns tokens, unit by unit, as maps: [B, N, D] -> [B, H, W, D]. It inverts ``to_units``.

    Args:
        side: places along a unit's side.
        units: rows and columns of units.
    """
    rows, columns = units
    x = unit_maps(x, side).reshape([-1, rows, columns, side, side, x.shape[2]])
    return x.transpose([0, 1, 3, 2, 4, 5]).reshape([-1, rows * side, columns * side, x.shape[5]])


def quarters(x: paddle.Tensor, places: int) -> list[paddle.Tensor]:
    """Returns the four quarters of each unit: tokens [B, N, D] -> four tensors [B, N / 4, D].

    Args:
        places: tokens of a unit.
    """
    length, dim = x.shape[1:]
    parts = x.reshape([-1, 4, places // 4, dim]).unbind(1)
    return [part.reshape([-1, length // 4, dim]) for part in parts]


def pool_units(x: paddle.Tensor, places: int) -> paddle.Tensor:
    """Returns the maximum of 2 x 2 neighbours: tokens [B, N, D], unit by unit -> [B, N / 4, D].

    Equal values share the gradient, except in Paddle 2.6, where one of them gets it. ``paddle.max``
    would give the whole gradient to each of them.

    Args:
        places: tokens of a unit.
    """
    if ops.usable(x):
        length, dim = x.shape[1:]
        return ops.amax(x.reshape([-1, 4, places // 4, dim])).reshape([-1, length // 4, dim])
    first, second, third, fourth = quarters(x, places)
    return paddle.maximum(paddle.maximum(first, second), paddle.maximum(third, fourth))


class MaskUnitAttention(Attention):
    """Attention within each mask unit, or among all tokens. The queries may be pooled.

    Args:
        in_dim: channels of the input.
        dim: channels of the output.
        num_heads: number of attention heads.
        places: tokens of a unit.
        within: whether tokens attend to those of their unit only.
        pools: whether the queries of 2 x 2 neighbours are replaced by their maximum.

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
        # The number of tokens that attend to each other.
        group = self.places if self.within else length
        if not self.pools:
            if self.within:
                x = x.reshape([-1, group, x.shape[2]])
            # Not super(), which Paddle 2.6 can't trace.
            return Attention.forward(self, x).reshape([-1, length, dim])
        q, kv = split(self.qkv(x), [dim, 2 * dim], axis=2)
        q = pool_units(q, self.places).reshape([-1, group // 4, dim])
        kv = kv.reshape([-1, group, 2 * dim])
        x = attend_heads([q, kv], self.num_heads, self.head_dim, self.scale, self.attn_drop)
        return self.proj(x.reshape([-1, length // 4, dim]))
