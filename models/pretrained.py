"""What weights tell a configuration. timm's config.json beside them tells how images have to be
prepared and the model was built. The names of their tensors tell how their model computes.
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
from settings.options import Configuration, is_given, is_users, pair, size_text
from settings.plain import parsed_json
from weights import find_weights
from weights.adapters import find_adapter
from weights.formats import METADATA, files_of, read_metadata
from weights.hub import read_config
from weights.transformers import read_transformers

_SPARE = 16 << 20  # parameters; what is resized for larger images may have more than the file
_IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
# timm's: ours, and what timm 1.0.31 takes where a file has none, null or 0
_KEYS: dict[str, tuple[str, Any]] = {
    "crop_pct": ("DATA.CROP_PCT", 0.875),
    "crop_mode": ("DATA.CROP_MODE", "center"),
    "interpolation": ("DATA.INTERPOLATION", "bicubic"),
    "mean": ("DATA.IMAGENET_MEAN", _IMAGENET[0]),
    "std": ("DATA.IMAGENET_STD", _IMAGENET[1]),
}
_COUNTED = threading.Lock()
_create_parameter = nn.Layer.create_parameter


def build_described(config: Configuration, path: str | Path) -> ImageModel:
    """Builds the model of which the weights ``path`` tell by themselves, as ``build_model`` does.

    A few numbers in a small file could describe a model that takes all memory, and minutes to
    build.

    Raises:
        InputError: as ``build_model``, or the file is too small for so many parameters.
    """
    file = find_weights(path)
    total = 0
    own = threading.get_ident()
    # A parameter takes a byte or more, in a file that may be compressed.
    most = _SPARE + 2 * sum(one.stat().st_size for one in files_of(path))

    def counted(layer: nn.Layer, shape: Sequence[int], *rest: Any, **named: Any) -> paddle.Tensor:
        nonlocal total
        total += math.prod(shape) if threading.get_ident() == own else 0
        if total > most:
            raise InputError(
                f"{file}: it describes a model of more than {most:,} parameters, more than it holds"
            )
        return _create_parameter(layer, shape, *rest, **named)

    with _COUNTED:
        nn.Layer.create_parameter = counted  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return build_model(config)
        finally:
            nn.Layer.create_parameter = _create_parameter


def with_preprocessing(config: Configuration, alone: bool = False) -> Configuration:
    """Returns ``config`` with the crop, interpolation and normalisation of MODEL.PRETRAINED, where
    it sets none itself, and with what ``with_switches`` adds.

    Args:
        alone: the weights alone say what they are of. Their images' size and channels are taken as
            well. Shipped YAML files count for less than they, the user's options for more.

    Raises:
        InputError: the weights can't be read, or their config.json, or it holds what a
            configuration can't.
    """
    path = config.MODEL.PRETRAINED
    if not path:
        return config
    config = _with_orientation(with_switches(config, path), path)
    stored = read_config(path) or read_transformers(path).get("images", {})
    try:
        told = {
            key: value
            for key, value in _images(stored).items()
            if alone and not is_users(config, key)
        }
        told |= preprocessing(stored, told.get("DATA.IMAGE_CHANNELS", config.DATA.IMAGE_CHANNELS))
        size = told.get("DATA.IMAGE_SIZE", config.DATA.IMAGE_SIZE)
        built = (stored.get("model_args") or {}).get("img_size") or size
        if (
            alone
            and "WINDOW_SIZE" in config.MODEL
            and "DATA.IMAGE_SIZE" in told
            and pair(size) != pair(built)
        ):
            stay = f"its windows stay those of {size_text(built)} pixels (DATA.IMAGE_SIZE)"
            raise InputError(f"input_size is {size_text(size)}, but {stay}")
        has = is_users if alone else is_given
        values = {
            key.replace(".", "__"): value for key, value in told.items() if not has(config, key)
        }
        return with_values(config, "the weights' config.json", **values)
    except InputError as error:
        raise InputError(
            f"the config.json of {path}: {error}; with -o KEY VALUE yours is taken"
        ) from None


def _with_orientation(config: Configuration, path: str) -> Configuration:
    """Returns ``config`` with the DATA.EXIF_ORIENTATION of the run that saved the weights, if it
    was one of ours.
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
                told = parsed_json(text.encode())["values"].get(key) if text else None
            if told is not None:
                return with_values(
                    config, "the weights' description", DATA__EXIF_ORIENTATION=told is True
                )
    except InputError:
        # Loading the weights says what is wrong with them.
        return config
    return config


def disagreements(config: Configuration, stored: dict[str, Any]) -> Iterator[str]:
    """Yields a warning for each setting in which ``config`` and the weights' config.json
    (``stored``) differ.
    """
    for key, value in preprocessing(stored, config.DATA.IMAGE_CHANNELS).items():
        own = config[key.partition(".")[0]][key.partition(".")[2]]
        if own != value if isinstance(own, str) else not _is_close(own, value):
            yield f"warning: {key} is {own}, the weights were made for {value}"


def _is_close(own: Any, value: Any) -> bool:
    """Whether numbers agree; one serves all channels."""
    own = np.atleast_1d(own)
    value = np.atleast_1d(value)
    return len({len(own), len(value), 1}) <= 2 and np.allclose(own, value, atol=1e-6)


def preprocessing(stored: dict[str, Any], channels: int) -> dict[str, Any]:
    """Returns the keys of a configuration that the weights' config.json (``stored``) tells, by
    their dotted names.

    Args:
        channels: of the images.
    """
    file = "architecture" in stored
    wanted = {
        key: stored.get(name) or (default if file else None)
        for name, (key, default) in _KEYS.items()
    }
    wanted = {key: value for key, value in wanted.items() if value is not None}
    if channels == 1:  # grey is what the colours are on average
        for key in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):
            if key in wanted:
                wanted[key] = [float(np.mean(wanted[key]))]
    return wanted


def _images(stored: dict[str, Any]) -> dict[str, Any]:
    """The images that config.json tells of, if it does; of other sides than a square's both."""
    if not stored.get("input_size"):
        return {}
    channels, height, width = stored["input_size"]
    return {
        "DATA.IMAGE_CHANNELS": channels,
        "DATA.IMAGE_SIZE": height if height == width else [height, width],
    }
