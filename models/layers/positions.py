"""Fixed position embeddings."""

import numpy as np

from errors import InputError


def sincos_2d(rows: int, columns: int, channels: int, temperature: float = 10_000.0) -> np.ndarray:
    """Returns the sine-cosine position embedding of a grid: [1, rows * columns, channels], float32.

    It is that of MoCo v3 (Chen et al. 2021, arXiv:2104.02057) and of "Better plain ViT baselines"
    (arXiv:2205.01580). The four quarters of the channels are the sines and the cosines of the
    column, then of the row, times frequencies. These fall geometrically from 1 to 1 / temperature.

    Raises:
        InputError: channels that don't make quarters of two or more.
    """
    if channels % 4 or channels < 8:
        raise InputError(
            f"EMBED_DIM is {channels}, expected a multiple of 4, 8 or more, with POS_EMBED sincos2d"
        )
    frequencies = temperature ** -np.linspace(0, 1, channels // 4)
    y, x = (axis.reshape(-1, 1) * frequencies for axis in np.mgrid[:rows, :columns])
    table = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    return table.astype(np.float32)[None]
