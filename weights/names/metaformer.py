"""CAFormer and ConvFormer."""

from collections.abc import Collection, Mapping
from typing import Any

from weights.names.rules import Arrays, dense_of, rename

_RULES = (
    (r"^downsample_layers\.0\.", "stem."),
    (r"^downsample_layers\.", "stages."),
    (r"^(stages\.\d\.)(conv|pre_norm)\.", r"\1downsample.\2."),
    (r"\.(pre|post)_norm\.", ".norm."),
    (r"^stages\.(\d)\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"^head\.", "head.fc."),
    (r"^norm\.", "head.norm."),
)
_DENSE = (".pwconv1.weight", ".pwconv2.weight", ".mlp.fc1.weight", ".mlp.fc2.weight")


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``MetaFormer``.

    Source: the files of sail-sg/metaformer. Its Linears within stages of convolutions are timm's 1
    x 1 convolutions.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = rename(arrays, _RULES) if _authors(arrays) else arrays
    shapes = wanted if isinstance(wanted, Mapping) else {}
    return {
        name: dense_of(array, layout, len(shapes[name].shape))
        if name in shapes and name.endswith(_DENSE)
        else array
        for name, array in arrays.items()
    }


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns HEAD_NORM_EPS 1e-5 for the authors' files: their classifier's norm has PyTorch's
    default epsilon.
    """
    return {"HEAD_NORM_EPS": 1e-5} if _authors(arrays) else {}


def _authors(arrays: Collection[str]) -> bool:
    return any(name.startswith("downsample_layers.") for name in arrays)
