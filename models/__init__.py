"""Builds models by name. Each architecture is a class of this package; each variant a YAML file of
configs/.
"""

import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from config import (
    default_values,
    get_config,
    model_files,
    segmentation_files,
    shipped_model,
    with_values,
)
from errors import InputError, reading
from models.base import ARCHITECTURES, ImageModel
from models.timm_arguments import from_timm_names, with_timm_arguments
from models.transformers_arguments import with_transformers_arguments
from models.transformers_heads import with_head_arguments
from settings.configuration import Configuration, add_note, explicit_sources
from settings.names import hub_weights, instead, matches, matching_file
from utils import within_memory
from weights import load_weights
from weights.formats import open_weights
from weights.hub import read_config
from weights.names import encoder_arrays, has_switches, switches


def build_model(config: Configuration, **arguments: Any) -> Any:
    """Builds the model of a configuration, with fresh weights.

    With a HEAD it is a ``models.heads.network.SegmentationModel``, otherwise an ``ImageModel``.

    Args:
        arguments: arguments of the constructor that replace those of the configuration:
            ``image_size=(224, 160)``.

    Raises:
        InputError: sizes that don't fit together, or an unresolved NUM_CLASSES.
        MemoryError: the machine doesn't have the memory.
    """
    model_class = architecture(config)
    if config.MODEL.NUM_CLASSES == "auto":
        raise InputError(
            "MODEL.NUM_CLASSES is 'auto', but there is no dataset to determine it; set a number"
        )
    values: dict[str, Any] = {
        "image_size": config.DATA.IMAGE_SIZE,
        "in_channels": config.DATA.IMAGE_CHANNELS,
    }
    for name in inspect.signature(model_class).parameters:
        if name not in values:
            values[name] = config.MODEL[name.upper()]
    if config.HEAD.NAME is not None:
        values["num_classes"] = 0
    with within_memory():
        model = model_class(**values | arguments)
        if config.HEAD.NAME is None:
            return model
        # Most programs build no such model, and needn't import the heads.
        from models.heads.network import add_head

        return add_head(config, model)


def architecture(config: Configuration) -> type[ImageModel]:
    """Returns the class that MODEL.TYPE names, in any case."""
    return ARCHITECTURES[config.MODEL.TYPE.lower()]


def list_models(
    pattern: str | Sequence[str] = "*",
    task: Literal["classification", "segmentation"] = "classification",
) -> list[str]:
    """Returns the sorted names of the shipped models that match a shell pattern, or one of several.

    Case doesn't matter. The names of timm and PaddleViT for a model match, too. The files of
    configs/recipes/ and configs/pretrain/ train these models and aren't models of their own.

    Args:
        pattern: ``"vit_*_384"``, ``["deit_*", "*beit*"]``.
        task: "segmentation": those with a head for a class of each pixel, in configs/segmentation/.

    Raises:
        InputError: there are no models of such a task.
    """
    files = {"classification": model_files, "segmentation": segmentation_files}
    if task not in files:
        raise InputError(f"task is {task!r}, expected {' or '.join(files)}")
    patterns = [pattern] if isinstance(pattern, str) else pattern
    return [
        file.stem for file in files[task]() if any(matches(file, pattern) for pattern in patterns)
    ]


