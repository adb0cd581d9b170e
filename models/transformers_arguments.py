"""Reads a model's architecture and options from the config.json of the library transformers.

Some options change what a model computes, but no shape of its tensors: an epsilon, an activation, a
number of heads. Without them the weights would load into a model that computes something else.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config import with_values
from errors import InputError, printable, reading
from models.openclip_arguments import described_openclip
from models.resnet import SIZES, BasicBlock, Bottleneck
from settings.architectures import architecture
from settings.configuration import Configuration, add_note, is_users
from settings.plain import Rule, check_form, is_list, is_real, is_whole, optional, value_text
from weights.hub import read_config
from weights.transformers import ENCODER, LABELS, head_of, read_transformers

# ACT by transformers' names.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
# The rules that values of a config.json have to meet, which anybody may have written.
_NUMBER = optional(Rule("a whole number", lambda value: is_whole(value, 1, 1 << 20)))
_COUNT = Rule("a whole number", lambda value: is_whole(value, 0, 1 << 20))
_REAL = optional(Rule("a number", lambda value: is_real(value, 0, 1e6)))
_NUMBERS = Rule(
    "whole numbers", lambda value: is_list(value, lambda item: is_whole(item, 1, 1 << 20), 1, 100)
)
_COUNTS = Rule("whole numbers", lambda value: is_list(value, _COUNT.holds, 1, 100))
_SIDES = Rule(
    "a whole number, or a list of such", lambda value: _NUMBER.holds(value) or _NUMBERS.holds(value)
)
_FLAGS = Rule(
    "a list of true and false",
    lambda value: is_list(value, lambda item: type(item) is bool, 1, 100),
)
_LISTS = optional(
    Rule("a list of lists", lambda value: is_list(value, lambda item: type(item) is list, 0, 100))
)
_FORM = {
    "hidden_size": _NUMBER,
    "num_hidden_layers": _NUMBER,
    "intermediate_size": _NUMBER,
    "embed_dim": _NUMBER,
    "window_size": _NUMBER,
    "groups_width": _NUMBER,
    "patch_size": _SIDES,
    "num_patches": _NUMBER,
    "masked_unit_attention": optional(_FLAGS),
    "depths": optional(_NUMBERS),
    "hidden_sizes": optional(_NUMBERS),
    "neck_hidden_sizes": optional(_NUMBERS),
    "num_heads": optional(_NUMBERS),
    "sr_ratios": optional(_NUMBERS),
    "key_dim": optional(_NUMBERS),
    "layer_norm_eps": _REAL,
    "layerscale_value": _REAL,
    "layer_scale_init_value": _REAL,
    "expand_ratio": _REAL,
    "rope_theta": _REAL,
    "down_ops": _LISTS,
    "num_register_tokens": optional(_COUNT),
    "num_query_pool": optional(_COUNT),
    "num_upscale_blocks": _NUMBER,
    "pretrained_window_sizes": _COUNTS,
}
# The defaults of transformers' classes, for keys that a config.json leaves out.
_VIT = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
_VIT_MLP = _VIT | {"intermediate_size": 3072}
_DINOV2 = _VIT | {"mlp_ratio": 4, "layer_norm_eps": 1e-6, "layerscale_value": 1.0}
_CLIP = _VIT_MLP | {"patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
_SIGLIP = _VIT_MLP | {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
_SIGLIP2 = _SIGLIP | {"num_patches": 256}
_SWIN = {
    "patch_size": 4,
    "embed_dim": 96,
    "depths": [2, 2, 6, 2],
    "num_heads": [3, 6, 12, 24],
    "window_size": 7,
}
_CONVNEXT = {"depths": [3, 3, 9, 3], "hidden_sizes": [96, 192, 384, 768]}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "vit": _VIT_MLP,
    "vit_mae": _VIT_MLP,
    "deit": _VIT_MLP,
    "beit": _VIT_MLP,
    "dinov2": _DINOV2 | {"patch_size": 14},
    "dinov2_with_registers": _DINOV2 | {"num_register_tokens": 4},
    "dinov3_vit": {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "patch_size": 16,
    },
    "eomt": _DINOV2
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 640,
        "num_register_tokens": 4,
        "num_upscale_blocks": 2,
    },
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "siglip2": _SIGLIP2,
    "siglip2_vision_model": _SIGLIP2,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "hiera": {"embed_dim": 96, "depths": [2, 3, 16, 3], "num_heads": [1, 2, 4, 8]},
    "levit": {
        "hidden_sizes": [128, 256, 384],
        "num_attention_heads": [4, 8, 12],
        "depths": [4, 4, 4],
        "key_dim": [16, 16, 16],
    },
    "pvt_v2": {
        "hidden_sizes": [32, 64, 160, 256],
        "depths": [2, 2, 2, 2],
        "num_attention_heads": [1, 2, 5, 8],
    },
    "segformer": {
        "hidden_sizes": [32, 64, 160, 256],
        "depths": [2, 2, 2, 2],
        "num_attention_heads": [1, 2, 5, 8],
    },
    "poolformer": {"hidden_sizes": [64, 128, 320, 512], "depths": [2, 2, 6, 2]},
    "mobilevit": {
        "hidden_sizes": [144, 192, 240],
        "neck_hidden_sizes": [16, 32, 64, 96, 128, 160, 640],
    },
    "convnext": _CONVNEXT,
    "convnextv2": _CONVNEXT,
    "dpt": _VIT_MLP,
    "resnet": {"depths": [3, 4, 6, 3]},
    "regnet": {"depths": [2, 6, 12, 2], "hidden_sizes": [128, 192, 512, 1088], "groups_width": 64},
}


def _vit(config: dict[str, Any]) -> dict[str, Any]:
    width = config["hidden_size"]
    hidden = config.get("intermediate_size")
    return {
        "EMBED_DIM": width,
        "DEPTH": config["num_hidden_layers"],
        "NUM_HEADS": config["num_attention_heads"],
        "PATCH_SIZE": config["patch_size"],
        "NORM_EPS": config["layer_norm_eps"],
        "MLP_RATIO": hidden / width if hidden else config["mlp_ratio"],
        "ACT": _activation(config),
        "QKV_BIAS": config.get("qkv_bias", True),
    }


def _dpt(config: dict[str, Any]) -> dict[str, Any]:
    return _vit(config) | {"POS_RESIZE": "bilinear"}


def _deit(config: dict[str, Any]) -> dict[str, Any]:
    # With a teacher, both tokens have a head. Without one, no head reads the distillation token,
    # which makes it a register.
    without_teacher = "DeiTForImageClassification" in config["architectures"]
    return _vit(config) | {"DISTILLED": not without_teacher, "REG_TOKENS": int(without_teacher)}


def _dinov2(config: dict[str, Any]) -> dict[str, Any]:
    values = _vit(config) | {"INIT_VALUES": config["layerscale_value"]}
    if registers := config.get("num_register_tokens"):
        values |= {"REG_TOKENS": registers, "NO_EMBED_CLASS": True}
    if config.get("use_swiglu_ffn"):
        # Two thirds of the width, rounded up to a multiple of 8, as in transformers.
        half = (int(config["hidden_size"] * values["MLP_RATIO"]) * 2 // 3 + 7) // 8 * 8
        values |= {"ACT": "swiglu", "MLP_RATIO": 2 * half / config["hidden_size"]}
    if _classifies(config):
        values["GLOBAL_POOL"] = "token_avg"
    return values


def _eomt(config: dict[str, Any]) -> dict[str, Any]:
    patch_size = config["patch_size"]
    if is_whole(patch_size):
        # So many times, the head doubles the rows and columns of a map (models.heads.eomt).
        expect(config, "num_upscale_blocks", max(1, patch_size.bit_length() - 3))
    return _dinov2(config) | {"NO_EMBED_CLASS": True}


def _dinov3(config: dict[str, Any]) -> dict[str, Any]:
    gated = bool(config.get("use_gated_mlp"))
    qkv_bias = config.get("query_bias", True)
    expect_all(
        config,
        key_bias=False,
        proj_bias=True,
        mlp_bias=True,
        value_bias=qkv_bias,
        hidden_act="silu" if gated else "gelu",
    )
    return {
        "EMBED_DIM": config["hidden_size"],
        "DEPTH": config["num_hidden_layers"],
        "NUM_HEADS": config["num_attention_heads"],
        "PATCH_SIZE": config["patch_size"],
        "MLP_RATIO": config["intermediate_size"] / config["hidden_size"],
        "SWIGLU_MLP": gated,
        "SWIGLU_ALIGN_TO": math.gcd(config["intermediate_size"], 8) if gated else 0,
        "QKV_BIAS": qkv_bias,
        "INIT_VALUES": config.get("layerscale_value", 1.0),
        "REG_TOKENS": config.get("num_register_tokens") or 0,
        "USE_ABS_POS_EMB": False,
        "DYNAMIC_IMG_SIZE": True,
        "ROPE_TYPE": "dinov3",
        "ROPE_TEMPERATURE": config.get("rope_theta", 100.0),
        "GLOBAL_POOL": "token",
        "NORM_EPS": config.get("layer_norm_eps", 1e-5),
    }


def _beit(config: dict[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in _vit(config).items() if key not in ("ACT", "QKV_BIAS")}
    expect(config, "hidden_act", "gelu")
    return values | {
        "INIT_VALUES": config.get("layer_scale_init_value", 0.1) or None,
        "USE_ABS_POS_EMB": config.get("use_absolute_position_embeddings", False),
        "USE_REL_POS_BIAS": config.get("use_relative_position_bias", False),
        "USE_SHARED_REL_POS_BIAS": config.get("use_shared_relative_position_bias", False),
        "GLOBAL_POOL": "avg" if config.get("use_mean_pooling", True) else "token",
    }


def _clip(config: dict[str, Any]) -> dict[str, Any]:
    values = _vit(config) | {"PRE_NORM": True}
    # A classifier reads the mean of the patches, without the last norm.
    if _classifies(config):
        values |= {"GLOBAL_POOL": "avg", "FINAL_NORM": False}
    return values


def _siglip(config: dict[str, Any]) -> dict[str, Any]:
    return _vit(config) | {"CLASS_TOKEN": False, "CUT_IMAGES": True} | _siglip_pooling(config)


def _siglip2(config: dict[str, Any]) -> dict[str, Any]:
    expect(config, "layer_norm_eps", 1e-6)
    values = {key: value for key, value in _vit(config).items() if key != "NORM_EPS"}
    positions = {"POS_GRID": math.isqrt(config["num_patches"]), "POS_RESIZE": "antialiased"}
    return values | positions | _siglip_pooling(config)


def _siglip_pooling(config: dict[str, Any]) -> dict[str, Any]:
    # A classifier reads the mean of the patches. Only an encoder's output is pooled by attention.
    if config.get("vision_use_head", True) and not _classifies(config):
        return {"GLOBAL_POOL": "map"}
    return {"GLOBAL_POOL": "avg", "FC_NORM": False}


def _classifies(config: dict[str, Any]) -> bool:
    """Returns whether the weights are those of a classifier."""
    return head_of(config) == LABELS


def _swin(config: dict[str, Any]) -> dict[str, Any]:
    expect_all(config, hidden_act="gelu", layer_norm_eps=1e-5, use_absolute_embeddings=False)
    return {
        "PATCH_SIZE": config["patch_size"],
        "EMBED_DIM": config["embed_dim"],
        "STAGE_DEPTHS": config["depths"],
        "NUM_HEADS": config["num_heads"],
        "WINDOW_SIZE": config["window_size"],
        "MLP_RATIO": config.get("mlp_ratio", 4.0),
        "QKV_BIAS": config.get("qkv_bias", True),
    }


def _swin_v2(config: dict[str, Any]) -> dict[str, Any]:
    sizes = config.get("pretrained_window_sizes", [0, 0, 0, 0])
    # transformers' default has four numbers. A model of fewer stages doesn't read the last ones.
    return _swin(config) | {"PRETRAINED_WINDOW_SIZES": sizes[: len(config["depths"])]}


def _hiera(config: dict[str, Any]) -> dict[str, Any]:
    stages = len(config["depths"])
    unit_side = 2 ** (stages - 1)
    expect_all(
        config,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
        embed_dim_multiplier=2.0,
        query_stride=[2, 2],
        patch_size=[7, 7],
        patch_stride=[4, 4],
        patch_padding=[3, 3],
        masked_unit_size=[unit_side, unit_side],
        num_heads=[config["num_heads"][0] * 2**stage for stage in range(stages)],
    )
    within = config.get("masked_unit_attention") or [True, True, False, False]
    if within != sorted(within, reverse=True):
        raise InputError(
            f"masked_unit_attention is {value_text(within)}, only the first stages can have it"
        )
    # In transformers, mask units shrink from stage to stage, pooled or not. Here they shrink by the
    # pooling alone. Both agree where every stage that attends within units is pooled.
    q_pool = config.get("num_query_pool", 3)
    least = min(sum(within), stages - 1)
    if q_pool < least:
        raise InputError(
            f"num_query_pool is {value_text(q_pool)}, expected at least {least} with this"
            " masked_unit_attention"
        )
    values = {
        "EMBED_DIM": config["embed_dim"],
        "STAGE_DEPTHS": config["depths"],
        "NUM_HEADS": config["num_heads"][0],
        "MASK_UNIT_ATTN": within,
        "MLP_RATIO": config.get("mlp_ratio", 4.0),
    }
    # A model for pre-training pools once less than the classifiers made of it.
    if "PreTraining" in str(config.get("architectures")):
        return values
    return values | {"Q_POOL": q_pool}


def _levit(config: dict[str, Any]) -> dict[str, Any]:
    dims = config["hidden_sizes"]
    stages = len(dims)
    key_dim = config["key_dim"][0]
    attn_ratio = config.get("attention_ratio", [2])[0]
    mlp_ratio = config.get("mlp_ratio", [2])[0]
    # The name, key_dim, heads, attn_ratio, mlp_ratio and stride of each downsampling.
    expected = [["Subsample", key_dim, dim // key_dim, 4, 2, 2] for dim in dims[:-1]]
    down_ops = config.get("down_ops", expected)
    # transformers appends a [""] each time that it builds the model.
    while down_ops and down_ops[-1] == [""]:
        down_ops = down_ops[:-1]
    if down_ops != expected:
        raise InputError("down_ops has unsupported transitions between stages")
    expect_all(
        config,
        kernel_size=3,
        stride=2,
        padding=1,
        patch_size=16,
        attention_ratio=[attn_ratio] * stages,
        mlp_ratio=[mlp_ratio] * stages,
        key_dim=[key_dim] * stages,
    )
    return {
        "EMBED_DIMS": dims,
        "STAGE_DEPTHS": config["depths"],
        "NUM_HEADS": config["num_attention_heads"],
        "KEY_DIM": key_dim,
        "ATTN_RATIO": attn_ratio,
        "MLP_RATIO": mlp_ratio,
        "DISTILLED": "WithTeacher" in str(config.get("architectures")),
    }


def _pvt_v2(config: dict[str, Any]) -> dict[str, Any]:
    expect_all(
        config,
        hidden_act="gelu",
        num_encoder_blocks=4,
        patch_sizes=[7, 3, 3, 3],
        strides=[4, 2, 2, 2],
    )
    return {
        "EMBED_DIMS": config["hidden_sizes"],
        "STAGE_DEPTHS": config["depths"],
        "NUM_HEADS": config["num_attention_heads"],
        "MLP_RATIO": config.get("mlp_ratios", [8, 8, 4, 4]),
        "SR_RATIO": config.get("sr_ratios", [8, 4, 2, 1]),
        "LINEAR": config.get("linear_attention", False),
        "QKV_BIAS": config.get("qkv_bias", True),
        "NORM_EPS": config.get("layer_norm_eps", 1e-6),
    }


def _segformer(config: dict[str, Any]) -> dict[str, Any]:
    expect_all(
        config,
        hidden_act="gelu",
        num_encoder_blocks=4,
        patch_sizes=[7, 3, 3, 3],
        strides=[4, 2, 2, 2],
        reshape_last_stage=True,
    )
    return {
        "EMBED_DIMS": config["hidden_sizes"],
        "STAGE_DEPTHS": config["depths"],
        "NUM_HEADS": config["num_attention_heads"],
        "MLP_RATIO": config.get("mlp_ratios", [4, 4, 4, 4]),
        "SR_RATIO": config.get("sr_ratios", [8, 4, 2, 1]),
        # Of all norms there; they don't read the configuration's layer_norm_eps.
        "NORM_EPS": 1e-5,
    }


def _poolformer(config: dict[str, Any]) -> dict[str, Any]:
    expect_all(
        config,
        hidden_act="gelu",
        pool_size=3,
        mlp_ratio=4.0,
        use_layer_scale=True,
        num_encoder_blocks=4,
        patch_sizes=[7, 3, 3, 3],
        strides=[4, 2, 2, 2],
        padding=[2, 1, 1, 1],
    )
    return {
        "STAGE_DEPTHS": config["depths"],
        "EMBED_DIMS": config["hidden_sizes"],
        "INIT_VALUES": config.get("layer_scale_init_value", 1e-5),
        "FC_NORM": False,
    }


def _mobilevit(config: dict[str, Any]) -> dict[str, Any]:
    expect_all(
        config,
        hidden_act="silu",
        patch_size=2,
        conv_kernel_size=3,
        output_stride=32,
        qkv_bias=True,
        layer_norm_eps=1e-5,
    )
    # The second stage has three blocks of the same width.
    stem, first, second, *others = config["neck_hidden_sizes"]
    return {
        "EMBED_DIMS": [stem, first, second, second, second, *others],
        "HIDDEN_DIMS": config["hidden_sizes"],
        "STAGE_DEPTHS": [2, 4, 3],
        "NUM_HEADS": config.get("num_attention_heads", 4),
        "EXPAND_RATIO": config.get("expand_ratio", 4.0),
        "MLP_RATIO": config.get("mlp_ratio", 2.0),
    }


def _convnext(config: dict[str, Any]) -> dict[str, Any]:
    expect_all(config, hidden_act="gelu", patch_size=4)
    v2 = config["model_type"] == "convnextv2"
    return {
        "STAGE_DEPTHS": config["depths"],
        "EMBED_DIMS": config["hidden_sizes"],
        "INIT_VALUES": 0.0 if v2 else config.get("layer_scale_init_value", 1e-6),
        "USE_GRN": v2,
        "HEAD_NORM_EPS": config.get("layer_norm_eps", 1e-12),
    }


def _resnet(config: dict[str, Any]) -> dict[str, Any]:
    expect_all(
        config,
        hidden_act="relu",
        embedding_size=64,
        downsample_in_bottleneck=False,
        downsample_in_first_stage=False,
    )
    kind = config.get("layer_type", "bottleneck")
    stage_depths = config["depths"]
    blocks = {"basic": BasicBlock, "bottleneck": Bottleneck}
    for depth, (known_block, known_depths) in SIZES.items():
        if known_block is blocks.get(kind) and list(known_depths) == stage_depths:
            return {"DEPTH": depth}
    raise InputError(
        f"depths is {value_text(stage_depths)} of layer_type {value_text(kind)},"
        " which isn't supported"
    )


def _regnet(config: dict[str, Any]) -> dict[str, Any]:
    expect_all(config, hidden_act="relu", embedding_size=32, downsample_in_first_stage=True)
    values = {"STAGE_DEPTHS": config["depths"], "EMBED_DIMS": config["hidden_sizes"]}
    se_ratio = 0.25 if config.get("layer_type", "y") == "y" else 0.0
    return values | {"GROUP_WIDTH": config["groups_width"], "SE_RATIO": se_ratio}


def _activation(config: dict[str, Any]) -> str:
    name = config.get("hidden_act", "gelu")
    if name not in _ACTIVATIONS:
        raise InputError(
            f"hidden_act is {value_text(name)}, expected one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def expect(config: dict[str, Any], key: str, value: Any) -> None:
    """Raises InputError unless a setting has this value, the only one of models here, or is left
    out.
    """
    if config.get(key, value) != value:
        raise InputError(
            f"{key} is {value_text(config[key])}, only {value_text(value)} is supported"
        )


def expect_all(config: dict[str, Any], **settings: Any) -> None:
    """Raises InputError unless each setting has this value or is left out."""
    for key, value in settings.items():
        expect(config, key, value)


# By model_type: MODEL.TYPE, and the function that returns the keys of MODEL.
_TYPES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "vit": ("ViT", _vit),
    "vit_mae": ("ViT", _vit),
    "deit": ("DeiT", _deit),
    "beit": ("BEiT", _beit),
    "dinov2": ("ViT", _dinov2),
    "dinov2_with_registers": ("ViT", _dinov2),
    "dinov3_vit": ("Eva", _dinov3),
    "eomt": ("ViT", _eomt),
    "clip": ("ViT", _clip),
    "clip_vision_model": ("ViT", _clip),
    "siglip": ("ViT", _siglip),
    "siglip_vision_model": ("ViT", _siglip),
    "siglip2": ("NaFlexViT", _siglip2),
    "siglip2_vision_model": ("NaFlexViT", _siglip2),
    "swin": ("Swin", _swin),
    "swinv2": ("SwinV2", _swin_v2),
    "hiera": ("Hiera", _hiera),
    "levit": ("LeViT", _levit),
    "pvt_v2": ("PVTv2", _pvt_v2),
    "segformer": ("PVTv2", _segformer),
    "poolformer": ("PoolFormer", _poolformer),
    "mobilevit": ("MobileViT", _mobilevit),
    "convnext": ("ConvNeXt", _convnext),
    "convnextv2": ("ConvNeXt", _convnext),
    "dpt": ("ViT", _dpt),
    "resnet": ("ResNet", _resnet),
    "regnet": ("RegNet", _regnet),
}
# Keys that show in the shapes of tensors. Where they differ, the weights don't fit, and
# ``load_weights`` says so.
_SHAPED = {
    "EMBED_DIM",
    "EMBED_DIMS",
    "DEPTH",
    "STAGE_DEPTHS",
    "PATCH_SIZE",
    "MLP_RATIO",
    "INIT_VALUES",
    "REG_TOKENS",
    "USE_GRN",
    "HIDDEN_DIMS",
    "EXPAND_RATIO",
}


def encoder_of(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a configuration that describes the encoder: all of it, or the backbone's."""
    return config.get("backbone_config") or {} if config["model_type"] == "upernet" else config


