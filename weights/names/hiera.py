"""Hiera."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^(decoder_|mask_token$|multi_scale_fusion_heads\.)", None),  # of masked pre-training
    (r"^(encoder_norm|norm)\.", "head.norm."),
    (r"^head\.projection\.", "head.fc."),
    (r"^pos_embed_abs$", "pos_embed"),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``Hiera``; a masked pre-training's decoder is
    dropped.

    Source: facebookresearch/hiera, its ``mae_hiera_*.pth`` too.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
