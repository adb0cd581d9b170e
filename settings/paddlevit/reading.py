"""PaddleViT's YAML files, read with the meaning that they have there.

A file of PaddleViT's is a difference to its family's ``config.py``. The YAML files in
configs/paddlevit are data:

LIKE      another of them, whose parts this one adds to
TYPES     the MODEL.TYPE of its files, in lower case; without it, a file only serves others
DEFAULTS  what the family's config.py sets, in PaddleViT's keys
IGNORED   keys (patterns) that PaddleViT's code doesn't read, or that mean nothing here
ONLY      keys that have one value here, and this value
AUGMENT   switches under TRAIN, the first that is on counts, and the policy (AUTO_AUGMENT here) that each stands for
HERE      what PaddleViT's code does and none of its keys says, in this toolkit's keys
DIFFERS   where its training differs from this toolkit's (``difference_lines``)

``NAME_2021.yaml`` holds the keys as they were named in 2021. Of a family's files, the newest whose
keys include all of a file's keys is the one that it is a difference to.
"""

import functools
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from errors import InputError
from settings.documents import read_yaml
from settings.options import CONFIG_DIR, Configuration, leaves
from settings.paddlevit.models import of_models
from settings.values import parse_value, quoted

FOLDER = CONFIG_DIR / "paddlevit"
# PaddleViT's groups in MODEL, and its keys that have another name here.
GROUPS = ("TRANS.", "MIXER.", "CNN.", "ENCODER.")
_ALIASES = {
    "DROP_PATH": "DROPPATH", "HIDDEN_SIZE": "EMBED_DIM", "DIM": "EMBED_DIM", "DIMS": "EMBED_DIMS",
    "NUM_LAYERS": "DEPTH", "DEPTHS": "STAGE_DEPTHS", "STAGE_DEPTH": "STAGE_DEPTHS", "LAYERS": "STAGE_DEPTHS",
    "SERIAL_DEPTHS": "STAGE_DEPTHS", "MLP_RATIOS": "MLP_RATIO", "LAYER_SCALE_INIT_VALUE": "INIT_VALUES",
    "ACTIVATION": "ACT", "HEADS": "NUM_HEADS", "ETA": "INIT_VALUES", "CLS_ATTN_LAYERS": "DEPTH_TOKEN_ONLY",
}  # fmt: skip
PLACE = "it is PaddleViT's, for files with its keys alone and no BASE: docs/paddlevit.md names the key for others"
# what PaddleViT's training does otherwise: (whether it matters, in words and with the key for its
# way)
_OTHERWISE = {
    "rate": (
        lambda train: not train.LR_SCHEDULER.PER_EPOCH,
        "changes the rate once an epoch (TRAIN.LR_SCHEDULER.PER_EPOCH True does so here)",
    ),
    "decay": (
        lambda train: not train.DECAY_ALL,
        "decays biases, norms and tokens too (TRAIN.DECAY_ALL True)",
    ),
    "average": (
        lambda train: train.MODEL_EMA and train.MODEL_EMA_WARMUP,
        "has no warm-up of the average (TRAIN.MODEL_EMA_WARMUP False)",
    ),
    "policy": (
        lambda train: (train.AUTO_AUGMENT or "").startswith("rand"),
        "moves images by up to 100 pixels in its policies, here as timm by up to 45 % of a side (no key)",
    ),
    "sum": (
        lambda train: train.ACCUM_ITER > 1,
        "adds the gradients of ACCUM_ITER steps, here they are averaged as its later code does (no key)",
    ),
}


class Family(NamedTuple):
    """A family of PaddleViT's models: a file of configs/paddlevit, merged with the file that it is LIKE.
    The module's docstring explains the parts.
    """

    name: str
    types: tuple[str, ...]
    defaults: dict[str, Any]
    ignored: tuple[str, ...]
    only: dict[str, Any]
    augment: dict[str, str]
    here: dict[str, Any]
    differs: tuple[str, ...]


