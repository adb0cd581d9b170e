"""PoolFormer."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^patch_embed\.proj\.", "stem.conv."),
    *((rf"^network\.{2 * i}\.", f"stages.{i}.blocks.") for i in range(4)),
    *((rf"^network\.{2 * i - 1}\.proj\.", f"stages.{i}.downsample.conv.") for i in (1, 2, 3)),
    (r"\.layer_scale_([12])$", r".layer_scale\1.scale"),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``MetaFormer``.

    Sources: the files of sail-sg/poolformer and of PaddleViT. Both normalise before the pooling:
    their norm is ``norm`` here, too, and timm's, after the pooling, ``head.norm``.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def computes(arrays: Collection[str]) -> dict[str, Any]:
    """Tells whether the norm comes after the pooling."""
    return (
        {"FC_NORM": "norm.weight" not in arrays}
        if {"norm.weight", "head.norm.weight"} & set(arrays)
        else {}
    )


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the norm's place: the other one's parameters have the same shapes."""
    return computes(arrays)
