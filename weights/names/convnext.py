"""The names of tensors in files of ConvNeXt and ConvNeXt V2."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import paddle

from weights.names.rules import Arrays, dense_of, rename

_RULES = (
    # FCMAE: its encoder, by MinkowskiEngine's names
    (r"^encoder\.(?=downsample_layers|stages\.\d+\.\d+\.)", ""),
    (r"\.(ln|linear)\.(weight|bias)$", r".\2"),
    (r"\.kernel$", ".weight"),
    # transformers
    (r"^convnext(v2)?\.", ""),
    (r"^embeddings\.patch_embeddings\.", "stem.0."),
    (r"^embeddings\.layernorm\.", "stem.1."),
    (r"^encoder\.stages\.(\d+)\.downsampling_layer\.", r"stages.\1.downsample."),
    (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"\.layer_scale_parameter$", ".gamma"),
    (r"\.layernorm\.", ".norm."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
    # The authors
    (r"^downsample_layers\.0\.", "stem."),
    (r"^downsample_layers\.(\d+)\.", r"stages.\1.downsample."),
    (r"^stages\.(\d+)\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"\.dwconv\.", ".conv_dw."),
    (r"\.pwconv([12])\.", r".mlp.fc\1."),
    (r"(?<!\.mlp)\.grn\.", ".mlp.grn."),
    (r"\.grn\.gamma$", ".grn.weight"),
    (r"\.grn\.beta$", ".grn.bias"),
    (r"^norm\.", "head.norm."),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``ConvNeXt``.

    Sources: the files of facebookresearch/ConvNeXt and ConvNeXt-V2 (also of its pre-training), of
    transformers and of PaddleClas. PaddleViT uses timm's names. The weights of an MLP get the form
    that the model has: Linears or 1 x 1 convolutions.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = {
        name: _torch_kernel(array) if name.endswith(".kernel") else array
        for name, array in arrays.items()
    }
    tensors = wanted if isinstance(wanted, Mapping) else {}
    named = rename(arrays, _RULES)
    for name, array in named.items():
        if ".grn." in name or (name.endswith(".bias") and array.ndim == 2):
            named[name] = array.reshape(-1)
        elif name in tensors and name.endswith((".mlp.fc1.weight", ".mlp.fc2.weight")):
            named[name] = dense_of(array, layout, len(tensors[name].shape))
    return named


def _torch_kernel(kernel: np.ndarray) -> np.ndarray:
    """Returns MinkowskiEngine's kernel of a convolution in PyTorch's layout.

    Args:
        kernel: [places, in, out], or [places, channels] of a depthwise convolution.
    """
    side = math.isqrt(len(kernel))
    flat = kernel.transpose(2, 1, 0) if kernel.ndim == 3 else kernel.T[:, None]
    # MinkowskiEngine counts the places column by column.
    return flat.reshape(*flat.shape[:2], side, side).swapaxes(2, 3)


def model_keys(arrays: Mapping[str, np.ndarray | paddle.Tensor]) -> dict[str, Any]:
    """Returns the keys of layer scale, the global response norm and the stem."""
    if "stages.0.blocks.0.conv_dw.weight" not in arrays:
        return {}
    stem = "patch"
    if "stem.2.weight" in arrays:
        is_equal = arrays["stem.0.weight"].shape[0] == arrays["stem.1.weight"].shape[0]
        stem = "overlap" if is_equal else "overlap_tiered"
    return {
        "INIT_VALUES": 1e-6 if "stages.0.blocks.0.gamma" in arrays else 0.0,
        "USE_GRN": "stages.0.blocks.0.mlp.grn.weight" in arrays,
        "STEM_TYPE": stem,
    }


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the epsilon of the last norm in transformers' files, 1e-12."""
    is_transformers = any(name.endswith("embeddings.patch_embeddings.weight") for name in arrays)
    return {"HEAD_NORM_EPS": 1e-12} if is_transformers else {}


def unstored_arrays(arrays: Arrays, state: Mapping[str, paddle.Tensor]) -> Arrays:
    """Returns the last norm, which FCMAE's pre-training doesn't have.

    As in the authors' fine-tuning, it starts with weights of 1 and biases of 0.
    """
    last = re.compile(r"^(convnextv2\.)?(norm|head|layernorm|classifier)\.")
    is_v2 = any(".grn." in name for name in arrays)
    if not is_v2 or any(map(last.match, arrays)) or "head.norm.weight" not in state:
        return {}
    channels = state["head.norm.weight"].shape
    return {
        "head.norm.weight": np.ones(channels, np.float32),
        "head.norm.bias": np.zeros(channels, np.float32),
    }
