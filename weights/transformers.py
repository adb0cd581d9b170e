"""Reads the files that Hugging Face's transformers writes beside weights.

They are config.json and preprocessor_config.json.
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

# The outputs of a class of transformers: one for each entry of id2label; maps of these for each
# pixel; CLIP's projection of the image; or none, for an encoder.
LABELS = "labels"
MAPS = "maps"
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
_SIGLIP2 = {name.replace("Siglip", "Siglip2"): head for name, head in _SIGLIP.items()}
# By model_type, the classes whose outputs models here can compute. The heads of other classes may
# compute something else.
HEADS: dict[str, dict[str, str]] = {
    "vit": {
        "ViTForImageClassification": LABELS,
        "ViTForMaskedImageModeling": ENCODER,
        "ViTModel": ENCODER,
    },
    "vit_mae": {"ViTMAEForPreTraining": ENCODER, "ViTMAEModel": ENCODER},
    "deit": {
        "DeiTForImageClassification": LABELS,
        "DeiTForImageClassificationWithTeacher": LABELS,
        "DeiTForMaskedImageModeling": ENCODER,
        "DeiTModel": ENCODER,
    },
    "beit": {
        "BeitForImageClassification": LABELS,
        "BeitForMaskedImageModeling": ENCODER,
        "BeitForSemanticSegmentation": MAPS,
        "BeitModel": ENCODER,
    },
    "dinov2": {"Dinov2ForImageClassification": LABELS, "Dinov2Model": ENCODER},
    "dinov2_with_registers": {
        "Dinov2WithRegistersForImageClassification": LABELS,
        "Dinov2WithRegistersModel": ENCODER,
    },
    "dinov3_vit": {"DINOv3ViTModel": ENCODER},
    "eomt": {"EomtForUniversalSegmentation": MAPS},
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "siglip2": _SIGLIP2,
    "siglip2_vision_model": _SIGLIP2,
    "swin": {
        "SwinForImageClassification": LABELS,
        "SwinForMaskedImageModeling": ENCODER,
        "SwinModel": ENCODER,
    },
    "swinv2": {
        "Swinv2ForImageClassification": LABELS,
        "Swinv2ForMaskedImageModeling": ENCODER,
        "Swinv2Model": ENCODER,
    },
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
    "segformer": {
        "SegformerForImageClassification": LABELS,
        "SegformerForSemanticSegmentation": MAPS,
        "SegformerModel": ENCODER,
    },
    "upernet": {"UperNetForSemanticSegmentation": MAPS},
    "dpt": {"DPTForSemanticSegmentation": MAPS},
    "poolformer": {"PoolFormerForImageClassification": LABELS},
    "mobilevit": {"MobileViTForImageClassification": LABELS, "MobileViTModel": ENCODER},
    "convnext": {"ConvNextForImageClassification": LABELS, "ConvNextModel": ENCODER},
    "convnextv2": {"ConvNextV2ForImageClassification": LABELS, "ConvNextV2Model": ENCODER},
    "resnet": {"ResNetForImageClassification": LABELS},
    "regnet": {"RegNetForImageClassification": LABELS},
}
# TASK by problem_type. Without problem_type, transformers' pipeline takes the softmax of the labels.
_TASKS = {
    "single_label_classification": "classification",
    "multi_label_classification": "multilabel",
    None: None,
}
# Models of images and texts. Their image tower is described by vision_config, but for these keys.
_WITH_TEXT = ("clip", "siglip", "siglip2")
_KEYS_OF_WHOLE = (
    "model_type",
    "architectures",
    "problem_type",
    "id2label",
    "num_labels",
    "projection_dim",
    "quantization_config",
)
_DEFAULT_LABELS = 2
_DEFAULT_PROJECTION = 512
# The side of images where a configuration has none, by model_type: transformers' default. UPerNet's
# is that of its published models.
_SIDES = {"mobilevit": 256, "dpt": 384, "upernet": 512, "eomt": 640}
_DEFAULT_SIDE = 224
# The most patches of an image where SigLIP 2's processor doesn't say it: transformers' default.
_DEFAULT_PATCHES = 256

_EDGES = ("height", "width", "shortest_edge")


def _is_side(value: Any) -> bool:
    return is_whole(value, 1, 1 << 16)


def _is_size(value: Any) -> bool:
    if type(value) is not dict:
        return _is_side(value)
    return all(_is_side(value[key]) for key in _EDGES if value.get(key) is not None)


def _are_labels(value: Any) -> bool:
    """Returns whether a value is a dictionary of names by output: "0", "1" and so on."""
    if type(value) is not dict or not all(type(name) is str for name in value.values()):
        return False
    return value.keys() == set(map(str, range(len(value))))


_SIDE = Rule("a size", lambda value: _is_side(value) or is_list(value, _is_side, 2, 2))
_SIZE = Rule(f"a size, or an object of {', '.join(_EDGES)}", _is_size)
_CHANNELS = Rule(
    "a number per channel",
    lambda value: is_list(value, lambda number: is_real(number, -1e3, 1e3), 1, 64),
)
_PATCHES = Rule("a number of patches", lambda value: is_whole(value, 1, 1 << 16))
_MODEL = {
    "model_type": NAME,
    "id2label": optional(Rule("an object with the names of all outputs, from 0 on", _are_labels)),
    "architectures": optional(
        Rule("a list of names", lambda value: is_list(value, is_name, 0, 100))
    ),
    "problem_type": optional(NAME),
    "num_labels": optional(Rule("a number of classes", lambda value: is_whole(value, 0, 1 << 24))),
    "projection_dim": optional(
        Rule("a number of channels", lambda value: is_whole(value, 1, 1 << 20))
    ),
    "vision_config": optional(Rule("a dictionary", lambda value: type(value) is dict)),
    "backbone_config": optional(Rule("a dictionary", lambda value: type(value) is dict)),
    "image_size": optional(_SIDE),
    "num_channels": optional(
        Rule("a number of channels", lambda value: is_whole(value, 1, 1 << 16))
    ),
    "num_patches": optional(_PATCHES),
}
_PREPROCESSOR = {
    "image_mean": optional(_CHANNELS),
    "image_std": optional(_CHANNELS),
    "resample": optional(Rule("Pillow's number of a filter", lambda value: is_whole(value, 0, 5))),
    "size": optional(_SIZE),
    "crop_size": optional(_SIZE),
    "crop_pct": optional(Rule("a share", lambda value: is_real(value, 0.01, 1))),
    "rescale_factor": Rule("a number", is_real),
    "max_num_patches": optional(_PATCHES),
    "image_processor_type": optional(NAME),
    "feature_extractor_type": optional(NAME),
}
# The rescale_factor of images in 8 bits.
_PIXELS = 1 / 255
# Processors that take a single number as the length of the shorter side, and keep the image's
# proportions.
_BY_EDGE = ("Bit", "CLIP", "ConvNext", "Levit", "MobileViT", "PoolFormer")
# The filters by Pillow's numbers.
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


def read_transformers(path: str | Path) -> dict[str, Any]:
    """Returns the config.json beside weights, if transformers wrote it, and otherwise {}.

    For CLIP and SigLIP it is that of the image tower. These entries are added: ``outputs``, the
    number of the classifier's outputs, 0 if there is none; ``label_names``, the classes in order;
    ``images``, how images are prepared, in timm's keys. ``models.transformers_arguments`` checks
    whether models here compute what the configuration describes.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: a file can't be read, or a key that is used here has another type or range than
            in transformers.
    """
    config = _read(beside(path, CONFIG), _MODEL)
    if "model_type" not in config:
        return {}
    if config["model_type"] in _WITH_TEXT:
        tower = {
            key: value
            for key, value in (config.get("vision_config") or {}).items()
            if key not in _KEYS_OF_WHOLE
        }
        config = tower | {key: config[key] for key in _KEYS_OF_WHOLE if key in config}
    by_output = config.get("id2label") or {}
    names = [by_output[str(output)] for output in range(len(by_output))]
    # Names that transformers made up aren't names of classes.
    if names == [f"LABEL_{output}" for output in range(len(names))]:
        names = []
    preprocessor = _read(beside(path, "preprocessor_config.json"), _PREPROCESSOR)
    try:
        images = _images(config, preprocessor)
    except InputError as error:
        raise InputError(f"the preprocessor_config.json of {path}: {error}") from None
    return config | {"outputs": _outputs(config), "label_names": names, "images": images}


def head_of(config: dict[str, Any]) -> str:
    """Returns the kind of outputs of a configuration's class: LABELS, MAPS, PROJECTION or ENCODER.

    Raises:
        InputError: models here can't compute the outputs of this class, or problem_type is none of
            the tasks here.
    """
    known = HEADS[config["model_type"]]
    classes = config.get("architectures") or []
    if len(classes) != 1 or classes[0] not in known:
        found = "it doesn't name a class"
        if classes:
            found = f"its class (architectures) is {printable(', '.join(classes), 80)}"
        raise InputError(f"{found}, which isn't supported; expected one of {', '.join(known)}")
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
            "it has one label, which means regression or a sigmoid; expected two labels or more"
        )
    return head


def is_projection(path: str | Path) -> bool:
    """Returns whether the outputs of transformers' weights are a projection of images.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: as ``read_transformers``.
    """
    return PROJECTION in _kinds(read_transformers(path))


def task_of(path: str | Path) -> str | None:
    """Returns the TASK of transformers' weights, or None if their config.json doesn't name it.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: as ``read_transformers``.
    """
    config = read_transformers(path)
    if MAPS in _kinds(config):
        return "segmentation"
    return _TASKS.get(config.get("problem_type"))


def _kinds(config: dict[str, Any]) -> set[str | None]:
    """Returns the kind of outputs of a configuration's classes; None stands for an unknown class."""
    heads = HEADS.get(config.get("model_type", ""), {})
    return {heads.get(name) for name in config.get("architectures") or []}


