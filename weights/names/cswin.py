"""The names of tensors in files of CSWin."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^patch_embedding\.patch_embed\.", "stage1_conv_embed.0."),
    (r"^patch_embedding\.norm\.", "stage1_conv_embed.2."),
    (r"^stages\.(\d)\.blocks\.", lambda match: f"stage{int(match[1]) + 1}."),
    (r"^stages\.(\d)\.merge\.", lambda match: f"merge{int(match[1]) + 1}."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of microsoft/CSWin-Transformer.

    Source: PaddleViT's CSwin.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
