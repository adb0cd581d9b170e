"""What Hugging Face's transformers writes beside weights: config.json (the model) and
preprocessor_config.json.
"""

import os
from pathlib import Path
from typing import Any

from errors import InputError, printable, reading
from settings.plain import (
    NAME,
    Rule,
    check_form,
    is_list,
    is_name,
    is_real,
    is_whole,
    optional,
    parsed_json,
    value_text,
    whole_file,
)
from weights.hub import CONFIG, LONGEST_CONFIG, beside

# What a class's outputs are: one for each entry of id2label; CLIP's projection of the image; none,
# of an encoder.
LABELS = "labels"
PROJECTION = "projection"
ENCODER = "encoder"
_CLIP = {
    "CLIPForImageClassification": LABELS,
    "CLIPModel": PROJECTION,
    "CLIPVisionModelWithProjection": PROJECTION,
    "CLIPVisionModel": ENCODER,
}
_SIGLIP = {
    "SiglipForImageClassification": LABELS,
    "SiglipModel": ENCODER,
    "SiglipVisionModel": ENCODER,
}
# The classes of each model_type whose outputs models here compute. Another class's head may compute
# something else.
HEADS: dict[str, dict[str, str]] = {
    "vit": {
        "ViTForImageClassification": LABELS,
        "ViTForMaskedImageModeling": ENCODER,
        "ViTModel": ENCODER,
    },
    "deit": {
        "DeiTForImageClassification": LABELS,
        "DeiTForImageClassificationWithTeacher": LABELS,
        "DeiTForMaskedImageModeling": ENCODER,
        "DeiTModel": ENCODER,
    },
    "beit": {
        "BeitForImageClassification": LABELS,
        "BeitForMaskedImageModeling": ENCODER,
        "BeitModel": ENCODER,
    },
    "dinov2": {"Dinov2ForImageClassification": LABELS, "Dinov2Model": ENCODER},
    "dinov2_with_registers": {
        "Dinov2WithRegistersForImageClassification": LABELS,
        "Dinov2WithRegistersModel": ENCODER,
    },
    "dinov3_vit": {"DINOv3ViTModel": ENCODER},
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "swin": {"SwinForImageClassification": LABELS, "SwinModel": ENCODER},
    "swinv2": {"Swinv2ForImageClassification": LABELS, "Swinv2Model": ENCODER},
    "hiera": {
        "HieraForImageClassification": LABELS,
        "HieraForPreTraining": ENCODER,
        "HieraModel": ENCODER,
    },
    "levit": {
        "LevitForImageClassification": LABELS,
        "LevitForImageClassificationWithTeacher": LABELS,
        "LevitModel": ENCODER,
    },
    "pvt_v2": {"PvtV2ForImageClassification": LABELS, "PvtV2Model": ENCODER},
    "poolformer": {"PoolFormerForImageClassification": LABELS},
    "mobilevit": {"MobileViTForImageClassification": LABELS, "MobileViTModel": ENCODER},
    "convnext": {"ConvNextForImageClassification": LABELS, "ConvNextModel": ENCODER},
    "convnextv2": {"ConvNextV2ForImageClassification": LABELS, "ConvNextV2Model": ENCODER},
    "resnet": {"ResNetForImageClassification": LABELS},
    "regnet": {"RegNetForImageClassification": LABELS},
}
# TASK by problem_type. Without one, transformers' pipeline takes the softmax of several labels.
_TASKS = {
    "single_label_classification": "classification",
    "multi_label_classification": "multilabel",
    None: None,
}
_WHOLE = ("clip", "siglip")  # kinds whose image tower is described by vision_config
_OF_THE_WHOLE = (
    "model_type",
    "architectures",
    "problem_type",
    "id2label",
    "num_labels",
    "projection_dim",
)
_OF_THE_WHOLE += ("quantization_config",)
_DEFAULT_LABELS = 2
_DEFAULT_PROJECTION = 512

