"""Chooses a model, a recipe and the settings of the data, where the command line names a dataset but
no -cfg.

docs/start/choose.md has the table. Each choice is an option that a flag or -o overrides, and a line
of the log.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from errors import InputError, printable, reading
from launch import launchers
from launch.devices import num_cores, num_gpus_of_paddle
from loading.csv_tables import table_layout
from loading.layout import validation_files
from loading.recognise import Layout, count_training_images, recognise
from settings.configuration import Configuration, Option, is_users
from settings.merging import shipped_configs, shipped_model
from settings.plain import parsed_json, whole_file
from settings.registry import datasets
from settings.tasks import columns_of, dataset_columns

# From so many images on, a model is trained by its own recipe for ImageNet, not by one for small
# datasets. It is also the largest number to which images are counted.
LARGE = 100_000
# The share of the training images that validate where the data has no validation images.
VAL_SPLIT = 0.2
# The fewest updates in an epoch, for which the recipe's batch is made smaller.
_UPDATES = 8
# In bytes, of a config.json.
_LONGEST_CONFIG = 4 << 20
# Models for training from random weights.
_ON_GPU = "vit_small_patch16_224"
_ON_CPU = "vit_tiny_patch16_224"
_IMAGENET = "deit_small_patch16_224"


class Plan(NamedTuple):
    """What is chosen for a dataset.

    Attributes:
        files: configurations, by the names of their files; later ones override earlier ones.
        options: values of keys over these files. Flags and -o override them.
        notes: lines of the log, one for each choice.
        images: the number of training images; at most LARGE. 0: they weren't counted.
    """

    files: tuple[str, ...]
    options: list[Option]
    notes: list[str]
    images: int = 0


def data_options(asked: Mapping[str, Any], is_evaluation: bool) -> tuple[Layout, Plan]:
    """Returns the layout of the dataset in -data_path, and the settings that it needs.

    Args:
        asked: the values of flags and -o by dotted key. DATA.DATA_PATH is one of them.

    Raises:
        InputError: no dataset was recognised there.
    """
    path = str(asked["DATA.DATA_PATH"])
    options: list[Option] = []
    notes: list[str] = []
    if name := asked.get("DATA.DATASET"):
        layout = Layout(str(name), path, "-dataset")
    else:
        layout = recognise(path)
        options.append(Option("DATA.DATASET", layout.dataset, "what the data's folder contains"))
        notes.append(f"dataset: {layout.dataset}, because {layout.reason} (-dataset changes it)")
    inner = _inner_folder(layout, path)
    options += inner.options
    notes += inner.notes
    splits = asked.keys() & {"DATA.VAL_SPLIT", "DATA.FOLDS"}
    if not (is_evaluation or splits) and _lacks_validation(layout):
        options.append(Option("DATA.VAL_SPLIT", VAL_SPLIT, "the data has no validation images"))
        notes.append(
            f"validation: {VAL_SPLIT:.0%} of the images, because the data has no validation images"
            " (DATA.VAL_SPLIT changes it)"
        )
    return layout, Plan((), options, notes)


def data_of_recipe(config: Configuration, asked: Mapping[str, Any]) -> Plan:
    """Returns the settings of the dataset in -data_path, for a model and a recipe that were named.

    Without DATA.DATASET they are for lists as PaddleViT has them (imagenet2012). If the folder has
    such lists, nothing is changed.

    Raises:
        InputError: no dataset was recognised there.
    """
    layout, plan = data_options(asked, config.EVAL)
    if layout.dataset == config.DATA.DATASET and layout.path == config.DATA.DATA_PATH:
        return Plan((), [], [])
    has_labels = "labels" in columns_of(config.TASK)
    if has_labels and not (config.EVAL or is_users(config, "MODEL.NUM_CLASSES")):
        plan.options.append(Option("MODEL.NUM_CLASSES", "auto", "the classes are the data's"))
    return plan


def data_of_run(config: Configuration, asked: Mapping[str, Any]) -> Plan:
    """Returns the folder of the data, for a run whose own configuration says all the rest.

    A run is resumed by the command that started it: -data_path may name the folder around the data.
    """
    path = str(asked["DATA.DATA_PATH"])
    if "DATA.DATASET" in asked or not os.path.isdir(path):
        return Plan((), [], [])
    try:
        layout = recognise(path)
    except InputError:
        # The run's reader says better what it expects.
        return Plan((), [], [])
    if layout.dataset != config.DATA.DATASET:
        return Plan((), [], [])
    return _inner_folder(layout, path)


def _inner_folder(layout: Layout, path: str) -> Plan:
    """Returns DATA.DATA_PATH, where a dataset was found in the only folder in -data_path."""
    if layout.path == path:
        return Plan((), [], [])
    option = Option("DATA.DATA_PATH", layout.path, "the only folder in -data_path")
    note = (
        f"data folder: {layout.path}, the only folder in {printable(path)} (-data_path changes it)"
    )
    return Plan((), [option], [note])


def _lacks_validation(layout: Layout) -> bool:
    component = datasets.components.get(layout.dataset)
    if component is None or "val" not in component.given:
        return False
    if layout.dataset == "csv":
        table = table_layout(Path(layout.path))
        if table and table.has_split:
            return False
    return not validation_files(layout.dataset, layout.path)


def choose(asked: Mapping[str, Any], is_evaluation: bool) -> Plan:
    """Returns the model, the recipe and the settings for a dataset.

    Args:
        asked: the values of flags and -o by dotted key. DATA.DATA_PATH is one of them.

    Raises:
        InputError: no dataset was recognised, or the weights don't say which model they are of.
    """
    layout, of_data = data_options(asked, is_evaluation)
    options = of_data.options
    notes = of_data.notes
    weights = asked.get("MODEL.PRETRAINED")
    model = _model_of(str(weights)) if weights else ""
    if is_evaluation:
        if not model:
            raise InputError("-eval needs -pretrained=WEIGHTS, or -cfg, the model")
        notes.append(f"model: {model}, which the weights are of (-cfg changes it)")
        return Plan((model,), options, notes)
    images = count_training_images(layout, LARGE)
    task = datasets.components[layout.dataset].given.get("task", "classification")
    has_labels = "labels" in dataset_columns(layout.dataset)
    if "TASK" in asked:
        task = str(asked["TASK"])
    elif "DATA.LABEL_SEPARATOR" in asked or str(asked.get("DATA.LABEL_COLUMN")).startswith("["):
        task = "multilabel"
    if task == "segmentation":
        files: tuple[str, ...] = ("segformer_shapes",)
        reason = "the data has masks"
    elif not has_labels:
        files, reason = _unlabelled(model, images)
    else:
        files, reason = _labelled(model, images)
        if task == "multilabel":
            options.append(Option("TASK", "multilabel", "the data has several labels an image"))
    if (has_labels or task == "segmentation") and "MODEL.NUM_CLASSES" not in asked:
        options.append(Option("MODEL.NUM_CLASSES", "auto", "the classes are the data's"))
        notes.append("classes: those of the data (MODEL.NUM_CLASSES changes their number)")
    notes.append(f"model and recipe: {' with '.join(files)}, for {reason} (-cfg changes it)")
    return Plan(files, options, notes, images)


def _labelled(model: str, images: int) -> tuple[tuple[str, ...], str]:
    """Returns the files for images with labels, and the reason in words.

    Args:
        model: of the weights; "": there are none.
    """
    count = _counted(images)
    if model:
        return _with_recipe(model, "finetune"), f"{count} and weights of {model}"
    if images >= LARGE:
        return (_IMAGENET,), f"{count} without weights"
    if num_gpus_of_paddle():
        return _with_recipe(_ON_GPU, "small_data"), f"{count} on a GPU, without weights"
    return _with_recipe(_ON_CPU, "small_data"), f"{count} on a CPU, without weights"


def _unlabelled(model: str, images: int) -> tuple[tuple[str, ...], str]:
    """Returns the files for images without labels, as ``_labelled``."""
    count = f"{_counted(images)} without labels"
    if model:
        name = f"continue_dino_{model}"
        if not shipped_configs(name):
            known = ", ".join(
                file.stem.removeprefix("continue_dino_")
                for file in shipped_configs("continue_dino_*")
            )
            raise InputError(
                f"the images have no labels, and there is no recipe for continuing the pre-training"
                f" of {model}; expected weights of {known}; or pass -cfg"
            )
        return (name,), f"{count} and weights of {model}"
    if images >= LARGE:
        return ("mae_vit_base_patch16_224",), count
    return ("small_data_mae_vit_small_patch16_224",), count


def _with_recipe(model: str, recipe: str) -> tuple[str, ...]:
    """Returns a file of a model and a recipe, if one is shipped, or the two."""
    name = f"{recipe}_{model}"
    return (name,) if shipped_configs(name) else (model, recipe)


def _counted(images: int) -> str:
    if images >= LARGE:
        return f"{LARGE:,} images or more"
    return "1 image" if images == 1 else f"{images:,} images"


def _model_of(weights: str) -> str:
    """Returns the name of the model that weights are of.

    Raises:
        InputError: they don't say.
    """
    if weights.startswith(("hf-hub:", "hf_hub:")):
        name = weights.rpartition("/")[2].partition("@")[0]
        # Others' repositories may have timm's name with a tag of their own.
        if shipped_model(name) is None:
            name = name.partition(".")[0]
    else:
        name = _architecture(Path(weights) / "config.json")
    model = shipped_model(name) if name else None
    if model is None:
        raise InputError(
            f"-pretrained={printable(weights)} doesn't say which model it is of; pass -cfg, the"
            " model (python tools/list_models.py lists them)"
        )
    return model


def _architecture(file: Path) -> str:
    """Returns the architecture in timm's config.json; "" if there is no such file or entry.

    ``weights.hub.read_config`` reads it, too, but imports Paddle.
    """
    if not file.is_file():
        return ""
    with reading(file, "a configuration of timm's"):
        content = parsed_json(whole_file(file, _LONGEST_CONFIG))
    name = content.get("architecture") if isinstance(content, dict) else None
    return name if isinstance(name, str) else ""


def smaller_batch(
    config: Configuration, images: int, processes: int
) -> tuple[list[Option], list[str]]:
    """Returns a smaller DATA.BATCH_SIZE as an option, and the line of the log about it. There are none
    if the recipe's fits.

    A dataset of few images gets at least ``_UPDATES`` updates an epoch, so that the number of
    updates is that of a training.

    Args:
        images: training images, with those that DATA.VAL_SPLIT takes.
        processes: that will train.
    """
    share = 1 - (config.DATA.VAL_SPLIT or 0)
    most = int(images * share) // _UPDATES // (processes * config.TRAIN.ACCUM_ITER)
    size = 1 << max(most, 1).bit_length() - 1
    if config.DATA.GLOBAL_BATCH is not None or size >= config.DATA.BATCH_SIZE:
        return [], []
    option = Option("DATA.BATCH_SIZE", size, f"{_UPDATES} updates an epoch")
    note = (
        f"batch size: {size} per device, for at least {_UPDATES} updates an epoch (-batch_size"
        " changes it)"
    )
    return [option], [note]


def num_processes(config: Configuration) -> int:
    """Returns the number of processes that will train, before Paddle is imported."""
    if launchers.is_launched():
        return int(os.environ["PADDLE_TRAINERS_NUM"])
    if config.NGPUS > 0:
        return config.NGPUS
    return num_gpus_of_paddle() or num_cores()
