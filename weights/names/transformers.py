"""Names that Hugging Face's transformers gives the tensors of models that are here, turned into
timm's.

Its image classifiers, and the image towers of CLIP and SigLIP: a whole model's text tower is
dropped. Files of its releases 4 and 5 are recognised by their names; all others pass as they are.
"""

import re
from collections.abc import Callable

import numpy as np

from weights.arrays import concatenated
from weights.names.rules import Arrays, Rules, join_qkv, rename


def _shift_stage(match: re.Match[str]) -> str:
    """Numbers a ResNet's stages from 1."""
    return f"layer{int(match[1]) + 1}.{match[2]}."


def _part(word: str) -> str:
    return "conv" if word == "convolution" else "bn"


def _count_blocks(match: re.Match[str]) -> str:
    """Numbers a RegNet's stages and blocks from 1."""
    return f"s{int(match[1]) + 1}.b{int(match[2]) + 1}."


def _stem(match: re.Match[str]) -> str:
    return f"stem.conv{match[1]}.{'linear.' if match[2] else ''}"


def _branch(match: re.Match[str]) -> str:
    """Pairs a LeViT's layers to blocks: attention, then the MLP."""
    number = int(match[2])
    return f"stages.{match[1]}.blocks.{number // 2}.{('attn', 'mlp')[number % 2]}."


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
_ENCODER = (  # ViT, DeiT, BEiT, DINOv2
    (r"^(vit|deit|beit|dinov2|dinov2_with_registers)\.", ""),
    (r"(^|\.)relative_position_index$|^(embeddings\.mask_token|pooler\.dense\.|lm_head\.)", None),
    (r"^(encoder\.layer|layers)\.", "blocks."),
    *_BLOCK,
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.", ""),
    (r"^encoder\.relative_position_bias\.", "rel_pos_bias."),
    (r"^pooler\.layernorm\.", "fc_norm."),  # BEiT's, of the patches' mean
    (r"^layernorm\.", "norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
_TOWER = (  # CLIP, SigLIP
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
    (r"\.relative_position_index$|^(embeddings\.mask_token|pooler\.)", None),
    (r"^encoder\.", ""),
    *_BLOCK,
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
    (r"^(decoder|multiscale_fusion)\.", None),  # of masked pre-training
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
    (r"^patch_embeddings\.embedding_layer_(\d)\.(convolution\.)?", _stem),
    (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.(module\.)?", _branch),
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
    (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.", _shift_stage),
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
    (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.", _count_blocks),
    (r"\.layer\.2\.attention\.0\.", ".se.fc1."),
    (r"\.layer\.2\.attention\.2\.", ".se.fc2."),
    (
        r"\.layer\.([01])\.(convolution|normalization)\.",
        lambda match: f".conv{int(match[1]) + 1}.{_part(match[2])}.",
    ),
    (r"\.layer\.[23]\.(convolution|normalization)\.", lambda match: f".conv3.{_part(match[1])}."),
    (r"\.shortcut\.(convolution|normalization)\.", lambda match: f".downsample.{_part(match[1])}."),
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
    (r"^(.*)\.(convolution|normalization)\.", lambda match: f"{match[1]}.{_part(match[2])}."),
    (r"^classifier\.", "head.fc."),
)


def timm_names(arrays: Arrays) -> Arrays:
    """Returns arrays of one of transformers' files under timm's names, in torch's layout; of
    others, as they are.
    """
    for telltale, rules, joined in _KINDS:
        if any(map(re.compile(telltale).search, arrays)):
            return joined(rename(arrays, rules))
    return arrays


def _encoders(arrays: Arrays) -> Arrays:
    """BEiT's keys have no bias, so those of queries and values stay apart. The distillation token
    of a DeiT without a teacher becomes a register token, because no head reads it.
    """
    if "blocks.0.attn.k.bias" not in arrays:
        arrays = rename(arrays, [(r"\.attn\.([qv])\.bias$", r".attn.\1_bias")])
    if "head.weight" in arrays and "head_dist.weight" not in arrays:
        arrays = rename(arrays, [("^dist_token$", "reg_token")])
    return join_qkv(arrays)


def _towers(arrays: Arrays) -> Arrays:
    """A classifier reads the mean of the patches. It has a bias, unlike CLIP's projection. Its file
    also holds SigLIP's attention pooling or CLIP's last norm, which the classifier doesn't use.
    """
    if "head.bias" in arrays:
        unused = r"^(attn_pool|norm)\." if "cls_token" in arrays else r"^attn_pool\."
        arrays = rename(arrays, [(unused, None)])
    # transformers stores both without the axis of the batch.
    if "cls_token" in arrays:
        arrays["cls_token"] = arrays["cls_token"].reshape((1, 1, -1))
    if "pos_embed" in arrays:
        positions = arrays["pos_embed"]
        arrays["pos_embed"] = positions.reshape((1, *positions.shape))
    for part in ("weight", "bias"):
        joined = arrays.pop(f"attn_pool.qkv.{part}", None)
        if joined is not None:
            third = len(joined) // 3
            arrays |= {
                f"attn_pool.q.{part}": joined[:third],
                f"attn_pool.kv.{part}": joined[third:],
            }
    if "head.weight" in arrays and "head.bias" not in arrays:  # CLIP's projection
        arrays["head.bias"] = np.zeros(len(arrays["head.weight"]), np.float32)
    return join_qkv(arrays)


def _pyramids(arrays: Arrays) -> Arrays:
    """Joins keys and values."""
    for name in [name for name in arrays if ".attn.k." in name]:
        other = name.replace(".attn.k.", ".attn.v.")
        if other in arrays:
            arrays[name.replace(".attn.k.", ".attn.kv.")] = concatenated(
                [arrays.pop(name), arrays.pop(other)]
            )
    return arrays


def _number_blocks(arrays: Arrays) -> Arrays:
    """Numbers a Hiera's blocks through all stages."""
    found = {
        (int(match[1]), int(match[2]))
        for name in arrays
        if (match := re.match(r"stages\.(\d+)\.layers\.(\d+)", name))
    }
    numbers = {
        f"stages.{stage}.layers.{layer}": i for i, (stage, layer) in enumerate(sorted(found))
    }
    return rename(
        arrays, [(r"^stages\.\d+\.layers\.\d+", lambda match: f"blocks.{numbers[match[0]]}")]
    )


def _between(arrays: Arrays) -> Arrays:
    """Puts a LeViT's last block of a stage that has keys of its own between this stage and the next
    one.
    """
    last = {name.partition(".attn.kv.")[0] for name in arrays if ".attn.kv." in name}

    def moved(match: re.Match[str]) -> str:
        if match[0].rpartition(".")[0] not in last:
            return match[0]
        return f"stages.{int(match[1]) + 1}.downsample.{'attn_downsample' if match[2] == 'attn' else 'mlp'}"

    return rename(arrays, [(r"^stages\.(\d+)\.blocks\.\d+\.(attn|mlp)", moved)])


def _blue_first(arrays: Arrays) -> Arrays:
    """MobileViT's images are blue, green, red there (do_flip_channel_order): the stem's channels
    are turned round.
    """
    stem = arrays.get("stem.conv.weight")
    if stem is not None and stem.ndim == 4:
        arrays["stem.conv.weight"] = np.ascontiguousarray(stem[:, ::-1])
    return join_qkv(arrays)


_KINDS: tuple[
    tuple[str, Rules, Callable[[Arrays], Arrays]], ...
] = (  # a name that no other toolkit has, what to do then
    (
        r"^((vit|deit|beit|dinov2\w*)\.)?encoder\.layer\.0\.attention\.attention\.query\.weight$",
        _ENCODER,
        _encoders,
    ),
    (r"^((vit|deit|beit|dinov2\w*)\.)?layers\.0\.attention\.q_proj\.weight$", _ENCODER, _encoders),
    (r"^((vision_model|visual)\.)?encoder\.layers\.0\.self_attn\.q_proj\.weight$", _TOWER, _towers),
    (
        r"^(swinv2\.)?encoder\.layers\.0\.blocks\.0\.attention\.self\.logit_scale$",
        _SWIN_V2,
        join_qkv,
    ),
    (r"^(swin\.)?encoder\.layers\.0\.blocks\.0\.attention\.self\.query\.weight$", _SWIN, join_qkv),
    (r"^(hiera\.)?encoder\.stages\.0\.layers\.0\.attn\.qkv\.weight$", _HIERA, _number_blocks),
    (
        r"^(levit\.)?encoder\.stages\.0\.layers\.0\.module\.queries_keys_values\.linear\.weight$",
        _LEVIT,
        _between,
    ),
    (r"^(pvt_v2\.)?encoder\.layers\.0\.patch_embedding\.layer_norm\.weight$", _PVT, _pyramids),
    (r"^(poolformer\.)?encoder\.block\.0\.0\.before_norm\.weight$", _POOLFORMER, dict),
    (r"^(mobilevit\.)?encoder\.layer\.2\.conv_kxk\.convolution\.weight$", _MOBILEVIT, _blue_first),
    (r"^resnet\.embedder\.embedder\.convolution\.weight$", _RESNET, dict),
    (r"^regnet\.embedder\.embedder\.convolution\.weight$", _REGNET, dict),
)
