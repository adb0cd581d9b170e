"""The names of tensors in files of text towers: transformers', OpenAI's, OpenCLIP's, big_vision's."""

import numpy as np

from errors import Unreadable
from weights.names.rules import Arrays, from_flax, join_qkv, rename, torch_kernel

_TRANSFORMERS = (
    (r"\.position_ids$", None),
    (r"^text_model\.embeddings\.token_embedding\.", "token_embedding."),
    (r"^text_model\.embeddings\.position_embedding\.weight$", "pos_embed"),
    (r"^text_model\.encoder\.layers\.", "blocks."),
    (r"^text_model\.final_layer_norm\.", "norm."),
    (r"^text_model\.head\.", "head."),
    (r"^text_projection\.", "head."),
    (r"\.layer_norm([12])\.", r".norm\1."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn.\1."),
    (r"\.self_attn\.out_proj\.", ".attn.proj."),
)
_OPENCLIP = (
    (r"^text\.", ""),
    (r"^attn_mask$", None),
    (r"^positional_embedding$", "pos_embed"),
    (r"^transformer\.resblocks\.", "blocks."),
    (r"^ln_final\.", "norm."),
    (r"^text_projection$", "head.weight"),
    (r"^text_projection\.", "head."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
_BIG_VISION = (
    ("token_embedding.weight", "Embed_0/embedding"),
    ("pos_embed", "pos_embedding"),
    ("blocks.<i>.norm1", "Encoder_0/encoderblock_<i>/LayerNorm_0"),
    ("blocks.<i>.attn.q", "Encoder_0/encoderblock_<i>/MultiHeadDotProductAttention_0/query"),
    ("blocks.<i>.attn.k", "Encoder_0/encoderblock_<i>/MultiHeadDotProductAttention_0/key"),
    ("blocks.<i>.attn.v", "Encoder_0/encoderblock_<i>/MultiHeadDotProductAttention_0/value"),
    ("blocks.<i>.attn.proj", "Encoder_0/encoderblock_<i>/MultiHeadDotProductAttention_0/out"),
    ("blocks.<i>.norm2", "Encoder_0/encoderblock_<i>/LayerNorm_1"),
    ("blocks.<i>.mlp.fc1", "Encoder_0/encoderblock_<i>/MlpBlock_0/Dense_0"),
    ("blocks.<i>.mlp.fc2", "Encoder_0/encoderblock_<i>/MlpBlock_0/Dense_1"),
    ("norm", "Encoder_0/encoder_norm"),
    ("head", "head"),
)
# The files' names of the logarithm of the scale, and of the bias.
_SCALES = {
    "logit_scale": "logit_scale",
    "logit_bias": "logit_bias",
    "params/t": "logit_scale",
    "params/b": "logit_bias",
}
# Where a file holds a text tower: the names of its tokens' embeddings.
TRANSFORMERS = "text_model.embeddings.token_embedding.weight"
OPENCLIP = "token_embedding.weight"
OPENCLIP_APART = "text.token_embedding.weight"
BIG_VISION_TEXT = "params/txt/Embed_0/embedding"


def layout_of(names: Arrays) -> str:
    """Returns in whose layout a file holds a text tower: "transformers", "openclip" or
    "big_vision"; "" if it holds none.

    Args:
        names: of the file's arrays.
    """
    if TRANSFORMERS in names:
        return "transformers"
    if OPENCLIP in names or OPENCLIP_APART in names:
        return "openclip"
    if BIG_VISION_TEXT in names:
        return "big_vision"
    return ""


def tower_names(arrays: Arrays) -> Arrays:
    """Returns the arrays of a text tower under the names of ``models.text.TextTransformer``, in
    PyTorch's layout.

    Arrays of the image tower are left out.

    Raises:
        Unreadable: the file has no text tower.
        InputError: two arrays get the same name.
    """
    layout = layout_of(arrays)
    if not layout:
        raise Unreadable("it has no text tower; use weights of CLIP or SigLIP with both towers")
    scales = {}
    for name, array in arrays.items():
        if name in _SCALES:
            scales[_SCALES[name]] = np.asarray(array).reshape([])
    if layout == "transformers":
        prefixes = ("text_model.", "text_projection.")
        own = {name: array for name, array in arrays.items() if name.startswith(prefixes)}
        named = join_qkv(rename(own, _TRANSFORMERS))
    elif layout == "openclip":
        named = _of_openclip(arrays)
    else:
        named = _of_big_vision(arrays)
    if "pos_embed" in named and named["pos_embed"].ndim == 2:
        named["pos_embed"] = named["pos_embed"][None]
    return named | scales


def _of_openclip(arrays: Arrays) -> Arrays:
    if OPENCLIP_APART in arrays:
        own = {name: array for name, array in arrays.items() if name.startswith("text.")}
    else:
        prefixes = ("transformer.", "ln_final.", "token_embedding.")
        names = ("positional_embedding", "text_projection", "text_projection.weight")
        own = {
            name: array
            for name, array in arrays.items()
            if name.startswith(prefixes) or name in names
        }
    named = rename(own, _OPENCLIP)
    # A parameter there, [in, out]; with a bias a Linear, [out, in].
    is_parameter = "text_projection" in own or "text.text_projection" in own
    if is_parameter and "head.weight" in named:
        named["head.weight"] = named["head.weight"].T
    return named


def _of_big_vision(arrays: Arrays) -> Arrays:
    tower = {}
    for name, array in arrays.items():
        if not name.startswith("params/txt/"):
            continue
        name = name.removeprefix("params/txt/")
        if name.startswith("Encoder_0/encoderblock/"):
            # Blocks that are stacked along a first axis. Read at once: a lazy stack would be read
            # again for each of its blocks.
            for number, block in enumerate(np.asarray(array)):
                tower[name.replace("encoderblock/", f"encoderblock_{number}/")] = block
        else:
            tower[name] = array
    named = from_flax(tower, _BIG_VISION)
    for name, array in named.items():
        if ".attn." in name and name.split(".")[3] in "qkv":
            # Weights are [in, heads, head_dim], biases [heads, head_dim].
            array = array.reshape(*array.shape[:-2], -1)
        elif name.endswith("attn.proj.weight"):
            # [heads, head_dim, out]
            array = array.reshape(-1, *array.shape[-1:])
        is_kernel = name.endswith(".weight") and name != "token_embedding.weight"
        named[name] = torch_kernel(array) if is_kernel else array
    return join_qkv(named)
