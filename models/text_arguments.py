"""Reads the arguments of a text tower from the files of transformers and OpenCLIP, or from the
shapes of its tensors.
"""

from pathlib import Path
from typing import Any

from errors import InputError, reading
from models.text import TextArguments
from settings.plain import FLAG, NAME, Rule, check_form, is_real, is_whole, optional, value_text
from weights.hub import CONFIG
from weights.names.clip import is_openais
from weights.names.text import layout_of, tower_names
from weights.openclip import OPENCLIP_CONFIG, json_beside, read_openclip

_COUNT = Rule("a whole number", lambda value: is_whole(value, 1, 1 << 20))
_TOKEN = optional(Rule("a token's number", lambda value: is_whole(value, 0, 1 << 24)))
_REAL = Rule("a number", lambda value: is_real(value, 1e-12, 1e6))
_OBJECT = optional(Rule("a dictionary", lambda value: type(value) is dict))
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
# transformers' keys, and the defaults of its classes for those that a config.json leaves out.
_FORM = {
    "vocab_size": _COUNT,
    "max_position_embeddings": _COUNT,
    "hidden_size": _COUNT,
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "intermediate_size": _COUNT,
    "projection_size": optional(_COUNT),
    "hidden_act": NAME,
    "layer_norm_eps": _REAL,
    "eos_token_id": _TOKEN,
}
_CLIP = {
    "vocab_size": 49408,
    "max_position_embeddings": 77,
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}
_SIGLIP = {
    "vocab_size": 32000,
    "max_position_embeddings": 64,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_DEFAULTS = {"clip": _CLIP, "siglip": _SIGLIP, "siglip2": _SIGLIP}
# transformers' value of eos_token_id in files that were written before it was read. The token with
# the largest number ends a text then.
_UNREAD_EOS = 2
# OpenCLIP's keys, and the defaults of its ``CLIPTextCfg``.
_OPENCLIP_FORM = {
    "context_length": _COUNT,
    "vocab_size": _COUNT,
    "width": _COUNT,
    "heads": _COUNT,
    "layers": _COUNT,
    "mlp_ratio": _REAL,
    "no_causal_mask": FLAG,
    "pool_type": NAME,
    "proj_bias": FLAG,
    "eos_id": _TOKEN,
    "act_kwargs": _OBJECT,
    "norm_kwargs": _OBJECT,
}
_OPENCLIP = {
    "context_length": 77,
    "vocab_size": 49408,
    "width": 512,
    "heads": 8,
    "layers": 12,
    "mlp_ratio": 4.0,
    "no_causal_mask": False,
    "pool_type": "argmax",
    "proj_bias": False,
    "eos_id": 2,
}
# Other keys of OpenCLIP change what a tower computes, but for these values.
_OPENCLIP_FIXED = {
    "hf_model_name": (None,),
    "ls_init_value": (None,),
    "embed_cls": (False,),
    "use_pad_mask": (False,),
    "final_ln_after_pool": (False,),
    "proj_type": ("linear",),
    "block_type": (None, "default"),
    "qk_norm": (False,),
    "scaled_cosine_attn": (False,),
    "scale_heads": (False,),
    "scale_attn_inner": (False,),
    "scale_attn": (False,),
    "scale_fc": (False,),
}
# Heads of towers whose files don't name them, by channels of a token. OpenAI's have 64 channels a
# head; of big_vision's, So400m has 72.
_HEADS = {512: 8, 640: 10, 768: 12, 1024: 16, 1152: 16, 1280: 20}


def text_arguments(path: str | Path, arrays: dict[str, Any]) -> TextArguments:
    """Returns the arguments of the text tower in a file of weights.

    Args:
        path: what ``find_weights`` takes.
        arrays: the file's, by its own names.

    Raises:
        InputError: it is unknown, or text towers don't support it.
    """
    config = json_beside(path, CONFIG)
    if config.get("model_type") in _DEFAULTS:
        with reading(f"the {CONFIG} of {path}", "a configuration of transformers'"):
            return _of_transformers(config)
    if openclip := read_openclip(path):
        with reading(f"the {OPENCLIP_CONFIG} of {path}", "a configuration of OpenCLIP's"):
            return _of_openclip(openclip)
    return _of_shapes(path, arrays)


def _of_transformers(config: dict[str, Any]) -> TextArguments:
    kind = config["model_type"]
    given = config.get("text_config") or {}
    check_form({"text_config": given}, {"text_config": _OBJECT})
    values = _DEFAULTS[kind] | {key: value for key, value in given.items() if key in _FORM}
    check_form(values, _FORM, where="text_config.")
    is_clip = kind == "clip"
    out_dim = values.get("projection_size") or values["hidden_size"]
    if is_clip:
        out_dim = config.get("projection_dim", 512)
        check_form({"projection_dim": out_dim}, {"projection_dim": _COUNT})
    if values["hidden_act"] not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise InputError(
            f"text_config.hidden_act is {value_text(values['hidden_act'])}, expected one of {known}"
        )
    by_eos = is_clip and values["eos_token_id"] != _UNREAD_EOS
    pool = "eos" if by_eos else "argmax"
    return TextArguments(
        vocab_size=values["vocab_size"],
        context_length=values["max_position_embeddings"],
        embed_dim=values["hidden_size"],
        depth=values["num_hidden_layers"],
        num_heads=values["num_attention_heads"],
        hidden_dim=values["intermediate_size"],
        out_dim=out_dim,
        act=_ACTIVATIONS[values["hidden_act"]],
        norm_eps=values["layer_norm_eps"],
        causal=is_clip,
        pool=pool if is_clip else "last",
        eos=values["eos_token_id"] if by_eos else None,
        head_bias=not is_clip,
    )


def _of_openclip(config: dict[str, Any]) -> TextArguments:
    given = config["model_cfg"].get("text_cfg") or {}
    for key, expected in _OPENCLIP_FIXED.items():
        if given.get(key, expected[0]) not in expected:
            raise InputError(
                f"text_cfg.{key} is {value_text(given[key])}, only"
                f" {value_text(expected[0])} is supported"
            )
    values = _OPENCLIP | {key: value for key, value in given.items() if key in _OPENCLIP_FORM}
    check_form(values, _OPENCLIP_FORM, where="text_cfg.")
    if values["pool_type"] not in ("argmax", "eos", "last"):
        raise InputError(
            f"text_cfg.pool_type is {value_text(values['pool_type'])}, expected argmax, eos or last"
        )
    act = "quick_gelu" if config["model_cfg"].get("quick_gelu") else "gelu"
    act_kwargs = values.get("act_kwargs") or {}
    if act == "gelu" and act_kwargs.get("approximate") == "tanh":
        act = "gelu_tanh"
    return TextArguments(
        vocab_size=values["vocab_size"],
        context_length=values["context_length"],
        embed_dim=values["width"],
        depth=values["layers"],
        num_heads=values["heads"],
        hidden_dim=int(values["width"] * values["mlp_ratio"]),
        out_dim=config["model_cfg"]["embed_dim"],
        act=act,
        norm_eps=(values.get("norm_kwargs") or {}).get("eps", 1e-5),
        causal=not values["no_causal_mask"],
        pool=values["pool_type"],
        eos=values["eos_id"] if values["pool_type"] == "eos" else None,
        head_bias=values["proj_bias"],
    )


def _of_shapes(path: str | Path, arrays: dict[str, Any]) -> TextArguments:
    """Returns the arguments of a tower of OpenAI's or big_vision's, whose files have no
    configuration.
    """
    layout = layout_of(arrays)
    if layout != "big_vision" and not is_openais(arrays):
        raise InputError(
            f"{path}: the configuration of its text tower is missing; put the config.json of"
            " transformers, or the open_clip_config.json of OpenCLIP, next to the weights"
        )
    shapes = {name: tuple(array.shape) for name, array in tower_names(arrays).items()}
    width = shapes["norm.weight"][0]
    if width not in _HEADS:
        known = ", ".join(map(str, _HEADS))
        raise InputError(
            f"{path}: its text tower has {width} channels, and its number of heads is unknown;"
            f" it is known for {known} channels"
        )
    is_siglip = layout == "big_vision"
    depth = sum(name.endswith(".norm1.weight") for name in shapes)
    return TextArguments(
        vocab_size=shapes["token_embedding.weight"][0],
        context_length=shapes["pos_embed"][1],
        embed_dim=width,
        depth=depth,
        num_heads=_HEADS[width],
        hidden_dim=shapes["blocks.0.mlp.fc1.weight"][0],
        out_dim=shapes["head.weight"][0],
        act="gelu_tanh" if is_siglip else "quick_gelu",
        norm_eps=1e-6 if is_siglip else 1e-5,
        causal=not is_siglip,
        pool="last" if is_siglip else "argmax",
        head_bias=is_siglip,
    )
