"""Layers that several architectures share; parameter names are timm's."""

from paddle import nn

from models.layers.attention import Attention
from models.layers.drop import DropPath, PatchDropout
from models.layers.mlp import Mlp
from models.layers.patch_embed import PatchEmbed
from models.layers.scale import LayerScale

__all__ = ["Attention", "DropPath", "LayerScale", "Mlp", "PatchDropout", "PatchEmbed", "linear_weights"]


def linear_weights(model: nn.Layer) -> set[str]:
    """Returns the structured names of the Linear weights: [in, out] here, [out, in] in PyTorch and in weight files."""
    return {f"{name}.weight" for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}
