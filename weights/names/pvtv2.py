"""The names of tensors in files of PVTv2, and of SegFormer's MiT, which has the same layers."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import paddle

from weights.names.rules import Arrays, dense_of, rename

_RULES = (
    (r"^patch_embed(ding)?1\.", "patch_embed."),
    *((rf"^patch_embed(ding)?{i + 1}\.", f"stages.{i}.downsample.") for i in (1, 2, 3)),
    *((rf"^block{i + 1}\.", f"stages.{i}.blocks.") for i in range(4)),
    *((rf"^norm{i + 1}\.", f"stages.{i}.norm.") for i in range(4)),
    (r"\.dwconv\.dwconv\.", ".dwconv."),
    # PaddleViT
    (r"(patch_embed|downsample)\.patch_embed\.", r"\1.proj."),
    # The MiT of PaddleViT's SegFormer has a list for each stage: the embedding, the blocks, the norm.
    (r"^layers\.0\.0\.", "patch_embed."),
    (r"^layers\.(\d)\.0\.", r"stages.\1.downsample."),
    (r"^layers\.(\d)\.1\.", r"stages.\1.blocks."),
    (r"^layers\.(\d)\.2\.", r"stages.\1.norm."),
    (r"(patch_embed|downsample)\.projection\.", r"\1.proj."),
    (r"\.ffn\.pe_conv\.", ".mlp.dwconv."),
    (r"\.ffn\.", ".mlp."),
)
# Files whose norms all have this epsilon, identified by the name of their first embedding.
_EPSILONS = {
    # PaddleViT's PVTv2
    "patch_embedding1.patch_embed.weight": 1e-6,
    # PaddleViT's MiT, alone and in its SegFormer
    "layers.0.0.projection.weight": 1e-5,
    "backbone.layers.0.0.projection.weight": 1e-5,
    # transformers' MiT
    "segformer.encoder.patch_embeddings.0.proj.weight": 1e-5,
    "encoder.patch_embeddings.0.proj.weight": 1e-5,
}


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``PyramidVisionTransformerV2``.

    Sources: the files of whai362/PVT, of NVlabs/SegFormer and of PaddleViT. The MLPs of PaddleViT's
    MiT are 1 x 1 convolutions, whose weights become those of a Linear.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return {
        name: dense_of(array, layout, 2) if ".mlp.fc" in name else array
        for name, array in rename(arrays, _RULES).items()
    }


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
    """Returns the epsilon of all norms in PaddleViT's and transformers' files.

    timm's and the authors' norms have 1e-6, but for 1e-5 in the embeddings and in the attention.
    """
    for name, epsilon in _EPSILONS.items():
        if name in arrays:
            return {"NORM_EPS": epsilon}
    return {}