def with_switches(config: Configuration, path: str | Path) -> Configuration:
    """Returns ``config`` with the keys of MODEL that the weights determine, unless somebody set
    them.

    These are keys that change what a model computes, but no shape of its tensors
    (``weights.names.switches``). Some are in the config.json beside the weights
    (``with_timm_arguments``, ``with_transformers_arguments``,
    ``with_head_arguments``). Others follow from the names of the
    tensors. A note reports each. If somebody set another value, ``load_weights`` refuses the
    weights or reports the difference.

    Args:
        path: the weights, as ``find_weights`` takes them.

    Raises:
        InputError: the weights can't be read, or config.json describes a model that can't be built
            here.
    """
    config = with_timm_arguments(config, path)
    config = with_transformers_arguments(config, path)
    config = with_head_arguments(config, path)
    names = architecture(config).weight_names
    if not has_switches(names):
        return config
    default = default_values(config)
    explicit = explicit_sources(config)
    with open_weights(path) as stored, reading(stored.path, "weights of this model"):
        arrays, _ = encoder_arrays(stored.arrays)
        values = switches(names, arrays)
    for key, value in values.items():
        dotted = f"MODEL.{key}"
        if dotted not in explicit and config.MODEL[key] == default[dotted] != value:
            config = with_values(config, "the names in the weights", **{f"MODEL__{key}": value})
            add_note(config, f"MODEL.{key} {value}, according to the names in {path}")
    return config


def create_model(
    name: str, pretrained: str | Path | bool | None = None, **overrides: Any
) -> ImageModel:
    """Builds a shipped model by name.

    Args:
        name: one of ``list_models()`` or of ``list_models(task="segmentation")``, or the model's
            name in timm or PaddleViT.
        pretrained: weights to load, which have to fit. True: timm's weights of this name and tag,
            from the Hugging Face Hub or its cache (HF_HOME). If ``num_classes`` differs from their
            number of classes, the classifier is new, and a warning says so.
        overrides: keys of MODEL, or IMAGE_SIZE and IMAGE_CHANNELS of DATA, in lower case:
            ``num_classes=10``. An image_size may be (height, width) here. timm's names are accepted
            for the same thing: ``in_chans``, ``img_size``, ``drop_path_rate``, ``checkpoint_path``.

    Raises:
        InputError: an unknown name or key, or weights that can't be read or don't fit.
    """
    if not isinstance(name, str):
        raise InputError(f"the model's name is {name!r}, expected a string")
    if shipped_model(name) is None and name not in list_models(task="segmentation"):
        files = [*model_files(), *segmentation_files()]
        raise InputError(f"no model {name}{instead(name, files)}")
    path = overrides.pop("checkpoint_path", None)
    if not isinstance(pretrained, str | Path | bool | None):
        raise InputError(f"pretrained is {pretrained!r}, expected True, False or weights")
    if path and pretrained:
        raise InputError(
            f"checkpoint_path is {path}, and pretrained is {pretrained}; pass only one of the two"
        )
    if pretrained is True:
        path = hub_weights(name, matching_file(name, model_files()))
    elif pretrained:
        path = str(pretrained)
    overrides = from_timm_names(get_config(name).MODEL.TYPE, overrides)
    # None is timm's default and leaves the number as it is.
    if overrides.get("num_classes", 0) is None:
        del overrides["num_classes"]
    classes_named = "num_classes" in overrides
    if pretrained is True and not classes_named:
        timm_config = read_config(path)
        if "num_classes" in timm_config:
            overrides["num_classes"] = timm_config["num_classes"]
    arguments = {}
    if "image_channels" in overrides:
        channels = overrides.pop("image_channels")
        if type(channels) is not int or channels < 1:
            raise InputError(f"image_channels is {channels!r}, expected a number of at least 1")
        arguments["in_channels"] = channels
    options = []
    for key, value in overrides.items():
        section = "DATA" if key == "image_size" else "MODEL"
        value = list(value) if isinstance(value, tuple) else value
        options += [f"{section}.{key.upper()}", value]
    config = get_config(name, options)
    if not path:
        return build_model(config, **arguments)
    model = build_model(with_switches(config, path), **arguments)
    allow = None
    if config.MODEL.NUM_CLASSES == 0:
        # The model has no classifier, so the file's is left out.
        allow = [f"{layer}.*" for layer in model.classifier_names()]
    report = load_weights(
        model, path, strict=not classes_named, allow=allow, classes=config.MODEL.PRETRAINED_CLASSES
    )
    if report.fresh:
        warnings.warn(
            f"{', '.join(report.fresh)} are new: {report.reason} ({report.file})", stacklevel=2
        )
    return model
