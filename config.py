"""The configuration: every option with its default, unit and meaning; YAML and command line merged, checked, frozen.

Precedence, lowest first: the defaults below, the YAML file (its BASE files first), flags, ``-o KEY VALUE ...``.
Key names are PaddleViT's. This module doesn't import Paddle, so that ``-h`` and a typing error answer at once.
"""

import argparse
import ast
import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from yacs.config import CfgNode

from errors import InputError

CONFIG_DIR = Path(__file__).resolve().parent / "configs"

_C = CfgNode()
_C.BASE = [""]  # YAML files, relative to the one that names them, merged before it

_C.DATA = CfgNode()
_C.DATA.BATCH_SIZE = 256  # training samples per device and step
_C.DATA.BATCH_SIZE_EVAL = 64  # evaluation samples per device and step
_C.DATA.DATA_PATH = "/dataset/imagenet/"  # the dataset's folder
_C.DATA.DATASET = "imagenet2012"  # one of DATASETS below
_C.DATA.IMAGE_SIZE = 224  # pixels, height = width
_C.DATA.IMAGE_CHANNELS = 3  # 3: RGB, 1: grey
_C.DATA.CROP_PCT = 0.875  # evaluation: the central crop's share of the resized short side
_C.DATA.INTERPOLATION = "bicubic"  # of every resize: bicubic, bilinear or nearest
_C.DATA.NUM_WORKERS = 2  # loader processes per device; 0: load in the training process
_C.DATA.IMAGENET_MEAN = [0.5, 0.5, 0.5]  # per channel, of pixels in 0..1 (one value serves all channels)
_C.DATA.IMAGENET_STD = [0.5, 0.5, 0.5]
_C.DATA.DROP_LAST = True  # training: drop the tail that fills no global batch; False: pad it to a multiple of devices
_C.DATA.SKIP_BROKEN = False  # training: replace an unreadable image by the next one, count and list it
_C.DATA.SYNTHETIC_SIZE = 1024  # images of the dataset "synthetic"

_C.MODEL = CfgNode()
_C.MODEL.TYPE = "ViT"  # the architecture (models/), in any case
_C.MODEL.NAME = "vit_base_patch16_224"
_C.MODEL.RESUME = None  # checkpoint to go on from: weights, optimizer, epoch
_C.MODEL.PRETRAINED = None  # weights to start from or to evaluate
_C.MODEL.NUM_CLASSES = 1000  # or "auto": the dataset's
_C.MODEL.DROPOUT = 0.0  # after the position embedding, the attention's projection and in the MLP
_C.MODEL.ATTENTION_DROPOUT = 0.0
_C.MODEL.DROPPATH = 0.0  # of the last block; rises linearly from 0 at the first
_C.MODEL.PATCH_SIZE = 16  # pixels
_C.MODEL.EMBED_DIM = 768
_C.MODEL.NUM_HEADS = 12
_C.MODEL.ATTN_HEAD_SIZE = None  # None: EMBED_DIM / NUM_HEADS
_C.MODEL.DEPTH = 12
_C.MODEL.MLP_RATIO = 4.0
_C.MODEL.QKV_BIAS = True

_C.TRAIN = CfgNode()
_C.TRAIN.LAST_EPOCH = 0  # the last epoch already done; a resumed run takes it from its checkpoint
_C.TRAIN.NUM_EPOCHS = 300
_C.TRAIN.WARMUP_EPOCHS = 32  # linear from WARMUP_START_LR to BASE_LR
_C.TRAIN.WEIGHT_DECAY = 0.3
_C.TRAIN.BASE_LR = 3e-3
_C.TRAIN.WARMUP_START_LR = 1e-6
_C.TRAIN.END_LR = 0.0  # reached at the end by a cosine from BASE_LR
_C.TRAIN.LINEAR_SCALED_LR = None  # batch that the three rates are meant for; they scale with the effective batch
_C.TRAIN.GRAD_CLIP = None  # largest global norm of the gradients
_C.TRAIN.ACCUM_ITER = 1  # steps whose gradients make one update
_C.TRAIN.SMOOTHING = 0.0  # label smoothing of the training loss
_C.TRAIN.CROP_SCALE = [0.08, 1.0]  # random resized crop: share of the image's area
_C.TRAIN.CROP_RATIO = [0.75, 1.3333333333333333]  # random resized crop: width / height
_C.TRAIN.HFLIP = 0.5  # probability of a horizontal flip
_C.TRAIN.AFFINE = [0.0, 0.0, 0.0]  # largest rotation (degrees), shift (share of the size), scaling (share)
_C.TRAIN.OPTIMIZER = CfgNode()
_C.TRAIN.OPTIMIZER.NAME = "AdamW"
_C.TRAIN.OPTIMIZER.EPS = 1e-8
_C.TRAIN.OPTIMIZER.BETAS = [0.9, 0.999]

