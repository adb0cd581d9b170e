"""Maps made larger and smaller."""

from collections.abc import Sequence

import numpy as np
import paddle


def resize_evenly(x: paddle.Tensor, grid: Sequence[int], size: Sequence[int]) -> paddle.Tensor:
    """Returns maps [B, D, *grid] resized bilinearly to multiples or even fractions of both sides,
    as PyTorch's ``interpolate`` does without aligned corners.

    Paddle's own takes the first of the places that a single row stands for, and its gradient adds
    in no order on a GPU.
    """
    for axis in (2, 3):
        old, new = grid[axis - 2], size[axis - 2]
        x = _enlarge(x, axis, old, new // old) if new > old else _reduce(x, axis, old, old // new)
    return x


def _enlarge(x: paddle.Tensor, axis: int, length: int, factor: int) -> paddle.Tensor:
    """Each place becomes ``factor`` places: means of it and of its neighbour, weighed by distance."""
    shape = x.shape
    ends = [paddle.slice(x, [axis], [start], [start + 1]) for start in (0, length - 1)]
    padded = paddle.concat([ends[0], x, ends[1]], axis)
    before, after = (paddle.slice(padded, [axis], [start], [start + length]) for start in (0, 2))
    offsets = [(2 * i + 1) / (2 * factor) - 0.5 for i in range(factor)]
    parts = [
        x * (1 - abs(offset)) + (before if offset < 0 else after) * abs(offset)
        for offset in offsets
    ]
    return paddle.stack(parts, axis + 1).reshape(
        [*shape[:axis], length * factor, *shape[axis + 1 :]]
    )


def _reduce(x: paddle.Tensor, axis: int, length: int, factor: int) -> paddle.Tensor:
    """The mean of the middle two of each ``factor`` places; of 1 the place itself."""
    if factor == 1:
        return x
    shape = [*x.shape[:axis], length // factor, factor, *x.shape[axis + 1 :]]
    parts = x.reshape(shape).unbind(axis + 1)
    return (parts[factor // 2 - 1] + parts[factor // 2]) * 0.5


def interpolate(x: paddle.Tensor, size: Sequence[int]) -> paddle.Tensor:
    """Returns maps [B, D, H, W] resized bilinearly to any ``size``, as PyTorch's ``interpolate``
    without aligned corners.

    By products with matrices, whose gradients add in one order on a GPU.
    """
    height, width = x.shape[2:]
    x = x if width == size[1] else paddle.matmul(x, _weights(width, size[1]), transpose_y=True)
    return x if height == size[0] else paddle.matmul(_weights(height, size[0]), x)


def _weights(length: int, new: int) -> paddle.Tensor:
    """Returns what each of ``length`` places gives to each of ``new``: [new, length]."""
    at = np.maximum((np.arange(new) + 0.5) * (length / new) - 0.5, 0)
    first = np.minimum(at.astype(int), length - 1)
    found = np.zeros([new, length], np.float32)
    share = at - first
    np.add.at(found, (np.arange(new), first), 1 - share)
    np.add.at(found, (np.arange(new), np.minimum(first + 1, length - 1)), share)
    return paddle.to_tensor(found)
