"""Initialisations that several architectures share."""

import math

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal, Uniform

from models.layers.attention import Attention
from models.layers.mlp import Mlp
from models.layers.patch_embed import PatchEmbed


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


@paddle.no_grad()
def init_as_big_vision(layer: nn.Layer) -> None:
    """Initialises one layer of a ViT as Flax does in big_vision; of a layer that has others, it comes after them.

    Linears are uniform with variance 2 / (fan in + fan out) (Glorot and Bengio 2010), queries, keys and values each by
    themselves. Patches have variance 1 / fan in, cut at two deviations. Biases are 0, those of an MLP N(0, 1e-6).
    """
    if isinstance(layer, nn.Linear):
        _glorot(layer, *layer.weight.shape)
    elif isinstance(layer, Attention):
        _glorot(layer.qkv, layer.qkv.weight.shape[0], layer.qkv.weight.shape[1] // 3)
    elif isinstance(layer, Mlp):
        for linear in (layer.fc1, layer.fc2):
            Normal(std=1e-6)(linear.bias)
    elif isinstance(layer, PatchEmbed):
        weight = layer.proj.weight
        within = math.erf(2 / math.sqrt(2))  # the share of a normal distribution within two deviations
        cut = paddle.erfinv(paddle.uniform(weight.shape, min=-within, max=within)) * math.sqrt(2)
        # Cutting leaves a deviation of 0.8796.
        weight.set_value(cut * (math.prod(weight.shape[1:]) ** -0.5 / 0.87962566103423978))
        if layer.proj.bias is not None:
            Constant(0.0)(layer.proj.bias)


def _glorot(linear: nn.Linear, fan_in: int, fan_out: int) -> None:
    bound = math.sqrt(6 / (fan_in + fan_out))
    Uniform(-bound, bound)(linear.weight)
    if linear.bias is not None:
        Constant(0.0)(linear.bias)