_SIDE = Rule(
    "a size",
    lambda v: is_whole(v, 1, 1 << 16) or is_list(v, lambda n: is_whole(n, 1, 1 << 16), 2, 2),
)
_EDGES = ("height", "width", "shortest_edge")
_SIZE = Rule(
    f"a size, or an object of {', '.join(_EDGES)}",
    lambda value: (
        is_whole(value, 1, 1 << 16)
        or (
            type(value) is dict
            and all(
                is_whole(value[key], 1, 1 << 16) for key in _EDGES if value.get(key) is not None
            )
        )
    ),
)
_CHANNELS = Rule(
    "a number per channel", lambda v: is_list(v, lambda n: is_real(n, -1e3, 1e3), 1, 64)
)
_MODEL = {
    "model_type": NAME,
    "id2label": optional(
        Rule("an object of names, of the outputs from 0 on without a gap", lambda v: _are_labels(v))
    ),
    "architectures": optional(
        Rule("a list of names", lambda value: is_list(value, is_name, 0, 100))
    ),
    "problem_type": optional(NAME),
    "num_labels": optional(Rule("a number of classes", lambda value: is_whole(value, 0, 1 << 24))),
    "projection_dim": optional(
        Rule("a number of channels", lambda value: is_whole(value, 1, 1 << 20))
    ),
    "vision_config": optional(Rule("a dictionary", lambda value: type(value) is dict)),
    "image_size": optional(_SIDE),
    "num_channels": optional(
        Rule("a number of channels", lambda value: is_whole(value, 1, 1 << 16))
    ),
}
_PREPROCESSOR = {
    "image_mean": optional(_CHANNELS),
    "image_std": optional(_CHANNELS),
    "resample": optional(Rule("Pillow's number of a filter", lambda value: is_whole(value, 0, 5))),
    "size": optional(_SIZE),
    "crop_size": optional(_SIZE),
    "crop_pct": optional(Rule("a share", lambda value: is_real(value, 0.01, 1))),
    "rescale_factor": Rule("a number", is_real),
    **dict.fromkeys(("image_processor_type", "feature_extractor_type"), optional(NAME)),
}
_PIXELS = 1 / 255
# Processors that take a single number as the shorter side's length, and keep the image's
# proportions.
_BY_EDGE = ("Bit", "CLIP", "ConvNext", "Levit", "MobileViT", "PoolFormer")
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers


def _are_labels(names: Any) -> bool:
    """Whether it is a dictionary of names by output: "0", "1" and so on."""
    if type(names) is not dict or not all(type(name) is str for name in names.values()):
        return False
    return names.keys() == set(map(str, range(len(names))))


def read_transformers(path: str | Path) -> dict[str, Any]:
    """Returns what config.json beside the weights says, where transformers wrote it; {} otherwise.

    Of CLIP and SigLIP it is the image tower's. Added are ``outputs``: of its classifier, 0: it has
    none; ``label_names``: the classes in order; ``images``: how they are prepared, in timm's keys.
    Whether models here compute what it says, ``models.transformers_arguments`` checks.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: it can't be read, or a key that is used here has another type or range than
            there.
    """
    config = _read(beside(path, CONFIG), _MODEL)
    if "model_type" not in config:
        return {}
    if config["model_type"] in _WHOLE:
        tower = {
            key: value
            for key, value in (config.get("vision_config") or {}).items()
            if key not in _OF_THE_WHOLE
        }
        config = tower | {key: config[key] for key in _OF_THE_WHOLE if key in config}
    names = config.get("id2label") or {}
    ordered = [names[str(number)] for number in range(len(names))]
    named = ordered != [f"LABEL_{number}" for number in range(len(names))]
    preprocessor = _read(beside(path, "preprocessor_config.json"), _PREPROCESSOR)
    try:
        images = _images(config, preprocessor)
    except InputError as error:
        raise InputError(f"the preprocessor_config.json of {path}: {error}") from None
    return config | {
        "outputs": _outputs(config),
        "label_names": ordered if named else [],
        "images": images,
    }


def head_of(config: dict[str, Any]) -> str:
    """Returns what the outputs of the class that a configuration names are: LABELS, PROJECTION or
    ENCODER.

    Raises:
        InputError: models here don't compute the outputs of this class, or problem_type is a task
            that isn't here.
    """
    known = HEADS[config["model_type"]]
    classes = config.get("architectures") or []
    if len(classes) != 1 or classes[0] not in known:
        found = (
            f"its class (architectures) is {printable(', '.join(classes), 80)}"
            if classes
            else "it names no class"
        )
        raise InputError(f"{found}, which isn't read; expected one of {', '.join(known)}")
    head = known[classes[0]]
    if head != LABELS:
        return head
    if config.get("problem_type") not in _TASKS:
        kinds = ", ".join(filter(None, _TASKS))
        raise InputError(
            f"problem_type is {value_text(config['problem_type'])}, expected {kinds}, or none"
        )
    if _outputs(config) == 1:
        raise InputError(
            "it has one label, which is a regression or a sigmoid there; expected two labels or more"
        )
    return head


