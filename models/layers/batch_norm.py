"""Batch norm's statistics."""

from collections.abc import Iterator
from contextlib import contextmanager

from paddle import nn


def statistics_as_buffers(layer: nn.Layer) -> None:
    """Makes a batch norm's running mean and variance buffers, as PyTorch's are; leaves other layers alone.

    Paddle holds them as parameters that want no gradient: they would be counted, frozen and averaged as such.
    """
    if isinstance(layer, nn.BatchNorm2D):
        for name in ("_mean", "_variance"):
            layer.register_buffer(name, layer._parameters.pop(name).detach())


@contextmanager
def statistics_kept(layer: nn.Layer) -> Iterator[None]:
    """While it lasts, the batch norms of ``layer`` normalise by their batch without taking it into their statistics."""
    norms = [norm for norm in layer.sublayers(include_self=True) if isinstance(norm, nn.BatchNorm2D)]
    momenta = [norm._momentum for norm in norms]
    for norm in norms:
        norm._momentum = 1.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm._momentum = momentum


def hold_frozen_statistics(model: nn.Layer) -> None:
    """Lets the batch norms of ``model`` whose parameters are frozen (TRAIN.FREEZE) normalise as in evaluation, by
    statistics that stay as they are.
    """
    for layer in model.sublayers():
        if isinstance(layer, nn.BatchNorm2D) and all(parameter.stop_gradient for parameter in layer.parameters()):
            layer.eval()
