"""The names of tensors in files of BEiT."""

from collections.abc import Collection
from typing import Any

from weights.names.rules import Arrays, drop_key_biases, rename

_RULES = ((r"(^|\.)relative_position_index$", None),)
_TABLE = "relative_position_bias_table"


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``Beit``.

    Sources: beit/ of microsoft/unilm, and PaddleViT's BEiT. Both have timm's names, but the model
    may differ from the pre-trained one in two ways:

    - The pre-trained model has one table of relative positions for all blocks. If the model has a
      table in each block, all start from that one, as in the authors' fine-tuning.
    - It has a ``norm`` where the model may have an ``fc_norm``. Here that starts from ``norm``; in
      the authors' fine-tuning it starts afresh.

    Derived buffers are dropped.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = drop_key_biases(rename(arrays, _RULES))
    if "head.weight" not in arrays and "fc_norm.weight" in wanted and "norm.weight" not in wanted:
        arrays = rename(arrays, [(r"^norm\.", "fc_norm.")])
    shared = f"rel_pos_bias.{_TABLE}"
    missing = [name for name in wanted if name.endswith(f".attn.{_TABLE}") and name not in arrays]
    if missing and shared in arrays and shared not in wanted:
        arrays |= dict.fromkeys(missing, arrays.pop(shared))
    return arrays


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the keys of positions, layer scale, biases and pooling.

    An ``fc_norm`` means that the head reads the mean of the patches.
    """
    # The file may be of another family.
    if "blocks.0.norm1.weight" not in arrays:
        return {}
    keys = {
        "USE_ABS_POS_EMB": "pos_embed" in arrays,
        "USE_REL_POS_BIAS": f"blocks.0.attn.{_TABLE}" in arrays,
        "USE_SHARED_REL_POS_BIAS": f"rel_pos_bias.{_TABLE}" in arrays,
        "INIT_VALUES": 0.1 if "blocks.0.gamma_1" in arrays else None,
    }
    if any(name.startswith("head.") for name in arrays):
        keys["HEAD_BATCH_NORM"] = "head.0.running_mean" in arrays
    if "blocks.0.attn.qkv.weight" in arrays:
        keys["QKV_BIAS"] = "blocks.0.attn.q_bias" in arrays
    if "norm.weight" in arrays or "fc_norm.weight" in arrays:
        keys["GLOBAL_POOL"] = "avg" if "fc_norm.weight" in arrays else "token"
    return keys
