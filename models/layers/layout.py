"""Changes of a map's layout, splits and concatenations, by the compiled operators (ops/) if they
can be used.
"""

from collections.abc import Sequence

import paddle

import ops


def swap_axes(x: paddle.Tensor) -> paddle.Tensor:
    """Returns x with its last two axes swapped: [B, M, N] -> [B, N, M]."""
    if ops.usable(x):
        batch, m, n = x.shape
        return ops.transpose(x, m, [batch, n, m])
    return x.transpose([0, 2, 1])


def channels_last(x: paddle.Tensor) -> paddle.Tensor:
    """Returns maps with the channels last: [B, C, H, W] -> [B, H, W, C]."""
    if ops.usable(x):
        batch, channels, height, width = x.shape
        return ops.transpose(x, channels, [batch, height, width, channels])
    return x.transpose([0, 2, 3, 1])


def channels_first(x: paddle.Tensor) -> paddle.Tensor:
    """Returns maps with the channels first: [B, H, W, C] -> [B, C, H, W]."""
    if ops.usable(x):
        batch, height, width, channels = x.shape
        return ops.transpose(x, height * width, [batch, channels, height, width])
    return x.transpose([0, 3, 1, 2])


def split(x: paddle.Tensor, sizes: Sequence[int], axis: int) -> list[paddle.Tensor]:
    """Returns parts of x with these sizes along an axis."""
    if ops.usable(x) and 2 <= len(sizes) <= 3:
        return ops.split(x, sizes, axis)
    return x.split(sizes, axis)


def concat(tensors: Sequence[paddle.Tensor], axis: int) -> paddle.Tensor:
    """Returns the tensors joined along an axis."""
    if 2 <= len(tensors) <= 3 and all(ops.usable(tensor) for tensor in tensors):
        return ops.concat(tensors, axis)
    return paddle.concat(tensors, axis)


def mean_of_places(x: paddle.Tensor) -> paddle.Tensor:
    """Returns the mean of each channel over all places: [B, C, H, W] -> [B, C]."""
    # Paddle's gradient of a mean over two axes takes forty times as long on a CPU.
    return x.flatten(2).mean(axis=-1)
