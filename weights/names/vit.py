"""The names of tensors in files of ViT and DeiT."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import paddle

from weights.arrays import concatenated
from weights.names.big_vision import google_layers
from weights.names.clip import from_clip
from weights.names.rules import (
    Arrays,
    from_flax,
    jax_kernel,
    join_qkv,
    rename,
    same_shape,
    to_flax,
    torch_kernel,
)
from weights.names.text import BIG_VISION_TEXT

_RULES = (
    # DINOv2: its blocks are in chunks, but are numbered from the first chunk to the last.
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),
    # DeiT-III
    (r"\.gamma_([12])$", r".ls\1.gamma"),
    # DINOv2's giant
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    # PaddleViT
    (r"^transformer\.", ""),
    (r"^(embeddings|patch_embedding)\.(cls_token|dist_token|position_embeddings)$", r"\2"),
    (r"^(embeddings\.patch_embeddings|patch_embedding\.patch_embedding)\.", "patch_embed.proj."),
    (r"^(encoder_)?position_embeddings?$", "pos_embed"),
    (r"^class_token$", "cls_token"),
    (r"^distill_token$", "dist_token"),
    (r"^(encoder\.)?layers\.", "blocks."),
    (r"^(blocks\.\d+\.)attn_norm\.", r"\1norm1."),
    (r"^(blocks\.\d+\.)mlp_norm\.", r"\1norm2."),
    (r"^(blocks\.\d+\.)attn\.out\.", r"\1attn.proj."),
    (r"^encoder\.(encoder_)?norm\.", "norm."),
    # PaddleViT's MAE, fine-tuned on the mean of the patches
    (r"^encoder_norm\.", "fc_norm."),
    (r"^classifier\.(weight|bias)$", r"head.\1"),
    (r"^(classifier_dist|head_distill)\.", "head_dist."),
)

# timm's and Google's names of layers and tokens. <i> is the number of a block.
_GOOGLE = (
    ("cls_token", "cls"),
    ("pos_embed", "Transformer/posembed_input/pos_embedding"),
    ("patch_embed.proj", "embedding"),
    ("blocks.<i>.norm1", "Transformer/encoderblock_<i>/LayerNorm_0"),
    ("blocks.<i>.attn.q", "Transformer/encoderblock_<i>/MultiHeadDotProductAttention_1/query"),
    ("blocks.<i>.attn.k", "Transformer/encoderblock_<i>/MultiHeadDotProductAttention_1/key"),
    ("blocks.<i>.attn.v", "Transformer/encoderblock_<i>/MultiHeadDotProductAttention_1/value"),
    ("blocks.<i>.attn.proj", "Transformer/encoderblock_<i>/MultiHeadDotProductAttention_1/out"),
    ("blocks.<i>.norm2", "Transformer/encoderblock_<i>/LayerNorm_2"),
    ("blocks.<i>.mlp.fc1", "Transformer/encoderblock_<i>/MlpBlock_3/Dense_0"),
    ("blocks.<i>.mlp.fc2", "Transformer/encoderblock_<i>/MlpBlock_3/Dense_1"),
    ("norm", "Transformer/encoder_norm"),
    ("head", "head"),
)
# The same of the attention that pools SigLIP's patches.
_MAP_HEAD = (
    ("attn_pool.latent", "MAPHead_0/probe"),
    ("attn_pool.q", "MAPHead_0/MultiHeadDotProductAttention_0/query"),
    ("attn_pool.k", "MAPHead_0/MultiHeadDotProductAttention_0/key"),
    ("attn_pool.v", "MAPHead_0/MultiHeadDotProductAttention_0/value"),
    ("attn_pool.proj", "MAPHead_0/MultiHeadDotProductAttention_0/out"),
    ("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
    ("attn_pool.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
    ("attn_pool.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``VisionTransformer``.

    A distilled model's are those of ``VisionTransformerDistilled``.

    Sources: the files of Google's ViT, AugReg, big_vision and its SigLIP (.npz), DeiT, DeiT-III,
    MAE, MoCo v3, DINO, DINOv2 and CLIP (``weights.names.clip``). Also those of older timm, and of
    PaddleViT's ViT, DeiT and MAE in all versions. PaddleClas uses timm's names.

    ``pre_logits`` is dropped, with the head that reads it, because timm has no such layer.

    MAE's pre-training has a ``norm`` where a fine-tuned model has an ``fc_norm``. Here ``fc_norm``
    starts from ``norm``; in MAE's own fine-tuning it starts afresh.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = _from_google(arrays) if layout == "jax" else from_clip(arrays)
    last_norm = "fc_norm." if "fc_norm.weight" in wanted else "norm."
    arrays = rename(arrays, _RULES)
    if any(name.startswith("pre_logits.") for name in arrays):
        arrays = rename(arrays, [(r"^(pre_logits|head)\.", None)])
    if "head.weight" not in arrays:
        arrays = rename(arrays, [(r"^norm\.", last_norm)])
    # DINOv2 adds no position to its registers. timm's model adds positions to the patches alone
    # then, so the class token gets its position here.
    if arrays.keys() >= {"register_tokens", "cls_token", "pos_embed"}:
        position, arrays["pos_embed"] = np.split(arrays["pos_embed"], [1], axis=1)
        token, position = same_shape(arrays["cls_token"], position, "cls_token and its position")
        arrays["cls_token"] = np.add(token, position)
        arrays["reg_token"] = arrays.pop("register_tokens")
    if "cls_token" in arrays and "pos_embed" in wanted and "cls_token" not in wanted:
        arrays = _without_tokens_position(arrays)
    if (
        "neck.proj.weight" in wanted
        and "neck.proj.weight" not in arrays
        and "head.weight" in arrays
    ):
        # CLIP's projection, which has no bias.
        arrays = rename(arrays, [(r"^head\.bias$", None), (r"^head\.", "neck.proj.")])
    kernel = arrays.get("patch_embed.proj.weight")
    if kernel is not None and kernel.ndim == 2:
        arrays["patch_embed.proj.weight"] = _convolution(kernel.T if layout == "paddle" else kernel)
    return arrays


def _without_tokens_position(arrays: Arrays) -> Arrays:
    """Returns the arrays without the position of a class token that the model doesn't have.

    The token itself stays, for the model to refuse it, or MODEL.PRETRAINED_ALLOW to leave it out.
    """
    positions = arrays.get("pos_embed")
    if positions is None or positions.ndim != 3 or not _is_square(positions.shape[1] - 1):
        return arrays
    return arrays | {"pos_embed": np.split(positions, [1], axis=1)[1]}


def _reads_two_tokens(arrays: Mapping[str, np.ndarray | paddle.Tensor]) -> bool:
    """Returns whether the classifier reads the class token beside the mean of the patches."""
    head = arrays.get("head.weight")
    token = arrays["cls_token"]
    # A damaged file may hold a number in place of a tensor.
    if head is None or head.ndim != 2 or token.ndim != 3:
        return False
    return head.shape[0] == 2 * token.shape[-1]


def model_keys(arrays: Mapping[str, np.ndarray | paddle.Tensor]) -> dict[str, Any]:
    """Returns the keys of tokens, positions, pooling, layer scale, norms and biases.

    An ``fc_norm`` means that the head reads the mean of the patches.
    """
    # The file may be of another family.
    if "blocks.0.norm1.weight" not in arrays:
        return {}
    has_token = "cls_token" in arrays
    registers = arrays.get("reg_token")
    prompts = arrays.get("prompt_tokens")
    keys = {
        "CLASS_TOKEN": has_token,
        "DISTILLED": "dist_token" in arrays,
        "REG_TOKENS": 0 if registers is None else int(registers.shape[1]),
        "PROMPT_TOKENS": 0 if prompts is None else int(prompts.shape[1]),
        "PROMPT_DEEP": prompts is not None and int(prompts.shape[0]) > 1,
        "PRE_NORM": "norm_pre.weight" in arrays,
        "INIT_VALUES": 1e-5 if "blocks.0.ls1.gamma" in arrays else None,
        "QK_NORM": "blocks.0.attn.q_norm.weight" in arrays,
        "POS_EMBED": "learn" if "pos_embed" in arrays else "sincos2d",
    }
    if any(name.startswith("head.") for name in arrays):
        keys["HEAD_BATCH_NORM"] = "head.0.running_mean" in arrays
    projection = arrays.get("neck.proj.weight")
    keys["NECK_DIM"] = None if projection is None else int(projection.shape[-1])
    if "blocks.0.attn.qkv.weight" in arrays:
        keys["QKV_BIAS"] = "blocks.0.attn.qkv.bias" in arrays
    has_fc_norm = "fc_norm.weight" in arrays
    keys["FINAL_NORM"] = has_fc_norm or "norm.weight" in arrays
    if "attn_pool.latent" in arrays:
        keys["GLOBAL_POOL"] = "map"
    elif has_token and _reads_two_tokens(arrays):
        keys["GLOBAL_POOL"] = "token_avg"
    elif keys["FINAL_NORM"]:
        keys["GLOBAL_POOL"] = "token" if has_token and not has_fc_norm else "avg"
        if not has_token:
            keys["FC_NORM"] = has_fc_norm
    if "pos_embed" in arrays and len(arrays["pos_embed"].shape) == 3:
        # Without a position for each token before the patches, the length itself is a square.
        length = int(arrays["pos_embed"].shape[1])
        tokens = has_token + keys["DISTILLED"] + keys["REG_TOKENS"]
        keys["NO_EMBED_CLASS"] = (
            tokens > 0 and not _is_square(length - tokens) and _is_square(length)
        )
    return keys


def switches(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the activation of big_vision's SigLIP, whose files hold the text tower, too.

    It is the approximation of GELU, where timm's models of these weights have the exact one.
    """
    return {"ACT": "gelu_tanh"} if BIG_VISION_TEXT in arrays else {}