def _outputs(config: dict[str, Any]) -> int:
    """Returns the number of outputs of a configuration's class; 0 if it has none, or isn't known."""
    kinds = _kinds(config)
    if PROJECTION in kinds:
        return config.get("projection_dim") or _DEFAULT_PROJECTION
    if not kinds & {LABELS, MAPS}:
        return 0
    return len(config.get("id2label") or {}) or config.get("num_labels") or _DEFAULT_LABELS


def _read(file: Path | None, form: dict[str, Rule]) -> dict[str, Any]:
    """Returns a JSON file's contents in a form, or {} if there is no such file of transformers."""
    if file is None or not os.path.lexists(file):
        return {}
    with reading(
        file, "a configuration of transformers'", "; repair it, or remove it and set its keys by -o"
    ):
        content = parsed_json(whole_file(file, LONGEST_CONFIG))
        if type(content) is not dict or ("model_type" in form and "model_type" not in content):
            return {}
        check_form(content, form)
        inner = {key: form[key] for key in form if key != "model_type"}
        for part in ("vision_config", "backbone_config"):
            check_form(content.get(part) or {}, inner, where=f"{part}.")
        return content


def _processor(preprocessor: dict[str, Any]) -> str:
    """Returns the name of the class that prepares images, under the key of any release."""
    return (
        preprocessor.get("image_processor_type") or preprocessor.get("feature_extractor_type") or ""
    )


