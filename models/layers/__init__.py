"""Layers that several architectures share; parameter names are timm's."""

from models.layers.attention import Attention
from models.layers.drop import DropPath
from models.layers.mlp import Mlp
from models.layers.patch_embed import PatchEmbed

__all__ = ["Attention", "DropPath", "Mlp", "PatchEmbed"]
