"""The order of a map's axes, by the compiled operators (ops/) where there are any."""

import paddle

import ops


def swap_axes(x: paddle.Tensor) -> paddle.Tensor:
    """[B, M, N] -> [B, N, M]."""
    if ops.usable(x):
        batch, m, n = x.shape
        return ops.swap(x, m, [batch, n, m])
    return x.transpose([0, 2, 1])


def channels_last(x: paddle.Tensor) -> paddle.Tensor:
    """[B, C, H, W] -> [B, H, W, C]."""
    if ops.usable(x):
        batch, channels, height, width = x.shape
        return ops.swap(x, channels, [batch, height, width, channels])
    return x.transpose([0, 2, 3, 1])


def channels_first(x: paddle.Tensor) -> paddle.Tensor:
    """[B, H, W, C] -> [B, C, H, W]."""
    if ops.usable(x):
        batch, height, width, channels = x.shape
        return ops.swap(x, height * width, [batch, channels, height, width])
    return x.transpose([0, 3, 1, 2])


def mean_of_places(x: paddle.Tensor) -> paddle.Tensor:
    """The mean of each channel: [B, C, H, W] -> [B, C]. Paddle's gradient of a mean over two axes takes forty times as
    long on a CPU.
    """
    return x.flatten(2).mean(axis=-1)
