"""The names of tensors in files of PiT."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, rename

_RULES = ((r"^pools\.(\d+)\.", lambda match: f"transformers.{int(match[1]) + 1}.pool."),)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``PoolingVisionTransformer``.

    Sources: the files of naver-ai/pit and of PaddleViT. They number the poolings from 0. In timm,
    pooling 0 belongs to the second stage.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether there is a distillation token, which has a head of its own."""
    if "head.weight" not in arrays:
        return {}
    return {"DISTILLED": "head_dist.weight" in arrays}
