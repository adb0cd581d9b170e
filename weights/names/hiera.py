"""The names of tensors in files of Hiera."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^(encoder_norm|norm)\.", "head.norm."),
    (r"^head\.projection\.", "head.fc."),
    (r"^pos_embed_abs$", "pos_embed"),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``Hiera``.

    Source: facebookresearch/hiera, also its ``mae_hiera_*.pth``.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
