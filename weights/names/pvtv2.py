"""The names of tensors in files of PVTv2."""

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
    # PaddleViT
    (r"(patch_embed|downsample)\.patch_embed\.", r"\1.proj."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``PyramidVisionTransformerV2``.

    Sources: the files of whai362/PVT and of PaddleViT.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)


def model_keys(arrays: Mapping[str, np.ndarray | paddle.Tensor]) -> dict[str, Any]:
    """Returns whether the attention is linear, and whether queries, keys and values have a bias.

    Only the linear attention reduces by a 1 x 1 convolution, and it does so in the last stage, too.
    """
    reduction = arrays.get("stages.3.blocks.0.attn.sr.weight")
    keys = {"LINEAR": reduction is not None and tuple(reduction.shape[2:]) == (1, 1)}
    if "stages.0.blocks.0.attn.q.weight" in arrays:
        keys["QKV_BIAS"] = "stages.0.blocks.0.attn.q.bias" in arrays
    return keys


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the epsilon of the norms in PaddleViT's files, 1e-6 for all of them.

    timm's and the authors' norms have 1e-5 in the embeddings and in the attention.
    """
    return {"NORM_EPS": 1e-6} if "patch_embedding1.patch_embed.weight" in arrays else {}
