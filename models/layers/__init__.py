"""Layers that several architectures share; parameter names are timm's."""

from paddle import nn
from paddle.nn.initializer import Constant, Normal

from models.layers.attention import Attention
from models.layers.drop import DropPath, PatchDropout
from models.layers.linear import LayerNorm, Linear, set_norm_eps
from models.layers.mlp import Mlp
from models.layers.patch_embed import PatchEmbed
from models.layers.scale import LayerScale

__all__ = [
    "Attention",
    "DropPath",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "Mlp",
    "PatchDropout",
    "PatchEmbed",
    "init_linear",
    "set_norm_eps",
]


def init_linear(layer: nn.Layer) -> None:
    """Initialises a Linear as most Vision Transformers do: weights by N(0, 0.02), the bias with 0.

    Other layers stay as they are.
    """
    # timm truncates the normal distribution at +-2, which is a hundred standard deviations away.
    if isinstance(layer, nn.Linear):
        Normal(std=0.02)(layer.weight)
        if layer.bias is not None:
            Constant(0.0)(layer.bias)
