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
    "file_name",
    "init_linear",
    "linear_weights",
    "set_norm_eps",
]


def linear_weights(model: nn.Layer) -> set[str]:
    """Returns the structured names of the Linear weights: [in, out] here, [out, in] in PyTorch and in weight files."""
    return {f"{name}.weight" for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}


def file_name(name: str) -> str:
    """Returns the name that a tensor has in PyTorch and in weight files; it differs for batch norm's statistics."""
    return name.replace("._mean", ".running_mean").replace("._variance", ".running_var")


def init_linear(layer: nn.Layer) -> None:
    """Initialises a Linear as most Vision Transformers do: weights N(0, 0.02), bias 0; leaves other layers alone."""
    # timm truncates at +-2, a hundred standard deviations away: the plain normal is the same distribution.
    if isinstance(layer, nn.Linear):
        Normal(std=0.02)(layer.weight)
        if layer.bias is not None:
            Constant(0.0)(layer.bias)
