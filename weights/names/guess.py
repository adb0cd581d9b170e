"""Guesses the architecture of a weight file by the names of its tensors."""

import re
from collections.abc import Collection

# For each architecture, a pattern of timm's names that no other one has. The order counts: an
# architecture whose names others have, too, comes after these.
_NAMES = {
    "beit": r"blocks\.\d+\.attn\.relative_position_bias_table|rel_pos_bias\.relative_position_bias_table",
    "botnet": r"stages\.\d+\.\d+\.self_attn\.qkv\.weight",
    "cait": r"blocks_token_only\.\d+\.norm1\.weight",
    "coat": r"crpe\d\.conv_list\.0\.weight",
    "convmixer": r"blocks\.\d+\.0\.fn\.0\.weight",
    "convmlp": r"stages\.\d+\.blocks\.\d+\.channel_mlp1\.fc1\.weight",
    "convnext": r"stages\.\d+\.blocks\.\d+\.conv_dw\.weight",
    "crossvit": r"blocks\.\d+\.fusion\.\d+\.attn\.wq\.weight",
    "cswin": r"stage\d\.\d+\.attns\.0\.get_v\.weight",
    "cyclemlp": r"network\.\d+\.\d+\.attn\.sfc_h\.weight",
    "cvt": r"stage\d\.blocks\.\d+\.attn\.conv_proj_q\.conv\.weight",
    "eva": r"blocks\.\d+\.(attn\.(q_bias|q_proj\.weight)|gamma_1)|rope\.periods",
    "ff_only": r"pos_encoding\.cls_pos_embed",
    "focal": r"layers\.\d+\.blocks\.\d+\.(pool_layers\.0\.weight|attn\.relative_position_bias_table_to_neighbors)",
    "gmlp": r"blocks\.\d+\.mlp_channels\.gate\.proj\.weight",
    "halonet": r"stages\.\d+\.\d+\.self_attn\.pos_embed\.height_rel",
    "lenet": r"features\.0\.weight",
    "hiera": r"blocks\.\d+\.proj\.weight|pos_embed_win",
    "hvt": r"blocks\.\d+\.pos_embed",
    "levit": r"stages\.\d+\.blocks\.\d+\.attn\.qkv\.linear\.weight",
    "metaformer": r"stages\.\d+\.blocks\.\d+\.mlp\.act\.scale",
    "mixer": r"blocks\.\d+\.mlp_tokens\.fc1\.weight",
    "mobileformer": r"blocks\.\d+\.toformer_bridge\.output\.weight",
    "mobilevit": r"stages\.\d+\.1\.transformer\.\d+\.norm1\.weight",
    "mobileone": r"stages\.\d+\.\d+\.(conv_kxk\.0\.conv|reparam_conv)\.weight",
    "pit": r"transformers\.\d+\.blocks\.\d+\.norm1\.weight",
    "poolformer": r"stages\.\d+\.blocks\.\d+\.layer_scale1\.scale",
    "pvtv2": r"stages\.\d+\.blocks\.\d+\.attn\.kv\.weight",
    "regnet": r"s1\.b1\.conv1\.conv\.weight",
    "replknet": r"stages\.\d+\.blocks\.\d+\.large_kernel\.(lkb_origin\.conv|lkb_reparam)\.weight",
    "repmlp": r"stages\.\d+\.\d+\.repmlp_block\.fc3\.weight",
    "repmlp_resnet": r"stage\d\.\d+\.(light|btnk)_repmlp\.fc3\.weight",
    "resmlp": r"blocks\.\d+\.linear_tokens\.weight",
    "resnet": r"layer1\.0\.conv1\.weight",
    "rest": r"patch_embed_2\.conv\.weight",
    "restv2": r"patch_2\.proj\.weight",
    "shuffle": r"stage\d\.layers\.\d+\.\d\.attn\.to_qkv\.weight",
    "swin": r"layers\.\d+\.blocks\.\d+\.attn\.relative_position_bias_table",
    "swinv2": r"layers\.\d+\.blocks\.\d+\.attn\.logit_scale",
    "t2t_vit": r"tokens_to_token\.project\.weight",
    "tinyvit": r"patch_embed\.conv1\.conv\.weight",
    "topformer": r"stages\.\d+\.\d+\.conv2_kxk\.conv\.weight",
    "vip": r"network\.\d+\.\d+\.attn\.mlp_h\.weight",
    "volo": r"network\.\d+\.\d+\.norm1\.weight",
    "xcit": r"cls_attn_blocks\.\d+\.norm1\.weight",
    "naflexvit": r"embeds\.proj\.weight",
    # DINOv2 has its blocks in chunks.
    "vit": r"blocks\.\d+\.(\d+\.)?attn\.qkv\.weight",
}


def guess_type(names: Collection[str]) -> str | None:
    """Returns the MODEL.TYPE, in lower case, of the architecture that has such names.

    Args:
        names: timm's names of a file's tensors.

    Returns:
        the type, or None if no architecture here has such names.
    """
    for model_type, pattern in _NAMES.items():
        if any(map(re.compile(pattern).fullmatch, names)):
            return model_type
    return None
