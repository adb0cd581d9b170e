"""Bilinear resizing of feature maps."""

from collections.abc import Sequence

import numpy as np
import paddle


def resize_evenly(x: paddle.Tensor, grid: Sequence[int], size: Sequence[int]) -> paddle.Tensor:
    """Returns maps resized bilinearly: [B, D, *grid] -> [B, D, *size].

    It equals PyTorch's ``interpolate`` with align_corners=False. When Paddle's own reduces a
    side to one place, it takes the first place instead of the mean of the middle two. On a GPU its
    gradient adds in no fixed order.

    Args:
        grid: rows and columns of the maps.
        size: rows and columns of the result. Each is a multiple of that of ``grid``, or ``grid`` is
            an even multiple of it.
    """
    for axis in (2, 3):
        old = grid[axis - 2]
        new = size[axis - 2]
        x = _enlarge(x, axis, old, new // old) if new > old else _reduce(x, axis, old, old // new)
    return x


def _enlarge(x: paddle.Tensor, axis: int, length: int, factor: int) -> paddle.Tensor:
    """Replaces each place by ``factor`` means of it and its nearest neighbour, weighted by distance."""
    shape = x.shape
    ends = [paddle.slice(x, [axis], [start], [start + 1]) for start in (0, length - 1)]
    padded = paddle.concat([ends[0], x, ends[1]], axis)
    before, after = (paddle.slice(padded, [axis], [start], [start + length]) for start in (0, 2))
    offsets = [(2 * i + 1) / (2 * factor) - 0.5 for i in range(factor)]
    places = []
    for offset in offsets:
        neighbour = before if offset < 0 else after
        places.append(x * (1 - abs(offset)) + neighbour * abs(offset))
    enlarged = [*shape[:axis], length * factor, *shape[axis + 1 :]]
    return paddle.stack(places, axis + 1).reshape(enlarged)


def _reduce(x: paddle.Tensor, axis: int, length: int, factor: int) -> paddle.Tensor:
    """Replaces each ``factor`` places by the mean of the middle two; with factor 1 returns x."""
    if factor == 1:
        return x
    shape = [*x.shape[:axis], length // factor, factor, *x.shape[axis + 1 :]]
    places = x.reshape(shape).unbind(axis + 1)
    return (places[factor // 2 - 1] + places[factor // 2]) * 0.5


def interpolate(x: paddle.Tensor, size: Sequence[int]) -> paddle.Tensor:
    """Returns maps resized bilinearly to any size: [B, D, H, W] -> [B, D, *size].

    It equals PyTorch's ``interpolate`` with align_corners=False. It is computed by matrix products,
    whose gradients add in a fixed order on a GPU.
    """
    height, width = x.shape[2:]
    if width != size[1]:
        x = paddle.matmul(x, _weights(width, size[1]))
    if height != size[0]:
        x = paddle.matmul(_weights(height, size[0]), x, transpose_x=True)
    return x


def _weights(length: int, new: int) -> paddle.Tensor:
    """Returns the weights of ``length`` places in each of ``new`` places: [length, new].

    Not [new, length]: with AVX-512, Paddle Inference 3.3.1 returns uninitialised memory for a
    product by a transposed matrix of one column.
    """
    # The middle of each new place, in old places.
    position = np.maximum((np.arange(new) + 0.5) * (length / new) - 0.5, 0)
    first = np.minimum(position.astype(int), length - 1)
    second = np.minimum(first + 1, length - 1)
    share = position - first
    weights = np.zeros([length, new], np.float32)
    np.add.at(weights, (first, np.arange(new)), 1 - share)
    np.add.at(weights, (second, np.arange(new)), share)
    return paddle.to_tensor(weights)
