"""The names of tensors in files of HaloNet."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^stage(\d)\.blocks\.", lambda match: f"stages.{int(match[1]) - 1}."),
    (r"\.creat_shortcut\.", ".shortcut."),
    (r"\.pos_embed\.rel_(height|width)$", r".pos_embed.\1_rel"),
    (r"\.post_attn\.bn\.", ".post_attn."),
    (r"^classifier\.1\.", "head.fc."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``ByobNet``.

    Source: PaddleViT's HaloNet.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
