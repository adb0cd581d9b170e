"""What timm's config.json says of the model beside how its images are prepared: the arguments that
built it.

Some change what a model computes, but none of its tensors, so that the weights would load and
answer something else.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config import shipped_model, with_values
from errors import InputError, printable
from settings.architectures import architecture
from settings.options import WITH_VALUES, Configuration, add_note, is_users
from settings.plain import value_text
from weights.hub import read_config

# The numbers of outputs, channels and pixels, which are compared elsewhere; what matters in
# training alone.
_ELSEWHERE = {
    "num_classes",
    "in_chans",
    "img_size",
    "dynamic_img_size",
    "dynamic_img_pad",
    "strict_img_size",
}
_ELSEWHERE |= {f"{part}drop_rate" for part in ("", "pos_", "patch_", "proj_", "attn_")}
_ELSEWHERE |= {"drop_path_rate", "drop_block_rate"}
_ELSEWHERE |= {
    "weight_init",
    "fix_init",
    "zero_init_last",
    "head_init_scale",
    "scriptable",
    "exportable",
    "no_jit",
}
_OURS = {  # timm's: ours, where it isn't the same in capitals
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
# Their classifiers read the class token, and they have no GLOBAL_POOL.
_BY_TOKEN = ("coat", "crossvit", "pit", "volo")
_ALONE = {"output_stride": 32, "proj_bias": True, "final_norm": True, "conv_bias": True}
_ALONE |= {"use_pos_embed": True}
_ALONE |= {
    "abs_win_pos_embed": True,
    "mask_unit_size": [8, 8],
    "q_stride": [2, 2],
    "dim_mul": 2.0,
    "head_mul": 2.0,
}  # Hiera
# ResNet's attention over channels: what timm calls it, and our keys.
_ATTENTION = {
    "": {"SE_RATIO": 0.0, "ECA": False},
    "se": {"SE_RATIO": 0.0625, "ECA": False},
    "eca": {"SE_RATIO": 0.0, "ECA": True},
}
_ANTI_ALIAS = {"avg": "avg", "avgpool": "avg", "blur": "blur", "blurpool": "blur"}
_RESNET = ("aa_layer", "block_args", "replace_stem_pool", "stem_type")


def with_timm_arguments(config: Configuration, path: str | Path) -> Configuration:
    """Returns ``config`` with the keys of MODEL that ``model_args`` in the weights' config.json
    tell.

    The user's own values stay; a note tells of each that differs, and of each that is taken.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: an argument that the architecture hasn't got, or hasn't got with this value. Or
            the configuration is of another model than the weights, with another value.
    """
    stored = read_config(path)
    kind = config.MODEL.TYPE
    arguments = stored.get("model_args") or {}
    if (
        kind.lower() == "resnet"
        and arguments.get("stem_type")
        and config.MODEL.STEM_TYPE == "plain"
    ):
        # timm's default; its variants with a deep stem name their width, as ours do.
        arguments = arguments | {"stem_width": arguments.get("stem_width") or 64}
    # These have no tensors, and a model here has them together.
    rotary = {}
    if kind.lower() == "eva":
        rotary = {
            "rope_type": config.MODEL.ROPE_TYPE,
            "rope_rotate_half": config.MODEL.ROPE_TYPE == "dinov3",
        }
    for name, value in arguments.items():
        beside = (
            f"the config.json of {path}: model_args.{printable(name, 60)} is {value_text(value)}"
        )
        if name in rotary and value is not None:
            if value != rotary[name]:
                raise InputError(
                    f"{beside}, but {config.MODEL.NAME} here has {value_text(rotary[name])} alone; take other weights"
                )
            continue
        for key, own in _keys(kind, name, value, beside).items():
            if config.MODEL[key] == own:
                continue
            if is_users(config, f"MODEL.{key}"):
                add_note(config, f"{beside}, yours {config.MODEL[key]}")
            elif config.MODEL.NAME not in (
                stored["architecture"],
                shipped_model(stored["architecture"]),
            ):
                other = f"{config.MODEL.NAME} has MODEL.{key} {config.MODEL[key]}"
                raise InputError(f"{beside}, but {other}; say by -o MODEL.{key} VALUE which it is")
            else:
                try:
                    config = with_values(config, "here", **{f"MODEL__{key}": own})
                except InputError as error:
                    raise InputError(
                        f"{beside}; {str(error).removeprefix(f'{WITH_VALUES}: ')}"
                    ) from None
                add_note(
                    config, f"MODEL.{key} {value_text(own)}, as the config.json of {path} tells"
                )
    return config


# Arguments of timm's create_model that mean the same under another name here, and what to write for
# the others.
_SAME_ARGUMENT = {"attn_drop_rate": "attention_dropout", "drop_path_rate": "droppath"}
_SAME_ARGUMENT |= {"in_chans": "image_channels", "img_size": "image_size"}
_DROPPED = "dropout=RATE is after the position embedding, the attention's projection and in the MLPs together"
_INSTEAD = {
    "cache_dir": "set HF_HOME before the program starts",
    "drop_block_rate": "droppath=RATE drops whole branches",
    "drop_rate": f"timm's is before the classifier, where nothing is dropped here; {_DROPPED}",
    "exportable": "leave it out: tools/export_model.py takes every model",
    "features_only": "model.forward_intermediates(images) gives the features, model.feature_info tells of them",
    "no_jit": "leave it out: nothing is scripted",
    "pos_drop_rate": _DROPPED,
    "proj_drop_rate": _DROPPED,
    "out_indices": "model.forward_intermediates(images, indices=[...]) gives these features",
    "pretrained_cfg": "give pretrained='hf-hub:timm/NAME.TAG', or a file",
    "pretrained_cfg_overlay": "give pretrained=FILE; its config.json tells how images are prepared",
    "scriptable": "leave it out: paddle.jit.to_static takes every model",
}


def from_timm_names(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of timm's ``create_model`` by the names that they have here.

    An argument that is None asks for nothing. So does one without a counterpart that is False.

    Args:
        kind: MODEL.TYPE.
        arguments: by name. An unknown one is returned as it is.

    Raises:
        InputError: an argument without a counterpart; the line says what to write.
    """
    own = {}
    for name, value in arguments.items():
        if f"MODEL.{name.upper()}" in architecture(kind).arguments:
            _check_value(kind, value, f"{name} is {value_text(value)}", "leave it out")
            own[name] = value
        elif name in _INSTEAD:
            if value:
                raise InputError(f"create_model takes no {name}; {_INSTEAD[name]}")
        elif name in _SAME_ARGUMENT:
            if value is not None:
                own[_SAME_ARGUMENT[name]] = value
        elif name in {*_OURS, *_ALONE, *_RESNET, "global_pool"}:
            keys = _keys(kind, name, value, f"{name} is {value_text(value)}", "leave it out")
            own |= {key.lower(): told for key, told in keys.items()}
        else:
            own[name] = value
    return own


