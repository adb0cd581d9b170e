"""Models by name: a YAML file under configs/ is the variant, a class here the architecture."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config import default_values, get_config, model_files, shipped_model, with_values
from configs.names import instead, matches
from errors import InputError, reading
from models.base import ARCHITECTURES, ImageModel
from models.timm_arguments import with_arguments
from models.transformers_settings import with_settings
from options import Configuration, add_note, explicit_sources
from utils import within_memory
from weights import load_weights
from weights.formats import read_weights
from weights.names import has_switches, switches


def build_model(config: Configuration, **arguments: Any) -> ImageModel:
    """Builds the model of a configuration, with fresh weights.

    Args:
        arguments: of the constructor, instead of the configuration's: ``image_size=(224, 160)``.

    Raises:
        InputError: sizes that don't fit together, or an unresolved NUM_CLASSES.
        MemoryError: the machine hasn't got the memory.
    """
    model, kind = config.MODEL, architecture(config)
    if model.NUM_CLASSES == "auto":
        raise InputError("MODEL.NUM_CLASSES is 'auto' where no dataset tells it; give a number")
    values: dict[str, Any] = {"image_size": config.DATA.IMAGE_SIZE, "in_channels": config.DATA.IMAGE_CHANNELS}
    values |= {name: model[name.upper()] for name in inspect.signature(kind).parameters if name not in values}
    with within_memory():
        return kind(**values | arguments)


def architecture(config: Configuration) -> type[ImageModel]:
    """Returns the class that MODEL.TYPE names, in any case."""
    return ARCHITECTURES[config.MODEL.TYPE.lower()]


def list_models(pattern: str | Sequence[str] = "*") -> list[str]:
    """Returns the names of the shipped models, sorted, that match a shell pattern, or one of several, in any case.

    What timm or PaddleViT calls a model may match, too. Files of configs/recipes/ train these models; they are no
    models of their own.

    Args:
        pattern: ``vit_*_384``, ``["deit_*", "*beit*"]``.
    """
    patterns = [pattern] if isinstance(pattern, str) else pattern
    return [file.stem for file in model_files() if any(matches(file, one) for one in patterns)]


def with_switches(config: Configuration, path: str | Path) -> Configuration:
    """Returns ``config`` with the keys of MODEL that the weights tell, unless somebody set them. Their config.json
    tells some (``with_arguments`` for timm's, ``with_settings`` for transformers'), the names of their tensors others.

    These are keys that change what a model computes, but none of its tensors' shapes (``weights.names.switches``). A
    note tells of each. Where the configuration has another value, ``load_weights`` refuses or tells it.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: the weights can't be read, or config.json tells what no model here computes.
    """
    config, kind = with_settings(with_arguments(config, path), path), architecture(config)
    if not has_switches(kind.weight_names):
        return config
    default, found = default_values(config), explicit_sources(config)
    stored = read_weights(path)
    with reading(stored.path, "weights of this model"):
        told = switches(kind.weight_names, stored.arrays)
    for key, value in told.items():
        if f"MODEL.{key}" not in found and config.MODEL[key] == default[f"MODEL.{key}"] != value:
            config = with_values(config, "the names in the weights", **{f"MODEL__{key}": value})
            add_note(config, f"MODEL.{key} {value}, as the names in {path} tell")
    return config


def create_model(name: str, pretrained: str | None = None, **overrides: Any) -> ImageModel:
    """Builds a shipped model by name.

    Args:
        name: one of ``list_models()``, or what timm or PaddleViT calls it.
        pretrained: weights to load; they have to fit, as for an evaluation (``load_weights(..., strict=False)`` for
            another number of classes).
        overrides: keys of MODEL, or IMAGE_SIZE and IMAGE_CHANNELS of DATA, in lower case: ``num_classes=10``. An
            image_size may be (height, width) here.

    Raises:
        InputError: an unknown name or key, or weights that don't fit.
    """
    if shipped_model(name) is None:
        raise InputError(f"no model {name}{instead(name, model_files())}")
    images = {"image_size": "image_size", "image_channels": "in_channels"}
    arguments = {images[key]: overrides.pop(key) for key in tuple(overrides) if key in images}
    options = []
    for key, value in overrides.items():
        options += [f"MODEL.{key.upper()}", value]
    config = get_config(name, options)
    if pretrained is None:
        return build_model(config, **arguments)
    model = build_model(with_switches(config, pretrained), **arguments)
    load_weights(model, pretrained, classes=config.MODEL.PRETRAINED_CLASSES)
    return model