def described_model(path: str | Path) -> tuple[str, dict[str, Any]] | None:
    """Returns MODEL.TYPE and the keys of MODEL from transformers' or OpenCLIP's configuration beside
    weights; None: there is no such file.

    Args:
        path: the weights, as ``find_weights`` takes them.

    Raises:
        InputError: the file can't be read, or describes a model or a setting that isn't supported.
    """
    config = read_transformers(path)
    if not config:
        # timm's own file says more than OpenCLIP's next to it.
        return None if read_config(path) else described_openclip(path)
    encoder = encoder_of(config)
    kind = encoder.get("model_type")
    if kind not in _TYPES:
        raise InputError(
            f"the config.json of {path}: it describes a {printable(str(kind), 60)}, which isn't"
            " supported;"
            " use other weights"
        )
    with reading(f"the config.json of {path}", "a configuration of transformers'"):
        try:
            head_of(config)
            expect(config, "quantization_config", None)
            check_form(encoder, _FORM)
            type_, keys = _TYPES[kind]
            values = keys(_DEFAULTS[kind] | encoder)
            # Its backbones pad maps before they shift windows, and never make windows smaller.
            # Classifiers have no map to pad, and do.
            if encoder is not config and type_ == "Swin":
                values["PAD_FIRST"] = True
                values["ALWAYS_PARTITION"] = True
            return type_, values
        except InputError as error:
            raise InputError(f"the config.json of {path}: {error}") from None


