"""The names of tensors in files of CvT."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^stages\.(\d)\.", r"stage\1."),
    (r"\.conv_proj_([qkv])\.0\.", r".conv_proj_\1.conv."),
    (r"\.conv_proj_([qkv])\.1\.", r".conv_proj_\1.bn."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of microsoft/CvT.

    Source: PaddleViT's CvT.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether the last stage has a class token."""
    stages = [name.split(".")[0] for name in arrays if name.endswith(".patch_embed.proj.weight")]
    if not stages:
        return {}
    return {"CLASS_TOKEN": f"{max(stages)}.cls_token" in arrays}
