"""The names of tensors in files of MLP-Mixer, gMLP and ResMLP."""

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

# timm's and Google's names of layers. <i> is the number of a block.
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

    Sources: the files of Google's Mixer (.npz), of facebookresearch/deit's ResMLP, and of
    PaddleViT's Mixer, gMLP and ResMLP.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    if layout == "jax":
        named = from_flax(arrays, _GOOGLE)
        for name, array in named.items():
            if name.endswith(".weight"):
                named[name] = torch_kernel(array)
        return named
    named = rename(arrays, _RULES)
    for name, array in named.items():
        # They are [D] in facebookresearch/deit.
        if name.endswith((".alpha", ".beta")):
            named[name] = array.reshape(1, 1, -1)
    return named


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the epsilon of the norms in the gates of PaddleViT's gMLP: 1e-6. timm's have 1e-5."""
    return {"NORM_EPS": 1e-6} if "mixer_layers.0.mlp_channels.gate.norm.weight" in arrays else {}


def google_names(arrays: Arrays) -> Arrays:
    """Returns an MLP-Mixer's arrays as Google's .npz files have them.

    Args:
        arrays: by timm's names, in torch's layout.

    Raises:
        InputError: Google's Mixer doesn't have one of the arrays.
    """
    kernels = {
        name: jax_kernel(array) if name.endswith(".weight") else array
        for name, array in arrays.items()
    }
    return to_flax(kernels, _GOOGLE)
