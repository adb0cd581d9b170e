"""PiT."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, rename

_RULES = ((r"^pools\.(\d+)\.", lambda found: f"transformers.{int(found[1]) + 1}.pool."),)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``PoolingVisionTransformer``.

    Sources: the files of naver-ai/pit and of PaddleViT, which count what pools from 0: before the
    second stage.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def computes(arrays: Collection[str]) -> dict[str, Any]:
    """Tells the distillation token, whose head is beside the other."""
    return {"DISTILLED": "head_dist.weight" in arrays} if "head.weight" in arrays else {}
