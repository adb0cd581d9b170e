"""Initialisations that several architectures share."""

import inspect
import math
from collections.abc import Iterable
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal, TruncatedNormal, Uniform

from models.layers.attention import Attention
from models.layers.mlp import Mlp

# The standard deviation of a normal distribution with deviation 1 that is cut at +-2.
_DEVIATION_OF_CUT = 0.87962566103423978


def fan_in(layer: nn.Layer) -> int:
    """Returns the number of inputs that an output of a convolution or Linear reads."""
    if isinstance(layer, nn.Linear):
        return layer.weight.shape[0]
    return math.prod(layer.weight.shape[1:])


def init_as_torch(layer: nn.Layer) -> None:
    """Initialises a convolution or Linear as PyTorch does by itself.

    Weights and biases are uniform between -1 / sqrt(fan in) and 1 / sqrt(fan in). Other layers stay
    as they are.
    """
    if isinstance(layer, (nn.Conv2D, nn.Linear)):
        bound = fan_in(layer) ** -0.5
        for parameter in layer.parameters():
            Uniform(-bound, bound)(parameter)


def init_lecun(layer: nn.Layer) -> None:
    """Initialises a convolution or Linear as Flax does by itself (LeCun's normal distribution).

    Weights come from a normal distribution that is cut at two standard deviations, and has the
    deviation 1 / sqrt(fan in) after the cut. Biases are 0. Other layers stay as they are.
    """
    if isinstance(layer, (nn.Conv2D, nn.Linear)):
        deviation = fan_in(layer) ** -0.5 / _DEVIATION_OF_CUT
        # Paddle 2.6 cuts at two deviations, Paddle 3 at the values a and b.
        bounds = {}
        if "a" in inspect.signature(TruncatedNormal.__init__).parameters:
            bounds = {"a": -2 * deviation, "b": 2 * deviation}
        TruncatedNormal(std=deviation, **bounds)(layer.weight)
        if layer.bias is not None:
            Constant(0.0)(layer.bias)


def init_branches(blocks: Iterable[Any], flax: bool = False, first: int = 1) -> None:
    """Redraws the last layer of each branch with a deviation divided by sqrt(2 i) in block i
    (BEiT, arXiv:2106.08254).

    Args:
        flax: whether to draw as ``init_as_flax`` does; otherwise from N(0, 0.02).
        first: the number i of the first of these blocks.
    """
    for i, block in enumerate(blocks, start=first):
        for layer in (block.attn.proj, block.mlp.fc2):
            if flax:
                _glorot(layer, *layer.weight.shape, scale=1 / math.sqrt(2 * i), bias=False)
            else:
                Normal(std=0.02 / math.sqrt(2 * i))(layer.weight)


def init_convolution(layer: nn.Layer) -> None:
    """Initialises a convolution for a ReLU after it (He et al. 2015, arXiv:1502.01852).

    Its weights are normal with the variance 2 / fan out, its bias stays at Paddle's 0. Other layers
    stay as they are.
    """
    if isinstance(layer, nn.Conv2D):
        out_channels, _, *kernel = layer.weight.shape
        variance = 2.0 * layer._groups / (out_channels * math.prod(kernel))
        Normal(std=math.sqrt(variance))(layer.weight)


@paddle.no_grad()
def init_as_flax(layer: nn.Layer) -> None:
    """Initialises one layer as timm's ``init_weight_jax`` does.

    Linears are uniform with variance 2 / (fan in + fan out) (Glorot and Bengio 2010), convolutions
    are drawn by ``init_lecun``. Biases are 0, those of an MLP come from N(0, 1e-6). A layer has to
    be initialised after its sublayers, as ``Layer.apply`` does.
    """
    if isinstance(layer, nn.Linear):
        _glorot(layer, *layer.weight.shape)
    elif isinstance(layer, Mlp):
        for linear in (layer.fc1, layer.fc2):
            Normal(std=1e-6)(linear.bias)
    else:
        init_lecun(layer)


def init_as_big_vision(layer: nn.Layer) -> None:
    """Initialises one layer of a ViT as big_vision does.

    It is ``init_as_flax``, but the weights of queries, keys and values are drawn as those of three
    Linears. A layer has to be initialised after its sublayers, as ``Layer.apply`` does.
    """
    init_as_flax(layer)
    if isinstance(layer, Attention):
        _glorot(layer.qkv, layer.qkv.weight.shape[0], layer.qkv.weight.shape[1] // 3)


def init_as_mae(layer: nn.Layer) -> None:
    """Initialises a Linear or an embedding of patches for MAE (He et al. 2021, arXiv:2111.06377).

    Weights are uniform with variance 2 / (fan in + fan out) (Glorot and Bengio 2010), those of a
    convolution as if it were a Linear over its patches. Biases of Linears are 0. Other layers and
    biases stay as they are.
    """
    if isinstance(layer, nn.Linear):
        _glorot(layer, *layer.weight.shape)
    elif isinstance(layer, nn.Conv2D):
        bound = math.sqrt(6 / (fan_in(layer) + layer.weight.shape[0]))
        Uniform(-bound, bound)(layer.weight)


def _glorot(
    linear: nn.Linear, fan_in: int, fan_out: int, scale: float = 1.0, bias: bool = True
) -> None:
    """Draws the weights uniformly with variance scale ** 2 * 2 / (fan_in + fan_out).

    Args:
        bias: whether the bias is set to 0.
    """
    bound = scale * math.sqrt(6 / (fan_in + fan_out))
    Uniform(-bound, bound)(linear.weight)
    if bias and linear.bias is not None:
        Constant(0.0)(linear.bias)
