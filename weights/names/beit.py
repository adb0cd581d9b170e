"""BEiT."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, drop_key_biases, rename

_RULES = (
    (r"(^|\.)relative_position_index$", None),
    (r"^(mask_token$|lm_head\.)", None),  # of the pre-training
)
_TABLE = "relative_position_bias_table"


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``Beit``; derived buffers and a
    pre-training's head are dropped.

    Sources: beit/ of microsoft/unilm, and PaddleViT's BEiT; both have timm's names.

    Two cases need more than names. The pre-training has one table of relative positions for all
    blocks. If the model wants one in each, all start from it, as the authors' fine-tuning does. And
    it has a ``norm`` where the model may want an ``fc_norm``: their fine-tuning starts that one
    afresh, here it starts from ``norm``.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = drop_key_biases(rename(arrays, _RULES))
    if "head.weight" not in arrays and "fc_norm.weight" in wanted and "norm.weight" not in wanted:
        arrays = rename(arrays, [(r"^norm\.", "fc_norm.")])
    shared = f"rel_pos_bias.{_TABLE}"
    own = [name for name in wanted if name.endswith(f".attn.{_TABLE}") and name not in arrays]
    if own and shared in arrays and shared not in wanted:
        arrays |= dict.fromkeys(own, arrays.pop(shared))
    return arrays


def computes(arrays: Collection[str]) -> dict[str, Any]:
    """Tells the kinds of positions, layer scale, biases, and what the head reads: ``fc_norm`` comes
    after a mean.
    """
    if "blocks.0.norm1.weight" not in arrays:  # another family's
        return {}
    told = {
        "USE_ABS_POS_EMB": "pos_embed" in arrays,
        "USE_REL_POS_BIAS": f"blocks.0.attn.{_TABLE}" in arrays,
        "USE_SHARED_REL_POS_BIAS": f"rel_pos_bias.{_TABLE}" in arrays,
        "INIT_VALUES": 0.1 if "blocks.0.gamma_1" in arrays else None,
    }
    if any(name.startswith("head.") for name in arrays):
        told["HEAD_BATCH_NORM"] = "head.0.running_mean" in arrays
    if "blocks.0.attn.qkv.weight" in arrays:
        told["QKV_BIAS"] = "blocks.0.attn.q_bias" in arrays
    if "norm.weight" in arrays or "fc_norm.weight" in arrays:
        told["GLOBAL_POOL"] = "avg" if "fc_norm.weight" in arrays else "token"
    return told
