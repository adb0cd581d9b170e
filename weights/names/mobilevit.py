"""The names of tensors in files of MobileViT."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import paddle

from weights.names.rules import Arrays, rename

# timm's stages and blocks of PaddleViT's seven inverted residuals.
_BLOCKS = ("0.0", "1.0", "1.1", "1.2", "2.0", "3.0", "4.0")


def _inverted_residual(match: re.Match[str]) -> str:
    """Renames a layer of PaddleViT's inverted residuals.

    Such a block has two convolutions with their norms, then a convolution, and then its norm.
    """
    block = _BLOCKS[int(match["block"]) - 1]
    layers = ("conv1_1x1.", "conv2_kxk.", "conv3_1x1.conv.", "conv3_1x1.bn.")
    layer = layers[int(match["layer"])]
    return f"stages.{block}.{layer}{match['rest']}"


_RULES = (
    # PaddleViT
    (r"^conv3x3\.", "stem."),
    (r"^conv1x1\.", "final_conv."),
    (r"^linear\.", "head.fc."),
    (r"^mv2_block_(?P<block>[1-7])\.conv\.(?P<layer>[0-3])\.(?P<rest>.*)", _inverted_residual),
    (r"^mvit_block_([123])\.", lambda match: f"stages.{int(match[1]) + 1}.1."),
    (r"^(stages\.\d\.1\.)conv1\.", r"\1conv_kxk."),
    (r"^(stages\.\d\.1\.)conv2\.", r"\1conv_1x1."),
    (r"^(stages\.\d\.1\.)conv3\.", r"\1conv_proj."),
    (r"^(stages\.\d\.1\.)conv4\.", r"\1conv_fusion."),
    (r"\.transformer\.norm\.", ".norm."),
    (r"\.transformer\.layers\.", ".transformer."),
    (r"(\.transformer\.\d+\.)attn_norm\.", r"\1norm1."),
    (r"(\.transformer\.\d+\.)mlp_norm\.", r"\1norm2."),
    # Apple
    (r"^conv_1\.block\.", "stem."),
    (r"^conv_1x1_exp\.block\.", "final_conv."),
    (r"^classifier\.fc\.", "head.fc."),
    (r"^layer_([1-5])\.", lambda match: f"stages.{int(match[1]) - 1}."),
    (r"\.block\.exp_1x1\.block\.", ".conv1_1x1."),
    (r"\.block\.conv_3x3\.block\.", ".conv2_kxk."),
    (r"\.block\.red_1x1\.block\.", ".conv3_1x1."),
    (r"\.local_rep\.conv_3x3\.block\.", ".conv_kxk."),
    (r"\.local_rep\.conv_1x1\.block\.conv\.", ".conv_1x1."),
    (r"\.global_rep\.\d+\.(weight|bias)$", r".norm.\1"),
    (r"\.global_rep\.", ".transformer."),
    (r"\.pre_norm_mha\.0\.", ".norm1."),
    (r"\.pre_norm_mha\.1\.qkv_proj\.", ".attn.qkv."),
    (r"\.pre_norm_mha\.1\.out_proj\.", ".attn.proj."),
    (r"\.pre_norm_ffn\.0\.", ".norm2."),
    (r"\.pre_norm_ffn\.1\.", ".mlp.fc1."),
    (r"\.pre_norm_ffn\.4\.", ".mlp.fc2."),
    (r"\.conv_proj\.block\.", ".conv_proj."),
    (r"\.fusion\.block\.", ".conv_fusion."),
    # both
    (r"^((stem|final_conv|stages\.\d\.\d\.conv\w+)\.)norm\.", r"\1bn."),
)
# Apple's name of the first kernel.
_APPLE_STEM = "conv_1.block.conv.weight"


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``ByobNet`` of MobileViT's variants.

    Sources: the files of PaddleViT and of apple/ml-cvnets. Apple's files are of its release 0.1,
    which reads images in the order blue, green, red (data/datasets/dataset_base.py:94). So the
    order of the first kernel's channels is reversed here.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    stem = arrays.get(_APPLE_STEM)
    if stem is not None and stem.ndim == 4:
        arrays = arrays | {_APPLE_STEM: np.ascontiguousarray(stem[:, ::-1])}
    return rename(arrays, _RULES)


def model_keys(arrays: Mapping[str, np.ndarray | paddle.Tensor]) -> dict[str, Any]:
    """Returns whether a norm comes before the attention, and how far the first block expands."""
    first = arrays.get("stages.0.0.conv1_1x1.conv.weight")
    if first is None or len(first.shape) != 4 or 0 in first.shape:
        return {}
    return {
        "HIDDEN_NORM": "stages.2.1.conv_1x1.bn.weight" in arrays,
        "EXPAND_RATIO": first.shape[0] / first.shape[1],
    }


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the keys in which all variants of PaddleViT's model differ from timm's."""
    if not any(name.startswith("mvit_block_1.") for name in arrays):
        return {}
    return {"NUM_HEADS": 8, "LAST_NORM_EPS": 1e-6, "HIDDEN_NORM": True}
