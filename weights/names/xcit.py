"""The names of tensors in files of XCiT."""

import re
from collections.abc import Collection

import numpy as np

from errors import InputError
from weights.names.rules import Arrays, rename

_RULES = ((r"^pos_embeder\.", "pos_embed."),)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``Xcit``.

    Sources: the files of facebookresearch/xcit and of PaddleViT. In the blocks of the class token,
    they have queries, keys and values in one tensor, which is split here.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.

    Raises:
        InputError: a tensor of queries, keys and values can't be split in three.
    """
    split: Arrays = {}
    for name, array in rename(arrays, _RULES).items():
        match = re.fullmatch(r"(cls_attn_blocks\.\d+\.attn\.)qkv(\.weight|\.bias)", name)
        if not match:
            split[name] = array
            continue
        axis = array.ndim - 1 if layout == "paddle" else 0
        if array.ndim < 1 or array.shape[axis] % 3:
            raise InputError(
                f"{name} is {list(array.shape)}, expected queries, keys and values of one size"
            )
        for letter, part in zip("qkv", np.split(array, 3, axis), strict=True):
            split[f"{match[1]}{letter}{match[2]}"] = part
    return split
