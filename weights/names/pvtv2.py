"""PVTv2."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import paddle

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^patch_embed(ding)?1\.", "patch_embed."),
    *((rf"^patch_embed(ding)?{i + 1}\.", f"stages.{i}.downsample.") for i in (1, 2, 3)),
    *((rf"^block{i + 1}\.", f"stages.{i}.blocks.") for i in range(4)),
    *((rf"^norm{i + 1}\.", f"stages.{i}.norm.") for i in range(4)),
    (r"\.dwconv\.dwconv\.", ".dwconv."),
    (r"(patch_embed|downsample)\.patch_embed\.", r"\1.proj."),  # PaddleViT
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``PyramidVisionTransformerV2``.

    Sources: the files of whai362/PVT and of PaddleViT.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def computes(arrays: Mapping[str, np.ndarray | paddle.Tensor]) -> dict[str, Any]:
    """Tells the linear attention, which reduces by 1 x 1 convolutions, in the last stage too."""
    query = "stages.0.blocks.0.attn.q"
    last = arrays.get("stages.3.blocks.0.attn.sr.weight")
    told = {"LINEAR": last is not None and tuple(last.shape[2:]) == (1, 1)}
    return told | ({"QKV_BIAS": f"{query}.bias" in arrays} if f"{query}.weight" in arrays else {})


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """PaddleViT's norms have one epsilon; timm's and the authors' have 1e-5 in the embeddings and
    in the attention.
    """
    return {"NORM_EPS": 1e-6} if "patch_embedding1.patch_embed.weight" in arrays else {}
