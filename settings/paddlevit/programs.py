"""Helps programs that were written for PaddleViT's ``config``, ``datasets`` and ``utils``.

Names that have a counterpart here work. For the others, the error says what to write instead.
"""

import importlib.abc
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from yacs.config import CfgNode

from settings.configuration import Option, leaves
from settings.paddlevit import reading
from settings.suggestions import nearest_key

# The keys that a program's parsed flags set, by attribute.
_ARGUMENTS = {
    "dataset": "DATA.DATASET",
    "data_path": "DATA.DATA_PATH",
    "batch_size": "DATA.BATCH_SIZE",
    "batch_size_eval": "DATA.BATCH_SIZE_EVAL",
    "image_size": "DATA.IMAGE_SIZE",
    "accum_iter": "TRAIN.ACCUM_ITER",
    "last_epoch": "TRAIN.LAST_EPOCH",
    "num_classes": "MODEL.NUM_CLASSES",
    "pretrained": "MODEL.PRETRAINED",
    "resume": "MODEL.RESUME",
    "output": "SAVE",
    "ngpus": "NGPUS",
    "eval": "EVAL",
    "amp": "AMP",
}
# By module, the names that PaddleViT's has and this toolkit's doesn't, and what to write instead.
_INSTEAD = {
    "datasets": {
        "ImageNet2012Dataset": "datasets.get_dataset(config, mode), with DATA.DATASET imagenet2012",
        "Cifar10Dataset": "datasets.get_dataset(config, mode), with DATA.DATASET cifar10",
        "get_train_transforms": "loading.transforms.TrainTransform(config)",
        "get_val_transforms": "loading.transforms.EvalTransform(config)",
    },
    "utils": {
        "cosine_scheduler": "training.optim.build_schedule(config, updates_per_epoch, effective_batch)",
        "orthogonal": "paddle.nn.initializer.Orthogonal",
        "RandomResizedCropAndInterpolationWithTwoPic": "loading.transforms.TrainTransform(config), of one picture",
    },
}
# PaddleViT's modules that don't exist in this toolkit, and what to do instead.
_MODULES = {
    "augment": "set TRAIN.AUTO_AUGMENT, which loading.transforms.TrainTransform(config) reads",
    "droppath": "write from models.layers import DropPath",
    "interpolate_position_embedding": "weights.load_weights(model, path) resizes position embeddings by itself",
    "losses": "write from training.losses import CrossEntropy, SoftTargetCrossEntropy, Teacher",
    "lr_decay": "set TRAIN.LAYER_DECAY, which training.optim.build_optimizer(config, model) reads",
    "masking_generator": "set TASK mae, which draws its masks itself",
    "mixup": "write from loading.transforms import BatchTransform, Mixup",
    "model_ema": "write from training.optim import ModelEma",
    "multi_scale_sampler": "set DATA.MULTI_SCALE, which datasets.get_dataloader(config, dataset, 'train') reads",
    "random_erasing": "write from loading.transforms import RandomErasing",
    "transforms": "write from loading.transforms import EvalTransform, TrainTransform",
}
# PaddleViT's modules of models that this toolkit builds from a configuration.
_MODELS = {
    "beit", "botnet", "cait", "coat", "convmixer", "convmlp", "convnext", "crossvit", "cswin",
    "cvt", "cyclemlp", "deit", "ffonly", "focal_transformer", "gmlp", "halonet", "hvt", "levit",
    "mlp_mixer", "mobileformer", "mobileone", "mobilevit", "pit", "poolformer", "pvtv2", "regnet",
    "replknet", "repmlp", "resmlp", "rest", "rest_v2", "shuffle_transformer", "swin", "t2t_vit",
    "topformer", "transformer", "vip", "vit", "volo", "xcit",
}  # fmt: skip


