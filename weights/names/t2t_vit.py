"""The names of tensors in files of T2T-ViT."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, rename

_RULES = (
    # PaddleViT
    (r"^patch_embed\.attn(\d)\.", r"tokens_to_token.attention\1."),
    (r"^patch_embed\.proj\.", "tokens_to_token.project."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of yitu-opensource/T2T-ViT's ``T2T_ViT``.

    Sources: the files of PaddleViT. timm doesn't have the model.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the kind of attention between the first tokens, and whether the blocks' queries, keys
    and values have a bias.
    """
    first = "tokens_to_token.attention1."
    if f"{first}norm1.weight" not in arrays:
        return {}
    is_performer = f"{first}kqv.weight" in arrays
    return {
        "TOKEN_TYPE": "performer" if is_performer else "transformer",
        "QKV_BIAS": "blocks.0.attn.qkv.bias" in arrays,
    }


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the epsilon of all norms in PaddleViT's files. The authors' is 1e-5."""
    if "patch_embed.attn1.norm1.weight" in arrays:
        return {"NORM_EPS": 1e-6}
    return {}
