"""Bilinear resizing of feature maps."""

from collections.abc import Sequence

import numpy as np
import paddle


def resize_evenly(x: paddle.Tensor, grid: Sequence[int], size: Sequence[int]) -> paddle.Tensor:
    """Returns maps [B, D, *grid] resized bilinearly to multiples or even fractions of both sides,
    as PyTorch's ``interpolate`` does without aligned corners.

    Paddle's own ``interpolate`` reduces to a single row by taking the first place instead of the
    middle ones. On a GPU its gradient adds in no fixed order.
    """
    for axis in (2, 3):
        old = grid[axis - 2]
        new = size[axis - 2]
        x = _enlarge(x, axis, old, new // old) if new > old else _reduce(x, axis, old, old // new)
    return x


def _enlarge(x: paddle.Tensor, axis: int, length: int, factor: int) -> paddle.Tensor:
    """Makes each place ``factor`` places: means of it and its nearer neighbour, weighted by distance."""
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
    """Returns the mean of the middle two of each ``factor`` places; with factor 1 the place itself."""
    if factor == 1:
        return x
    shape = [*x.shape[:axis], length // factor, factor, *x.shape[axis + 1 :]]
    places = x.reshape(shape).unbind(axis + 1)
    return (places[factor // 2 - 1] + places[factor // 2]) * 0.5


def interpolate(x: paddle.Tensor, size: Sequence[int]) -> paddle.Tensor:
    """Returns maps [B, D, H, W] resized bilinearly to any ``size``, as PyTorch's ``interpolate``
    without aligned corners.

    It multiplies with matrices, whose gradients add in a fixed order on a GPU.
    """
    height, width = x.shape[2:]
    if width != size[1]:
        x = paddle.matmul(x, _weights(width, size[1]), transpose_y=True)
    if height != size[0]:
        x = paddle.matmul(_weights(height, size[0]), x)
    return x


def _weights(length: int, new: int) -> paddle.Tensor:
    """Returns the weight of each of ``length`` places in each of ``new`` places: [new, length]."""
    at = np.maximum((np.arange(new) + 0.5) * (length / new) - 0.5, 0)
    first = np.minimum(at.astype(int), length - 1)
    second = np.minimum(first + 1, length - 1)
    share = at - first
    weights = np.zeros([new, length], np.float32)
    np.add.at(weights, (np.arange(new), first), 1 - share)
    np.add.at(weights, (np.arange(new), second), share)
    return paddle.to_tensor(weights)
