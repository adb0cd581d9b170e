"""Fixed position embeddings."""

import numpy as np

from errors import InputError


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
