"""What weights tell a configuration: timm's config.json beside them how images have to be prepared, and the names of
their tensors how their model computes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from config import with_values
from errors import InputError
from models import with_switches
from options import Configuration, is_given
from weights.hub import read_config

_KEYS = {  # timm's: ours
    "crop_pct": "DATA.CROP_PCT",
    "crop_mode": "DATA.CROP_MODE",
    "interpolation": "DATA.INTERPOLATION",
    "mean": "DATA.IMAGENET_MEAN",
    "std": "DATA.IMAGENET_STD",
}


def with_preprocessing(config: Configuration) -> Configuration:
    """Returns ``config`` with the crop, interpolation and normalisation of MODEL.PRETRAINED, where it sets none itself,
    and with what ``with_switches`` adds.

    Raises:
        InputError: the weights can't be read, or their config.json, or it holds what a configuration can't.
    """
    if not config.MODEL.PRETRAINED:
        return config
    config = with_switches(config, config.MODEL.PRETRAINED)
    found = preprocessing(config, read_config(config.MODEL.PRETRAINED))
    try:
        told = {key.replace(".", "__"): value for key, value in found.items() if not is_given(config, key)}
        return with_values(config, "the weights' config.json", **told)
    except InputError as error:
        raise InputError(
            f"the config.json of {config.MODEL.PRETRAINED}: {error}; with -o KEY VALUE yours is taken"
        ) from None


def disagreements(config: Configuration, stored: dict[str, Any]) -> Iterator[str]:
    """Yields a warning for each setting in which ``config`` and the weights' config.json (``stored``) differ."""
    for key, value in preprocessing(config, stored).items():
        own = config[key.partition(".")[0]][key.partition(".")[2]]
        if own != value if isinstance(own, str) else not _is_close(own, value):
            yield f"warning: {key} is {own}, the weights were made for {value}"


def _is_close(own: Any, value: Any) -> bool:
    """Whether numbers agree; one serves all channels."""
    own, value = np.atleast_1d(own), np.atleast_1d(value)
    return len({len(own), len(value), 1}) <= 2 and np.allclose(own, value, atol=1e-6)


def preprocessing(config: Configuration, stored: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a configuration that the weights' config.json (``stored``) tells, by their dotted names."""
    wanted = {key: stored[name] for name, key in _KEYS.items() if stored.get(name) is not None}
    if config.DATA.IMAGE_CHANNELS == 1:  # grey is what the colours are on average
        for key in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):
            if key in wanted:
                wanted[key] = [float(np.mean(wanted[key]))]
    return wanted
