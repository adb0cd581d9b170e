"""The bilinear resize of graphs that are exported, of any size.

It is written with operators that every format has. Paddle Inference can't run Paddle's own with
oneDNN, and runtimes differ in how they compute theirs.
"""

from typing import Any

import numpy as np
import paddle

from models.layers.graph_sizes import as_tensor, places


def resized_in_graph(maps: paddle.Tensor, size: Any, align_corners: bool) -> paddle.Tensor:
    """Returns maps resized as ``models.heads.base.resized`` does, in a static graph.

    Args:
        maps: [B, D, H, W]. H and W may be known only when the graph is run.
        size: rows and columns, whole numbers or tensors of one.
    """
    for axis in (2, 3):
        maps = _resized_along(maps, axis, size[axis - 2], align_corners)
    return maps


def _resized_along(maps: paddle.Tensor, axis: int, to: Any, align_corners: bool) -> paddle.Tensor:
    length = maps.shape[axis]
    if isinstance(length, int) and isinstance(to, int):
        # Constants, which Paddle Inference folds wrongly from the graph's own integers.
        sides = np.int64(length), np.int64(to)
        between = _places(np.arange(to), *sides, align_corners, np.minimum, np.maximum)
        first, second, share = map(paddle.to_tensor, between)
    else:
        length = as_tensor(length)
        to = as_tensor(to)
        out = places(to)
        between = _places(out, length, to, align_corners, paddle.minimum, paddle.maximum)
        first, second, share = between
    # Not gather: in Paddle 2.6 its gradient is wrong along any axis but the first.
    low = paddle.index_select(maps, first, axis)
    high = paddle.index_select(maps, second, axis)
    return low + (high - low) * share.reshape([1, 1, -1, 1] if axis == 2 else [1, 1, 1, -1])


def _places(
    out: Any, length: Any, to: Any, align_corners: bool, minimum: Any, maximum: Any
) -> tuple[Any, Any, Any]:
    """Returns the two places of a map between which each place of the result lies, int64, and the
    second one's share, float32.

    The places are fractions of whole numbers, which are exact.

    Args:
        out: the places of the result, 0 to ``to`` - 1.
        minimum, maximum: of NumPy or of Paddle, as the numbers are.
    """
    if align_corners:
        numerator = out * (length - 1)
        denominator = maximum(to - 1, to - to + 1)
    else:
        numerator = maximum((2 * out + 1) * length - to, out - out)
        denominator = 2 * to
    first = minimum(numerator // denominator, length - 1)
    second = minimum(first + 1, length - 1)
    rest = numerator - first * denominator
    return first, second, rest.astype("float32") / denominator.astype("float32")
