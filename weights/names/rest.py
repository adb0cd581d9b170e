"""The names of tensors in files of ResT and ResTv2."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, rename


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of wofmanaf/ResT's ``ResT`` and ``ResTV2``.

    Sources: the files of PaddleViT, which number stages and the layers between them from 0. timm
    doesn't have the models.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    # The layers between two stages have other names in ResTv2.
    step = "patch" if any(name.startswith("stem.proj.") for name in arrays) else "patch_embed"
    rules = (
        (r"^patch_embeds\.(\d)\.", lambda match: f"{step}_{int(match[1]) + 2}."),
        (r"^stages\.(\d)\.(?=\d)", lambda match: f"stage{int(match[1]) + 1}."),
    )
    return rename(arrays, rules)


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether queries, keys and values have a bias, and for ResT whether its heads are
    mixed.
    """
    if "stage4.0.attn.q.weight" not in arrays:
        return {}
    keys = {"QKV_BIAS": "stage4.0.attn.q.bias" in arrays}
    if "stem.conv1.weight" in arrays:
        keys["APPLY_TRANSFORM"] = "stage4.0.attn.transform_conv.weight" in arrays
    return keys
