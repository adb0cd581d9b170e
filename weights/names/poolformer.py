"""The names of tensors in files of PoolFormer."""

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

    Sources: the files of sail-sg/poolformer and of PaddleViT. Their norm comes before the pooling,
    and stays ``norm`` here. timm's comes after the pooling, and is ``head.norm``.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether the norm comes after the pooling."""
    if not {"norm.weight", "head.norm.weight"} & set(arrays):
        return {}
    return {"FC_NORM": "norm.weight" not in arrays}


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns what ``model_keys`` returns: a norm has the same shapes in both places."""
    return model_keys(arrays)
