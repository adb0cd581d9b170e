"""The names of tensors in files of CAFormer and ConvFormer."""

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

    Source: the files of sail-sg/metaformer. In stages of convolutions they have Linears where timm
    has 1 x 1 convolutions. The weights get the form that the model has.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    if _is_authors(arrays):
        arrays = rename(arrays, _RULES)
    tensors = wanted if isinstance(wanted, Mapping) else {}
    named = {}
    for name, array in arrays.items():
        if name in tensors and name.endswith(_DENSE):
            array = dense_of(array, layout, len(tensors[name].shape))
        named[name] = array
    return named


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the epsilon of the classifier's norm: PyTorch's default in the authors' files."""
    return {"HEAD_NORM_EPS": 1e-5} if _is_authors(arrays) else {}


def _is_authors(arrays: Collection[str]) -> bool:
    """Returns whether a file is the authors'."""
    return any(name.startswith("downsample_layers.") for name in arrays)
