"""Reads an image tower's architecture and options from OpenCLIP's open_clip_config.json."""

from pathlib import Path
from typing import Any

from errors import InputError, printable
from settings.plain import Rule, check_form, is_real, is_whole, optional, value_text
from weights.openclip import OPENCLIP_CONFIG, read_openclip

_COUNT = Rule("a whole number", lambda value: is_whole(value, 1, 1 << 20))
_REAL = optional(Rule("a number", lambda value: is_real(value, 1e-12, 1e6)))
_FORM = {
    "layers": _COUNT,
    "width": _COUNT,
    "head_width": _COUNT,
    "mlp_ratio": _REAL,
    "patch_size": _COUNT,
    "ls_init_value": _REAL,
}
# The defaults of OpenCLIP's ``CLIPVisionCfg``.
_DEFAULTS = {"layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0, "patch_size": 16}
# Other keys change what a tower computes, but for these values. None: the key is left out.
_FIXED = {
    "attentional_pool": False,
    "no_ln_pre": False,
    "pos_embed_type": "learnable",
    "final_ln_after_pool": False,
    "pool_type": "tok",
    "block_type": None,
    "qk_norm": None,
    "scaled_cosine_attn": None,
    "scale_heads": None,
    "scale_attn_inner": None,
    "scale_attn": None,
    "scale_fc": None,
}
# Of towers from timm: how SigLIP's read the patches.
_FIXED_TIMM = {"timm_pool": "map", "timm_proj": "none"}


def described_openclip(path: str | Path) -> tuple[str, dict[str, Any]] | None:
    """Returns MODEL.TYPE and the keys of MODEL of the image tower in OpenCLIP's configuration beside
    weights; None: there is no such file, or the tower is timm's.

    Args:
        path: the weights, as ``find_weights`` takes them.

    Raises:
        InputError: the file can't be read, or describes what no model here computes.
    """
    config = read_openclip(path)
    if not config or config["model_cfg"]["vision_cfg"].get("timm_model_name"):
        return None
    vision = config["model_cfg"]["vision_cfg"]
    source = f"the {OPENCLIP_CONFIG} of {path}"
    _expect(vision, _FIXED, source)
    if type(vision.get("layers", 12)) is list:
        raise InputError(
            f"{source}: its image tower is a ResNet of OpenAI's, which isn't supported"
        )
    values = _DEFAULTS | {key: value for key, value in vision.items() if key in _FORM}
    check_form(values, _FORM, where="vision_cfg.")
    return "ViT", {
        "EMBED_DIM": values["width"],
        "DEPTH": values["layers"],
        "NUM_HEADS": max(1, values["width"] // values["head_width"]),
        "MLP_RATIO": values["mlp_ratio"],
        "PATCH_SIZE": values["patch_size"],
        "INIT_VALUES": values.get("ls_init_value"),
        "PRE_NORM": True,
        "ACT": "quick_gelu" if config["model_cfg"].get("quick_gelu") else "gelu",
    }


def timm_tower(path: str | Path) -> str | None:
    """Returns timm's name of the image tower in OpenCLIP's configuration beside weights; None: there
    is no such file, or the tower is OpenCLIP's own.

    Args:
        path: the weights, as ``find_weights`` takes them.

    Raises:
        InputError: the file can't be read, or the tower has a head that isn't supported.
    """
    config = read_openclip(path)
    vision = config["model_cfg"]["vision_cfg"] if config else {}
    name = vision.get("timm_model_name")
    if name is not None:
        _expect(vision, _FIXED_TIMM, f"the {OPENCLIP_CONFIG} of {path}")
    return name


def _expect(vision: dict[str, Any], fixed: dict[str, Any], source: str) -> None:
    """Raises InputError unless settings of an image tower have the only supported values."""
    for key, expected in fixed.items():
        if vision.get(key, expected) != expected:
            raise InputError(
                f"{source}: vision_cfg.{printable(key)} is {value_text(vision[key])}, only"
                f" {value_text(expected)} is supported"
            )
