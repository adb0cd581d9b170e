"""Maps of any size in graphs that are exported: what layers compute of sides that are known only
when a graph is run.

It is written with operators that every format has. Sides are whole numbers, or tensors of one.
"""

from typing import Any

import numpy as np
import paddle


@paddle.jit.not_to_static
def is_known(*sides: Any) -> bool:
    """Returns whether all sides are numbers, and none is a tensor of a graph."""
    return all(isinstance(side, int) for side in sides)


def as_tensor(side: Any) -> paddle.Tensor:
    """Returns a side as a tensor [1] int64."""
    if isinstance(side, int):
        return paddle.full([1], side, "int64")
    return side.astype("int64").reshape([1])


def places(side: Any) -> paddle.Tensor:
    """Returns 0, 1, ... side - 1, int64."""
    return paddle.arange(0, as_tensor(side), 1, dtype="int64")


def at_least(side: Any, least: int) -> paddle.Tensor:
    """Returns a side that is a tensor, or ``least`` where that is more, [1] int64."""
    return paddle.maximum(as_tensor(side), as_tensor(least))


def rounded_up(side: Any, unit: int) -> Any:
    """Returns the least multiple of ``unit`` that isn't below a side."""
    return (side + (unit - 1)) // unit * unit


def extended(x: paddle.Tensor, axis: int, to: Any) -> paddle.Tensor:
    """Returns x with zeros after its last place along an axis, so that it has ``to`` places."""
    return taken(x, axis, places(to), as_tensor(x.shape[axis]))


def taken(x: paddle.Tensor, axis: int, at: paddle.Tensor, length: paddle.Tensor) -> paddle.Tensor:
    """Returns the places ``at`` of an axis of x, and zeros where they lie behind its end.

    Args:
        at: [n] int64, 0 or more.
        length: of the axis, [1] int64.
    """
    shape = [1] * len(x.shape)
    shape[axis] = -1
    inside = (at < length).astype(x.dtype).reshape(shape)
    # Not gather: in Paddle 2.6 its gradient is wrong along any axis but the first.
    return paddle.index_select(x, paddle.minimum(at, length - 1), axis) * inside


def bicubic_weights(old: int, new: Any) -> paddle.Tensor:
    """Returns the matrix [new, old] of ``weights.resize.bicubic_matrix``, float32.

    Distances are fractions of whole numbers, which are exact.
    """
    to = as_tensor(new)
    out = places(new).unsqueeze(1)
    source = paddle.arange(old, dtype="int64").unsqueeze(0)
    offset = ((2 * source + 1) * to - (2 * out + 1) * old).astype("float32")
    longer = paddle.maximum(to, paddle.full([1], old, "int64"))
    weights = bicubic((offset / (2 * longer).astype("float32")).abs())
    return weights / weights.sum(1, keepdim=True)


def bilinear_weights(old: int, new: Any) -> paddle.Tensor:
    """Returns the matrix [new, old] of ``weights.resize.bilinear_matrix``, float32.

    Places are fractions of whole numbers, which are exact.
    """
    to = as_tensor(new)
    out = places(new).unsqueeze(1)
    at = ((2 * out + 1) * old - to).astype("float32") / (2 * to).astype("float32")
    source = paddle.arange(old, dtype="float32").unsqueeze(0)
    return (1 - (source - at.clip(0, old - 1)).abs()).clip(min=0)


def bicubic(x: paddle.Tensor) -> paddle.Tensor:
    """Returns the bicubic weights of distances x >= 0 (Keys 1981), with a = -0.5."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return paddle.where(x < 1, near, paddle.where(x < 2, far, paddle.zeros_like(x)))


def means_of_regions(x: paddle.Tensor, size: Any) -> paddle.Tensor:
    """Returns the means of maps over a grid of regions, as ``F.adaptive_avg_pool2d``.

    paddle2onnx writes that as a pooling of equal regions, which sides that aren't a multiple don't
    have.

    Args:
        x: [B, D, H, W] float32.
        size: rows and columns of the result.
    """
    columns = _shares_of_regions(x.shape[3], size[1])
    rows = _shares_of_regions(x.shape[2], size[0])
    # Transposed first: Paddle Inference multiplies a convolution's maps by a matrix in another
    # layout than theirs.
    x = paddle.matmul(x.transpose([0, 1, 3, 2]), rows)
    return paddle.matmul(x.transpose([0, 1, 3, 2]), columns)


def _shares_of_regions(side: Any, count: Any) -> paddle.Tensor:
    """Returns the share of each place in the mean of each region: [side, count] float32.

    Not [count, side]: with AVX-512, Paddle Inference 3.3.1 returns uninitialised memory for a
    product by a transposed matrix of one column.
    """
    if is_known(side, count):
        region = np.arange(count)
        place = np.arange(side)[:, None]
        length = side
    else:
        region = places(count).unsqueeze(0)
        place = places(side).unsqueeze(1)
        length = as_tensor(side)
        count = as_tensor(count)
    first = region * length // count
    end = ((region + 1) * length + (count - 1)) // count
    shares = (place >= first).astype("float32") * (place < end).astype("float32")
    shares = shares / (end - first).astype("float32")
    return paddle.to_tensor(shares) if isinstance(shares, np.ndarray) else shares
