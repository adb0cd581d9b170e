"""Batch norm's statistics."""

from paddle import nn


def statistics_as_buffers(layer: nn.Layer) -> None:
    """Makes a batch norm's running mean and variance buffers, as PyTorch's are; leaves other layers alone.

    Paddle holds them as parameters that want no gradient: they would be counted, frozen and averaged as such.
    """
    if isinstance(layer, nn.BatchNorm2D):
        for name in ("_mean", "_variance"):
            layer.register_buffer(name, layer._parameters.pop(name).detach())