def instead(module: str, name: str) -> NoReturn:
    """Raises the error for a name that ``module`` doesn't have, with advice for PaddleViT's names.

    Raises:
        ImportError: the name is PaddleViT's. ``from module import name`` would replace the text of
            an AttributeError.
        AttributeError: the name isn't PaddleViT's.
    """
    for paddlevits, advice in _INSTEAD.get(module, {}).items():
        if name == paddlevits or name.startswith(f"{paddlevits}_"):
            raise ImportError(
                f"{module} has no {name}; for PaddleViT's, write {advice}:"
                " docs/migrate/paddlevit.md",
                name=module,
            )
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class ModuleFinder(importlib.abc.MetaPathFinder):
    """A finder that finds no module, but raises an error for PaddleViT's modules.

    The error says what to write instead.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        advice = _MODULES.get(fullname)
        if fullname in _MODELS:
            advice = (
                "write from models import build_model, for the model of a configuration,"
                " or create_model"
            )
        if advice:
            line = f"No module named {fullname!r}; for PaddleViT's, {advice}: docs/migrate/paddlevit.md"
            raise ModuleNotFoundError(line, name=fullname)


def explain_missing_modules() -> None:
    """Adds a ``ModuleFinder`` behind all other finders, unless there is one already."""
    if not any(isinstance(finder, ModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(ModuleFinder())


def options_of(arguments: Any, evaluates: bool) -> Iterator[Option]:
    """Yields the options that a program's parsed flags set, as PaddleViT's ``update_config`` does.

    A flag that is missing, None, False, 0 or "" sets nothing.

    Args:
        arguments: the flags as attributes.
        evaluates: whether the configuration is one for an evaluation, before the flags count.
    """
    flags = {name: getattr(arguments, name, None) for name in _ARGUMENTS}
    # With -eval, PaddleViT's -batch_size is the evaluation's, and its -amp has no effect.
    if evaluates or flags["eval"]:
        flags["batch_size_eval"] = flags["batch_size_eval"] or flags["batch_size"]
        flags["amp"] = None
    if getattr(arguments, "mae_pretrain", None):
        yield Option("TASK", "mae", "flag -mae_pretrain")
    for name, value in flags.items():
        if value:
            yield Option(_ARGUMENTS[name], value, f"flag -{name}")


class Section(CfgNode):
    """A section of the configuration's tree.

    Its keys can also be read by PaddleViT's names, such as MODEL.TRANS.DEPTH.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.__dict__["name"] = name

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        # Python itself looks for names in lower case.
        if not key.isupper():
            raise AttributeError(key)
        name = self.__dict__["name"]
        if name == "MODEL" and f"{key}." in reading.GROUPS:
            return _Group(self, f"MODEL.{key}.")
        return _own_value(self, f"{name}.{key}")


class _Group:
    """A group of keys that PaddleViT has within MODEL, such as MODEL.TRANS.

    Its keys can only be read.
    """

    def __init__(self, model: Section, prefix: str) -> None:
        self.__dict__.update(model=model, prefix=prefix)

    def __getattr__(self, key: str) -> Any:
        if not key.isupper():
            raise AttributeError(key)
        if f"{key}." in reading.GROUPS:
            return _Group(self.model, f"{self.prefix}{key}.")
        return _own_value(self.model, f"{self.prefix}{key}")

    def __setattr__(self, key: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"{self.prefix}{key} can only be read; set {reading.own_key(self.prefix + key, value)}"
        )


def _own_value(section: Section, paddlevits: str) -> Any:
    """Returns the value of a key by PaddleViT's name.

    Raises:
        AttributeError: the section has no such key. The line says where the value is in this toolkit.
    """
    # A key may have one name here for a number, and another one for a list.
    names = (reading.own_key(paddlevits), reading.own_key(paddlevits, []))
    prefix = section.__dict__["name"] + "."
    for name in names:
        if name.startswith(prefix) and name.removeprefix(prefix) in section:
            return section[name.removeprefix(prefix)]
    if names[0] != paddlevits and not names[0].startswith(prefix):
        advice = f"; in this toolkit it is {names[0]}"
    elif reading.has_key(paddlevits):
        advice = "; docs/migrate/paddlevit.md lists the keys that replace PaddleViT's"
    else:
        advice = nearest_key(paddlevits, [f"{prefix}{key}" for key, _ in leaves(section)])
    raise AttributeError(f"no key {paddlevits}{advice}")
