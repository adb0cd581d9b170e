"""The names of tensors in files of NaFlexViT, and of plain ViTs that become one."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import paddle

from weights.names import vit
from weights.names.rules import Arrays, same_shape

_EMBEDDING = "patch_embed.proj.weight"
# timm's names in a plain ViT, of what belongs to the embedding here.
_MOVED = {
    "cls_token": "embeds.cls_token",
    "reg_token": "embeds.reg_token",
    "pos_embed": "embeds.pos_embed",
    "patch_embed.proj.bias": "embeds.proj.bias",
}


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``NaFlexVit``.

    Sources: timm's NaFlexVit, SigLIP 2's NaFlex towers (transformers and big_vision's .npz), and
    all files of plain ViTs (``weights.names.vit``). Of these, the convolution that embeds patches
    becomes a Linear of the pixels of a patch. The position of the class token is added to the
    token, and the others become a grid.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    if any(name.startswith("embeds.") for name in arrays):
        return arrays
    # A Linear in these files reads patches as this model does, pixel by pixel. ``vit`` would take
    # it for one that reads them channel by channel.
    linear = {
        name: arrays[name]
        for name in ("patch_embed.proj.weight", "embedding/kernel", "params/img/embedding/kernel")
        if name in arrays and arrays[name].ndim == 2
    }
    rest = {name: array for name, array in arrays.items() if name not in linear}
    of_vit = {name: ours for name, ours in _MOVED.items() if ours in wanted}
    named = vit.timm_names(rest, layout, {*wanted, *of_vit})
    for name, kernel in linear.items():
        named[_EMBEDDING] = kernel if name == _EMBEDDING else kernel.T
    return _with_embedding(named, layout)


def _with_embedding(arrays: Arrays, layout: str) -> Arrays:
    """Returns a plain ViT's arrays under the names of this model."""
    arrays = dict(arrays)
    kernel = arrays.pop(_EMBEDDING, None)
    if kernel is not None:
        if kernel.ndim == 4:
            kernel = kernel.transpose(0, 2, 3, 1).reshape(len(kernel), -1)
            kernel = kernel.T if layout == "paddle" else kernel
        arrays["embeds.proj.weight"] = kernel
    if "pos_embed" in arrays:
        arrays |= _grid_of_positions(arrays)
    return {_MOVED.get(name, name): array for name, array in arrays.items()}


def _grid_of_positions(arrays: Arrays) -> Arrays:
    """Returns the positions of patches as [1, rows, columns, D], and the tokens that had positions
    with these added.

    The grid is a square. Positions that make none are returned as they are.
    """
    positions = arrays["pos_embed"]
    # SigLIP 2's are [patches, D].
    if positions.ndim == 2:
        positions = positions[None]
    if positions.ndim != 3 or len(positions) != 1:
        return {}
    names = [name for name in ("cls_token", "reg_token") if name in arrays]
    tokens = sum(arrays[name].shape[1] for name in names if arrays[name].ndim == 3)
    count = positions.shape[1]
    changed: Arrays = {}
    if not _is_square(count) and _is_square(count - tokens):
        start = 0
        for name in names:
            end = start + arrays[name].shape[1]
            token, position = same_shape(
                arrays[name], positions[:, start:end], f"{name} and its position"
            )
            changed[name] = np.add(token, position)
            start = end
        positions = positions[:, tokens:]
        count -= tokens
    if not _is_square(count):
        return {}
    side = math.isqrt(count)
    changed["pos_embed"] = positions.reshape(1, side, side, -1)
    return changed


def model_keys(arrays: Mapping[str, np.ndarray | paddle.Tensor]) -> dict[str, Any]:
    """Returns the keys of tokens, positions, pooling, layer scale, norms, projection and biases."""
    # The file may be of another family.
    if "blocks.0.norm1.weight" not in arrays:
        return {}
    registers = arrays.get("embeds.reg_token")
    count = 0
    # A damaged file may hold another array in its place.
    if registers is not None and len(registers.shape) == 3:
        count = int(registers.shape[1])
    has_fc_norm = "fc_norm.weight" in arrays
    keys = {
        "CLASS_TOKEN": "embeds.cls_token" in arrays,
        "REG_TOKENS": count,
        "POS_EMBED": "factorized" if "embeds.pos_embed_y" in arrays else "learn",
        "INIT_VALUES": 1e-5 if "blocks.0.ls1.gamma" in arrays else None,
        "FINAL_NORM": has_fc_norm or "norm.weight" in arrays,
    }
    if any(name.startswith("head.") for name in arrays):
        keys["HEAD_BATCH_NORM"] = "head.0.running_mean" in arrays
    projection = arrays.get("neck.proj.weight")
    keys["NECK_DIM"] = None if projection is None else int(projection.shape[-1])
    if "blocks.0.attn.qkv.weight" in arrays:
        keys["QKV_BIAS"] = "blocks.0.attn.qkv.bias" in arrays
    if "attn_pool.latent" in arrays:
        keys["GLOBAL_POOL"] = "map"
    elif keys["FINAL_NORM"]:
        keys["GLOBAL_POOL"] = "token" if keys["CLASS_TOKEN"] and not has_fc_norm else "avg"
        if not keys["CLASS_TOKEN"]:
            keys["FC_NORM"] = has_fc_norm
    return keys


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number