@functools.cache
def family(name: str) -> Family:
    """Returns the family file ``NAME.yaml``."""
    content = read_yaml(FOLDER / f"{name}.yaml")
    like = Family(name, (), {}, (), {}, {}, {}, ())
    if "LIKE" in content:
        like = family(content["LIKE"])
    return Family(
        name,
        tuple(content.get("TYPES", ())),
        like.defaults | dict(leaves(content["DEFAULTS"])),
        (*like.ignored, *content.get("IGNORED", ())),
        like.only | content.get("ONLY", {}),
        content.get("AUGMENT", like.augment),
        like.here | dict(leaves(content.get("HERE", {}))),
        tuple(content.get("DIFFERS", like.differs)),
    )


def families(model_type: str) -> list[Family]:
    """Returns the families with files of this MODEL.TYPE, the newest first."""
    return [one for one in _all() if model_type.lower() in one.types]


def is_family(path: Path, content: dict[str, Any]) -> bool:
    """Returns whether a YAML file is a family's; a model's own file may lie beside those."""
    return path.parent == FOLDER and "DEFAULTS" in content


@functools.cache
def sections() -> frozenset[str]:
    """Returns the dotted names of all sections in PaddleViT's files: they may be empty there."""
    keys = {key for one in _all() for key in one.defaults}
    return frozenset(key[:dot] for key in keys for dot, letter in enumerate(key) if letter == ".")


def has_key(key: str) -> bool:
    """Returns whether a family of PaddleViT's has this dotted key."""
    return any(key in one.defaults for one in _all())


@functools.cache
def _all() -> tuple[Family, ...]:
    files = sorted(FOLDER.glob("*.yaml"), key=lambda file: len(file.stem))
    return tuple(family(file.stem) for file in files if is_family(file, read_yaml(file)))


class Reading(NamedTuple):
    """A file of PaddleViT's, in this toolkit's keys.

    Attributes:
        family: the name of its family.
        values: its values and its family's, by dotted key.
        defaults: the keys that have the family's values, and not the file's own.
    """

    family: str
    values: dict[str, Any]
    defaults: frozenset[str] = frozenset()


def read(
    path: Path, content: dict[str, Any], own: dict[str, Any], others: dict[str, Any]
) -> tuple[Reading | None, str]:
    """Returns (the file in this toolkit's keys, a line for the log), or (None, "") if it isn't a file
    of PaddleViT's.

    Args:
        path, content: of the file, which names no BASE. It may be a family's own.
        own: its dotted keys and values.
        others: config.py's defaults by dotted key.

    Raises:
        InputError: it has a value that isn't here, or it may be meant in two ways that differ.
    """
    if is_family(path, content):
        one = family(path.stem)
        own = {}
        return Reading(one.name, translate(one, own, path)[0]), ""
    one, foreign = family_of(content, own)
    if one is None:
        # The caller reports keys of neither toolkit as unknown.
        has_unknown = any(key not in others and not has_key(key) for key in own)
        if not foreign or has_unknown:
            return None, ""
        newest = families(content["MODEL"]["TYPE"])[0]
        if _is_ambiguous(newest, own, others):
            raise InputError(
                f"{path}: it names no BASE, as PaddleViT's files, but PaddleViT's {newest.name} has {foreign}; say"
                f" which defaults hold: BASE: paddlevit/{newest.name}.yaml (PaddleViT's) or BASE: '' (config.py's)"
            )
        return None, ""
    values, ignored = translate(one, own, path)
    remark = f"; of no effect there, and ignored: {', '.join(ignored)}" if ignored else ""
    unsaid = translate(one, {}, path)[0]
    said = {own_key(key, value) for key, value in own.items()}
    defaults = frozenset(
        key for key, value in values.items() if key not in said and unsaid.get(key) == value
    )
    return Reading(one.name, values, defaults), (
        f"{path} is read as PaddleViT's, with the defaults of configs/paddlevit/{one.name}.yaml{remark}"
    )