def _images(config: dict[str, Any], preprocessor: dict[str, Any]) -> dict[str, Any]:
    """Returns how images are prepared, in timm's keys.

    The input size is that of the model's configuration. The preprocessor's sizes only decide which
    share of an image is cropped, unless the model makes maps: it takes the preprocessor's size then.
    """
    # MobileViT's processor can't normalise.
    is_mobilevit = config.get("model_type") == "mobilevit"
    side = config.get("image_size") or _SIDES.get(config.get("model_type", ""), _DEFAULT_SIDE)
    makes_maps = MAPS in _kinds(config)
    if makes_maps:
        side = _resized_to(preprocessor) or side
    height, width = side if isinstance(side, list) else (side, side)
    images: dict[str, Any] = {"input_size": [config.get("num_channels") or 3, height, width]}
    if config.get("model_type") in ("siglip2", "siglip2_vision_model"):
        images["num_tokens"] = preprocessor.get("max_num_patches") or _DEFAULT_PATCHES
    if is_mobilevit and preprocessor.get("do_flip_channel_order", True) is not True:
        raise InputError(
            "do_flip_channel_order is False, expected True: the stem takes blue, green, red"
        )
    if not is_mobilevit and preprocessor.get("do_normalize", True):
        images |= {"mean": preprocessor.get("image_mean"), "std": preprocessor.get("image_std")}
    elif preprocessor or is_mobilevit:
        images |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    if "resample" in preprocessor:
        images["interpolation"] = _FILTERS[preprocessor["resample"]]
    factor = 1
    if preprocessor.get("do_rescale", True):
        factor = preprocessor.get("rescale_factor", _PIXELS)
    if abs(factor - _PIXELS) > 1e-6:
        raise InputError(
            f"pixels are multiplied by {value_text(factor)} (rescale_factor), expected 1/255"
        )
    if makes_maps:
        images |= _whole(preprocessor)
    else:
        images |= _crop(preprocessor)
    return {key: value for key, value in images.items() if value is not None}


