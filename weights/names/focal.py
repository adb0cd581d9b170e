"""The names of tensors in files of Focal Transformer."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

# Tables that follow from sizes.
_RULES = ((r"\.(relative_position_index(_\d)?|valid_ind_(rolled|unfold_\d)|attn_mask)$", None),)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of microsoft/Focal-Transformer.

    Sources: its files, and those of PaddleViT's Focal Transformer.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
