"""The names of tensors in files of MobileOne."""

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from weights.names.rules import Arrays, rename


def _place(match: re.Match[str]) -> str:
    """Numbers PaddleViT's blocks as timm does.

    In PaddleViT the stem is a stage, and a depthwise and a 1 x 1 block are one.
    """
    stage = int(match["stage"])
    if stage == 0:
        return "stem."
    block = 2 * int(match["block"])
    if match["kind"] == "pw":
        block += 1
    return f"stages.{stage - 1}.{block}."


_RULES = (
    (r"^stage0\.", "stem."),
    (r"^stage([1-4])\.", lambda match: f"stages.{int(match[1]) - 1}."),
    (r"\.rbr_skip\.", ".identity."),
    (r"\.rbr_conv\.", ".conv_kxk."),
    (r"\.rbr_scale\.", ".conv_scale."),
    (r"\.se\.reduce\.", ".attn.fc1."),
    (r"\.se\.expand\.", ".attn.fc2."),
    (r"^(linear|fc)\.", "head.fc."),
    # PaddleViT
    (r"^(stages\.\d+\.\d+\.)dw_1x1\.", r"\1dw_conv_scale."),
    (r"^(stages\.\d+\.\d+\.)([dp]w)_\dx\d\.conv\.", r"\1\2_reparam_conv."),
    (r"^(stages\.\d+\.\d+\.)([dp]w)_\dx\d_blocks\.", r"\1\2_conv_kxk."),
    (r"^(stages\.\d+\.\d+\.)([dp]w)_skip\.", r"\1\2_identity."),
    (r"^(stages\.\d+\.\d+\.)([dp]w)_se\.reduce\.", r"\1\2_attn.fc1."),
    (r"^(stages\.\d+\.\d+\.)([dp]w)_se\.expand\.", r"\1\2_attn.fc2."),
    (r"^(stages\.\d+\.\d+\.[dp]w_.*\.)norm\.", r"\1bn."),
    (r"^stages\.(?P<stage>\d+)\.(?P<block>\d+)\.(?P<kind>[dp]w)_", _place),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``ByobNet`` of MobileOne's variants.

    Sources: the files of apple/ml-mobileone and of PaddleViT, with or without folded branches.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether the branches of each block are folded into one convolution."""
    parts = {part for name in arrays for part in name.split(".")}
    if not parts & {"reparam_conv", "conv_kxk"}:
        return {}
    return {"DEPLOY": "reparam_conv" in parts}


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns what ``model_keys`` returns, so that DEPLOY needn't be set for a folded file."""
    return model_keys(rename(dict.fromkeys(arrays, np.zeros(0)), _RULES))
