"""Resizes weights for another resolution, window, patch size or number of channels.

The results agree with those of timm 1.0.31.
"""

import math

import numpy as np

from errors import InputError


def resize_pos_embed(
    pos_embed: np.ndarray,
    num_prefix_tokens: int,
    grid_size: int | tuple[int, int],
    old_grid: tuple[int, int] | None = None,
    method: str = "bicubic",
) -> np.ndarray:
    """Resizes a position embedding to another grid, as timm's ``resample_abs_pos_embed`` does.

    Args:
        pos_embed: [1, prefix + h * w, D].
        num_prefix_tokens: the number of leading positions, such as the class token's, that stay
            unchanged.
        grid_size: the new grid (H, W), or one number for both.
        old_grid: the old grid (h, w); None: a square.
        method: the interpolation, one of ``RESIZING``.

    Returns:
        [1, prefix + H * W, D], float32.

    Raises:
        InputError: the number of patches isn't h * w, or isn't a square.
    """
    prefix, patches = np.split(pos_embed.astype(np.float32), [num_prefix_tokens], axis=1)
    side = math.isqrt(patches.shape[1])
    old = old_grid or (side, side)
    new = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    if not patches.shape[1] == math.prod(old) > 0:
        expected = "{} x {}".format(*old) if old_grid else "a square"
        raise InputError(
            f"a position embedding has {patches.shape[1]} patches, expected {expected}; pass"
            " their grid"
        )
    rows, columns = map(RESIZING[method], old, new)
    resized = rows @ patches[0].T.reshape(-1, *old) @ columns.T
    return np.concatenate([prefix, _rows(resized)[None]], axis=1)


def resize_rel_pos_bias_table(
    table: np.ndarray, window: tuple[int, int], new_window: tuple[int, int]
) -> np.ndarray:
    """Resizes a table of relative position biases, as timm does for Swin and BEiT.

    timm's ``resize_rel_pos_bias_table`` does this unless TIMM_USE_SCIPY_INTERP is set. Its points
    are BEiT's geometric progression, which is finer in the middle. But it interpolates linearly
    between them, where BEiT's own code uses cubic splines.

    Args:
        table: [(2h - 1)(2w - 1) + extra, heads]. BEiT's 3 extra rows at the end stay unchanged.
        window: the old window (h, w).
        new_window: the new window (H, W).

    Returns:
        [(2H - 1)(2W - 1) + extra, heads], float32.

    Raises:
        InputError: the table has another number of rows.
    """
    old, new = ([2 * side - 1 for side in sides] for sides in (window, new_window))
    biases, extra = np.split(table.astype(np.float32), [math.prod(old)])
    if len(biases) < math.prod(old) or len(extra) not in (0, 3):
        raise InputError(
            f"a table of {len(table)} relative positions isn't one of {window[0]} x {window[1]} windows,"
            f" expected {math.prod(old)}, or 3 more; pass its window"
        )
    if old != new:
        rows, columns = map(_geometric_matrix, old, new)
        biases = _rows(rows @ biases.T.reshape(-1, *old) @ columns.T)
    return np.concatenate([biases, extra])


def resize_attention_biases(
    biases: np.ndarray, window: tuple[int, int], new_window: tuple[int, int]
) -> np.ndarray:
    """Resizes a table of biases by distance bicubically.

    timm's ``resize_rel_pos_bias_table_levit`` does the same.

    Args:
        biases: [heads, h w].
        window: the old window (h, w).
        new_window: the new window (H, W).

    Returns:
        [heads, H W], float32.
    """
    rows, columns = map(bicubic_matrix, window, new_window)
    resized = rows @ biases.astype(np.float32).reshape(-1, *window) @ columns.T
    return resized.reshape(len(biases), -1).astype(np.float32)


