"""Rotary position embeddings of a grid (RoPE; Su et al. 2021, arXiv:2104.09864).

Queries and keys are rotated by angles that depend on their places.
"""

from typing import Any, Literal

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from models.layers.constants import Constants
from models.layers.graph_sizes import as_tensor, is_known, places
from models.layers.linear import in_float32
from weights.arrays import to_bfloat16

Kind = Literal["cat", "dinov3"]
Table = tuple[paddle.Tensor, paddle.Tensor]


class RotaryEmbedding(nn.Layer):
    """Computes cosines and sines of the angles by which pairs of a head's channels are rotated.

    Half of the pairs are rotated by the row, half by the column. Tokens before the places aren't
    rotated. There are no parameters, and nothing is stored in weight files.

    Args:
        kind: "cat": angles follow the index of row and column (EVA-02, arXiv:2303.11331, timm's
            ``RotaryEmbeddingCat``). "dinov3": they follow the position in the image, from -1 to 1
            (DINOv3, arXiv:2508.10104, timm's ``RotaryEmbeddingDinoV3``).
        grid_size: (rows, columns) of the model's images; those of others are ``Constants``.
        head_dim: channels d of a head.
        temperature: frequencies or periods are powers of it.
        reference: rows and columns to which another grid is scaled (kind "cat"); None: grids
            aren't scaled.
        prefix: number of tokens before the places.
        bfloat16: whether the periods are rounded to bfloat16 (kind "dinov3").

    Raises:
        InputError: channels that don't make two halves of pairs.
    """

    cosines: paddle.Tensor
    sines: paddle.Tensor

    def __init__(
        self,
        kind: Kind,
        grid_size: tuple[int, int],
        head_dim: int,
        temperature: float,
        reference: int | None = None,
        prefix: int = 1,
        bfloat16: bool = False,
    ) -> None:
        super().__init__()
        if head_dim % 4:
            raise InputError(
                f"EMBED_DIM / NUM_HEADS is {head_dim}, expected a multiple of 4 (pairs of"
                " channels are rotated)"
            )
        self.kind = kind
        self.grid_size = grid_size
        self.head_dim = head_dim
        self.temperature = temperature
        self.reference = reference
        self.prefix = prefix
        self.rounded = bfloat16
        for name, values in zip(("cosines", "sines"), self._table(grid_size), strict=True):
            self.register_buffer(name, paddle.to_tensor(values), persistable=False)
        self.tables = Constants(self._table)

    def forward(self, grid_size: tuple[int, int]) -> Table:
        """Returns cosines and sines [prefix + rows * columns, 1, d / 2], float32."""
        if not is_known(*grid_size):
            return self._table_in_graph(grid_size)
        if grid_size == self.grid_size:
            return self.cosines, self.sines
        cosines, sines = self.tables.at(grid_size)
        return cosines, sines

    def _table(self, grid_size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the output of ``forward`` as arrays.

        Every step is rounded to float32 as in timm, because the rounding of large angles shows.
        """
        one = np.float32(1)
        powers = self._powers()
        axes = [np.arange(count, dtype=np.float32) for count in grid_size]
        if self.kind == "dinov3":
            axes = [
                np.float32(2) * ((axis + np.float32(0.5)) / np.float32(len(axis))) - one
                for axis in axes
            ]
            turns = [np.float32(2 * np.pi) * axis[:, None] / powers for axis in axes]
        else:
            if self.reference is not None:
                axes = [axis / np.float32(len(axis)) * np.float32(self.reference) for axis in axes]
            turns = [axis[:, None] * (one / powers) for axis in axes]
        rows, columns = grid_size
        angles = np.concatenate([turns[0].repeat(columns, 0), np.tile(turns[1], (rows, 1))], axis=1)
        angles = np.pad(angles, ((self.prefix, 0), (0, 0)))[:, None]
        return np.cos(angles), np.sin(angles)

    def _powers(self) -> np.ndarray:
        """Returns the periods of a quarter of a head's channels, float32, in places or in turns."""
        quarter = self.head_dim // 4
        powers = np.float32(self.temperature) ** (
            np.arange(quarter, dtype=np.float32) / np.float32(quarter)
        )
        return to_bfloat16(powers) if self.kind == "dinov3" and self.rounded else powers

    def _table_in_graph(self, grid_size: tuple[Any, Any]) -> Table:
        """Returns the output of ``forward`` for sides that are known only when a graph is run."""
        rows, columns = grid_size
        by_row = self._turns_in_graph(rows).unsqueeze(1)
        by_column = self._turns_in_graph(columns).unsqueeze(0)
        # A sum with zeros gives each place the angles of its row and of its column.
        by_row = by_row + paddle.zeros_like(by_column)
        by_column = by_column + paddle.zeros_like(by_row)
        angles = paddle.concat([by_row, by_column], axis=2).flatten(0, 1)
        prefix = paddle.zeros([self.prefix, self.head_dim // 2])
        angles = paddle.concat([prefix, angles]).unsqueeze(1)
        return paddle.cos(angles), paddle.sin(angles)

    def _turns_in_graph(self, side: Any) -> paddle.Tensor:
        """Returns the angles along an axis, [side, d / 4] float32, rounded as those of ``_table``."""
        axis = places(side).astype("float32").unsqueeze(1)
        length = as_tensor(side).astype("float32")
        if self.kind == "dinov3":
            powers = paddle.to_tensor(self._powers())
            axis = 2 * ((axis + 0.5) / length) - 1
            # Tiled first: with fewer rows than powers, oneDNN of Paddle 2.6 divides by the rows.
            return float(np.float32(2 * np.pi)) * axis.tile([1, len(powers)]) / powers
        if self.reference is not None:
            axis = axis / length * self.reference
        return axis * paddle.to_tensor(np.float32(1) / self._powers())


def with_unrotated(table: Table, count: int) -> Table:
    """Returns the output of ``RotaryEmbedding`` for ``count`` tokens more, which aren't rotated.

    They come after the places.
    """
    cosines, sines = table
    shape = [count, *cosines.shape[1:]]
    return (
        paddle.concat([cosines, paddle.ones(shape, cosines.dtype)]),
        paddle.concat([sines, paddle.zeros(shape, sines.dtype)]),
    )


def rotate(x: paddle.Tensor, table: Table, halves: bool) -> paddle.Tensor:
    """Rotates each pair of channels of queries or keys by its token's angle; keeps their type.

    Args:
        x: [B, N, H, d].
        table: the output of ``RotaryEmbedding`` for N tokens.
        halves: whether a pair is a channel of the first half and its counterpart in the second.
            Otherwise it is two neighbours.
    """
    length, heads, channels = x.shape[1:]
    cosines, sines = table
    # The axis of the two channels of a pair.
    axis = -2 if halves else -1
    pairs = [2, channels // 2] if halves else [channels // 2, 2]
    first, second = in_float32(x).reshape([-1, length, heads, *pairs]).unbind(axis)
    rotated = [first * cosines - second * sines, second * cosines + first * sines]
    return paddle.stack(rotated, axis).reshape([-1, length, heads, channels]).astype(x.dtype)
