"""Names in files of RepMLPNet. The authors' names and PaddleViT's are ours."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of the authors' ``RepMLPNet``, which they have.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return arrays


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether the convolutions over parts are in the linear layers."""
    parts = {part for name in arrays if ".repmlp_block." in name for part in name.split(".")}
    if "fc3" not in parts:
        return {}
    return {"DEPLOY": "fc3_bn" not in parts}


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns what ``model_keys`` returns, so that DEPLOY needn't be set for a folded file."""
    return model_keys(arrays)