def resample_patch_kernel(weight: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes the kernel that embeds patches, as timm's ``resample_patch_embed`` does.

    The method is FlexiViT's (arXiv:2212.08013). The kernel is multiplied by the pseudo-inverse of
    bicubic resizing. So patches that are enlarged together with their image have the same embedding
    as before.

    Args:
        weight: [out, in, h, w].
        size: the new kernel size (H, W).

    Returns:
        [out, in, H, W], float32.
    """
    rows, columns = map(patch_matrix, weight.shape[2:], size)
    return (rows @ weight @ columns.T).astype(np.float32)


def patch_matrix(old: int, new: int) -> np.ndarray:
    """Returns the matrix [new, old] that resizes one side of a kernel of patches: the transposed
    pseudo-inverse of ``bicubic_matrix``.
    """
    return np.linalg.pinv(bicubic_matrix(old, new)).T


def adapt_input_channels(weight: np.ndarray, in_channels: int) -> np.ndarray:
    """Adapts a convolution of 3 channels to another number, as timm's ``adapt_input_conv`` does.

    One channel gets the sum of the three kernels. Several get the three kernels in turn, scaled by
    3 / in_channels.

    Args:
        weight: [out, in, h, w].
        in_channels: the new number of channels.

    Returns:
        [out, in_channels, h, w].

    Raises:
        InputError: the convolution reads neither 3 channels nor in_channels.
    """
    channels = weight.shape[1]
    if channels == in_channels:
        return weight
    if channels != 3:
        raise InputError(
            f"the first convolution has {channels} channels, expected 3 for an adaptation to"
            f" {in_channels}"
        )
    if in_channels == 1:
        return weight.sum(axis=1, keepdims=True)
    return weight[:, np.arange(in_channels) % 3] * np.float32(3 / in_channels)


def bicubic_matrix(old: int, new: int) -> np.ndarray:
    """Returns the matrix [new, old] that resizes ``old`` samples to ``new`` bicubically.

    The kernel is Keys's cubic with a = -0.5. It is stretched by old / new if that is above 1
    (antialiasing), and cut off at the borders. Each row's sum is 1. The result is that of PyTorch's
    ``interpolate(mode="bicubic", antialias=True, align_corners=False)``.
    """
    scale = old / new
    centers = (np.arange(new) + 0.5) * scale
    x = np.abs(np.arange(old) + 0.5 - centers[:, None]) / max(scale, 1.0)
    near = (1.5 * x - 2.5) * x**2 + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)


def bilinear_matrix(old: int, new: int) -> np.ndarray:
    """Returns the matrix [new, old] that resizes ``old`` samples to ``new`` linearly.

    The result is that of PyTorch's ``interpolate(mode="bilinear", align_corners=False)``, which
    isn't antialiased.
    """
    places = ((np.arange(new) + 0.5) * (old / new) - 0.5).clip(0, old - 1)
    return (1 - np.abs(np.arange(old) - places[:, None])).clip(min=0)


# The matrices that resize one side of a position embedding, by MODEL.POS_RESIZE.
RESIZING = {"bicubic": bicubic_matrix, "bilinear": bilinear_matrix}


def _geometric_matrix(old: int, new: int) -> np.ndarray:
    """Returns the matrix [new, old] of linear interpolation from ``old`` offsets to ``new``.

    Both numbers are odd. New offsets are whole numbers around 0. Old ones lie at 0, +-1, +-(1 + q),
    +-(1 + q + q^2) ..., where q between 1.01 and 1.5 is chosen such that the ends of both meet, if
    possible. Beyond the old offsets the last value is repeated.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        if (ratio ** (old // 2) - 1) / (ratio - 1) > new // 2:
            high = ratio
        else:
            low = ratio
    distances = np.cumsum(ratio ** np.arange(old // 2))
    points = np.concatenate([-distances[::-1], [0], distances])
    targets = np.arange(new) - new // 2
    return np.stack([np.interp(targets, points, unit) for unit in np.eye(old)], axis=1)


def _rows(grids: np.ndarray) -> np.ndarray:
    """Returns [D, H, W] as float32 [H * W, D]."""
    return grids.reshape(len(grids), -1).T.astype(np.float32)
