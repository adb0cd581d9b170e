"""The names of tensors in files of HVT."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, rename

# PaddleViT
_RULES = ((r"^layers\.(?=\d+\.(norm1|norm2|attn|mlp|pos_embed)\b)", "blocks."),)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of ziplab/HVT's ``HVT``.

    Sources: the files of PaddleViT. timm doesn't have the model.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether queries, keys and values have a bias, and how many blocks lie between two
    poolings.
    """
    if "blocks.0.attn.qkv.weight" not in arrays:
        return {}
    pooling = [index for index in range(len(arrays)) if f"blocks.{index}.pos_embed" in arrays]
    keys: dict[str, Any] = {"QKV_BIAS": "blocks.0.attn.qkv.bias" in arrays}
    if len(pooling) != 1:
        keys["POOL_BLOCK_WIDTH"] = pooling[1] if pooling else 0
    return keys