def unstored_arrays(arrays: Collection[str], state: Mapping[str, paddle.Tensor]) -> Arrays:
    """Returns the position embedding of PaddleViT's MAE, which its files leave out.

    An even channel is sin(place / 10000 ** (channel / channels)), and the next one is the cosine of
    the same angle. The place is that in the sequence; the class token has the place 0.
    """
    maes = {"patch_embedding.cls_token", "patch_embedding.patch_embedding.weight"}
    wanted = state.get("pos_embed")
    has_positions = any("position" in name for name in arrays)
    if not maes <= set(arrays) or has_positions or wanted is None:
        return {}
    if {"dist_token", "reg_token"} & set(state) or model_keys(state)["NO_EMBED_CLASS"]:
        return {}
    _, length, channels = wanted.shape
    even = np.arange(channels) // 2 * 2
    angles = np.arange(length)[:, None] / 10000 ** (even / channels)
    table = np.where(np.arange(channels) % 2 == 0, np.sin(angles), np.cos(angles))
    return {"pos_embed": table[None].astype(np.float32)}


def google_names(arrays: Arrays, num_heads: int) -> Arrays:
    """Returns a plain ViT's arrays as Google's .npz files have them.

    timm and Google's own repository of ViT load these files.

    Args:
        arrays: by timm's names, in torch's layout.
        num_heads: heads of each block.

    Raises:
        InputError: Google's ViT doesn't have one of the arrays.
    """
    split = {}
    for name, array in arrays.items():
        if name.endswith(".weight"):
            array = jax_kernel(array)
        if ".qkv." in name:
            for letter, part in zip("qkv", np.split(array, 3, axis=-1), strict=True):
                by_head = part.reshape(*part.shape[:-1], num_heads, -1)
                split[name.replace(".qkv.", f".{letter}.")] = by_head
        elif name.endswith("attn.proj.weight"):
            split[name] = array.reshape(num_heads, -1, array.shape[-1])
        else:
            split[name] = array
    return to_flax(split, _GOOGLE)