_C.SAVE = "./output"  # runs go to SAVE/<train|eval>-<model>-<time>
_C.OUTPUT = None  # the run's folder itself, instead
_C.TAG = "default"  # a note, kept with the run
_C.SAVE_FREQ = 10  # epochs between checkpoints
_C.REPORT_FREQ = 20  # steps between reports
_C.VALIDATE_FREQ = 1  # epochs between evaluations
_C.SEED = 0
_C.EVAL = False  # evaluate only
_C.AMP = False  # GPU: autocast to bfloat16, or to float16 with a scaler where there is no bfloat16
_C.NGPUS = -1  # processes; -1: one per visible GPU, or without a GPU one per core
_C.DETERMINISTIC = False  # GPU: cuDNN's deterministic algorithms (the CPU's are)
_C.CUDNN_BENCHMARK = False  # GPU: let cuDNN search for its fastest algorithm
_C.TUNE_CPU = True  # CPU: threads, stride kernels and allocator set for speed (utils.tune_cpu)

DATASETS = ("imagenet2012", "folder", "cifar10", "cifar100", "mnist", "fashion_mnist", "digits", "synthetic")
_CHOICES = {
    "DATA.DATASET": DATASETS,
    "DATA.IMAGE_CHANNELS": (1, 3),
    "DATA.INTERPOLATION": ("bicubic", "bilinear", "nearest"),
    "TRAIN.OPTIMIZER.NAME": ("AdamW",),
}
# What a key takes whose default doesn't tell it; each of these takes None (YAML: null) too, but for NUM_CLASSES.
_TYPES = {
    "MODEL.RESUME": str,
    "MODEL.PRETRAINED": str,
    "MODEL.ATTN_HEAD_SIZE": int,
    "TRAIN.LINEAR_SCALED_LR": int,
    "TRAIN.GRAD_CLIP": float,
    "OUTPUT": str,
}
_AT_LEAST_ONE = (
    "DATA.BATCH_SIZE", "DATA.BATCH_SIZE_EVAL", "DATA.IMAGE_SIZE", "DATA.SYNTHETIC_SIZE", "MODEL.PATCH_SIZE",
    "MODEL.EMBED_DIM", "MODEL.NUM_HEADS", "MODEL.DEPTH", "TRAIN.NUM_EPOCHS", "TRAIN.ACCUM_ITER", "SAVE_FREQ",
    "REPORT_FREQ", "VALIDATE_FREQ", "MODEL.NUM_CLASSES", "MODEL.ATTN_HEAD_SIZE", "TRAIN.LINEAR_SCALED_LR",
)  # fmt: skip
_NOT_NEGATIVE = (
    "DATA.NUM_WORKERS", "TRAIN.LAST_EPOCH", "TRAIN.WARMUP_EPOCHS", "TRAIN.WEIGHT_DECAY", "TRAIN.BASE_LR",
    "TRAIN.WARMUP_START_LR", "TRAIN.END_LR", "SEED",
)  # fmt: skip
_BELOW_ONE = ("MODEL.DROPOUT", "MODEL.ATTENTION_DROPOUT", "MODEL.DROPPATH", "TRAIN.SMOOTHING")
_LENGTHS = {"TRAIN.OPTIMIZER.BETAS": 2, "TRAIN.CROP_SCALE": 2, "TRAIN.CROP_RATIO": 2, "TRAIN.AFFINE": 3}


def get_config(cfg_file: str | os.PathLike | None = None, options: Sequence[str] = ()) -> CfgNode:
    """Returns the frozen configuration: defaults, then ``cfg_file``, then ``options``.

    Args:
        cfg_file: a YAML file, or the name of a model under configs/ (``vit_base_patch16_224``).
        options: alternating keys and values, e.g. ``["TRAIN.BASE_LR", "1e-4"]``.

    Raises:
        InputError: an unknown key, a wrong type, a value out of range, an unreadable file.
    """
    config = _C.clone()
    if cfg_file is not None:
        _merge_file(config, find_config(cfg_file))
    _merge_options(config, options)
    _check(config)
    config.freeze()
    return config


