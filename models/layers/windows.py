"""Windows of a feature map."""

from collections.abc import Callable, Sequence

import paddle


def in_windows(
    x: paddle.Tensor, window_size: Sequence[int], layer: Callable[[paddle.Tensor], paddle.Tensor]
) -> paddle.Tensor:
    """Returns what ``layer`` makes of each window of maps [B, H, W, D]: the same shape.

    Args:
        window_size: (height, width); maps that aren't a multiple of it are padded by zeros meanwhile.
        layer: [B * windows, height * width, D] -> the same.
    """
    height, width, dim = x.shape[1:]
    window_height, window_width = window_size
    below, right = -height % window_height, -width % window_width
    x = pad_maps(x, below, right)
    rows, columns = (height + below) // window_height, (width + right) // window_width
    x = x.reshape([-1, rows, window_height, columns, window_width, dim]).transpose([0, 1, 3, 2, 4, 5])
    x = layer(x.reshape([-1, window_height * window_width, dim]))
    x = x.reshape([-1, rows, columns, window_height, window_width, dim]).transpose([0, 1, 3, 2, 4, 5])
    x = x.reshape([-1, height + below, width + right, dim])
    return x[:, :height, :width] if below or right else x


def pad_maps(x: paddle.Tensor, below: int, right: int) -> paddle.Tensor:
    """Returns maps [B, H, W, D] with rows and columns of zeros added.

    ``F.pad`` exports wrong: ONNX gets an arbitrary value, Paddle Inference another layout (Paddle 3.3.1).
    """
    if below:
        x = paddle.concat([x, paddle.zeros_like(x[:, :below])], axis=1)
    return paddle.concat([x, paddle.zeros_like(x[:, :, :right])], axis=2) if right else x