def _from_google(arrays: Arrays) -> Arrays:
    """Returns the arrays of a .npz file of Google's under timm's names, in torch's layout."""
    named = from_flax(google_layers(arrays), (*_GOOGLE, *_MAP_HEAD))
    for name, array in named.items():
        if re.search(r"(\.attn|^attn_pool)\.[qkv]\.", name):
            # Weights are [in, heads, head_dim], biases [heads, head_dim].
            array = array.reshape(*array.shape[:-2], -1)
        elif name.endswith(("attn.proj.weight", "attn_pool.proj.weight")):
            # [heads, head_dim, out]
            array = array.reshape(-1, *array.shape[-1:])
        named[name] = torch_kernel(array) if name.endswith(".weight") else array
    if "attn_pool.latent" in named:
        for leaf in ("weight", "bias"):
            key_and_value = [named.pop(f"attn_pool.{letter}.{leaf}") for letter in "kv"]
            named[f"attn_pool.kv.{leaf}"] = concatenated(key_and_value)
    return join_qkv(named)


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def _convolution(kernel: np.ndarray) -> np.ndarray:
    """Returns the kernel [out, in, p, p] of a Linear's weight [out, in * p * p].

    The patches have 3 channels or 1. A weight of another width is returned as it is.
    """
    for channels in (3, 1):
        size = math.isqrt(kernel.shape[1] // channels)
        if channels * size**2 == kernel.shape[1] > 0:
            return kernel.reshape(-1, channels, size, size)
    return kernel
