"""What describes an exported model in the files that other toolkits read: labels, timm's config.json, PaddleX's
inference.yml.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from loading.transforms import pixel_mode
from loading.transforms.image import before_crop
from options import Configuration, pair
from training.checkpoint import Description

TIMM, PADDLEX, LABELS = "config.json", "inference.yml", "labels.txt"
_THRESHOLD, _TOP = 0.5, 5


def write_conventions(folder: Path, config: Configuration, description: Description, num_features: int) -> None:
    """Writes the files into ``folder``: labels if the classes' names are known. PaddleX's file is only for colours, and
    with two different sides only for squashed images. Neither it nor PaddleClas has anything else.
    """
    timm = json.dumps(timm_config(config, description, num_features), indent=2, ensure_ascii=False)
    (folder / TIMM).write_text(timm + "\n", encoding="utf-8")
    square = isinstance(config.DATA.IMAGE_SIZE, int)
    if pixel_mode(config) == "RGB" and (square or config.DATA.CROP_MODE == "squash"):
        paddlex = yaml.safe_dump(paddlex_config(config, description), sort_keys=False, allow_unicode=True)
        (folder / PADDLEX).write_text(paddlex, encoding="utf-8")
    if description.classes:
        (folder / LABELS).write_text("".join(f"{name}\n" for name in description.classes), encoding="utf-8")


def timm_config(config: Configuration, description: Description, num_features: int) -> dict[str, Any]:
    """Returns what ``timm.models.load_model_config_from_path`` and the Hub read (timm 1.0.31)."""
    data, classes = config.DATA, {"label_names": description.classes} if description.classes else {}
    return {
        "architecture": config.MODEL.NAME,
        "num_classes": config.MODEL.NUM_CLASSES,
        "num_features": num_features,
        **classes,
        "pretrained_cfg": {
            "input_size": [data.IMAGE_CHANNELS, *pair(data.IMAGE_SIZE)],
            "fixed_input_size": True,
            "interpolation": data.INTERPOLATION,
            "crop_pct": data.CROP_PCT,
            "crop_mode": data.CROP_MODE,
            "mean": _per_channel(config, data.IMAGENET_MEAN),
            "std": _per_channel(config, data.IMAGENET_STD),
            "num_classes": config.MODEL.NUM_CLASSES,
        },
    }


def paddlex_config(config: Configuration, description: Description) -> dict[str, Any]:
    """Returns what PaddleX 3 and the deployment of PaddleClas read: names of operations and their arguments.

    Both decode into RGB before the operations. ``backend`` pil is PaddleClas's for Pillow's filters.
    """
    data = config.DATA
    size = height, width = pair(data.IMAGE_SIZE)
    to = before_crop(size, data.CROP_PCT)
    squashed = data.CROP_MODE == "squash"
    resized: dict[str, Any] = {"size": [*to[::-1]]} if squashed else {"resize_short": to[0]}
    normalize = {"mean": _per_channel(config, data.IMAGENET_MEAN), "std": _per_channel(config, data.IMAGENET_STD)}
    normalize |= {"scale": 1 / 255, "order": "", "channel_num": 3}
    labels = {"label_list": description.classes} if description.classes else {}
    if description.task == "multilabel":
        post = {"MultiLabelThreshOutput": {"threshold": description.thresholds or _THRESHOLD, **labels}}
    else:
        post = {"Topk": {"topk": min(_TOP, config.MODEL.NUM_CLASSES), **labels}}
    shapes = {"images": [[batch, 3, height, width] for batch in (1, 1, 8)]}  # least, usual, most
    return {
        "Global": {"model_name": config.MODEL.NAME},
        "Hpi": {"backend_configs": {"paddle_infer": {"trt_dynamic_shapes": shapes}}},
        "PreProcess": {
            "transform_ops": [
                {"ResizeImage": {**resized, "interpolation": data.INTERPOLATION, "backend": "pil"}},
                {"CropImage": {"size": height if height == width else [width, height]}},
                {"NormalizeImage": normalize},
                {"ToCHWImage": None},
            ]
        },
        "PostProcess": post,
    }


def _per_channel(config: Configuration, values: list[float]) -> list[float]:
    return list(values) * (config.DATA.IMAGE_CHANNELS if len(values) == 1 else 1)