def _resized_to(preprocessor: dict[str, Any]) -> Any:
    """Returns the side, or [height, width], to which a preprocessor resizes images without keeping
    their proportions; None: it doesn't say it.
    """
    size = preprocessor.get("size")
    if isinstance(size, dict) and size.get("height") and size.get("width"):
        return [size["height"], size["width"]]
    return size if is_whole(size) else None


def _whole(preprocessor: dict[str, Any]) -> dict[str, Any]:
    """Returns timm's keys for a preprocessor that crops nothing, for a class of each pixel."""
    size = preprocessor.get("size")
    if isinstance(size, dict) and size.get("shortest_edge"):
        return {"crop_mode": "short"}
    return {"crop_pct": 1.0, "crop_mode": "squash"}


def _crop(preprocessor: dict[str, Any]) -> dict[str, Any]:
    """Returns timm's crop_pct and crop_mode for a preprocessor; {} if it says nothing of sizes."""
    processor = _processor(preprocessor)
    size = preprocessor.get("size")
    if is_whole(size) and processor.startswith(_BY_EDGE):
        size = {"shortest_edge": size}
    elif is_whole(size):
        size = {"height": size, "width": size}
    size = size or {}
    shortest = size.get("shortest_edge")
    # LeViT's processor enlarges its size itself.
    if processor.startswith("Levit") and shortest:
        shortest = int(256 / 224 * shortest)
    crop = preprocessor.get("crop_size")
    if isinstance(crop, dict):
        crop = crop.get("height")

    # ConvNeXt's and PoolFormer's processors have timm's crop_pct. ConvNeXt's doesn't crop from 384
    # pixels on.
    if preprocessor.get("crop_pct") and shortest:
        if shortest >= 384 and not preprocessor.get("do_center_crop"):
            return {"crop_pct": 1.0, "crop_mode": "squash"}
        return {"crop_pct": preprocessor["crop_pct"], "crop_mode": "center"}
    crop_mode = "center" if shortest else "squash"
    resized = shortest or size.get("height")
    if preprocessor.get("do_center_crop") and crop and resized:
        return {"crop_pct": crop / resized, "crop_mode": crop_mode}
    if size:
        return {"crop_pct": 1.0, "crop_mode": crop_mode}
    return {}