def config_from_arguments(program: str, argv: Sequence[str] | None = None) -> CfgNode:
    """Returns the frozen configuration that a command line asks for (``argv``: None takes the process's)."""
    arguments = _parser(program).parse_args(argv)
    options: list[str] = []
    for flag, (key, _, _) in _FLAGS.items():
        value = getattr(arguments, flag)
        if value is not None:
            options += [key, value]
    # The guide's evaluation command gives -batch_size alone; it is the evaluation's batch there.
    config = get_config(arguments.cfg, options + (arguments.o or []))
    if config.EVAL and arguments.batch_size is not None and arguments.batch_size_eval is None:
        options += ["DATA.BATCH_SIZE_EVAL", arguments.batch_size]
        config = get_config(arguments.cfg, options + (arguments.o or []))
    return config


def with_values(config: CfgNode, **values: Any) -> CfgNode:
    """Returns a frozen copy of ``config`` in which each KEY (dots written as ``__``) has its new value."""
    changed = config.clone()
    changed.defrost()
    for key, value in values.items():
        _set(changed, key.replace("__", "."), value, "with_values")
    _check(changed)
    changed.freeze()
    return changed


def differences(config: CfgNode) -> list[str]:
    """Returns one line ``KEY: default -> value`` for each key that isn't at its default."""
    default = dict(_leaves(_C))
    return [f"{key}: {default[key]} -> {value}" for key, value in _leaves(config) if value != default[key]]


def find_config(cfg_file: str | os.PathLike) -> Path:
    """Returns the path of a configuration given as a file or as the name of one under configs/."""
    path = Path(cfg_file)
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(CONFIG_DIR.glob("*/*.yaml"))}
    # PaddleViT keeps its files in configs/ itself: configs/NAME.yaml finds configs/<family>/NAME.yaml here.
    if path.stem in shipped and path.suffix in ("", ".yaml") and path.parent.name in ("", "configs"):
        return shipped[path.stem]
    raise InputError(f"no configuration file {path}{_nearest(path.stem, shipped)}")


_FLAGS: dict[str, tuple[str, type, str]] = {
    "dataset": ("DATA.DATASET", str, "one of " + ", ".join(DATASETS)),
    "data_path": ("DATA.DATA_PATH", str, "the dataset's folder"),
    "output": ("OUTPUT", str, "the run's folder (default: output/<train|eval>-<model>-<time>)"),
    "batch_size": ("DATA.BATCH_SIZE", int, "training samples per device; with -eval alone, evaluation's"),
    "batch_size_eval": ("DATA.BATCH_SIZE_EVAL", int, "evaluation samples per device"),
    "image_size": ("DATA.IMAGE_SIZE", int, "pixels"),
    "accum_iter": ("TRAIN.ACCUM_ITER", int, "steps whose gradients make one update"),
    "pretrained": ("MODEL.PRETRAINED", str, "weights to start from or to evaluate"),
    "resume": ("MODEL.RESUME", str, "checkpoint to go on from"),
    "last_epoch": ("TRAIN.LAST_EPOCH", int, "the last epoch already done"),
    "ngpus": ("NGPUS", int, "processes; -1: one per visible GPU, or without a GPU one per core"),
    "eval": ("EVAL", bool, "evaluate only"),
    "amp": ("AMP", bool, "mixed precision"),
}


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        program,
        allow_abbrev=False,
        description="Train or evaluate a Vision Transformer.",
        epilog="Flags may be written with one dash or two. config.py describes every KEY.",
    )
    parser.add_argument("-cfg", "--cfg", metavar="FILE", help="YAML file, or a model's name under configs/")
    for flag, (_, kind, text) in _FLAGS.items():
        takes = (
            {"nargs": "?", "const": "True", "metavar": "BOOL"} if kind is bool else {"metavar": kind.__name__.upper()}
        )
        parser.add_argument(f"-{flag}", f"--{flag}", help=text, **takes)
    parser.add_argument("-o", "--o", nargs="+", action="extend", metavar="KEY VALUE", help="any keys of config.py")
    return parser


def _merge_file(config: CfgNode, path: Path, including: tuple[Path, ...] = ()) -> None:
    path = path.resolve()
    if path in including:
        raise InputError(f"{path}: BASE leads back to this file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read ({error})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a mapping of keys, found {type(content).__name__}")
    base = content.get("BASE") or []
    for parent in [base] if isinstance(base, str) else base:
        if parent:
            _merge_file(config, find_config(path.parent / parent), (*including, path))
    for key, value in _flatten(content):
        # PaddleViT's earlier files group the transformer's sizes under MODEL.TRANS; its later ones don't.
        _set(config, key.replace("MODEL.TRANS.", "MODEL."), value, str(path))


