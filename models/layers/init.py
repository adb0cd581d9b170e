"""Initialisations that several architectures share."""

import inspect
import math

from paddle import nn
from paddle.nn.initializer import Constant, Normal, TruncatedNormal, Uniform

# Of a normal distribution of deviation 1 that is cut at +-2.
_DEVIATION_OF_CUT = 0.87962566103423978


def fan_in(layer: nn.Layer) -> int:
    """Returns how many inputs an output of a convolution or Linear reads."""
    return layer.weight.shape[0] if isinstance(layer, nn.Linear) else math.prod(layer.weight.shape[1:])


def init_as_torch(layer: nn.Layer) -> None:
    """Initialises a convolution or Linear as PyTorch does by itself: uniform within 1 / sqrt(fan in), its bias too."""
    if isinstance(layer, (nn.Conv2D, nn.Linear)):
        bound = fan_in(layer) ** -0.5
        for parameter in layer.parameters():
            Uniform(-bound, bound)(parameter)


def init_lecun(layer: nn.Layer) -> None:
    """Initialises a convolution or Linear as Flax does by itself: weights of deviation 1 / sqrt(fan in), normal, cut at
    two deviations of the uncut; bias 0.
    """
    if isinstance(layer, (nn.Conv2D, nn.Linear)):
        deviation = fan_in(layer) ** -0.5 / _DEVIATION_OF_CUT
        # Paddle 2.6 cuts at two deviations; Paddle 3 at the values a and b.
        by_value = "a" in inspect.signature(TruncatedNormal.__init__).parameters
        bounds = {"a": -2 * deviation, "b": 2 * deviation} if by_value else {}
        TruncatedNormal(std=deviation, **bounds)(layer.weight)
        Constant(0.0)(layer.bias)


def init_convolution(layer: nn.Layer) -> None:
    """Initialises a convolution for the ReLU after it (He et al. 2015, arXiv:1502.01852): weights of variance 2 / fan
    out; the bias stays at Paddle's 0, other layers as they are.
    """
    if isinstance(layer, nn.Conv2D):
        out_channels, _, *kernel = layer.weight.shape
        Normal(std=math.sqrt(2.0 * layer._groups / (out_channels * math.prod(kernel))))(layer.weight)
