"""The names of tensors in files of RepLKNet."""

from collections.abc import Collection
from typing import Any

import numpy as np

from weights.names.rules import Arrays, rename

# PaddleViT's names. The authors' are ours.
_RULES = (
    (
        r"(\.pw_conv_\d|_origin|\.small_kernel_conv|^stem\.\d|^transitions\.\d\.\d)\.norm\.",
        r"\1.bn.",
    ),
    (r"\.pw_conv_(\d)\.", r".pw\1."),
    (r"\.pre_large_kernel_bn\.", ".prelkb_bn."),
    (r"\.pre_ffn_bn\.", ".preffn_bn."),
    (r"\.large_kernel_(origin|reparam)\.", r".lkb_\1."),
    (r"\.small_kernel_conv\.", ".small_conv."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of the authors' ``RepLKNet``.

    Sources: the files of DingXiaoH/RepLKNet-pytorch and of PaddleViT, with merged kernels or not.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether the small kernels are merged into the large ones."""
    parts = {part for name in arrays for part in name.split(".")}
    if not parts & {"lkb_origin", "lkb_reparam"}:
        return {}
    return {"SMALL_KERNEL_MERGED": "lkb_reparam" in parts}


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns what ``model_keys`` returns, so that SMALL_KERNEL_MERGED needn't be set for a file."""
    return model_keys(rename(dict.fromkeys(arrays, np.zeros(0)), _RULES))
