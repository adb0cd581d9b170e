"""MLP-Mixer, gMLP and ResMLP."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, from_flax, jax_kernel, rename, to_flax, torch_kernel

_RULES = (
    (r"^patch_embed\.(patch_embed|proj)\.", "stem.proj."),
    (r"^mixer_layers\.", "blocks."),
    (r"^(blocks\.\d+)\.attn\.", r"\1.linear_tokens."),
    (r"^(blocks\.\d+)\.mlp\.", r"\1.mlp_channels."),
    (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2"),
)

# timm's layers, and Google's; <i> is a block's number.
_GOOGLE = (
    ("stem.proj", "stem"),
    ("blocks.<i>.norm1", "MixerBlock_<i>/LayerNorm_0"),
    ("blocks.<i>.norm2", "MixerBlock_<i>/LayerNorm_1"),
    ("blocks.<i>.mlp_tokens.fc1", "MixerBlock_<i>/token_mixing/Dense_0"),
    ("blocks.<i>.mlp_tokens.fc2", "MixerBlock_<i>/token_mixing/Dense_1"),
    ("blocks.<i>.mlp_channels.fc1", "MixerBlock_<i>/channel_mixing/Dense_0"),
    ("blocks.<i>.mlp_channels.fc2", "MixerBlock_<i>/channel_mixing/Dense_1"),
    ("norm", "pre_head_layer_norm"),
    ("head", "head"),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``MlpMixer``.

    Sources: Google's Mixer (.npz), facebookresearch/deit's ResMLP, PaddleViT's three.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    if layout == "jax":
        named = from_flax(arrays, _GOOGLE)
        return {
            name: torch_kernel(a) if name.endswith(".weight") else a for name, a in named.items()
        }
    named = rename(arrays, _RULES)
    affine = (".alpha", ".beta")  # [D] in facebookresearch/deit
    return {name: a.reshape(1, 1, -1) if name.endswith(affine) else a for name, a in named.items()}


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """PaddleViT's gates (of gMLP) have an epsilon of 1e-6, as its other norms; timm's have 1e-5."""
    return {"NORM_EPS": 1e-6} if "mixer_layers.0.mlp_channels.gate.norm.weight" in arrays else {}


def google_names(arrays: Arrays) -> Arrays:
    """Returns MLP-Mixer's arrays (timm's names, torch's layout) as Google's .npz files have them.

    Raises:
        InputError: an array that Google's Mixer doesn't have.
    """
    kernels = {name: jax_kernel(a) if name.endswith(".weight") else a for name, a in arrays.items()}
    return to_flax(kernels, _GOOGLE)