def _is_ambiguous(newest: Family, own: dict[str, Any], others: dict[str, Any]) -> bool:
    """Returns whether a file that also has keys of this toolkit would give another configuration with
    PaddleViT's defaults than with config.py's (``others``).

    For ViT both are the same, unless the file has keys that only PaddleViT has.
    """
    if any(key not in others for key in own):
        return True
    values, _ = translate(newest, {}, FOLDER)
    compared = ("TRAIN.", "DATA.IMAGENET_", "DATA.CROP_PCT")
    return any(key.startswith(compared) and values[key] != others[key] for key in values)


def family_of(content: dict[str, Any], keys: Collection[str]) -> tuple[Family | None, str | None]:
    """Returns the family that a YAML file is a difference to: (the family, None).

    A file is PaddleViT's if it names no BASE, its MODEL.TYPE is one of PaddleViT's, and PaddleViT
    has all its keys. If only the last doesn't hold, (None, what PaddleViT doesn't have, in words)
    is returned; else (None, None).

    Args:
        content: of the file.
        keys: the dotted keys that it sets.
    """
    model = content.get("MODEL")
    kind = model.get("TYPE") if isinstance(model, dict) else None
    candidates = families(kind) if isinstance(kind, str) and "BASE" not in content else []
    for one in candidates:
        if all(key in one.defaults for key in keys):
            return one, None
    if not candidates:
        return None, None
    foreign = [key for key in keys if not any(key in one.defaults for one in candidates)]
    if foreign:
        return None, f"no {foreign[0]}"
    # Each key is of one format, but none has them all: one key that the newest lacks, one that the
    # others lack.
    lacking = [next(key for key in keys if key not in one.defaults) for one in candidates]
    return None, f"no format with both {' and '.join(dict.fromkeys(reversed(lacking)))}"


