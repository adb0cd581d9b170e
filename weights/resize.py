"""Position embeddings for another resolution."""

import math

import numpy as np


def resize_pos_embed(pos_embed: np.ndarray, num_prefix_tokens: int, grid_size: int) -> np.ndarray:
    """Resizes a position embedding to another grid, as timm's ``resample_abs_pos_embed`` does: bicubic, antialiased.

    Args:
        pos_embed: [1, prefix + G * G, D].
        num_prefix_tokens: leading positions (class token, say), which stay as they are.
        grid_size: patches per side, to be.

    Returns:
        [1, prefix + grid_size * grid_size, D], float32.
    """
    prefix, patches = np.split(pos_embed.astype(np.float32), [num_prefix_tokens], axis=1)
    old, dim = math.isqrt(patches.shape[1]), patches.shape[2]
    matrix = bicubic_matrix(old, grid_size)
    resized = np.einsum("ai,bj,ijd->abd", matrix, matrix, patches.reshape(old, old, dim), optimize=True)
    return np.concatenate([prefix, resized.reshape(1, -1, dim).astype(np.float32)], axis=1)


def bicubic_matrix(old: int, new: int) -> np.ndarray:
    """Returns the [new, old] weights that resize ``old`` samples to ``new``, each row's sum 1.

    The kernel is Keys's cubic with a = -0.5, stretched by old / new where that is above 1 (antialiasing) and cut off at
    the borders: PyTorch's ``interpolate(mode="bicubic", antialias=True, align_corners=False)``.
    """
    scale = old / new
    centers = (np.arange(new) + 0.5) * scale
    x = np.abs(np.arange(old) + 0.5 - centers[:, None]) / max(scale, 1.0)
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)
