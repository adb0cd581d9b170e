"""The names of tensors in files of CaiT."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = ((r"^patch_embed\.patch_embed\.", "patch_embed.proj."),)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``Cait``.

    Sources: the files of PaddleViT. Those of facebookresearch/deit have timm's names.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