def _check_value(kind: str, value: Any, beside: str, advice: str) -> None:
    """Refuses timm's word "none" (``pos_embed``): a configuration would read it as null, which is
    the default.
    """
    if isinstance(value, str) and value.lower() in ("none", "null"):
        raise InputError(f"{beside}, which {kind} here can't be; {advice}")


def _keys(
    kind: str, name: str, value: Any, beside: str, advice: str = "take other weights"
) -> dict[str, Any]:
    """Returns MODEL's keys for an argument of timm's, with their values; {}: with this value it
    changes nothing.

    A flag that is off, or null, changes nothing either: where a model has what it is for, the
    tensors' names differ. EVA's rotary positions have no tensors.
    """
    if name in _ELSEWHERE or value is None:
        return {}
    _check_value(kind, value, beside, advice)
    if kind.lower() == "resnet" and name in _RESNET:
        told = _of_resnet(name, value)
        if told is None:
            values = "'avg' or 'blur'" if name == "aa_layer" else "an attn_layer, 'se' or 'eca',"
            raise InputError(f"{beside}, but {kind} here takes {values} alone; {advice}")
        return told
    keys = [_OURS.get(name, name.upper()), *(["STAGE_DEPTHS"] if name == "depth" else [])]
    for key in keys:
        if f"MODEL.{key}" in architecture(kind).arguments:
            return {key: value}
    alone = _ALONE | {
        "act_layer": "relu" if kind.lower() in ("resnet", "regnet") else "gelu",
        "global_pool": "token" if kind.lower() in _BY_TOKEN else "avg",
    }
    if kind.lower() == "eva":
        alone["use_rot_pos_emb"] = True
    # Of Hiera's embeddings, False is the usual one.
    off = value is False and (name not in alone or name == "abs_win_pos_embed")
    if off or (name in alone and alone[name] == value):
        return {}
    has = f"has {value_text(alone[name])} alone" if name in alone else "has no such argument"
    raise InputError(f"{beside}, but {kind} here {has}; {advice}")


def _of_resnet(name: str, value: Any) -> dict[str, Any] | None:
    """Returns the keys for one of ResNet's arguments whose values have other names here; None:
    ResNet here can't.
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
