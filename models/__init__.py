"""Models by name: a YAML file under configs/ is the variant, a class here the architecture."""

import fnmatch
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from config import get_config, shipped_configs, with_values
from errors import InputError
from models.base import ImageModel
from models.beit import Beit
from models.convmixer import ConvMixer
from models.convnext import ConvNeXt
from models.gmlp import GMlp
from models.lenet import LeNet
from models.mixer import MlpMixer
from models.poolformer import PoolFormer
from models.pvtv2 import PyramidVisionTransformerV2
from models.regnet import RegNet
from models.resmlp import ResMlp
from models.resnet import ResNet
from models.swin import SwinTransformer
from models.vit import VisionTransformer
from options import add_note, nearest_model, set_by_someone
from weights import load_weights
from weights.formats import read_weights
from weights.names import has_switches, switches

ARCHITECTURES: dict[str, type[ImageModel]] = {
    "vit": VisionTransformer,
    "deit": VisionTransformer,
    "convnext": ConvNeXt,
    "convmixer": ConvMixer,
    "regnet": RegNet,
    "resnet": ResNet,
    "lenet": LeNet,
    "mixer": MlpMixer,
    "gmlp": GMlp,
    "resmlp": ResMlp,
    "beit": Beit,
    "swin": SwinTransformer,
    "poolformer": PoolFormer,
    "pvtv2": PyramidVisionTransformerV2,
}
# Keys of MODEL whose constructor argument isn't the key in lower case, and those that are no argument.
_ARGUMENTS = {
    "DROPOUT": "drop",
    "ATTENTION_DROPOUT": "attn_drop",
    "DROPPATH": "drop_path",
    "DROPPATH_SHAPE": "drop_path_shape",
    "ATTN_HEAD_SIZE": "head_dim",
}
_NO_ARGUMENTS = ("TYPE", "NAME", "RESUME", "PRETRAINED", "PRETRAINED_ALLOW", "PRETRAINED_CLASSES")


def build_model(config: CfgNode, **arguments: Any) -> ImageModel:
    """Builds the model of a configuration, with fresh weights.

    The constructor's arguments are image_size, in_channels and MODEL's keys in lower case (but for ``_ARGUMENTS``);
    a key that is None leaves the architecture's own default.

    Args:
        arguments: of the constructor, instead of the configuration's: ``image_size=(224, 160)``.

    Raises:
        InputError: an unknown MODEL.TYPE, a key that this architecture doesn't take, sizes that don't fit together, or
            an unresolved NUM_CLASSES.
    """
    check_keys(config)
    model, kind = config.MODEL, architecture(config)
    if model.NUM_CLASSES == "auto":
        raise InputError("MODEL.NUM_CLASSES is 'auto' where no dataset tells it; give a number")
    taken = inspect.signature(kind).parameters
    values = {"image_size": config.DATA.IMAGE_SIZE, "in_channels": config.DATA.IMAGE_CHANNELS}
    for key, value in model.items():
        name = _ARGUMENTS.get(key, key.lower())
        if name in taken and value is not None:
            if isinstance(value, list) and "Sequence" not in str(taken[name].annotation):
                raise InputError(f"MODEL.{key} is {value}, but {model.TYPE} takes one number")
            values[name] = value
    return kind(**values | arguments)


def check_keys(config: CfgNode) -> None:
    """Raises InputError for a key of MODEL that was set and that the architecture doesn't take, whatever its value.

    It is no error below the TYPE that was set over it, such as a recipe's DROPPATH; None takes a key back.
    """
    model, found = config.MODEL, set_by_someone(config)
    taken = inspect.signature(architecture(config)).parameters
    own = found["MODEL.TYPE"].level if "MODEL.TYPE" in found else 0
    for key, value in model.items():
        where = found.get(f"MODEL.{key}")
        idle = key not in _NO_ARGUMENTS and _ARGUMENTS.get(key, key.lower()) not in taken
        if idle and where and where.level >= own and value is not None:
            said = f"MODEL.{key} is {value!r}, but {model.TYPE} takes no {key}; leave it out"
            raise InputError(f"{where.source}: {said}")


def architecture(config: CfgNode) -> type[ImageModel]:
    """Returns the class that MODEL.TYPE names, in any case.

    Raises:
        InputError: there is none.
    """
    kind = ARCHITECTURES.get(config.MODEL.TYPE.lower())
    if kind is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise InputError(f"MODEL.TYPE is {config.MODEL.TYPE!r}, expected one of {known}")
    return kind


def list_models(pattern: str | Sequence[str] = "*") -> list[str]:
    """Returns the names of the shipped models, sorted, that match a shell pattern, or one of several, in any case.

    Files of configs/recipes/ train these models; they are no models of their own.

    Args:
        pattern: ``vit_*_384``, ``["deit_*", "*beit*"]``.
    """
    patterns = [pattern.lower()] if isinstance(pattern, str) else [one.lower() for one in pattern]
    names = sorted(file.stem for file in shipped_configs() if file.parent.name != "recipes")
    return [name for name in names if any(fnmatch.fnmatchcase(name, one) for one in patterns)]


def with_switches(config: CfgNode, path: str | Path) -> CfgNode:
    """Returns ``config`` with the keys of MODEL that the names of the weights' tensors tell, where they are None.

    These are keys that change what a model computes, but none of its tensors' shapes (``weights.names.switches``). A
    note tells of each. Where the configuration has another value, ``load_weights`` refuses or tells it.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: the weights can't be read.
    """
    kind = architecture(config)
    if not has_switches(kind.weight_names):
        return config
    told = switches(kind.weight_names, read_weights(path).arrays)
    defaults = inspect.signature(kind).parameters
    for key, value in told.items():
        if config.MODEL[key] is None and defaults[key.lower()].default != value:
            config = with_values(config, "the names in the weights", **{f"MODEL__{key}": value})
            add_note(config, f"MODEL.{key} {value}, as the names in {path} tell")
    return config


def create_model(name: str, pretrained: str | None = None, **overrides: Any) -> ImageModel:
    """Builds a shipped model by name.

    Args:
        name: one of ``list_models()``.
        pretrained: weights to load; they have to fit, as for an evaluation (``load_weights(..., strict=False)`` for
            another number of classes).
        overrides: keys of MODEL, or IMAGE_SIZE and IMAGE_CHANNELS of DATA, in lower case: ``num_classes=10``. An
            image_size may be (height, width) here.

    Raises:
        InputError: an unknown name or key, or weights that don't fit.
    """
    if name not in list_models():
        raise InputError(f"no model {name}{nearest_model(name, list_models())}")
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
