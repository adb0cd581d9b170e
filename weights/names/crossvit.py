"""The names of tensors in files of CrossViT."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^(pos_embed|cls_token)\.(\d)$", r"\1_\2"),
    # PaddleViT
    (r"\.attn\.out\.", ".attn.proj."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``CrossVit``.

    Sources: the files of IBM/CrossViT and of PaddleViT.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