def with_transformers_arguments(config: Configuration, path: str | Path) -> Configuration:
    """Returns ``config`` with the keys of MODEL in transformers' config.json that change no shapes.

    Values that the user has set stay. A note reports each of them that differs, and of each value
    that is taken.

    Args:
        path: the weights, as ``find_weights`` takes them.

    Raises:
        InputError: as ``described_model``, or the weights are of another architecture.
    """
    described = described_model(path)
    if described is None:
        return config
    kind, values = described
    stored = read_transformers(path)
    is_encoder = bool(stored) and head_of(stored) == ENCODER
    known_keys = architecture(config.MODEL.TYPE).arguments
    if architecture(kind).module != architecture(config.MODEL.TYPE).module:
        raise InputError(
            f"the config.json of {path}: it describes a {kind}, but {config.MODEL.NAME} is a"
            f" {config.MODEL.TYPE}"
        )
    for key, value in values.items():
        if key in _SHAPED or f"MODEL.{key}" not in known_keys or config.MODEL[key] == value:
            continue
        # An encoder doesn't say what a classifier on top of it would read.
        if is_encoder and key in ("GLOBAL_POOL", "FC_NORM"):
            continue
        config = with_told(config, f"MODEL.{key}", value, path)
    return config


def with_told(config: Configuration, key: str, value: Any, path: str | Path) -> Configuration:
    """Returns ``config`` with a key's value from the config.json beside weights, and a note of it.

    If the user set another value, that stays, and the note reports both.
    """
    note = f"{key} {value_text(value)}, according to the config.json of {path}"
    if is_users(config, key):
        section, _, name = key.partition(".")
        add_note(config, f"{note}; yours is {config[section][name]}")
        return config
    config = with_values(config, "the weights' config.json", **{key.replace(".", "__"): value})
    add_note(config, note)
    return config
