"""The settings of a training that can be published: without paths of this machine."""

import os
from typing import Any

from config import default_values
from settings.configuration import Configuration, leaves
from weights.hub import HUB_PREFIXES

TRAINING = "training.yaml"
# Keys of one run or one machine, which say nothing of the recipe.
_OF_A_RUN = {
    "DATA.CACHE",
    "DATA.DATA_PATH",
    "EVAL",
    "MODEL.RESUME",
    "OUTPUT",
    "REPORT",
    "TRACKERS",
}


def recipe(config: Configuration) -> dict[str, tuple[Any, Any]]:
    """Returns (default, value) of each key that isn't at its default, by dotted key.

    Of a path to a file of this machine only the file's own name is given.
    """
    default = default_values(config)
    return {
        key: (default[key], _without_folder(value))
        for key, value in leaves(config)
        if value != default[key] and key not in _OF_A_RUN
    }


def _without_folder(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_without_folder(each) for each in value]
    is_path = isinstance(value, str) and os.sep in value and not value.startswith(HUB_PREFIXES)
    return os.path.basename(os.path.normpath(value)) if is_path else value


def training_yaml(config: Configuration) -> dict[str, Any]:
    """Returns the tree of a YAML file that ``-cfg`` takes, with the keys of ``recipe``."""
    tree: dict[str, Any] = {}
    for key, (_, value) in recipe(config).items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree
