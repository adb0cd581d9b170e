"""Reads PaddleViT's YAML files, with the meaning that they have in PaddleViT.

A file of PaddleViT's only holds what differs from its family's ``config.py``. Those defaults, and
what else the family's code decides, are in the YAML files of configs/paddlevit. Their parts are:

- LIKE: another of these files, whose parts this one adds to.
- TYPES: the MODEL.TYPE of the family's files, in lower case. Without it, a file only serves others.
- SIGN: a key that all of the family's files set, where another family has the same MODEL.TYPE.
- DEFAULTS: what the family's config.py sets, in PaddleViT's keys.
- IGNORED: keys (patterns) that PaddleViT's code doesn't read, or that mean nothing here.
- ONLY: keys that may only have the value given here.
- AUGMENT: switches under TRAIN, and the policy (AUTO_AUGMENT here) that each stands for. The first
  switch that is on counts.
- HERE: what PaddleViT's code does without a key, in this toolkit's keys.
- DIFFERS: in what PaddleViT's training differs from this toolkit's (``difference_lines``).

``NAME_2021.yaml`` has the keys by their names of 2021. A model's file belongs to the newest of its
family's files that has all of its keys. ``segmentation.yaml`` has the keys of all models for
segmentation, whose files have no MODEL.TYPE (``settings.paddlevit.segmentation``).
"""

import functools
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from errors import InputError
from settings.configuration import CONFIG_DIR, Configuration, leaves
from settings.documents import read_yaml
from settings.paddlevit import segmentation
from settings.paddlevit.models import of_models
from settings.values import parse_value, quoted

FOLDER = CONFIG_DIR / "paddlevit"
# The groups of keys that PaddleViT has within MODEL, and this toolkit hasn't.
GROUPS = ("TRANS.", "MIXER.", "CNN.", "ENCODER.", "FOCAL.")
# This toolkit's names of keys of MODEL, by PaddleViT's.
_ALIASES = {
    "DROP_PATH": "DROPPATH", "HIDDEN_SIZE": "EMBED_DIM", "DIM": "EMBED_DIM", "DIMS": "EMBED_DIMS",
    "NUM_LAYERS": "DEPTH", "DEPTHS": "STAGE_DEPTHS", "STAGE_DEPTH": "STAGE_DEPTHS",
    "LAYERS": "DEPTH", "SERIAL_DEPTHS": "STAGE_DEPTHS", "MLP_RATIOS": "MLP_RATIO",
    "SR_RATIOS": "SR_RATIO",
    "LAYER_SCALE_INIT_VALUE": "INIT_VALUES", "ACTIVATION": "ACT", "HEADS": "NUM_HEADS",
    "ETA": "INIT_VALUES", "CLS_ATTN_LAYERS": "DEPTH_TOKEN_ONLY", "CHANNELS": "EMBED_DIMS",
    "NUM_BLOCKS": "STAGE_DEPTHS", "IN_CHANS": "IN_CHANNELS",
}  # fmt: skip
# The keys of TASK mae, by PaddleViT's of its pre-training.
_MAE_KEYS = {
    "MODEL.TRANS.MASK_RATIO": "METHOD.MASK_RATIO",
    "MODEL.TRANS.DECODER.EMBED_DIM": "METHOD.DECODER_WIDTH",
    "MODEL.TRANS.DECODER.DEPTH": "METHOD.DECODER_DEPTH",
    "MODEL.TRANS.DECODER.NUM_HEADS": "METHOD.DECODER_HEADS",
    "TRAIN.NORMALIZE_TARGET": "METHOD.NORM_TARGET",
}
# The keys of TASK dino, by PaddleViT's of its pre-training.
_DINO_KEYS = {
    "DATA.GLOBAL_CROPS_SCALE": "METHOD.GLOBAL_SCALE",
    "DATA.LOCAL_CROPS_NUMBER": "METHOD.LOCAL_VIEWS",
    "DATA.LOCAL_CROPS_SCALE": "METHOD.LOCAL_SCALE",
    "DATA.SMALL_CROP_IMAGE_SIZE": "METHOD.LOCAL_SIZE",
    "MODEL.NORM_LAST_LAYER": "METHOD.NORM_LAST_LAYER",
    "MODEL.OUT_DIM": "METHOD.PROTOTYPES",
    "TRAIN.FREEZE_LAST_LAYER": "METHOD.FREEZE_LAST_LAYER",
    "TRAIN.MOMENTUM_TEACHER": "METHOD.MOMENTUM",
    "TRAIN.TEACHER_TEMP": "METHOD.TEACHER_TEMP",
    "TRAIN.USE_BN_IN_HEAD": "METHOD.HEAD_BATCH_NORM",
    "TRAIN.WARMUP_TEACHER_TEMP": "METHOD.WARMUP_TEACHER_TEMP",
    "TRAIN.WARMUP_TEACHER_TEMP_EPOCHS": "METHOD.WARMUP_TEACHER_TEMP_EPOCHS",
}
# What an error says of a key that only PaddleViT has, in a file that isn't read as PaddleViT's.
PLACE = (
    "it is PaddleViT's, for files with its keys alone and no BASE:"
    " docs/migrate/paddlevit.md names the key for others"
)


class Family(NamedTuple):
    """A family of PaddleViT's models: a file of configs/paddlevit, with the parts of its LIKE.

    The module's docstring explains the parts.
    """

    name: str
    types: tuple[str, ...]
    sign: str
    defaults: dict[str, Any]
    ignored: tuple[str, ...]
    only: dict[str, Any]
    augment: dict[str, str]
    here: dict[str, Any]
    differs: tuple[str, ...]


@functools.cache
def _read_family(name: str) -> Family:
    """Returns the family in the file ``NAME.yaml``."""
    content = read_yaml(FOLDER / f"{name}.yaml")
    if "LIKE" in content:
        like = _read_family(content["LIKE"])
    else:
        like = Family(
            name,
            types=(),
            sign="",
            defaults={},
            ignored=(),
            only={},
            augment={},
            here={},
            differs=(),
        )
    return Family(
        name=name,
        types=tuple(content.get("TYPES", ())),
        sign=content.get("SIGN", ""),
        defaults=like.defaults | dict(leaves(content["DEFAULTS"])),
        ignored=(*like.ignored, *content.get("IGNORED", ())),
        only=like.only | content.get("ONLY", {}),
        augment=content.get("AUGMENT", like.augment),
        here=like.here | dict(leaves(content.get("HERE", {}))),
        differs=tuple(content.get("DIFFERS", like.differs)),
    )


def is_family(path: Path, content: dict[str, Any]) -> bool:
    """Returns whether a YAML file is a family's. A model's own file may lie beside those."""
    return path.parent == FOLDER and "DEFAULTS" in content


@functools.cache
def _all_families() -> tuple[Family, ...]:
    """Returns all families. Of one family's files, the newest comes first."""
    files = sorted(FOLDER.glob("*.yaml"), key=lambda file: len(file.stem))
    return tuple(_read_family(file.stem) for file in files if is_family(file, read_yaml(file)))


def families(model_type: str) -> list[Family]:
    """Returns the families whose files have this MODEL.TYPE, the newest first."""
    return [family for family in _all_families() if model_type.lower() in family.types]


@functools.cache
def sections() -> frozenset[str]:
    """Returns the dotted names of all sections in PaddleViT's files, where they may be empty."""
    keys = {key for family in _all_families() for key in family.defaults}
    return frozenset(key[:dot] for key in keys for dot, letter in enumerate(key) if letter == ".")


def has_key(key: str) -> bool:
    """Returns whether any family of PaddleViT's has this dotted key."""
    return any(key in family.defaults for family in _all_families())


class Reading(NamedTuple):
    """A file of PaddleViT's in this toolkit's keys.

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
    """Reads a YAML file, if it is one of PaddleViT's.

    Args:
        path: of the file.
        content: of the file, which names no BASE; or of a family's file.
        own: the dotted keys and values that the file sets.
        others: config.py's defaults by dotted key.

    Returns:
        (the file in this toolkit's keys, a line for the log), or (None, "") if the file isn't
        PaddleViT's.

    Raises:
        InputError: the file has a value that isn't supported, or has a different meaning as PaddleViT's
            and as this toolkit's.
    """
    if is_family(path, content):
        family = _read_family(path.stem)
        if family.name == segmentation.NAME:
            raise InputError(
                f"{path}: it only has PaddleViT's defaults, which don't name a model; use"
                " PaddleViT's file"
                " of a model, without BASE"
            )
        values, _ = _translate(family, {}, path)
        return Reading(family.name, values), ""
    if "BASE" not in content and segmentation.is_segmentation(own):
        return _read_segmentation(path, own)
    family, foreign = _family_of(content, own)
    if family is None:
        # If a key is neither toolkit's, the caller reports it as unknown.
        has_unknown = any(key not in others and not has_key(key) for key in own)
        if foreign and not has_unknown:
            newest = families(content["MODEL"]["TYPE"])[0]
            _check_unambiguous(newest, foreign, path, own, others)
        return None, ""
    values, ignored = _translate(family, own, path)
    family_values, _ = _translate(family, {}, path)
    own_keys = {own_key(key, value) for key, value in own.items()}
    defaults = frozenset(
        key
        for key, value in values.items()
        if key not in own_keys and family_values.get(key) == value
    )
    return Reading(family.name, values, defaults), _note(path, family, ignored)


def _read_segmentation(path: Path, own: dict[str, Any]) -> tuple[Reading, str]:
    """``read`` for a file for segmentation."""
    family = _read_family(segmentation.NAME)
    segmentation.check_keys(path, own, family.defaults)
    values, keys_read = segmentation.translate(_settings_of(family, own, path), path)
    return Reading(family.name, values), _note(path, family, sorted(own.keys() - keys_read))


def _note(path: Path, family: Family, ignored: list[str]) -> str:
    """Returns the line for the log about a file.

    Args:
        ignored: the file's keys that have no effect.
    """
    note = (
        f"{path} is read as PaddleViT's, with the defaults of configs/paddlevit/{family.name}.yaml"
    )
    if ignored:
        note += f"; without effect in PaddleViT, and ignored: {', '.join(ignored)}"
    return note


def _check_unambiguous(
    newest: Family, foreign: str, path: Path, own: dict[str, Any], others: dict[str, Any]
) -> None:
    """Checks a file that is almost one of PaddleViT's, but has keys that only this toolkit has.

    Raises:
        InputError: with PaddleViT's defaults the configuration would be another one than with
            config.py's (``others``). For ViT both are the same, unless the file has keys that only
            PaddleViT has.
    """
    differ = any(key not in others for key in own)
    if not differ:
        values, _ = _translate(newest, {}, FOLDER)
        compared = ("TRAIN.", "DATA.IMAGENET_", "DATA.CROP_PCT")
        differ = any(key.startswith(compared) and values[key] != others[key] for key in values)
    if differ:
        raise InputError(
            f"{path}: it has no BASE, like PaddleViT's files, but PaddleViT's {newest.name} has"
            f" {foreign}; choose the defaults: BASE: paddlevit/{newest.name}.yaml (PaddleViT's)"
            " or BASE: '' (config.py's)"
        )


def _family_of(content: dict[str, Any], keys: Collection[str]) -> tuple[Family | None, str]:
    """Returns the family to which a YAML file belongs.

    A file is PaddleViT's if it names no BASE, its MODEL.TYPE is one of PaddleViT's, and PaddleViT
    has all of its keys.

    Args:
        content: of the file.
        keys: the dotted keys that it sets.

    Returns:
        (the family, ""); or (None, text) if only the last condition doesn't hold, where the text
        says what PaddleViT lacks; otherwise (None, "").
    """
    model = content.get("MODEL")
    model_type = model.get("TYPE") if isinstance(model, dict) else None
    if not isinstance(model_type, str) or "BASE" in content:
        return None, ""
    candidates = [
        family for family in families(model_type) if not family.sign or family.sign in keys
    ]
    if not candidates:
        return None, ""
    for family in candidates:
        if all(key in family.defaults for key in keys):
            return family, ""
    for key in keys:
        if not any(key in family.defaults for family in candidates):
            return None, f"no {key}"
    # Each key is in some format, but none has them all. So there is one key that the newest lacks,
    # and another one that an older one lacks.
    lacking = [next(key for key in keys if key not in family.defaults) for family in candidates]
    return None, f"no format with both {' and '.join(dict.fromkeys(reversed(lacking)))}"


def _translate(family: Family, own: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns (this toolkit's keys and values, the file's own keys that have no effect).

    Args:
        family: whose defaults hold for the keys that ``own`` doesn't set.
        own: the file's dotted keys and values.
        path: of the file, for errors.

    Raises:
        InputError: PaddleViT takes a value that this toolkit doesn't have.
    """
    settings = _settings_of(family, own, path)
    of_task: dict[str, Any] = {}
    # It is True in PaddleViT's defaults, which hold for files of fine-tunings, too.
    if "MODEL.MAE_PRETRAIN" in own and settings["MODEL.MAE_PRETRAIN"]:
        of_task = {key: settings[name] for name, key in _MAE_KEYS.items()}
        of_task["TASK"] = "mae"
    idle = {key for key in settings if any(fnmatchcase(key, name) for name in family.ignored)}
    settings = {key: value for key, value in settings.items() if key not in idle}
    for key, only_value in family.only.items():
        if key in settings and settings.pop(key) != only_value:
            raise InputError(
                f"{path}: {key} is {own[key]}, expected {only_value}, the only value that this"
                " toolkit supports"
            )
    values, unused = _of_training(family, settings)
    values |= of_models(settings, own, path)
    for key, value in settings.items():
        if value and key == "MODEL.CNN.ACTIVATION":
            value = value.lower()
        values.setdefault(own_key(key, value), value)
    # Without a value, PaddleViT takes -batch_size.
    if values["DATA.BATCH_SIZE_EVAL"] is None:
        del values["DATA.BATCH_SIZE_EVAL"]
    if of_task:
        idle -= _MAE_KEYS.keys()
    return values | family.here | of_task, sorted((idle | unused) & own.keys())


def _settings_of(family: Family, own: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the values of all keys of a file, its family's where it has none.

    Raises:
        InputError: one is of another kind than the family's.
    """
    settings = {
        key: parse_value(value) if isinstance(value, str) else value
        for key, value in (family.defaults | own).items()
    }
    for key in own:
        _check_kind(key, settings[key], family.defaults[key], path)
    return settings


def _check_kind(key: str, value: Any, default: Any, path: Path) -> None:
    """Checks that a value is of the same kind as the family's default, as PaddleViT does.

    The value "auto" is this toolkit's own, and fits every key.

    Raises:
        InputError: it is of another kind.
    """
    found = _kind(value)
    expected = _kind(parse_value(default) if isinstance(default, str) else default)
    if None in (value, default) or value == "auto" or found == expected:
        return
    raise InputError(
        f"{path}: {key} takes {expected} in PaddleViT's files, found {quoted(value)};"
        " a file with BASE uses the keys and values of this toolkit"
    )


def _kind(value: Any) -> str:
    """Returns the kind of a value in words."""
    kinds = {
        bool: "True or False",
        int: "a number",
        float: "a number",
        list: "a list",
        tuple: "a list",
    }
    return kinds.get(type(value), "a word")


def own_key(key: str, value: Any = None) -> str:
    """Returns this toolkit's name of a key of PaddleViT's; any other key as it is.

    Args:
        value: of the key. A list may have another key than a number.
    """
    if not key.startswith("MODEL.") or key in _DINO_KEYS:
        return _DINO_KEYS.get(key, key)
    name = key.removeprefix("MODEL.")
    for group in GROUPS:
        name = name.removeprefix(group)
    name = _ALIASES.get(name, name)
    if name == "IN_CHANNELS":
        return "DATA.IMAGE_CHANNELS"
    if name == "SYNC_BN":
        return "TRAIN.SYNC_BN"
    if isinstance(value, list):
        # A number for each stage.
        name = {"EMBED_DIM": "EMBED_DIMS", "DEPTH": "STAGE_DEPTHS"}.get(name, name)
    return f"MODEL.{name}"


def difference_lines(name: str, config: Configuration) -> list[str]:
    """Returns a line about where PaddleViT's own training of a family differs, or none.

    The line names the key for PaddleViT's way, if there is one.

    Args:
        name: of the family.
        config: of a training.
    """
    differs = _read_family(name).differs
    train = config.TRAIN
    differences = []
    if "rate" in differs and not train.LR_SCHEDULER.PER_EPOCH:
        differences.append(
            "changes the rate once per epoch (as with TRAIN.LR_SCHEDULER.PER_EPOCH True)"
        )
    if "decay" in differs and not train.DECAY_ALL:
        differences.append(
            "applies weight decay to biases, norms and tokens, too (TRAIN.DECAY_ALL True)"
        )
    if "iterations" in differs:
        differences.append(
            "counts steps instead of epochs, so n processes train n times as long"
            " (TRAIN.NUM_EPOCHS is for one)"
        )
    if "exchanged" in differs and train.CROP == "scale_jitter":
        differences.append("swaps height and width when it resizes training images (no key)")
    if train.MODEL_EMA and train.MODEL_EMA_WARMUP:
        differences.append("has no warm-up of the average (TRAIN.MODEL_EMA_WARMUP False)")
    if (train.AUTO_AUGMENT or "").startswith("rand"):
        differences.append(
            "translates images by up to 100 pixels in its policies,"
            " this toolkit, like timm, by up to 45 % of a side (no key)"
        )
    if "sum" in differs and train.ACCUM_ITER > 1:
        differences.append(
            "sums the gradients of ACCUM_ITER steps,"
            " this toolkit averages them, as its later code does (no key)"
        )
    if not differences:
        return []
    return [f"PaddleViT itself {'; '.join(differences)}: docs/migrate/paddlevit.md"]


def _of_training(family: Family, settings: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Removes the keys of a training from ``settings`` that have no counterpart of their own here.

    Returns:
        (this toolkit's keys and values for them, PaddleViT's keys that have no effect).
    """
    values: dict[str, Any] = {}
    train = {
        key.removeprefix("TRAIN."): value
        for key, value in settings.items()
        if key.startswith("TRAIN.")
    }
    # AdamWDL is AdamW with a rate for each layer, which is a key here.
    if train.get("OPTIMIZER.NAME") == "AdamWDL":
        values["TRAIN.OPTIMIZER.NAME"] = "AdamW"
    # PaddleViT's other schedules read neither of these keys.
    if train.get("LR_SCHEDULER.NAME", "warmupcosine") != "warmupcosine":
        values["TRAIN.WARMUP_EPOCHS"] = 0
        values["TRAIN.END_LR"] = 0.0

    policy = ""
    for switch, switched in family.augment.items():
        if train.get(switch):
            policy = switched
            break
    values["TRAIN.AUTO_AUGMENT"] = policy.format(**train) or None
    policy_keys = {name for name in train if name.startswith("RAND_AUGMENT_")}
    unused = {f"TRAIN.{name}" for name in policy_keys if f"{{{name}}}" not in policy}
    if policy:
        values["TRAIN.COLOR_JITTER"] = 0.0
        unused.add("TRAIN.COLOR_JITTER")

    if "DISTILLATION_TYPE" in train:
        kind = train["DISTILLATION_TYPE"]
        distils = settings.pop("MODEL.DISTILL", True) and kind not in (None, "none")
        # TEACHER_MODEL is the file of the teacher's weights there, also without its ending.
        file = train["TEACHER_MODEL"]
        if file:
            file = f"{file.removesuffix('.pdparams')}.pdparams"
        if "MODEL.DISTILLED" not in family.ignored:
            values["MODEL.DISTILLED"] = distils
        values["TRAIN.DISTILLATION_TYPE"] = kind if distils else None
        values["TRAIN.TEACHER_MODEL"] = "regnety_160" if distils else None
        values["TRAIN.TEACHER_PATH"] = file if distils else None

    # Five sizes, from half of IMAGE_SIZE to one and a half times as much.
    if settings.pop("TRAIN.MULTI_SCALE_SAMPLER_DDP", False):
        quarters = (2, 3, 4, 5, 6)
        sides = (int(settings["DATA.IMAGE_SIZE"] * count / 4) // 32 * 32 for count in quarters)
        values["DATA.MULTI_SCALE"] = list(dict.fromkeys(sides))

    for name in policy_keys | family.augment.keys():
        settings.pop(f"TRAIN.{name}", None)
    settings.pop("MODEL.MAE_PRETRAIN", None)
    return values, unused
