"""Windows of a feature map."""

from collections.abc import Callable, Sequence

import paddle

import ops
from models.layers.layout import concat


def in_windows(
    x: paddle.Tensor,
    window_size: Sequence[int],
    layer: Callable[[paddle.Tensor], paddle.Tensor],
    shift: Sequence[int] = (0, 0),
) -> paddle.Tensor:
    """Returns what ``layer`` makes of each window of maps [B, H, W, D]: the same shape.

    Args:
        window_size: (height, width); maps that aren't a multiple of it are padded by zeros
            meanwhile.
        layer: [B * windows, height * width, D] -> the same.
        shift: rows and columns by which maps are moved up and to the left meanwhile, in a circle.
    """
    height, width, dim = x.shape[1:]
    window_height, window_width = window_size
    below = -height % window_height
    right = -width % window_width
    if ops.usable(x) and not (below or right):
        windows = layer(ops.into_windows(x, window_size, shift))
        return ops.from_windows(windows, x.shape, window_size, shift)
    if any(shift):
        x = paddle.roll(x, [-step for step in shift], axis=[1, 2])
    x = pad_maps(x, below, right)
    rows, columns = (height + below) // window_height, (width + right) // window_width
    x = x.reshape([-1, rows, window_height, columns, window_width, dim]).transpose(
        [0, 1, 3, 2, 4, 5]
    )
    # Flattened, not reshaped: Paddle Inference loses a reshape between a transposition and a Linear
    # (Paddle 3.3.1).
    x = layer(x.flatten(0, 2).flatten(1, 2))
    x = x.reshape([-1, rows, columns, window_height, window_width, dim]).transpose(
        [0, 1, 3, 2, 4, 5]
    )
    x = x.reshape([-1, height + below, width + right, dim])
    x = x[:, :height, :width] if below or right else x
    return paddle.roll(x, list(shift), axis=[1, 2]) if any(shift) else x


def pad_maps(x: paddle.Tensor, below: int, right: int) -> paddle.Tensor:
    """Returns maps [B, H, W, D] with rows and columns of zeros added.

    ``F.pad`` exports wrong: ONNX gets an arbitrary value, Paddle Inference another layout (Paddle
    3.3.1).
    """
    if below:
        x = concat([x, paddle.zeros_like(x[:, :below])], axis=1)
    return concat([x, paddle.zeros_like(x[:, :, :right])], axis=2) if right else x
