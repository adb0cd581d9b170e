"""Reads the arguments with which timm built a model, from the config.json beside its weights.

Some of them change what a model computes, but none of its tensors. Without them the weights would
load into a model that computes something else.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config import shipped_model, with_values
from errors import InputError, printable
from settings.architectures import architecture
from settings.configuration import WITH_VALUES, Configuration, add_note, is_users
from settings.plain import value_text
from weights.hub import read_config

# Arguments that aren't compared here.
_IGNORED = {
    # Numbers of outputs, channels and pixels, which are compared elsewhere.
    "num_classes",
    "in_chans",
    "img_size",
    "dynamic_img_size",
    "dynamic_img_pad",
    "strict_img_size",
    # They matter in training only.
    "drop_rate",
    "pos_drop_rate",
    "patch_drop_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "drop_path_rate",
    "drop_block_rate",
    # They matter for fresh weights only.
    "weight_init",
    "fix_init",
    "zero_init_last",
    "head_init_scale",
    # They are about PyTorch's compilers.
    "scriptable",
    "exportable",
    "no_jit",
}
# The keys of MODEL by timm's arguments, where they aren't the arguments in capitals.
_KEYS = {
    "act_layer": "ACT",
    "cls_attn_layers": "DEPTH_TOKEN_ONLY",
    "depths": "STAGE_DEPTHS",
    "dim": "EMBED_DIM",
    "dims": "EMBED_DIMS",
    "eta": "INIT_VALUES",
    "heads": "NUM_HEADS",
    "layer_scale_init_values": "INIT_VALUES",
    "ls_init_value": "INIT_VALUES",
    "mlp_ratios": "MLP_RATIO",
    "num_blocks": "DEPTH",
    "num_reg_tokens": "REG_TOKENS",
    "serial_depths": "STAGE_DEPTHS",
    "sr_ratios": "SR_RATIO",
    "stages": "STAGE_DEPTHS",
    "use_fc_norm": "FC_NORM",
}
# Architectures without GLOBAL_POOL whose classifiers read the class token.
_BY_TOKEN = ("coat", "crossvit", "pit", "volo")
# Arguments without a key, and the only value that models here have.
_FIXED = {
    "output_stride": 32,
    "proj_bias": True,
    "final_norm": True,
    "conv_bias": True,
    "use_pos_embed": True,
    # Hiera
    "abs_win_pos_embed": True,
    "mask_unit_size": [8, 8],
    "q_stride": [2, 2],
    "dim_mul": 2.0,
    "head_mul": 2.0,
}
# The keys of ResNet's channel attention, by timm's name of it.
_ATTENTION = {
    "": {"SE_RATIO": 0.0, "ECA": False},
    "se": {"SE_RATIO": 0.0625, "ECA": False},
    "eca": {"SE_RATIO": 0.0, "ECA": True},
}
# ANTI_ALIAS by timm's names of it.
_ANTI_ALIAS = {"avg": "avg", "avgpool": "avg", "blur": "blur", "blurpool": "blur"}
# ResNet's arguments whose values have other names here.
_RESNET = ("aa_layer", "block_args", "replace_stem_pool", "stem_type")


def with_timm_arguments(config: Configuration, path: str | Path) -> Configuration:
    """Returns ``config`` with the keys of MODEL in ``model_args`` of the weights' config.json.

    Values that the user has set stay. A note reports each of them that differs, and of each value
    that is taken.

    Args:
        path: the weights, as ``find_weights`` takes them.

    Raises:
        InputError: the architecture here doesn't have an argument, or not this value of it. Or the
            configuration is of another model than the weights and has another value.
    """
    stored = read_config(path)
    kind = config.MODEL.TYPE
    arguments = stored.get("model_args") or {}
    if (
        kind.lower() == "resnet"
        and arguments.get("stem_type")
        and config.MODEL.STEM_TYPE == "plain"
    ):
        # timm's default width. Its variants with a deep stem set theirs, and so do those here.
        arguments = arguments | {"stem_width": arguments.get("stem_width") or 64}
    # EVA's rotary positions have no tensors. ROPE_TYPE stands for both arguments.
    rotary = {}
    if kind.lower() == "eva":
        rotary = {
            "rope_type": config.MODEL.ROPE_TYPE,
            "rope_rotate_half": config.MODEL.ROPE_TYPE == "dinov3",
        }
    for name, value in arguments.items():
        argument = (
            f"the config.json of {path}: model_args.{printable(name, 60)} is {value_text(value)}"
        )
        if name in rotary and value is not None:
            if value != rotary[name]:
                raise InputError(
                    f"{argument}, but {config.MODEL.NAME} only supports"
                    f" {value_text(rotary[name])}; use other weights"
                )
            continue
        for key, wanted in _keys(kind, name, value, argument).items():
            if config.MODEL[key] == wanted:
                continue
            if is_users(config, f"MODEL.{key}"):
                add_note(config, f"{argument}, yours {config.MODEL[key]}")
            elif config.MODEL.NAME not in (
                stored["architecture"],
                shipped_model(stored["architecture"]),
            ):
                other = f"{config.MODEL.NAME} has MODEL.{key} {config.MODEL[key]}"
                raise InputError(f"{argument}, but {other}; choose one by -o MODEL.{key} VALUE")
            else:
                try:
                    config = with_values(config, "here", **{f"MODEL__{key}": wanted})
                except InputError as error:
                    problem = str(error).removeprefix(f"{WITH_VALUES}: ")
                    raise InputError(f"{argument}; {problem}") from None
                add_note(
                    config,
                    f"MODEL.{key} {value_text(wanted)}, according to the config.json of {path}",
                )
    return config


# Arguments of timm's create_model that mean the same under another name here.
_SAME_ARGUMENT = {
    "attn_drop_rate": "attention_dropout",
    "drop_path_rate": "droppath",
    "in_chans": "image_channels",
    "img_size": "image_size",
}
_DROPOUT = (
    "dropout=RATE applies after the position embedding, after the attention's projection and in"
    " the MLPs"
)
# What to write instead of the other arguments.
_INSTEAD = {
    "cache_dir": "set HF_HOME before the program starts",
    "drop_block_rate": "use droppath=RATE to drop whole branches",
    "drop_rate": f"timm's dropout before the classifier isn't supported; {_DROPOUT}",
    "exportable": "leave it out: tools/export_model.py supports every model",
    "features_only": "model.forward_intermediates(images) returns the features, which model.feature_info describes",
    "no_jit": "leave it out: models aren't scripted",
    "pos_drop_rate": _DROPOUT,
    "proj_drop_rate": _DROPOUT,
    "out_indices": "model.forward_intermediates(images, indices=[...]) returns these features",
    "pretrained_cfg": "pass pretrained='hf-hub:timm/NAME.TAG', or a file",
    "pretrained_cfg_overlay": "pass pretrained=FILE, whose config.json describes the preprocessing",
    "scriptable": "leave it out: paddle.jit.to_static supports every model",
}


def from_timm_names(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of timm's ``create_model`` by the names that they have here.

    An argument that is None has no effect, nor has one without a counterpart that is False.

    Args:
        kind: MODEL.TYPE.
        arguments: by name. An unknown one is returned as it is.

    Raises:
        InputError: an argument has no counterpart; the message says what to write.
    """
    renamed = {}
    for name, value in arguments.items():
        if f"MODEL.{name.upper()}" in architecture(kind).arguments:
            _check_value(kind, value, f"{name} is {value_text(value)}", "leave it out")
            renamed[name] = value
        elif name in _INSTEAD:
            if value:
                raise InputError(f"create_model doesn't take {name}; {_INSTEAD[name]}")
        elif name in _SAME_ARGUMENT:
            if value is not None:
                renamed[_SAME_ARGUMENT[name]] = value
        elif name in {*_KEYS, *_FIXED, *_RESNET, "global_pool"}:
            keys = _keys(kind, name, value, f"{name} is {value_text(value)}", "leave it out")
            renamed |= {key.lower(): key_value for key, key_value in keys.items()}
        else:
            renamed[name] = value
    return renamed


