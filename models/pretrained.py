"""Takes settings from weights into a configuration: how images are prepared, how a model is built.

They are in the config.json beside the weights, or follow from the names of the tensors.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from config import with_values
from errors import InputError, reading
from models import build_model, with_switches
from models.base import ImageModel
from settings.configuration import Configuration, is_given, is_users, pair, size_text
from settings.plain import parsed_json
from settings.tasks import answers_of
from weights import LoadReport, find_weights
from weights.adapters import find_adapter
from weights.fit import resampled_patches
from weights.formats import METADATA, files_of, read_metadata
from weights.hub import read_config
from weights.openclip import images_of, read_openclip
from weights.transformers import read_transformers

# Parameters that a model may have beyond those of its file: some are resized for larger images.
_SPARE = 16 << 20
_IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
# By timm's key: the key here, and timm 1.0.31's value for a file that has none, null or 0.
_KEYS: dict[str, tuple[str, Any]] = {
    "crop_pct": ("DATA.CROP_PCT", 0.875),
    "crop_mode": ("DATA.CROP_MODE", "center"),
    "interpolation": ("DATA.INTERPOLATION", "bicubic"),
    "mean": ("DATA.IMAGENET_MEAN", _IMAGENET[0]),
    "std": ("DATA.IMAGENET_STD", _IMAGENET[1]),
    "num_tokens": ("DATA.NUM_TOKENS", None),
}
# Held while ``nn.Layer.create_parameter`` is replaced.
_patch_lock = threading.Lock()
_create_parameter = nn.Layer.create_parameter


def build_described(config: Configuration, path: str | Path) -> ImageModel:
    """Builds the model that the weights ``path`` describe, as ``build_model`` does.

    A few numbers in a small file could describe a model that takes all memory, and minutes to
    build. The parameters are therefore counted as they are created.

    Raises:
        InputError: as ``build_model``, or the file is too small for so many parameters.
    """
    file = find_weights(path)
    total = 0
    thread = threading.get_ident()
    # A parameter takes a byte or more, in a file that may be compressed.
    limit = _SPARE + 2 * sum(part.stat().st_size for part in files_of(path))

    def create_counted(
        layer: nn.Layer, shape: Sequence[int], *args: Any, **kwargs: Any
    ) -> paddle.Tensor:
        nonlocal total
        if threading.get_ident() == thread:
            total += math.prod(shape)
        if total > limit:
            raise InputError(
                f"{file}: it describes a model of more than {limit:,} parameters, but doesn't"
                " have that many"
            )
        return _create_parameter(layer, shape, *args, **kwargs)

    with _patch_lock:
        nn.Layer.create_parameter = create_counted  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return build_model(config)
        finally:
            nn.Layer.create_parameter = _create_parameter


def with_preprocessing(config: Configuration, alone: bool = False) -> Configuration:
    """Returns ``config`` with the crop, interpolation and normalisation of MODEL.PRETRAINED, unless
    it sets them itself, and with the keys that ``with_switches`` adds.

    Args:
        alone: whether nothing but the weights describes the model. The size and channels of their
            images are then taken as well. The weights take precedence over shipped YAML files, and
            the user's options over the weights.

    Raises:
        InputError: the weights or their config.json can't be read, or hold values that a
            configuration can't have.
    """
    path = config.MODEL.PRETRAINED
    if not path:
        return config
    config = _with_orientation(with_switches(config, path), path)
    stored = read_config(path) or _images_of_others(path)
    try:
        values: dict[str, Any] = {}
        if alone:
            images = _images(stored)
            values = {key: images[key] for key in images if not is_users(config, key)}
        channels = values.get("DATA.IMAGE_CHANNELS", config.DATA.IMAGE_CHANNELS)
        values |= preprocessing(stored, channels, config.TASK)
        size = values.get("DATA.IMAGE_SIZE", config.DATA.IMAGE_SIZE)
        built_size = (stored.get("model_args") or {}).get("img_size") or size
        takes_size = alone and "DATA.IMAGE_SIZE" in values
        if takes_size and "WINDOW_SIZE" in config.MODEL and pair(size) != pair(built_size):
            stay = f"its windows stay those of {size_text(built_size)} pixels (DATA.IMAGE_SIZE)"
            raise InputError(f"input_size is {size_text(size)}, but {stay}")
        is_set = is_users if alone else is_given
        arguments = {
            key.replace(".", "__"): value
            for key, value in values.items()
            if not is_set(config, key)
        }
        return with_values(config, "the weights' config.json", **arguments)
    except InputError as error:
        raise InputError(
            f"the config.json of {path}: {error}; set the key by -o KEY VALUE"
        ) from None


def _images_of_others(path: str | Path) -> dict[str, Any]:
    """Returns how transformers or OpenCLIP prepare the images of weights, in timm's keys; {}: no
    file of theirs says it.
    """
    if stored := read_transformers(path):
        return stored["images"]
    openclip = read_openclip(path)
    return images_of(openclip) if openclip else {}


def _with_orientation(config: Configuration, path: str) -> Configuration:
    """Returns ``config`` with the DATA.EXIF_ORIENTATION of the run of this toolkit that saved the
    weights, if one did.
    """
    key = "DATA.EXIF_ORIENTATION"
    # DALI rotates no image.
    if is_given(config, key) or config.DATA.LOADER == "dali":
        return config
    adapter = config.MODEL.PRETRAINED_ADAPTER
    try:
        files = [find_adapter(adapter)] if adapter else []
        for file in [*files, find_weights(path)]:
            with reading(file, "weights that describe themselves"):
                text = read_metadata(file).get(METADATA)
                value = parsed_json(text.encode())["values"].get(key) if text else None
            if value is not None:
                return with_values(
                    config, "the weights' description", DATA__EXIF_ORIENTATION=value is True
                )
    except InputError:
        # Loading the weights will report the problem.
        return config
    return config


def disagreements(config: Configuration, stored: dict[str, Any]) -> Iterator[str]:
    """Yields a warning for each setting in which ``config`` and the weights' config.json
    (``stored``) differ.
    """
    settings = preprocessing(stored, config.DATA.IMAGE_CHANNELS, config.TASK)
    for key, value in settings.items():
        section, _, name = key.partition(".")
        current = config[section][name]
        is_plain = current is None or isinstance(current, str)
        same = current == value if is_plain else _is_close(current, value)
        if not same:
            yield f"warning: {key} is {current}, the weights were made for {value}"


def patch_size_warning(config: Configuration, report: LoadReport) -> str:
    """Returns a warning if weights are evaluated with patches of another size than they were trained
    with, else "". FlexiViT's were trained with many sizes (Beyer et al. 2022, arXiv:2212.08013), and
    so were those with MODEL.PATCH_SIZES.

    Args:
        report: what ``load_weights`` returned for the weights.
    """
    sizes = resampled_patches(report.resized)
    names = (config.MODEL.NAME, report.config.get("architecture"))
    is_flexible = any(str(name).startswith("flexivit") for name in names)
    if sizes is None or is_flexible or config.MODEL.get("PATCH_SIZES"):
        return ""
    trained, current = sizes
    return (
        f"the model has patches of {current} pixels, its weights were trained with {trained}: without"
        " fine-tuning, accuracy drops a lot; keep MODEL.PATCH_SIZE, or"
        " fine-tune with the new one"
    )


def _is_close(first: Any, second: Any) -> bool:
    """Returns whether numbers agree; a single number stands for all channels."""
    first = np.atleast_1d(first)
    second = np.atleast_1d(second)
    return len({len(first), len(second), 1}) <= 2 and np.allclose(first, second, atol=1e-6)


def preprocessing(stored: dict[str, Any], channels: int, task: str) -> dict[str, Any]:
    """Returns the preprocessing in the weights' config.json (``stored``), by dotted keys.

    Args:
        channels: channels of the images.
        task: a task of masks evaluates whole images, so the weights' crop doesn't count.
    """
    # timm's defaults hold only for a config.json of timm.
    is_timm = "architecture" in stored
    values: dict[str, Any] = {}
    for name, (key, default) in _KEYS.items():
        value = stored.get(name) or (default if is_timm else None)
        if value is not None:
            values[key] = value
    if answers_of(task) == "pixels":
        values.pop("DATA.CROP_PCT", None)
        values.pop("DATA.CROP_MODE", None)
        values.pop("DATA.NUM_TOKENS", None)
    if channels == 1:
        # A grey image is normalised by the average of the colours.
        for key in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):
            if key in values:
                values[key] = [float(np.mean(values[key]))]
    return values


def _images(stored: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of the images' channels and size in config.json, if it has them."""
    if not stored.get("input_size"):
        return {}
    channels, height, width = stored["input_size"]
    return {
        "DATA.IMAGE_CHANNELS": channels,
        "DATA.IMAGE_SIZE": height if height == width else [height, width],
    }
