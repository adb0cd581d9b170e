"""Reads a head for segmentation from the config.json of the library transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import InputError, reading
from models.transformers_arguments import encoder_of, expect_all, with_told
from settings.configuration import Configuration
from settings.plain import Form, Rule, check_form, is_list, is_real, is_whole, optional, value_text
from weights.transformers import MAPS, head_of, read_transformers

_NUMBER = Rule("a whole number", lambda value: is_whole(value, 1, 1 << 20))
_INDEX = Rule("a whole number", lambda value: is_whole(value, 0, 1 << 20))
_INDICES = optional(Rule("whole numbers", lambda value: is_list(value, _INDEX.holds, 1, 100)))
_NUMBERS = Rule("whole numbers", lambda value: is_list(value, _NUMBER.holds, 1, 100))
_FLAG = optional(Rule("true or false", lambda value: type(value) is bool))
_FORM: Form = {
    "hidden_size": optional(_NUMBER),
    "decoder_hidden_size": _NUMBER,
    "pool_scales": _NUMBERS,
    "use_auxiliary_head": _FLAG,
    "auxiliary_channels": _NUMBER,
    "out_indices": _INDICES,
    "segmentation_indices": _INDICES,
    "backbone_out_indices": _INDICES,
    "neck_hidden_sizes": _NUMBERS,
    "fusion_hidden_size": _NUMBER,
    "num_queries": _NUMBER,
    "num_blocks": _NUMBER,
    "use_batch_norm_in_fusion_residual": _FLAG,
    "use_bias_in_fusion_residual": _FLAG,
    "semantic_classifier_dropout": Rule("a rate", lambda value: is_real(value, 0, 0.999)),
}
# The epsilon of the norms of a backbone's maps, by the backbone's model_type.
_MAP_NORM_EPS = {"swin": 1e-5, "convnext": 1e-6, "convnextv2": 1e-6}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]


def _auxiliary(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of the auxiliary head of UPerNet."""
    values: dict[str, Any] = {"AUXILIARY": config.get("use_auxiliary_head", True)}
    if values["AUXILIARY"]:
        expect_all(config, auxiliary_num_convs=1, auxiliary_concat_input=False)
        values["AUXILIARY_CHANNELS"] = config.get("auxiliary_channels", 256)
    return values


def _upernet(config: dict[str, Any]) -> dict[str, Any]:
    encoder = encoder_of(config)
    kind = encoder.get("model_type")
    if kind not in _MAP_NORM_EPS:
        raise InputError(
            f"its backbone is a {value_text(kind)}, expected one of {', '.join(_MAP_NORM_EPS)}"
        )
    expect_all(encoder, out_features=_STAGES)
    return {
        "NAME": "upernet",
        "PYRAMID_CHANNELS": config.get("hidden_size", 512),
        "POOL_SCALES": list(config.get("pool_scales", (1, 2, 3, 6))),
        "MAP_NORMS": True,
        "MAP_NORM_EPS": _MAP_NORM_EPS[kind],
        **_auxiliary(config),
    }


def _beit(config: dict[str, Any]) -> dict[str, Any]:
    places = config.get("out_indices") or config.get("segmentation_indices") or []
    # transformers counts from 1, and its first map is the patches' embedding.
    if len(places) != 4 or min(places) < 2:
        raise InputError(
            f"out_indices is {value_text(places)}, expected four numbers, each from 2 on"
        )
    sides = config["images"]["input_size"][1:]
    return {
        "NAME": "upernet",
        "INDICES": [place - 2 for place in places],
        # BEiT takes images of one size. Its authors slide windows of 640 pixels by 426.
        "STRIDE": [max(1, 2 * side // 3) for side in sides],
        "PYRAMID_CHANNELS": config.get("hidden_size", 768),
        "POOL_SCALES": list(config.get("pool_scales", (1, 2, 3, 6))),
        "MAP_NORMS": False,
        **_auxiliary(config),
    }


def _segformer(config: dict[str, Any]) -> dict[str, Any]:
    return {"NAME": "segformer", "FUSED_CHANNELS": config.get("decoder_hidden_size", 256)}


def _dpt(config: dict[str, Any]) -> dict[str, Any]:
    batch_norm = bool(config.get("use_batch_norm_in_fusion_residual"))
    has_bias = config.get("use_bias_in_fusion_residual")
    if has_bias is not None:
        expect_all(config, use_bias_in_fusion_residual=not batch_norm)
    expect_all(
        config,
        is_hybrid=False,
        backbone_config=None,
        hidden_act="gelu",
        head_in_index=-1,
        reassemble_factors=[4, 2, 1, 0.5],
    )
    return {
        "NAME": "dpt",
        "INDICES": list(config.get("backbone_out_indices", (2, 5, 8, 11))),
        "READOUT": config.get("readout_type", "project"),
        "NECK_CHANNELS": list(config.get("neck_hidden_sizes", (96, 192, 384, 768))),
        "FUSION_CHANNELS": config.get("fusion_hidden_size", 256),
        "FUSION_BATCH_NORM": batch_norm,
        "AUXILIARY": config.get("use_auxiliary_head", True),
        "DROPOUT": config.get("semantic_classifier_dropout", 0.1),
    }


def _eomt(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "NAME": "eomt",
        "NUM_QUERIES": config.get("num_queries", 200),
        "NUM_BLOCKS": config.get("num_blocks", 4),
        # Images are split into windows along their longer side.
        "STRIDE": list(config["images"]["input_size"][1:]),
    }


# By model_type, the function that returns the keys of HEAD.
_HEADS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "upernet": _upernet,
    "beit": _beit,
    "segformer": _segformer,
    "dpt": _dpt,
    "eomt": _eomt,
}
# Keys that show in the shapes of tensors.
_SHAPED = {
    "PYRAMID_CHANNELS",
    "MAP_NORMS",
    "AUXILIARY",
    "AUXILIARY_CHANNELS",
    "FUSED_CHANNELS",
    "NECK_CHANNELS",
    "FUSION_CHANNELS",
    "FUSION_BATCH_NORM",
    "NUM_QUERIES",
}
# Keys that the user chooses for training and evaluation.
_CHOSEN = {"DROPOUT", "STRIDE"}


def described_head(path: str | Path) -> dict[str, Any]:
    """Returns the keys of HEAD from transformers' config.json beside weights; {}: there is no head
    for segmentation.

    Args:
        path: the weights, as ``find_weights`` takes them.

    Raises:
        InputError: the file can't be read, or describes a head or a setting that isn't supported.
    """
    config = read_transformers(path)
    if not config or config["model_type"] not in _HEADS:
        return {}
    with reading(f"the config.json of {path}", "a configuration of transformers'"):
        try:
            if head_of(config) != MAPS:
                return {}
            check_form(config, _FORM)
            return _HEADS[config["model_type"]](config)
        except InputError as error:
            raise InputError(f"the config.json of {path}: {error}") from None


def with_head_arguments(config: Configuration, path: str | Path) -> Configuration:
    """Returns ``config`` with the keys of HEAD in transformers' config.json that change no shapes,
    if it has the same head.

    Args:
        path: the weights, as ``find_weights`` takes them.

    Raises:
        InputError: as ``described_head``.
    """
    if config.HEAD.NAME is None:
        return config
    values = described_head(path)
    if values.get("NAME") != config.HEAD.NAME:
        return config
    for key, value in values.items():
        if key not in _SHAPED | _CHOSEN and config.HEAD[key] != value:
            config = with_told(config, f"HEAD.{key}", value, path)
    return config
