"""What Hugging Face's transformers writes beside weights: config.json (the model) and preprocessor_config.json."""

import os
import re
from pathlib import Path
from typing import Any

from errors import InputError, reading
from weights.hub import CONFIG, LONGEST_CONFIG, beside
from weights.plain import NAME, Rule, check_form, is_list, is_real, is_whole, optional, parsed_json, whole_file

_SIDE = Rule("a size", lambda v: is_whole(v, 1, 1 << 16) or is_list(v, lambda n: is_whole(n, 1, 1 << 16), 2, 2))
_EDGES = ("height", "width", "shortest_edge")
_SIZE = Rule(
    f"a size, or an object of {', '.join(_EDGES)}",
    lambda value: (
        is_whole(value, 1, 1 << 16)
        or (
            type(value) is dict
            and all(is_whole(value[key], 1, 1 << 16) for key in _EDGES if value.get(key) is not None)
        )
    ),
)
_CHANNELS = Rule("a number per channel", lambda v: is_list(v, lambda n: is_real(n, -1e3, 1e3), 1, 64))
_MODEL = {
    "model_type": NAME,
    "id2label": optional(
        Rule("an object of names", lambda v: type(v) is dict and all(type(n) is str for n in v.values()))
    ),
    "vision_config": optional(Rule("a dictionary", lambda value: type(value) is dict)),
    "image_size": optional(_SIDE),
    "num_channels": optional(Rule("a number of channels", lambda value: is_whole(value, 1, 1 << 16))),
}
_PREPROCESSOR = {
    "image_mean": optional(_CHANNELS),
    "image_std": optional(_CHANNELS),
    "resample": optional(Rule("Pillow's number of a filter", lambda value: is_whole(value, 0, 5))),
    "size": optional(_SIZE),
    "crop_size": optional(_SIZE),
    "crop_pct": optional(Rule("a share", lambda value: is_real(value, 0.01, 1))),
}
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers


def read_transformers(path: str | Path) -> dict[str, Any]:
    """Returns what config.json beside the weights says, where transformers wrote it; {} otherwise.

    Of CLIP and SigLIP it is the image tower's. Added are ``outputs``: of its classifier, 0: it has none;
    ``label_names``: the classes in order; ``images``: how they are prepared, in timm's keys.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: it can't be read, or a key that is used here has another type or range than there.
    """
    config = _read(beside(path, CONFIG), _MODEL)
    if "model_type" not in config:
        return {}
    config |= config.get("vision_config") or {}
    names = config.get("id2label") or {}
    ordered = [names[str(number)] for number in range(len(names)) if str(number) in names]
    named = len(ordered) == len(names) and ordered != [f"LABEL_{number}" for number in range(len(names))]
    made = str(config.get("architectures"))
    outputs = len(names) or 2 if "ForImageClassification" in made and "Dinov2" not in made else 0
    outputs = config.get("projection_dim", 512) if re.search("CLIPModel|WithProjection", made) else outputs
    preprocessor = _read(beside(path, "preprocessor_config.json"), _PREPROCESSOR)
    return config | {
        "outputs": outputs,
        "label_names": ordered if named else [],
        "images": _images(config, preprocessor),
    }


def _read(file: Path | None, form: dict[str, Rule]) -> dict[str, Any]:
    if file is None or not os.path.lexists(file):
        return {}
    with reading(file, "a configuration of transformers'", "; repair it, or remove it and set its keys by -o"):
        content = parsed_json(whole_file(file, LONGEST_CONFIG))
        if type(content) is not dict or ("model_type" in form and "model_type" not in content):
            return {}
        check_form(content, form)
        check_form(
            content.get("vision_config") or {},
            {key: form[key] for key in form if key != "model_type"},
            where="vision_config.",
        )
        return content


def _images(config: dict[str, Any], preprocessor: dict[str, Any]) -> dict[str, Any]:
    """How images are prepared, in timm's keys. A side is the model's: what the preprocessor says is its share."""
    side = config.get("image_size") or 224
    height, width = side if isinstance(side, list) else (side, side)
    found: dict[str, Any] = {"input_size": [config.get("num_channels") or 3, height, width]}
    mobile = config.get("model_type") == "mobilevit"  # its processor can't normalise
    if mobile and preprocessor.get("do_flip_channel_order", True) is not True:
        raise InputError("do_flip_channel_order is False, expected True: the stem takes blue, green, red")
    if not mobile and preprocessor.get("do_normalize", True):
        found |= {"mean": preprocessor.get("image_mean"), "std": preprocessor.get("image_std")}
    elif preprocessor or mobile:
        found |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    if "resample" in preprocessor:
        found["interpolation"] = _FILTERS[preprocessor["resample"]]
    size = preprocessor.get("size")
    size = size if isinstance(size, dict) else {"height": size, "width": size} if size else {}
    shortest, crop = size.get("shortest_edge"), preprocessor.get("crop_size")
    crop = crop.get("height") if isinstance(crop, dict) else crop
    if preprocessor.get("crop_pct") and shortest:  # ConvNeXt's and PoolFormer's ways of saying it
        squashed = shortest >= 384 and not preprocessor.get("do_center_crop")
        found |= {
            "crop_pct": 1.0 if squashed else preprocessor["crop_pct"],
            "crop_mode": "squash" if squashed else "center",
        }
    elif preprocessor.get("do_center_crop") and crop and (shortest or size.get("height")):
        found |= {"crop_pct": crop / (shortest or size["height"]), "crop_mode": "center" if shortest else "squash"}
    elif size:
        found |= {"crop_pct": 1.0, "crop_mode": "center" if shortest else "squash"}
    return {key: value for key, value in found.items() if value is not None}
