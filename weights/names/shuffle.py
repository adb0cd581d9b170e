"""The names of tensors in files of Shuffle Transformer."""

import re
from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, rename


def _block(match: re.Match[str]) -> str:
    """Numbers PaddleViT's stages from 1, and its blocks by pairs."""
    pair, second = divmod(int(match[2]), 2)
    return f"stage{int(match[1]) + 1}.layers.{pair}.{second}."


_RULES = (
    # A table that follows from sizes.
    (r"\.relative_position_index$", None),
    (r"^patch_embedding\.", "to_token."),
    (r"^stages\.(\d)\.layers\.(\d+)\.", _block),
    (r"^stages\.(\d)\.", lambda match: f"stage{int(match[1]) + 1}."),
    (r"\.attn\.qkv\.", ".attn.to_qkv."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of mulinmeng/Shuffle-Transformer.

    Sources: its files, and those of PaddleViT's Shuffle Transformer.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether the queries, keys and values have a bias."""
    if not any(name.endswith(".attn.to_qkv.weight") for name in arrays):
        return {}
    return {"QKV_BIAS": any(name.endswith(".attn.to_qkv.bias") for name in arrays)}
