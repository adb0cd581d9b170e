"""VOLO."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, rename

_RULES = (
    # PaddleViT
    (r"^model\.(\d+)\.", r"network.\1."),
    (r"^patch_embed\.stem\.", "patch_embed.conv."),
    (r"^post_model\.(\d+)\.", r"post_network.\1."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``VOLO``.

    Sources: the files of sail-sg/volo, which have timm's names, and of PaddleViT.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def computes(arrays: Collection[str]) -> dict[str, Any]:
    """Tells the bias of the queries, keys and values."""
    weight = "network.0.0.attn.v.weight"
    return {"QKV_BIAS": "network.0.0.attn.v.bias" in arrays} if weight in arrays else {}
