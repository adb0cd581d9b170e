"""Writes a classifier that a text tower made, as weights that every command takes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from config import default_values, get_config
from datasets import get_dataset
from errors import printable
from inference.predictor import Predictor
from inference.run_data import data_config, data_keys
from launch.files import making_folder, writing_whole
from training.checkpoint import describe
from training.checkpoint.description import METADATA
from training.command_line import FILE
from weights import file_arrays
from weights.formats import write_weights
from weights.hub import IN_FOLDER

# Of the training that may start from the classifier.
_RECIPE = "finetune"


def classes_of_data(data: Sequence[tuple[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """Returns the names of a dataset's classes, in their order, and all keys that name it.

    Args:
        data: keys that name it, and their values. Without DATA.DATASET it is a folder.

    Raises:
        InputError: it can't be read.
    """
    words = data_keys(None, data, "the classes' names are read from a dataset")
    config = data_config(get_config(None), words)
    classes = list(get_dataset(config, "val", alone=True).classes)
    return classes, dict(zip(words[::2], words[1::2], strict=True))


def write_classifier(
    path: str | Path,
    classes: Sequence[str],
    templates: Sequence[str],
    output: Path,
    cfg: str | None = None,
    options: Sequence[Any] = (),
    data: Mapping[str, Any] | None = None,
) -> Predictor:
    """Writes an image tower with a classifier of texts into a new folder, whole or not at all.

    The folder has the weights with their description, and a config.yaml for -eval and
    training.

    Args:
        path, classes, templates, cfg, options: as for ``Predictor``.
        data: keys of the dataset that the classes are of, and their values; they become those of
            config.yaml.

    Returns:
        the classifier.

    Raises:
        InputError: as ``Predictor``, or the weights have no text tower.
    """
    predictor = Predictor(path, cfg, options, classes, templates=templates)
    predictor.check_text_tower()
    assert predictor.model is not None
    description = describe(predictor.config, predictor.classes, predictor.task)
    defaults = default_values(predictor.config)
    settings: dict[str, Any] = {"BASE": _RECIPE}
    if predictor.task != defaults["TASK"]:
        settings["TASK"] = predictor.task
    keys = {key: value for key, value in description.values.items() if value != defaults[key]}
    # What names the architecture is there in any case.
    keys |= {key: description.values[key] for key in ("MODEL.TYPE", "MODEL.NAME")}
    for key, value in (keys | dict(data or {})).items():
        section, _, name = key.partition(".")
        settings.setdefault(section, {})[name] = value
    with making_folder(output) as folder:
        arrays = file_arrays(predictor.model)
        write_weights(folder / IN_FOLDER[0], arrays, {METADATA: description.to_json()})
        with writing_whole(folder / FILE) as file:
            file.write(f"# A classifier of texts, made of {printable(str(path))}.\n")
            yaml.safe_dump(settings, file, allow_unicode=True, sort_keys=False)
    return predictor
