"""ConvNeXt and ConvNeXt V2."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import paddle

from weights.names.rules import Arrays, dense_of, rename

_RULES = (
    # FCMAE's: the encoder's names of MinkowskiEngine, without the decoder.
    (r"^(decoder\.|mask_token$|proj\.|pred\.)", None),
    (r"^encoder\.(?=downsample_layers|stages\.\d+\.\d+\.)", ""),
    (r"\.(ln|linear)\.(weight|bias)$", r".\2"),
    (r"\.kernel$", ".weight"),
    # transformers'
    (r"^convnext(v2)?\.", ""),
    (r"^embeddings\.patch_embeddings\.", "stem.0."),
    (r"^embeddings\.layernorm\.", "stem.1."),
    (r"^encoder\.stages\.(\d+)\.downsampling_layer\.", r"stages.\1.downsample."),
    (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"\.layer_scale_parameter$", ".gamma"),
    (r"\.layernorm\.", ".norm."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
    # The authors'
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

    Sources: the files of facebookresearch/ConvNeXt and ConvNeXt-V2, those of its pre-training too,
    of transformers and of PaddleClas; PaddleViT uses timm's names. Weights of a 1 x 1 convolution
    become a Linear's, and the other way round, as the model wants them.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    kernels = {name for name in arrays if name.endswith(".kernel")}
    arrays = {name: _dense(array) if name in kernels else array for name, array in arrays.items()}
    shapes = wanted if isinstance(wanted, Mapping) else {}
    return {
        name: _reshape(
            name, array, layout, len(shapes[name].shape) if name in shapes else array.ndim
        )
        for name, array in rename(arrays, _RULES).items()
    }


def _dense(kernel: np.ndarray) -> np.ndarray:
    """MinkowskiEngine's kernel [places, in, out], of a depthwise convolution [places, channels], as
    a dense one's.
    """
    side = math.isqrt(len(kernel))
    out_in = kernel.transpose(2, 1, 0) if kernel.ndim == 3 else kernel.T[:, None]
    # its places go column by column
    return out_in.reshape(*out_in.shape[:2], side, side).swapaxes(2, 3)


def _reshape(name: str, array: np.ndarray, layout: str, axes: int) -> np.ndarray:
    if ".grn." in name or (name.endswith(".bias") and array.ndim == 2):
        return array.reshape(-1)
    return (
        dense_of(array, layout, axes)
        if name.endswith((".mlp.fc1.weight", ".mlp.fc2.weight"))
        else array
    )


def computes(arrays: Mapping[str, np.ndarray | paddle.Tensor]) -> dict[str, Any]:
    """Tells layer scale, the global response norm and the stem."""
    if "stages.0.blocks.0.conv_dw.weight" not in arrays:
        return {}
    told: dict[str, Any] = {"INIT_VALUES": 1e-6 if "stages.0.blocks.0.gamma" in arrays else 0.0}
    told["USE_GRN"] = "stages.0.blocks.0.mlp.grn.weight" in arrays
    if "stem.2.weight" in arrays:
        equal = arrays["stem.0.weight"].shape[0] == arrays["stem.1.weight"].shape[0]
        return told | {"STEM_TYPE": "overlap" if equal else "overlap_tiered"}
    return told | {"STEM_TYPE": "patch"}


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns HEAD_NORM_EPS 1e-12 for transformers' files: its last norm has that epsilon."""
    theirs = any(name.endswith("embeddings.patch_embeddings.weight") for name in arrays)
    return {"HEAD_NORM_EPS": 1e-12} if theirs else {}


def unstored_arrays(arrays: Arrays, state: Mapping[str, paddle.Tensor]) -> Arrays:
    """Returns the last norm, which FCMAE's pre-training hasn't got: fine-tuning starts it at 1 and
    0.
    """
    last = re.compile(r"^(convnextv2\.)?(norm|head|layernorm|classifier)\.")
    if (
        not any(".grn." in name for name in arrays)
        or any(map(last.match, arrays))
        or "head.norm.weight" not in state
    ):
        return {}
    channels = state["head.norm.weight"].shape
    return {
        "head.norm.weight": np.ones(channels, np.float32),
        "head.norm.bias": np.zeros(channels, np.float32),
    }
