"""The names of tensors in files of Hugging Face's transformers, releases 4 and 5.

They are those of its image classifiers, and of the image towers of CLIP and SigLIP; a text tower is
dropped. The files are recognised by their names, and other files pass as they are.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weights.arrays import concatenated
from weights.names.rules import Arrays, Rules, join_qkv, rename


def _resnet_block(match: re.Match[str]) -> str:
    """Numbers a ResNet's stages from 1."""
    return f"layer{int(match[1]) + 1}.{match[2]}."


def _regnet_block(match: re.Match[str]) -> str:
    """Numbers a RegNet's stages and blocks from 1."""
    return f"s{int(match[1]) + 1}.b{int(match[2]) + 1}."


def _levit_stem(match: re.Match[str]) -> str:
    """Renames a convolution of a LeViT's stem, or its norm."""
    linear = "linear." if match[2] else ""
    return f"stem.conv{match[1]}.{linear}"


def _levit_layer(match: re.Match[str]) -> str:
    """Returns the place of a LeViT's layer.

    timm joins an attention and the MLP after it in one block.
    """
    block, is_mlp = divmod(int(match[2]), 2)
    layer = "mlp" if is_mlp else "attn"
    return f"stages.{match[1]}.blocks.{block}.{layer}."


_BLOCK = (
    (r"\.attention\.(attention|self)\.(query|key|value)\.", lambda match: f".attn.{match[2][0]}."),
    (r"\.attention\.(attention|self)\.(relative_position_bias\.)?", ".attn."),
    (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.mlp\.weights_in\.", ".mlp.fc1."),
    (r"\.mlp\.weights_out\.", ".mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.lambda_([12])$", r".gamma_\1"),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
)
# ViT, DeiT, BEiT, DINOv2
_ENCODER = (
    # BEiT's pre-training reads its mask token and its lm_head.
    (r"^beit\.embeddings\.mask_token$", "mask_token"),
    (r"^(vit|deit|beit|dinov2|dinov2_with_registers)\.", ""),
    (r"(^|\.)relative_position_index$|^pooler\.dense\.", None),
    (r"^(encoder\.layer|layers)\.", "blocks."),
    *_BLOCK,
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.", ""),
    (r"^encoder\.relative_position_bias\.", "rel_pos_bias."),
    # BEiT's norm of the mean of the patches
    (r"^pooler\.layernorm\.", "fc_norm."),
    (r"^layernorm\.", "norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
# CLIP, SigLIP
_TOWER = (
    (r"^(text_model|text_projection|logit_scale|logit_bias)(\.|$)|\.position_ids$", None),
    (r"^(vision_model|visual)\.", ""),
    (r"^encoder\.layers\.", "blocks."),
    (r"\.layer_norm([12])\.", r".norm\1."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn.\1."),
    (r"\.self_attn\.out_proj\.", ".attn.proj."),
    (r"^embeddings\.class_embedding$", "cls_token"),
    (r"^embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"^embeddings\.position_embedding\.weight$", "pos_embed"),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^post_layernorm\.", "norm."),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.in_proj_(weight|bias)$", r"attn_pool.qkv.\1"),
    (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^head\.layernorm\.", "attn_pool.norm."),
    (r"^head\.mlp\.", "attn_pool.mlp."),
    (r"^(visual_projection|classifier)\.", "head."),
)
_SWIN = (
    (r"^swin\.", ""),
    (r"\.relative_position_index$|^pooler\.", None),
    (r"^encoder\.", ""),
    *_BLOCK,
    (r"^embeddings\.mask_token$", "mask_token"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head.fc."),
)
_SWIN_V2 = (
    (r"^swinv2\.", ""),
    (r"\.relative_coords_table$", None),
    (r"\.attention\.self\.continuous_position_bias_mlp\.", ".attn.cpb_mlp."),
    *_SWIN,
    (r"\.attn\.([qv])\.bias$", r".attn.\1_bias"),
)
_HIERA = (
    (r"^hiera\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^encoder\.stages\.", "stages."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^(pooler\.layernorm|encoder_norm)\.", "head.norm."),
    (r"^classifier\.", "head.fc."),
)
_LEVIT = (
    (r"^levit\.", ""),
    (r"\.attention_bias_idxs$", None),
    (r"\.batch_norm\.", ".bn."),
    (r"^patch_embeddings\.embedding_layer_(\d)\.(convolution\.)?", _levit_stem),
    (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.(module\.)?", _levit_layer),
    (r"\.queries_keys_values\.", ".qkv."),
    (r"\.keys_values\.", ".kv."),
    (r"\.queries\.", ".q.ln."),
    (r"\.projection\.", ".proj.ln."),
    (r"\.linear_up\.", ".ln1."),
    (r"\.linear_down\.", ".ln2."),
    (r"^classifier\.", "head."),
    (r"^classifier_distill\.", "head_dist."),
)
_PVT = (
    (r"^pvt_v2\.", ""),
    (r"^encoder\.layers\.0\.patch_embedding\.", "patch_embed."),
    (r"^encoder\.layers\.(\d+)\.patch_embedding\.", r"stages.\1.downsample."),
    (r"^encoder\.layers\.", "stages."),
    (r"\.layer_norm_([12])\.", r".norm\1."),
    (r"\.attention\.query\.", ".attn.q."),
    (r"\.attention\.(key|value)\.", lambda match: f".attn.{match[1][0]}."),
    (r"\.attention\.spatial_reduction\.", ".attn.sr."),
    (r"\.attention\.", ".attn."),
    (r"(^|\.)layer_norm\.", r"\1norm."),
    (r"\.mlp\.dense([12])\.", r".mlp.fc\1."),
    (r"\.dwconv\.dwconv\.", ".dwconv."),
    (r"^classifier\.", "head."),
)
_SEGFORMER = (
    (r"^segformer\.", ""),
    (r"^encoder\.patch_embeddings\.0\.", "patch_embed."),
    (r"^encoder\.patch_embeddings\.(\d+)\.", r"stages.\1.downsample."),
    (r"^encoder\.block\.(\d+)\.", r"stages.\1.blocks."),
    (r"^encoder\.layer_norm\.(\d+)\.", r"stages.\1.norm."),
    (r"\.layer_norm_([12])\.", r".norm\1."),
    *_BLOCK,
    (r"\.layer_norm\.", ".norm."),
    (r"\.mlp\.dense([12])\.", r".mlp.fc\1."),
    (r"\.dwconv\.dwconv\.", ".dwconv."),
    (r"^classifier\.", "head."),
)
_POOLFORMER = (
    (r"^poolformer\.", ""),
    (r"^encoder\.patch_embeddings\.0\.projection\.", "stem.conv."),
    (r"^encoder\.patch_embeddings\.(\d+)\.projection\.", r"stages.\1.downsample.conv."),
    (r"^encoder\.block\.(\d+)\.", r"stages.\1.blocks."),
    (r"\.before_norm\.", ".norm1."),
    (r"\.after_norm\.", ".norm2."),
    (r"\.output\.conv([12])\.", r".mlp.fc\1."),
    (r"\.layer_scale_([12])$", r".layer_scale\1.scale"),
    (r"^classifier\.", "head.fc."),
)
_RESNET = (
    (r"^resnet\.", ""),
    (r"^embedder\.embedder\.convolution\.", "conv1."),
    (r"^embedder\.embedder\.normalization\.", "bn1."),
    (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.", _resnet_block),
    (r"\.layer\.(\d)\.convolution\.", lambda match: f".conv{int(match[1]) + 1}."),
    (r"\.layer\.(\d)\.normalization\.", lambda match: f".bn{int(match[1]) + 1}."),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.normalization\.", ".downsample.1."),
    (r"^classifier\.1\.", "fc."),
)
_REGNET = (
    (r"^regnet\.", ""),
    (r"^embedder\.embedder\.convolution\.", "stem.conv."),
    (r"^embedder\.embedder\.normalization\.", "stem.bn."),
    (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.", _regnet_block),
    (r"\.layer\.2\.attention\.0\.", ".se.fc1."),
    (r"\.layer\.2\.attention\.2\.", ".se.fc2."),
    (r"\.layer\.([01])\.convolution\.", lambda match: f".conv{int(match[1]) + 1}.conv."),
    (r"\.layer\.([01])\.normalization\.", lambda match: f".conv{int(match[1]) + 1}.bn."),
    (r"\.layer\.[23]\.convolution\.", ".conv3.conv."),
    (r"\.layer\.[23]\.normalization\.", ".conv3.bn."),
    (r"\.shortcut\.convolution\.", ".downsample.conv."),
    (r"\.shortcut\.normalization\.", ".downsample.bn."),
    (r"^classifier\.1\.", "head.fc."),
)
_MOBILEVIT = (
    (r"^mobilevit\.", ""),
    (r"^conv_stem\.", "stem."),
    (r"^conv_1x1_exp\.", "final_conv."),
    (r"^encoder\.layer\.(\d)\.layer\.(\d)\.", r"stages.\1.\2."),
    (r"^encoder\.layer\.(\d)\.downsampling_layer\.", r"stages.\1.0."),
    (r"^encoder\.layer\.(\d)\.", r"stages.\1.1."),
    (r"\.expand_1x1\.", ".conv1_1x1."),
    (r"\.conv_3x3\.", ".conv2_kxk."),
    (r"\.reduce_1x1\.", ".conv3_1x1."),
    (r"\.conv_1x1\.convolution\.", ".conv_1x1."),
    (r"\.transformer\.layer\.", ".transformer."),
    *_BLOCK,
    (r"\.layernorm\.", ".norm."),
    (r"\.conv_projection\.", ".conv_proj."),
    (r"\.fusion\.", ".conv_fusion."),
    (r"^(.*)\.convolution\.", r"\1.conv."),
    (r"^(.*)\.normalization\.", r"\1.bn."),
    (r"^classifier\.", "head.fc."),
)


# EoMT, as the network of an encoder and a head
_EOMT = (
    (r"^criterion\.", None),
    (r"^attn_mask_probs$", "decode_head.attn_mask_probs"),
    (r"^query\.", "decode_head.q."),
    (r"^class_predictor\.", "decode_head.class_head."),
    (r"^mask_head\.fc(\d)\.", lambda match: f"decode_head.mask_head.{2 * int(match[1]) - 2}."),
    (r"^upscale_block\.block\.", "decode_head.upscale."),
    (r"\.layernorm2d\.", ".norm."),
    (r"^layernorm\.", "encoder.norm."),
    (r"^embeddings\.register_tokens$", "encoder.reg_token"),
    (r"^embeddings\.position_embeddings\.weight$", "encoder.pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "encoder.patch_embed.proj."),
    (r"^embeddings\.", "encoder."),
    (r"^layers\.", "encoder.blocks."),
    (r"\.attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
    *_BLOCK,
)


def timm_names(arrays: Arrays) -> Arrays:
    """Returns the arrays of a file of transformers under timm's names, in torch's layout.

    The arrays of other files are returned as they are.
    """
    for kind in _KINDS:
        if any(map(re.compile(kind.telltale).search, arrays)):
            return kind.finish(rename(arrays, kind.rules))
    return arrays


def _finish_encoder(arrays: Arrays) -> Arrays:
    """Joins queries, keys and values, and renames what the rules can't express.

    BEiT's keys have no bias, so the biases of queries and values stay apart. The distillation token
    of a DeiT without a teacher becomes a register token, because no head reads it.
    """
    if "blocks.0.attn.k.bias" not in arrays:
        arrays = rename(arrays, [(r"\.attn\.([qv])\.bias$", r".attn.\1_bias")])
    if "head.weight" in arrays and "head_dist.weight" not in arrays:
        arrays = rename(arrays, [("^dist_token$", "reg_token")])
    return join_qkv(arrays)


def _finish_eomt(arrays: Arrays) -> Arrays:
    """Joins queries, keys and values, and the two halves of a gated MLP."""
    if "encoder.pos_embed" in arrays:
        # transformers stores them without the axis of the batch.
        positions = arrays["encoder.pos_embed"]
        arrays["encoder.pos_embed"] = positions.reshape((1, *positions.shape))
    for gate in [name for name in arrays if ".mlp.gate_proj." in name]:
        up = gate.replace(".gate_proj.", ".up_proj.")
        if up in arrays:
            joined = concatenated([arrays.pop(gate), arrays.pop(up)])
            arrays[gate.replace(".gate_proj.", ".fc1.")] = joined
    return join_qkv(arrays)


def _finish_tower(arrays: Arrays) -> Arrays:
    """Joins queries, keys and values, and gives CLIP's projection the form of a classifier."""
    # A bias means a classifier, which reads the mean of the patches. Its file also has SigLIP's
    # attention pooling or CLIP's last norm, which it doesn't use.
    if "head.bias" in arrays:
        unused = r"^(attn_pool|norm)\." if "cls_token" in arrays else r"^attn_pool\."
        arrays = rename(arrays, [(unused, None)])
    # transformers stores both without the axis of the batch.
    if "cls_token" in arrays:
        arrays["cls_token"] = arrays["cls_token"].reshape((1, 1, -1))
    if "pos_embed" in arrays:
        positions = arrays["pos_embed"]
        arrays["pos_embed"] = positions.reshape((1, *positions.shape))
    for leaf in ("weight", "bias"):
        joined = arrays.pop(f"attn_pool.qkv.{leaf}", None)
        if joined is not None:
            third = len(joined) // 3
            arrays[f"attn_pool.q.{leaf}"] = joined[:third]
            arrays[f"attn_pool.kv.{leaf}"] = joined[third:]
    # CLIP's projection has no bias.
    if "head.weight" in arrays and "head.bias" not in arrays:
        arrays["head.bias"] = np.zeros(len(arrays["head.weight"]), np.float32)
    return join_qkv(arrays)


def _finish_pvt(arrays: Arrays) -> Arrays:
    """Joins keys and values."""
    for key in [name for name in arrays if ".attn.k." in name]:
        value = key.replace(".attn.k.", ".attn.v.")
        if value in arrays:
            joined = concatenated([arrays.pop(key), arrays.pop(value)])
            arrays[key.replace(".attn.k.", ".attn.kv.")] = joined
    return arrays


def _finish_hiera(arrays: Arrays) -> Arrays:
    """Numbers the blocks of all stages in one row."""
    block = re.compile(r"^stages\.(\d+)\.layers\.(\d+)")
    matches = [match for name in arrays if (match := block.match(name))]
    places = sorted({(int(match[1]), int(match[2])) for match in matches})
    numbers = {
        f"stages.{stage}.layers.{layer}": number for number, (stage, layer) in enumerate(places)
    }
    return rename(arrays, [(block.pattern, lambda match: f"blocks.{numbers[match[0]]}")])


def _finish_levit(arrays: Arrays) -> Arrays:
    """Moves the downsampling from the end of a stage to the beginning of the next one.

    It is the block whose attention has keys and values apart from the queries.
    """
    downsampling = {name.partition(".attn.kv.")[0] for name in arrays if ".attn.kv." in name}

    def moved(match: re.Match[str]) -> str:
        if match[0].rpartition(".")[0] not in downsampling:
            return match[0]
        layer = "attn_downsample" if match[2] == "attn" else "mlp"
        return f"stages.{int(match[1]) + 1}.downsample.{layer}"

    return rename(arrays, [(r"^stages\.(\d+)\.blocks\.\d+\.(attn|mlp)", moved)])


def _finish_mobilevit(arrays: Arrays) -> Arrays:
    """Joins queries, keys and values, and reverses the channels of the first kernel.

    transformers' MobileViT reads images in the order blue, green, red (do_flip_channel_order).
    """
    stem = arrays.get("stem.conv.weight")
    if stem is not None and stem.ndim == 4:
        arrays["stem.conv.weight"] = np.ascontiguousarray(stem[:, ::-1])
    return join_qkv(arrays)


class _Kind(NamedTuple):
    """A kind of files.

    Attributes:
        telltale: a pattern of names that no other toolkit's files have.
        rules: what becomes of the names.
        finish: does what rules can't do, with the renamed arrays.
    """

    telltale: str
    rules: Rules
    finish: Callable[[Arrays], Arrays]


_KINDS = (
    # Before the encoders, whose blocks have the same names.
    _Kind(r"^class_predictor\.weight$", _EOMT, _finish_eomt),
    _Kind(
        r"^((vit|deit|beit|dinov2\w*)\.)?encoder\.layer\.0\.attention\.attention\.query\.weight$",
        _ENCODER,
        _finish_encoder,
    ),
    _Kind(
        r"^((vit|deit|beit|dinov2\w*)\.)?layers\.0\.attention\.q_proj\.weight$",
        _ENCODER,
        _finish_encoder,
    ),
    _Kind(
        r"^((vision_model|visual)\.)?encoder\.layers\.0\.self_attn\.q_proj\.weight$",
        _TOWER,
        _finish_tower,
    ),
    _Kind(
        r"^(swinv2\.)?encoder\.layers\.0\.blocks\.0\.attention\.self\.logit_scale$",
        _SWIN_V2,
        join_qkv,
    ),
    _Kind(
        r"^(swin\.)?encoder\.layers\.0\.blocks\.0\.attention\.self\.query\.weight$",
        _SWIN,
        join_qkv,
    ),
    _Kind(r"^(hiera\.)?encoder\.stages\.0\.layers\.0\.attn\.qkv\.weight$", _HIERA, _finish_hiera),
    _Kind(
        r"^(levit\.)?encoder\.stages\.0\.layers\.0\.module\.queries_keys_values\.linear\.weight$",
        _LEVIT,
        _finish_levit,
    ),
    _Kind(
        r"^(pvt_v2\.)?encoder\.layers\.0\.patch_embedding\.layer_norm\.weight$", _PVT, _finish_pvt
    ),
    _Kind(
        r"^(segformer\.)?encoder\.patch_embeddings\.0\.layer_norm\.weight$",
        _SEGFORMER,
        _finish_pvt,
    ),
    _Kind(r"^(poolformer\.)?encoder\.block\.0\.0\.before_norm\.weight$", _POOLFORMER, dict),
    _Kind(
        r"^(mobilevit\.)?encoder\.layer\.2\.conv_kxk\.convolution\.weight$",
        _MOBILEVIT,
        _finish_mobilevit,
    ),
    _Kind(r"^resnet\.embedder\.embedder\.convolution\.weight$", _RESNET, dict),
    _Kind(r"^regnet\.embedder\.embedder\.convolution\.weight$", _REGNET, dict),
)
