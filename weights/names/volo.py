"""The names of tensors in files of VOLO."""

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

    Sources: the files of PaddleViT. Those of sail-sg/volo have timm's names.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether queries, keys and values have a bias."""
    if "network.0.0.attn.v.weight" not in arrays:
        return {}
    return {"QKV_BIAS": "network.0.0.attn.v.bias" in arrays}
