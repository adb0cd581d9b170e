"""The names of tensors in files of EVA-02 and DINOv3."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from errors import InputError
from weights.arrays import to_bfloat16
from weights.names.rules import Arrays, drop_key_biases, join_qkv, rename, same_shape

_RULES = (
    (r"(^|\.)rope\.freqs_(cos|sin)$", None),
    (r"(^|\.)rope_embed\.periods$", None),
    # timm's traced programs
    (r"^rope\.(bands|periods|pos_embed)$", None),
    # DINOv3's training on small crops
    (r"^local_cls_norm\.", None),
    # EVA-02
    (r"\.attn\.inner_attn_ln\.", ".attn.norm."),
    (r"\.mlp\.ffn_ln\.", ".mlp.norm."),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    # EVA-02 and DINOv3
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    # DINOv3
    (r"^storage_tokens$", "reg_token"),
    (r"\.ls([12])\.gamma$", r".gamma_\1"),
    # transformers' DINOv3
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.patch_embeddings\.", "patch_embed.proj."),
    (r"^(model\.)?layer\.(\d+)\.", r"blocks.\2."),
    (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.layer_scale([12])\.lambda1$", r".gamma_\1"),
    (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
)
# DINOv3's periods are powers of this number.
_BASE = 100.0


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``Eva``.

    Sources: EVA-02/ of baaivision/EVA, facebookresearch/dinov3, transformers' DINOv3, and the image
    towers of EVA-CLIP. Tables of angles, the text tower of a CLIP, and DINOv3's norm of small crops
    are dropped.

    DINOv3's biases of queries and values are 0 in most files. If the model has no such biases, the
    zeros are dropped. So is the bias of the keys, which DINOv3's authors mask. EVA-02's
    pre-training has a ``norm``. If the model wants an ``fc_norm`` instead, that starts from it.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    towers = [prefix for prefix in ("visual.trunk.", "visual.") if f"{prefix}cls_token" in arrays]
    if towers:
        arrays = {
            name.removeprefix(towers[0]): array
            for name, array in arrays.items()
            if name.startswith(towers[0])
        }
    is_gated = any(name.endswith(".mlp.gate_proj.weight") for name in arrays)
    up_projection = ".mlp.fc1_x." if is_gated else ".mlp.fc1."
    arrays = rename(arrays, [*_RULES, (r"\.mlp\.up_proj\.", up_projection)])
    arrays = _place_biases(join_qkv(drop_key_biases(arrays)), wanted)
    # Of a model without register tokens, transformers stores an empty tensor.
    if "reg_token" in arrays and not arrays["reg_token"].size:
        del arrays["reg_token"]
    if "head.weight" not in arrays and "fc_norm.weight" in wanted and "norm.weight" not in wanted:
        arrays = rename(arrays, [(r"^norm\.", "fc_norm.")])
    return arrays


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the keys of norms, biases, positions, layer scale, and the norm after the pooling."""
    # The file may be of another family.
    if "blocks.0.norm1.weight" not in arrays:
        return {}
    is_fused = "blocks.0.attn.qkv.weight" in arrays
    bias = "blocks.0.attn.q_bias" if is_fused else "blocks.0.attn.q_proj.bias"
    keys: dict[str, Any] = {
        "SCALE_MLP": "blocks.0.mlp.norm.weight" in arrays,
        "SCALE_ATTN_INNER": "blocks.0.attn.norm.weight" in arrays,
        "QKV_FUSED": is_fused,
        "QKV_BIAS": bias in arrays,
        "INIT_VALUES": 1e-5 if "blocks.0.gamma_1" in arrays else None,
        "USE_ABS_POS_EMB": "pos_embed" in arrays,
    }
    if {"norm.weight", "fc_norm.weight"} & set(arrays):
        keys["FC_NORM"] = "fc_norm.weight" in arrays
    return keys


def switches(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the keys of rotary positions, from the angles in the authors' files.

    The files of timm and of transformers have none.

    Raises:
        InputError: the file has periods that no model here has.
    """
    keys: dict[str, Any] = {}
    # DINOv3
    periods = arrays.get("rope_embed.periods", arrays.get("rope.periods"))
    if periods is not None:
        count = max(periods.size, 1)
        exact = np.float32(_BASE) ** (np.arange(count, dtype=np.float32) / np.float32(count))
        is_exact = np.allclose(periods, exact, rtol=1e-4, atol=0)
        is_rounded = np.allclose(periods, to_bfloat16(exact), rtol=1e-4, atol=0)
        if periods.shape != exact.shape or not (is_exact or is_rounded):
            raise InputError(f"rope_embed.periods aren't powers of {_BASE:g}, as DINOv3 needs")
        keys["ROPE_BFLOAT16"] = not is_exact
    # EVA-02
    tables = [array for name, array in arrays.items() if re.search(r"(^|\.)rope\.freqs_cos$", name)]
    if tables and tables[0].ndim >= 2 and tables[0].size:
        cosines = tables[0].reshape(-1, tables[0].shape[-1])
        side = int(len(cosines) ** 0.5)
        # The first channel's frequency is 1, so in the second row its angle is reference / side.
        angle = np.arccos(np.clip(np.float64(cosines[min(side, len(cosines) - 1), 0]), -1, 1))
        reference = None
        if np.isfinite(side * angle):
            reference = max(1, round(float(side * angle)))
        keys["REF_FEAT_SHAPE"] = reference
    return keys


def _place_biases(arrays: Arrays, wanted: Collection[str]) -> Arrays:
    """Returns arrays in which the biases of queries and values have the model's names.

    Those of a fused projection stand apart from its weight, because keys have no bias.
    """
    placed: Arrays = {}
    for name, array in arrays.items():
        block, _, last = name.rpartition("attn.")
        if last == "qkv.bias" and array.ndim == 1 and len(array) % 3 == 0:
            mask = arrays.get(f"{name}_mask", np.ones_like(array))
            bias, mask = same_shape(array, mask, f"{name} and its mask")
            q, k, v = np.split(np.multiply(bias, mask), 3)
            placed[f"{block}attn.q_bias"] = q
            placed[f"{block}attn.v_bias"] = v
            if k.any():
                placed[f"{block}attn.k_bias"] = k
        elif last == "qkv.bias_mask":
            continue
        elif last in ("q.bias", "v.bias"):
            placed[f"{block}attn.{last[0]}_bias"] = array
        elif last in ("q_bias", "v_bias") and f"{block}attn.q_proj.weight" in arrays:
            placed[f"{block}attn.{last[0]}_proj.bias"] = array
        else:
            placed[name] = array
    unwanted = [
        name for name in placed if re.search(r"\.attn\.[qv]_bias$", name) and name not in wanted
    ]
    if not any(placed[name].any() for name in unwanted):
        placed = {name: array for name, array in placed.items() if name not in unwanted}
    return placed