def translate(one: Family, own: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns (this toolkit's keys and values, the file's own keys that do nothing).

    Args:
        one: the family whose defaults hold where ``own`` says nothing.
        own: the file's dotted keys and values.
        path: the file, named in errors.

    Raises:
        InputError: a value that PaddleViT takes and this toolkit doesn't have.
    """
    settings = {
        key: parse_value(v) if isinstance(v, str) else v for key, v in (one.defaults | own).items()
    }
    for key in own:
        _check_kind(key, settings[key], one.defaults[key], path)
    if settings.get("MODEL.MAE_PRETRAIN") and "MODEL.MAE_PRETRAIN" in own:
        raise InputError(
            f"{path}: MAE_PRETRAIN is True, but MAE's pre-training isn't here; give a fine-tuning's file"
        )
    idle = {key for key in settings if any(fnmatchcase(key, pattern) for pattern in one.ignored)}
    settings = {key: value for key, value in settings.items() if key not in idle}
    for key in settings.keys() & one.only.keys():
        if settings.pop(key) != one.only[key]:
            raise InputError(
                f"{path}: {key} is {own[key]}, expected {one.only[key]}, the only value that this toolkit has"
            )
    values, unused = _of_training(one, settings)
    values |= of_models(settings, own, path)
    for key, value in settings.items():
        values.setdefault(
            own_key(key, value), value.lower() if value and key == "MODEL.CNN.ACTIVATION" else value
        )
    # Without a value, PaddleViT takes -batch_size.
    if values["DATA.BATCH_SIZE_EVAL"] is None:
        del values["DATA.BATCH_SIZE_EVAL"]
    return values | one.here, sorted((idle | unused) & own.keys())


def _check_kind(key: str, value: Any, default: Any, path: Path) -> None:
    """Checks that a value is of its default's kind, as PaddleViT does. "auto" is this toolkit's own.

    Raises:
        InputError: it isn't.
    """
    found = _kind(value)
    expected = _kind(parse_value(default) if isinstance(default, str) else default)
    if None in (value, default) or value == "auto" or found == expected:
        return
    raise InputError(
        f"{path}: {key} takes {expected} in PaddleViT's files, found {quoted(value)}; a file with BASE is your own,"
        " and has this toolkit's keys and values"
    )


def _kind(value: Any) -> str:
    kinds = {
        bool: "True or False",
        int: "a number",
        float: "a number",
        list: "a list",
        tuple: "a list",
    }
    return kinds.get(type(value), "a word")


def own_key(key: str, value: Any = None) -> str:
    """Returns this toolkit's name of a key of PaddleViT's, or the name as it is."""
    if not key.startswith("MODEL."):
        return key
    name = key.removeprefix("MODEL.")
    for group in GROUPS:
        name = name.removeprefix(group)
    name = _ALIASES.get(name, name)
    if name == "IN_CHANNELS":
        return "DATA.IMAGE_CHANNELS"
    if isinstance(value, list):
        # A number for each stage.
        name = {"EMBED_DIM": "EMBED_DIMS", "DEPTH": "STAGE_DEPTHS"}.get(name, name)
    return f"MODEL.{name}"


def difference_lines(name: str, config: Configuration) -> list[str]:
    """Returns one line, or none: where PaddleViT's training of a family differs, with the keys for
    its way.
    """
    told = [*family(name).differs, "average", "policy"]
    lines = [
        line
        for what, (matters, line) in _OTHERWISE.items()
        if what in told and matters(config.TRAIN)
    ]
    return [f"PaddleViT itself {'; '.join(lines)}: docs/paddlevit.md"] if lines else []


def _of_training(one: Family, settings: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Takes out of ``settings`` what has no key of its own here; returns what that comes to, and
    what is unused.
    """
    values: dict[str, Any] = {}
    train = {
        key.removeprefix("TRAIN."): value
        for key, value in settings.items()
        if key.startswith("TRAIN.")
    }
    if train.get("OPTIMIZER.NAME") == "AdamWDL":  # AdamW with rates by layer
        values["TRAIN.OPTIMIZER.NAME"] = "AdamW"
    # the others take neither key there
    if train.get("LR_SCHEDULER.NAME", "warmupcosine") != "warmupcosine":
        values |= {"TRAIN.WARMUP_EPOCHS": 0, "TRAIN.END_LR": 0.0}
    policy = next((policy for switch, policy in one.augment.items() if train.get(switch)), "")
    values["TRAIN.AUTO_AUGMENT"] = policy.format(**train) or None
    numbers = {name for name in train if name.startswith("RAND_AUGMENT_")}
    unused = {f"TRAIN.{name}" for name in numbers if f"{{{name}}}" not in policy}
    if policy:
        values["TRAIN.COLOR_JITTER"] = 0.0
        unused.add("TRAIN.COLOR_JITTER")
    if "DISTILLATION_TYPE" in train:  # TEACHER_MODEL is the teacher's weights there
        distils = settings.pop("MODEL.DISTILL", True) and train["DISTILLATION_TYPE"] not in (
            None,
            "none",
        )
        file = train["TEACHER_MODEL"]
        weights = file and f"{file.removesuffix('.pdparams')}.pdparams"
        if "MODEL.DISTILLED" not in one.ignored:
            values["MODEL.DISTILLED"] = distils
        values["TRAIN.DISTILLATION_TYPE"] = train["DISTILLATION_TYPE"] if distils else None
        values["TRAIN.TEACHER_MODEL"] = "regnety_160" if distils else None
        values["TRAIN.TEACHER_PATH"] = weights if distils else None
    # five sizes, from half of the images' to half more
    if settings.pop("TRAIN.MULTI_SCALE_SAMPLER_DDP", False):
        sides = (
            int(settings["DATA.IMAGE_SIZE"] * quarters / 4) // 32 * 32
            for quarters in (2, 3, 4, 5, 6)
        )
        values["DATA.MULTI_SCALE"] = list(dict.fromkeys(sides))
    for name in numbers | one.augment.keys():
        settings.pop(f"TRAIN.{name}", None)
    settings.pop("MODEL.MAE_PRETRAIN", None)
    return values, unused
