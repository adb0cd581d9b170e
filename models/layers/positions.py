"""Fixed position embeddings, and position embeddings of other grids."""

import numpy as np
import paddle

from errors import InputError
from models.layers.constants import Constants
from models.layers.graph_sizes import bicubic_weights, bilinear_weights, is_known
from weights.resize import RESIZING

# As RESIZING, for sides that are known only when a graph is run.
_IN_GRAPH = {"bicubic": bicubic_weights, "bilinear": bilinear_weights}


def sincos_2d(
    rows: int,
    columns: int,
    channels: int,
    temperature: float = 10_000.0,
    endpoint: bool = True,
    key: str = "EMBED_DIM",
) -> np.ndarray:
    """Returns the sine-cosine position embedding of a grid: [1, rows * columns, channels], float32.

    The four quarters of the channels are the sines and the cosines of the column, then of the row,
    times frequencies. These fall geometrically from 1 to 1 / temperature.

    Args:
        endpoint: whether 1 / temperature is the last frequency, as in MoCo v3 (Chen et al. 2021,
            arXiv:2104.02057) and "Better plain ViT baselines" (arXiv:2205.01580). In MAE (He et al.
            2021, arXiv:2111.06377) it is the one that would follow the last.
        key: what sets the channels, for the error.

    Raises:
        InputError: channels that don't make quarters of two or more.
    """
    if channels % 4 or channels < 8:
        raise InputError(
            f"{key} is {channels}, expected a multiple of 4, 8 or more, for sine-cosine positions"
        )
    frequencies = temperature ** -np.linspace(0, 1, channels // 4, endpoint=endpoint)
    y, x = (axis.reshape(-1, 1) * frequencies for axis in np.mgrid[:rows, :columns])
    table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    return table.astype(np.float32)[None]


class ResizedPositions:
    """Resizes a position embedding to the grid of the images at hand, as timm's
    ``resample_abs_pos_embed`` does.

    It is a product with two constant matrices, so the embedding gets its gradients from images of
    all sizes.

    Args:
        grid_size: (rows, columns) of the embedding.
        prefix: number of its leading positions, such as the class token's, that stay unchanged.
        method: "bicubic", which is antialiased, or "bilinear", which isn't.
    """

    def __init__(self, grid_size: tuple[int, int], prefix: int, method: str = "bicubic") -> None:
        self.grid_size = grid_size
        self.prefix = prefix
        self.method = method
        self.matrices = Constants(self._matrices)

    def resized(self, pos_embed: paddle.Tensor, grid_size: tuple[int, int]) -> paddle.Tensor:
        """Returns the embedding [1, prefix + patches, D] for a grid: [1, prefix + rows * columns,
        D].
        """
        if is_known(*grid_size) and grid_size == self.grid_size:
            return pos_embed
        if is_known(*grid_size):
            rows, columns = self.matrices.at(grid_size)
        else:
            weights = _IN_GRAPH[self.method]
            rows = weights(self.grid_size[0], grid_size[0])
            columns = weights(self.grid_size[1], grid_size[1])
        width = pos_embed.shape[-1]
        # Autocast would round the products to half precision.
        with paddle.amp.auto_cast(enable=False):
            places = pos_embed[0, self.prefix :].reshape([self.grid_size[0], -1])
            places = paddle.matmul(rows, places)
            places = places.reshape([-1, self.grid_size[1], width])
            resized = paddle.matmul(columns, places).reshape([1, -1, width])
        if not self.prefix:
            return resized
        return paddle.concat([pos_embed[:, : self.prefix], resized], axis=1)

    def _matrices(self, grid_size: tuple[int, int]) -> list[np.ndarray]:
        """Returns the matrices that resize rows and columns, float32."""
        matrix = RESIZING[self.method]
        rows = matrix(self.grid_size[0], grid_size[0])
        columns = matrix(self.grid_size[1], grid_size[1])
        return [rows.astype(np.float32), columns.astype(np.float32)]
