"""ConvNeXt."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^downsample_layers\.0\.", "stem."),
    (r"^downsample_layers\.(\d+)\.", r"stages.\1.downsample."),
    (r"^stages\.(\d+)\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"\.dwconv\.", ".conv_dw."),
    (r"\.pwconv([12])\.", r".mlp.fc\1."),
    (r"^norm\.", "head.norm."),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``ConvNeXt``.

    Sources: the files of facebookresearch/ConvNeXt and of PaddleClas; PaddleViT uses timm's names.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def computes(arrays: Collection[str]) -> dict[str, Any]:
    """Tells layer scale."""
    return {"INIT_VALUES": 1e-6 if "stages.0.blocks.0.gamma" in arrays else None}
