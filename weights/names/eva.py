"""EVA-02 and DINOv3."""

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
    (r"^rope\.(bands|periods|pos_embed)$", None),  # of timm's traced programs
    (r"^(mask_token|embeddings\.mask_token)$|^lm_head\.", None),  # of the pre-training
    (r"^local_cls_norm\.", None),  # of DINOv3's training on small crops
    # EVA-02
    (r"\.attn\.inner_attn_ln\.", ".attn.norm."),
    (r"\.mlp\.ffn_ln\.", ".mlp.norm."),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),  # DINOv3's, too
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
_BASE = 100.0  # of DINOv3's periods


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``Eva``.

    Sources: EVA-02/ of baaivision/EVA, facebookresearch/dinov3, transformers' DINOv3, and the image
    towers of EVA-CLIP. Dropped: mask tokens, the pre-training's head, tables of angles, a CLIP's
    text tower, DINOv3's norm of small crops.

    DINOv3's biases of the queries and values are 0 in most files. Where the model has none, such
    zeros are dropped. So is the keys' bias, which its authors mask. EVA-02's pre-training has a
    ``norm`` where the model may want an ``fc_norm``, which starts from it.

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
    gated = any(name.endswith(".mlp.gate_proj.weight") for name in arrays)
    arrays = rename(
        arrays, [*_RULES, (r"\.mlp\.up_proj\.", ".mlp.fc1_x." if gated else ".mlp.fc1.")]
    )
    arrays = _biases(join_qkv(drop_key_biases(arrays)), wanted)
    # transformers stores that there are none
    if "reg_token" in arrays and not arrays["reg_token"].size:
        del arrays["reg_token"]
    if "head.weight" not in arrays and "fc_norm.weight" in wanted and "norm.weight" not in wanted:
        arrays = rename(arrays, [(r"^norm\.", "fc_norm.")])
    return arrays


def computes(arrays: Collection[str]) -> dict[str, Any]:
    """Tells the MLP, norms, biases, positions, registers, layer scale, and whether a norm comes
    after the pooling.
    """
    if "blocks.0.norm1.weight" not in arrays:  # another family's
        return {}
    fused = "blocks.0.attn.qkv.weight" in arrays
    told: dict[str, Any] = {
        "SCALE_MLP": "blocks.0.mlp.norm.weight" in arrays,
        "SCALE_ATTN_INNER": "blocks.0.attn.norm.weight" in arrays,
        "QKV_FUSED": fused,
        "QKV_BIAS": f"blocks.0.attn.{'q_bias' if fused else 'q_proj.bias'}" in arrays,
        "INIT_VALUES": 1e-5 if "blocks.0.gamma_1" in arrays else None,
        "USE_ABS_POS_EMB": "pos_embed" in arrays,
    }
    if {"norm.weight", "fc_norm.weight"} & set(arrays):
        told["FC_NORM"] = "fc_norm.weight" in arrays
    return told


def switches(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Tells from the angles in the authors' files how they were made; timm's and transformers'
    files have none.

    Raises:
        InputError: periods that no model here has.
    """
    told: dict[str, Any] = {}
    periods = arrays.get("rope_embed.periods", arrays.get("rope.periods"))
    if periods is not None:
        count = max(periods.size, 1)
        exact = np.float32(_BASE) ** (np.arange(count, dtype=np.float32) / np.float32(count))
        close = [
            np.allclose(periods, one, rtol=1e-4, atol=0) for one in (exact, to_bfloat16(exact))
        ]
        if periods.shape != exact.shape or not any(close):
            raise InputError(
                f"rope_embed.periods aren't powers of {_BASE:g}, which DINOv3's are here"
            )
        told["ROPE_BFLOAT16"] = not close[0]
    cosines = next(
        (array for name, array in arrays.items() if re.search(r"(^|\.)rope\.freqs_cos$", name)),
        None,
    )
    if cosines is not None and cosines.ndim >= 2 and cosines.size:
        cosines = cosines.reshape(-1, cosines.shape[-1])
        side = int(len(cosines) ** 0.5)
        first = cosines[min(side, len(cosines) - 1), 0]  # of the second row: its frequency is 1
        reference = side * np.arccos(np.clip(np.float64(first), -1, 1))
        told["REF_FEAT_SHAPE"] = max(1, round(float(reference))) if np.isfinite(reference) else None
    return told


def _biases(arrays: Arrays, wanted: Collection[str]) -> Arrays:
    """Gives the biases of queries and values their places, in a fused projection or beside it."""
    found: Arrays = {}
    for name, array in arrays.items():
        block, _, last = name.rpartition("attn.")
        if last == "qkv.bias" and array.ndim == 1 and len(array) % 3 == 0:
            mask = arrays.get(f"{name}_mask", np.ones_like(array))
            q, k, v = np.split(np.multiply(*same_shape(array, mask, f"{name} and its mask")), 3)
            found |= {f"{block}attn.q_bias": q, f"{block}attn.v_bias": v}
            found |= {f"{block}attn.k_bias": k} if k.any() else {}
        elif last == "qkv.bias_mask":
            continue
        elif last in ("q.bias", "v.bias"):
            found[f"{block}attn.{last[0]}_bias"] = array
        elif last in ("q_bias", "v_bias") and f"{block}attn.q_proj.weight" in arrays:
            found[f"{block}attn.{last[0]}_proj.bias"] = array
        else:
            found[name] = array
    unwanted = [
        name for name in found if re.search(r"\.attn\.[qv]_bias$", name) and name not in wanted
    ]
    if not any(found[name].any() for name in unwanted):
        found = {name: array for name, array in found.items() if name not in unwanted}
    return found
