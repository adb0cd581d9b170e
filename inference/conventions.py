"""What describes an exported model in the files that other toolkits read: labels and timm's
config.json.
"""

import json
from pathlib import Path
from typing import Any

from settings.options import Configuration, pair
from training.checkpoint import Description

TIMM = "config.json"
LABELS = "labels.txt"


def write_conventions(
    folder: Path, config: Configuration, description: Description, num_features: int
) -> None:
    """Writes the files into ``folder``: labels if the classes' names are known."""
    timm = json.dumps(timm_config(config, description, num_features), indent=2, ensure_ascii=False)
    (folder / TIMM).write_text(timm + "\n", encoding="utf-8")
    if description.classes:
        (folder / LABELS).write_text(
            "".join(f"{name}\n" for name in description.classes), encoding="utf-8"
        )


def timm_config(
    config: Configuration, description: Description, num_features: int
) -> dict[str, Any]:
    """Returns what ``timm.models.load_model_config_from_path`` and the Hub read (timm 1.0.31)."""
    data = config.DATA
    classes = {"label_names": description.classes} if description.classes else {}
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


def _per_channel(config: Configuration, values: list[float]) -> list[float]:
    return list(values) * (config.DATA.IMAGE_CHANNELS if len(values) == 1 else 1)
