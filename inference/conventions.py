"""Writes the files of an export that other toolkits read: timm's config.json, and labels.txt."""

import json
from pathlib import Path
from typing import Any

from settings.configuration import Configuration, pair
from training.checkpoint import Description

TIMM = "config.json"
LABELS = "labels.txt"


def write_conventions(
    folder: Path, config: Configuration, description: Description, num_features: int
) -> None:
    """Writes the files into ``folder``. LABELS is left out if the classes' names aren't known.

    Args:
        num_features: the number of features that the classifier reads.
    """
    content = timm_config(config, description, num_features)
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (folder / TIMM).write_text(f"{text}\n", encoding="utf-8")
    if description.classes:
        lines = "".join(f"{name}\n" for name in description.classes)
        (folder / LABELS).write_text(lines, encoding="utf-8")


def timm_config(
    config: Configuration, description: Description, num_features: int
) -> dict[str, Any]:
    """Returns the content of timm's config.json, as ``timm.models.load_model_config_from_path`` and
    the Hub read it (timm 1.0.31).
    """
    data = config.DATA
    content: dict[str, Any] = {
        "architecture": config.MODEL.NAME,
        "num_classes": config.MODEL.NUM_CLASSES,
        "num_features": num_features,
    }
    if description.classes:
        content["label_names"] = description.classes
    content["pretrained_cfg"] = {
        "input_size": [data.IMAGE_CHANNELS, *pair(data.IMAGE_SIZE)],
        "fixed_input_size": True,
        "interpolation": data.INTERPOLATION,
        "crop_pct": data.CROP_PCT,
        "crop_mode": data.CROP_MODE,
        "mean": _per_channel(config, data.IMAGENET_MEAN),
        "std": _per_channel(config, data.IMAGENET_STD),
        "num_classes": config.MODEL.NUM_CLASSES,
    }
    return content


def _per_channel(config: Configuration, values: list[float]) -> list[float]:
    """Returns a value for each channel. A single one stands for all."""
    if len(values) == 1:
        return list(values) * config.DATA.IMAGE_CHANNELS
    return list(values)