def _merge_options(config: CfgNode, options: Sequence[str]) -> None:
    if len(options) % 2:
        raise InputError(f"-o takes pairs of KEY VALUE; found {len(options)} words, the last is '{options[-1]}'")
    for key, text in zip(options[::2], options[1::2], strict=True):
        _set(config, key, text, "command line")


def _set(config: CfgNode, key: str, value: Any, source: str) -> None:
    """Sets one dotted key; the value is coerced to the key's type, and ``source`` is named in errors."""
    defaults = dict(_leaves(_C))
    if key not in defaults:
        raise InputError(f"{source}: unknown key {key}{_nearest(key, defaults)}")
    parent, _, name = key.rpartition(".")
    node = config
    for part in filter(None, parent.split(".")):
        node = node[part]
    node[name] = _coerce(key, value, defaults[key], source)


def _coerce(key: str, value: Any, default: Any, source: str) -> Any:
    """Returns ``value`` in the key's type; a whole number serves as a float, a single value as a list of one."""
    kind, optional = _TYPES.get(key, type(default)), key in _TYPES
    if isinstance(value, str) and (kind is not str or value.lower() in ("none", "null")):
        value = _parsed(value)
    if (value is None and optional) or (value == "auto" and key == "MODEL.NUM_CLASSES"):
        return value
    item = type(default[0]) if kind is list else kind
    values = list(value) if kind is list and isinstance(value, list | tuple) else [value]
    if all(type(v) is item or (item is float and type(v) is int) for v in values):
        values = [item(v) for v in values]
        return values if kind is list else values[0]
    expected = f"a list of {item.__name__}s" if kind is list else item.__name__
    raise InputError(f"{source}: {key} takes {expected}, found {value!r} ({type(value).__name__})")


def _parsed(text: str) -> Any:
    """The value that a word means: on the command line, or in YAML, whose version 1.1 takes 1e-6 for a string."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _check(config: CfgNode) -> None:
    values = dict(_leaves(config))

    def require(valid: bool, key: str, expected: str) -> None:
        if not valid:
            raise InputError(f"{key} is {values[key]!r}, expected {expected}")

    for key, choices in _CHOICES.items():
        require(values[key] in choices, key, "one of " + ", ".join(map(str, choices)))
    for key in _AT_LEAST_ONE:
        require(values[key] in (None, "auto") or values[key] >= 1, key, "at least 1")
    for key in _NOT_NEGATIVE:
        require(values[key] >= 0, key, "0 or more")
    for key in _BELOW_ONE:
        require(0 <= values[key] < 1, key, "0 <= value < 1")
    for key, length in _LENGTHS.items():
        require(len(values[key]) == length, key, f"{length} values")
    channels = config.DATA.IMAGE_CHANNELS
    for key in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):
        require(len(values[key]) in (1, channels), key, f"1 or {channels} values, as IMAGE_CHANNELS")
    require(all(std > 0 for std in config.DATA.IMAGENET_STD), "DATA.IMAGENET_STD", "values above 0")
    require(0 < config.DATA.CROP_PCT <= 1, "DATA.CROP_PCT", "0 < value <= 1")
    require(0 <= config.TRAIN.HFLIP <= 1, "TRAIN.HFLIP", "a probability")
    require(
        0 < config.TRAIN.CROP_SCALE[0] <= config.TRAIN.CROP_SCALE[1] <= 1, "TRAIN.CROP_SCALE", "0 < low <= high <= 1"
    )
    require(0 < config.TRAIN.CROP_RATIO[0] <= config.TRAIN.CROP_RATIO[1], "TRAIN.CROP_RATIO", "0 < low <= high")
    require(all(0 <= beta < 1 for beta in config.TRAIN.OPTIMIZER.BETAS), "TRAIN.OPTIMIZER.BETAS", "0 <= values < 1")
    require(config.TRAIN.GRAD_CLIP is None or config.TRAIN.GRAD_CLIP > 0, "TRAIN.GRAD_CLIP", "above 0, or null")
    require(config.NGPUS == -1 or config.NGPUS >= 1, "NGPUS", "-1 (all) or at least 1")
    require(not (config.MODEL.RESUME and config.EVAL), "MODEL.RESUME", "-pretrained FILE with -eval")
    require(not (config.MODEL.RESUME and config.MODEL.PRETRAINED), "MODEL.RESUME", "either -resume or -pretrained")


def _leaves(node: CfgNode, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, CfgNode):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _flatten(content: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None or not isinstance(_C.get(key), CfgNode):  # an empty section sets nothing
            yield f"{prefix}{key}", value


def _nearest(name: str, known: Sequence[str] | dict) -> str:
    found = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {found[0]}?" if found else ""