def _check_value(kind: str, value: Any, argument: str, advice: str) -> None:
    """Raises InputError for timm's word "none" (``pos_embed``), which a configuration would read as
    null, the default.
    """
    if isinstance(value, str) and value.lower() in ("none", "null"):
        raise InputError(f"{argument}, which {kind} doesn't support; {advice}")


def _keys(
    kind: str, name: str, value: Any, argument: str, advice: str = "use other weights"
) -> dict[str, Any]:
    """Returns the keys of MODEL and their values for one of timm's arguments; {}: it has no effect.

    A flag that is off has no effect, either. Where a model has what the flag is for, the names of
    the tensors differ, so that other weights don't load.

    Args:
        kind: MODEL.TYPE.
        name: the argument.
        value: its value; None: the argument has no effect.
        argument: where the argument stands and its value, for messages.
        advice: what the user can do, for messages.

    Raises:
        InputError: the architecture here doesn't have the argument, or doesn't have this value.
    """
    if name in _IGNORED or value is None:
        return {}
    _check_value(kind, value, argument, advice)
    if kind.lower() == "resnet" and name in _RESNET:
        resnet_keys = _resnet_keys(name, value)
        if resnet_keys is None:
            values = "'avg' or 'blur'" if name == "aa_layer" else "an attn_layer of 'se' or 'eca'"
            raise InputError(f"{argument}, but {kind} only supports {values}; {advice}")
        return resnet_keys
    candidates = [_KEYS.get(name, name.upper())]
    if name == "depth":
        # timm's name in LeViT and PiT, which have stages.
        candidates.append("STAGE_DEPTHS")
    for key in candidates:
        if f"MODEL.{key}" in architecture(kind).arguments:
            return {key: value}
    fixed = _FIXED | {
        "act_layer": "relu" if kind.lower() in ("resnet", "regnet") else "gelu",
        "global_pool": "token" if kind.lower() in _BY_TOKEN else "avg",
    }
    if kind.lower() == "eva":
        fixed["use_rot_pos_emb"] = True
    # Hiera here has both values of abs_win_pos_embed; the names of its tensors show which one.
    off = value is False and (name not in fixed or name == "abs_win_pos_embed")
    if off or (name in fixed and fixed[name] == value):
        return {}
    has = f"only supports {value_text(fixed[name])}" if name in fixed else "has no such argument"
    raise InputError(f"{argument}, but {kind} {has}; {advice}")


def _resnet_keys(name: str, value: Any) -> dict[str, Any] | None:
    """Returns the keys for one of ResNet's arguments whose values have other names here; None:
    ResNet here doesn't have the value.
    """
    if name == "replace_stem_pool":
        return {"STEM_POOL": "conv" if value else "max"}
    if name == "stem_type":
        return {"STEM_TYPE": value or "plain"}
    if name == "aa_layer":
        kind = _ANTI_ALIAS.get(str(value).lower().replace("_", "").replace("-", ""))
        return {"ANTI_ALIAS": kind} if kind else None
    # Without attn_layer, a block has no attention.
    if not isinstance(value, Mapping) or value.keys() - {"attn_layer"}:
        return None
    attention = value.get("attn_layer") or ""
    return _ATTENTION.get("se" if attention is True else str(attention).lower())
