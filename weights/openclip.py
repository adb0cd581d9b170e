"""Reads open_clip_config.json, which OpenCLIP writes beside weights."""

import os
from pathlib import Path
from typing import Any

from errors import InputError, printable, reading
from settings.plain import (
    FLAG,
    NAME,
    Rule,
    check_form,
    is_list,
    is_real,
    is_whole,
    optional,
    parsed_json,
    whole_file,
)
from weights.hub import CONFIG, LONGEST_CONFIG, SIDE, beside

OPENCLIP_CONFIG = "open_clip_config.json"
# OpenAI's normalisation, which is OpenCLIP's default.
_MEAN = [0.48145466, 0.4578275, 0.40821073]
_STD = [0.26862954, 0.26130258, 0.27577711]
_DICTIONARY = Rule("a dictionary", lambda value: type(value) is dict)
_NUMBERS = Rule(
    "three numbers",
    lambda value: is_list(value, lambda number: is_real(number, -1e3, 1e3), 3, 3),
)
_MODEL = {
    "embed_dim": Rule("a number of channels", lambda value: is_whole(value, 1, 1 << 20)),
    "vision_cfg": _DICTIONARY,
    "text_cfg": optional(_DICTIONARY),
    "quick_gelu": optional(FLAG),
}
_VISION = {"image_size": SIDE, "timm_model_name": optional(NAME)}
_PREPROCESS = {
    "size": optional(SIDE),
    "mean": optional(_NUMBERS),
    "std": optional(_NUMBERS),
    "interpolation": optional(NAME),
    "resize_mode": optional(NAME),
}


def json_beside(path: str | Path, name: str) -> dict[str, Any]:
    """Returns the object in a JSON file beside weights; {} if there is none, or it has no object.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: the file can't be read.
    """
    file = beside(path, name)
    if file is None or not os.path.lexists(file):
        return {}
    with reading(file, "a configuration"):
        content = parsed_json(whole_file(file, LONGEST_CONFIG))
    return content if type(content) is dict else {}


def read_openclip(path: str | Path) -> dict[str, Any]:
    """Returns the open_clip_config.json beside weights; {} if there is none.

    Its ``model_cfg`` and ``preprocess_cfg`` are there, and the values that are used have the types
    that OpenCLIP gives them. The text tower's are checked by ``models.text_arguments``.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: the file can't be read, or a value has another type.
    """
    config = json_beside(path, OPENCLIP_CONFIG)
    if not config:
        return {}
    with reading(f"the {OPENCLIP_CONFIG} of {path}", "a configuration of OpenCLIP's"):
        preprocess = config.setdefault("preprocess_cfg", {})
        check_form(config, {"model_cfg": _DICTIONARY}, ("model_cfg",))
        check_form(config["model_cfg"], _MODEL, ("embed_dim", "vision_cfg"), "model_cfg.")
        check_form(config["model_cfg"]["vision_cfg"], _VISION, where="vision_cfg.")
        check_form(preprocess, _PREPROCESS, where="preprocess_cfg.")
    return config


def images_of(config: dict[str, Any]) -> dict[str, Any]:
    """Returns how the images of a configuration of OpenCLIP's are prepared, in timm's keys.

    Raises:
        InputError: its resizing isn't known here.
    """
    preprocess = config["preprocess_cfg"]
    size = preprocess.get("size") or config["model_cfg"]["vision_cfg"].get("image_size", 224)
    height, width = size if isinstance(size, list) else (size, size)
    mode = preprocess.get("resize_mode") or "shortest"
    modes = {"shortest": "center", "squash": "squash"}
    if mode not in modes:
        raise InputError(
            f"preprocess_cfg.resize_mode is {printable(mode)}, expected {' or '.join(modes)}"
        )
    return {
        "input_size": [3, height, width],
        "crop_pct": 1.0,
        "crop_mode": modes[mode],
        "interpolation": preprocess.get("interpolation") or "bicubic",
        "mean": preprocess.get("mean") or _MEAN,
        "std": preprocess.get("std") or _STD,
    }


def is_openclip(path: str | Path) -> bool:
    """Returns whether OpenCLIP's configuration, and no other, describes weights. Their outputs are
    embeddings then.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: a configuration can't be read.
    """
    return not json_beside(path, CONFIG) and bool(read_openclip(path))
