"""PoolFormer."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^patch_embed\.proj\.", "stem.conv."),
    *((rf"^network\.{2 * i}\.", f"stages.{i}.blocks.") for i in range(4)),
    *((rf"^network\.{2 * i - 1}\.proj\.", f"stages.{i}.downsample.conv.") for i in (1, 2, 3)),
    (r"\.layer_scale_([12])$", r".layer_scale\1.scale"),
    (r"^norm\.", "head.norm."),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``MetaFormer``.

    Sources: the files of sail-sg/poolformer and of PaddleViT. Both normalise before the pooling, timm after it: only
    with MODEL.FC_NORM False the same weights give their logits.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
