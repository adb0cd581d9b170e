"""Models by name: a YAML file under configs/ is the variant, a module here the architecture."""

import fnmatch
from typing import Any

from paddle import nn
from yacs.config import CfgNode

from config import CONFIG_DIR, get_config
from errors import InputError
from models.vit import build_vit
from options import nearest

_BUILDERS = {"vit": build_vit, "deit": build_vit}


def build_model(config: CfgNode) -> nn.Layer:
    """Builds the model of a configuration, with fresh weights.

    Raises:
        InputError: an unknown MODEL.TYPE, sizes that don't fit together, or an unresolved NUM_CLASSES.
    """
    builder = _BUILDERS.get(config.MODEL.TYPE.lower())
    if builder is None:
        raise InputError(f"MODEL.TYPE is {config.MODEL.TYPE!r}, expected one of {', '.join(sorted(_BUILDERS))}")
    if config.MODEL.NUM_CLASSES == "auto":
        raise InputError("MODEL.NUM_CLASSES is 'auto' where no dataset tells it; give a number")
    return builder(config)


def list_models(pattern: str = "*") -> list[str]:
    """Returns the names of the shipped models that match a shell pattern, e.g. ``vit_*_384``, sorted.

    Files of configs/recipes/ train these models; they are no models of their own.
    """
    files = (file for file in CONFIG_DIR.glob("*/*.yaml") if file.parent.name != "recipes")
    return fnmatch.filter(sorted(file.stem for file in files), pattern)


def create_model(name: str, pretrained: str | None = None, **overrides: Any) -> nn.Layer:
    """Builds a shipped model by name.

    Args:
        name: one of ``list_models()``.
        pretrained: weights to load; they have to fit, as for an evaluation (``load_weights(..., strict=False)`` for
            another number of classes).
        overrides: keys of MODEL, or IMAGE_SIZE and IMAGE_CHANNELS of DATA, in lower case: ``num_classes=10``.

    Raises:
        InputError: an unknown name or key, or weights that don't fit.
    """
    if name not in list_models():
        raise InputError(f"no model {name}{nearest(name, list_models())}")
    options = []
    for key, value in overrides.items():
        group = "DATA" if key in ("image_size", "image_channels") else "MODEL"
        options += [f"{group}.{key.upper()}", value]
    model = build_model(get_config(name, options))
    if pretrained is not None:
        from weights import load_weights  # weights stand above models: only this shortcut looks up

        load_weights(model, pretrained)
    return model