def is_projection(path: str | Path) -> bool:
    """Returns whether transformers' config.json beside weights names a class whose outputs are a
    projection of images.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: as ``read_transformers``.
    """
    config = read_transformers(path)
    heads = HEADS.get(config.get("model_type", ""), {})
    return PROJECTION in {heads.get(name) for name in config.get("architectures") or []}


def task_of(path: str | Path) -> str | None:
    """Returns the TASK that transformers' config.json beside weights tells, or None.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: as ``read_transformers``.
    """
    return _TASKS.get(read_transformers(path).get("problem_type"))


def _outputs(config: dict[str, Any]) -> int:
    """Returns the number of outputs of the class that a configuration names; 0: it has none, or
    isn't read here.
    """
    heads = HEADS.get(config["model_type"], {})
    kinds = {heads.get(name) for name in config.get("architectures") or []}
    if PROJECTION in kinds:
        return config.get("projection_dim") or _DEFAULT_PROJECTION
    if LABELS not in kinds:
        return 0
    return len(config.get("id2label") or {}) or config.get("num_labels") or _DEFAULT_LABELS


def _read(file: Path | None, form: dict[str, Rule]) -> dict[str, Any]:
    if file is None or not os.path.lexists(file):
        return {}
    with reading(
        file, "a configuration of transformers'", "; repair it, or remove it and set its keys by -o"
    ):
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


def _processor(preprocessor: dict[str, Any]) -> str:
    """Returns the name of the class that prepares images, of any release."""
    return (
        preprocessor.get("image_processor_type") or preprocessor.get("feature_extractor_type") or ""
    )


def _images(config: dict[str, Any], preprocessor: dict[str, Any]) -> dict[str, Any]:
    """How images are prepared, in timm's keys. A side is the model's: what the preprocessor says is
    its share.
    """
    mobile = config.get("model_type") == "mobilevit"  # its processor can't normalise
    default_side = 256 if mobile else 224
    side = config.get("image_size") or default_side
    height, width = side if isinstance(side, list) else (side, side)
    found: dict[str, Any] = {"input_size": [config.get("num_channels") or 3, height, width]}
    if mobile and preprocessor.get("do_flip_channel_order", True) is not True:
        raise InputError(
            "do_flip_channel_order is False, expected True: the stem takes blue, green, red"
        )
    if not mobile and preprocessor.get("do_normalize", True):
        found |= {"mean": preprocessor.get("image_mean"), "std": preprocessor.get("image_std")}
    elif preprocessor or mobile:
        found |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    if "resample" in preprocessor:
        found["interpolation"] = _FILTERS[preprocessor["resample"]]
    pixels = (
        preprocessor.get("rescale_factor", _PIXELS) if preprocessor.get("do_rescale", True) else 1
    )
    if abs(pixels - _PIXELS) > 1e-6:
        raise InputError(
            f"pixels are multiplied by {value_text(pixels)} (rescale_factor), expected 1/255"
        )
    processor = _processor(preprocessor)
    size = preprocessor.get("size")
    if is_whole(size):
        size = (
            {"shortest_edge": size}
            if processor.startswith(_BY_EDGE)
            else {"height": size, "width": size}
        )
    size = size or {}
    shortest = size.get("shortest_edge")
    crop = preprocessor.get("crop_size")
    if processor.startswith("Levit") and shortest:
        shortest = int(256 / 224 * shortest)
    crop = crop.get("height") if isinstance(crop, dict) else crop
    if preprocessor.get("crop_pct") and shortest:  # ConvNeXt's and PoolFormer's ways of saying it
        squashed = shortest >= 384 and not preprocessor.get("do_center_crop")
        found |= {
            "crop_pct": 1.0 if squashed else preprocessor["crop_pct"],
            "crop_mode": "squash" if squashed else "center",
        }
    elif preprocessor.get("do_center_crop") and crop and (shortest or size.get("height")):
        found |= {
            "crop_pct": crop / (shortest or size["height"]),
            "crop_mode": "center" if shortest else "squash",
        }
    elif size:
        found |= {"crop_pct": 1.0, "crop_mode": "center" if shortest else "squash"}
    return {key: value for key, value in found.items() if value is not None}
