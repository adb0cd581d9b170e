"""Initialisations that several architectures share."""

import math

from paddle import nn
from paddle.nn.initializer import Normal, Uniform


def init_as_torch(layer: nn.Layer) -> None:
    """Initialises a convolution or Linear as PyTorch does by itself: uniform within 1 / sqrt(fan in), its bias too."""
    if isinstance(layer, nn.Conv2D):
        fan_in = math.prod(layer.weight.shape[1:])
    elif isinstance(layer, nn.Linear):
        fan_in = layer.weight.shape[0]
    else:
        return
    for parameter in layer.parameters():
        Uniform(-(fan_in**-0.5), fan_in**-0.5)(parameter)


def init_convolution(layer: nn.Layer) -> None:
    """Initialises a convolution for the ReLU after it (He et al. 2015, arXiv:1502.01852): weights of variance 2 / fan
    out; the bias stays at Paddle's 0, other layers as they are.
    """
    if isinstance(layer, nn.Conv2D):
        out_channels, _, *kernel = layer.weight.shape
        Normal(std=math.sqrt(2.0 * layer._groups / (out_channels * math.prod(kernel))))(layer.weight)
