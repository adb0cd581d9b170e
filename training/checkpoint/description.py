"""Descriptions of weights: their model, its classes, and how its images are prepared.

A description is stored in the metadata of the weights' own file.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from config import (
    default_values,
    get_config,
    shipped_configs,
    shipped_model,
    with_options,
    with_values,
)
from errors import InputError, printable, reading
from loading.class_names import UNPRINTABLE
from loading.label_spaces import imagenet_names
from models.openclip_arguments import described_openclip, timm_tower
from models.pretrained import with_preprocessing
from models.transformers_arguments import described_model
from models.transformers_heads import described_head
from settings.architectures import architectures
from settings.configuration import Configuration, leaves
from settings.names import instead
from settings.needs import TRAINING
from settings.parser import pairs
from settings.plain import NAME, Form, Rule, check_form, is_list, is_real, parsed_json
from settings.registry import heads, tasks
from training.checkpoint.calibration import Calibration, read_calibration
from training.checkpoint.state import state_beside
from weights import find_weights
from weights.adapters import find_adapter
from weights.formats import METADATA, read_metadata
from weights.hub import read_config
from weights.openclip import read_openclip
from weights.transformers import read_transformers
from weights.transformers import task_of as transformers_task

TASKS = tasks.names()
# The keys of DATA that say how images are prepared.
_IMAGES = (
    "IMAGE_SIZE",
    "IMAGE_CHANNELS",
    "CROP_PCT",
    "CROP_MODE",
    "NUM_TOKENS",
    "INTERPOLATION",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "FAST_EVAL",
    "EXIF_ORIENTATION",
    "IMAGE_DTYPE",
)
_ADAPTER = "MODEL.PRETRAINED_ADAPTER"
# The keys of MODEL that don't build the model.
_OF_A_RUN = ("RESUME", "PRETRAINED", "PRETRAINED_ALLOW", "PRETRAINED_CLASSES", "PRETRAINED_ADAPTER")
_CLASS = Rule("a list of names that can be printed", lambda value: is_list(value, _is_class))
_VALUES = Rule("a dictionary of keys and their values", lambda v: type(v) is dict and len(v) < 500)


def _is_class(name: Any) -> bool:
    return type(name) is str and not UNPRINTABLE.search(name)


def _is_share(value: Any) -> bool:
    return is_real(value, 0, 1)


_FORM: Form = {
    "model": NAME,
    "task": Rule(f"one of {', '.join(TASKS)}", lambda value: value in TASKS),
    "classes": _CLASS,
    "values": _VALUES,
    "thresholds": Rule("a list of probabilities", lambda value: is_list(value, _is_share)),
}


@dataclass(frozen=True)
class Description:
    """The model that weights belong to, its classes and its images.

    Attributes:
        model: the model's name.
        task: the TASK it was trained for: "classification" (one class for each image), "multilabel"
            (any number of them) or another one.
        classes: the names of the outputs, in their order; empty: they aren't known.
        values: the keys that build the model and prepare its images, with their dots:
            ``{"MODEL.TYPE": "ViT", ...}``.
        thresholds: with multilabel, the probability from which on an output is a yes, by output;
            empty: none were chosen.
        calibration: what ``tools/calibrate.py`` chose; None: it wasn't run.
    """

    model: str
    task: str
    classes: list[str]
    values: dict[str, Any]
    thresholds: list[float] = field(default_factory=list)
    calibration: Calibration | None = None

    def entries(self) -> dict[str, Any]:
        """Returns what ``to_json`` writes. Weights without a calibration have no entry for it."""
        entries = dict(vars(self))
        if self.calibration is None:
            del entries["calibration"]
        else:
            entries["calibration"] = self.calibration.as_json()
        return entries

    def to_json(self) -> str:
        """Returns the description as JSON, which ``read_description`` reads."""
        return json.dumps(self.entries(), ensure_ascii=False)

    def to_config(self, options: Sequence[str] = ()) -> Configuration:
        """Returns the frozen configuration of the model and its images.

        All other keys have their defaults.

        Args:
            options: words as after ``-o``.

        Raises:
            InputError: a key or a value that this release doesn't take.
        """
        words = []
        keys = ["MODEL.TYPE", "MODEL.NAME"]
        if "HEAD.NAME" in self.values:
            # Its keys are refused under other tasks.
            words += ["TASK", self.task]
            keys += ["HEAD.NAME", "DATA.CROP_MODE"]
            # Otherwise it does nothing, and is refused itself.
            if self.values.get("DATA.CROP_MODE") == "squash":
                keys.append("DATA.CROP_PCT")
        for key in keys:
            if key in self.values:
                words += [key, self.values[key]]
        config = get_config(None, words)
        if unknown := sorted(self.values.keys() - default_values(config).keys()):
            raise InputError(
                f"it has the key {printable(unknown[0])}, which {config.MODEL.TYPE} doesn't have"
            )
        values = {key.replace(".", "__"): value for key, value in self.values.items()}
        config = with_values(config, "the weights' description", **values)
        return with_options(config, options) if options else config


def describe(
    config: Configuration,
    classes: list[str],
    task: str = "classification",
    thresholds: Sequence[float] = (),
    calibration: Calibration | None = None,
) -> Description:
    """Returns the description of a model of ``config`` whose outputs are ``classes``."""
    values = {key: value for key, value in leaves(config) if _describes(key)}
    head = config.HEAD.NAME
    if head is not None:
        read = {heads.key_of(word) for word in heads.components[head].keys}
        read |= {"HEAD.NAME", "HEAD.INDICES", "HEAD.STRIDE"}
        values |= {key: value for key, value in leaves(config) if key in read}
    return Description(
        config.MODEL.NAME, task, list(classes), values, list(thresholds), calibration
    )


def _describes(key: str) -> bool:
    section, _, name = key.partition(".")
    return (section == "MODEL" and name not in _OF_A_RUN) or (section == "DATA" and name in _IMAGES)


def without_training_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a description's values without the keys that have an effect in training alone, such as
    MODEL.DROPPATH. Those of an unsupported architecture stay.
    """
    kind = str(values.get("MODEL.TYPE", "")).lower()
    if kind not in architectures():
        return values
    keys = architectures()[kind].arguments
    return {
        key: value
        for key, value in values.items()
        if key not in keys or TRAINING not in keys[key].needs
    }


def read_description(text: bytes) -> Description:
    """Returns the description that ``Description.to_json`` wrote.

    Call it within ``errors.reading``, which makes an InputError of what it raises.

    Raises:
        Unreadable, Exception: the text is something else.
    """
    entries = parsed_json(text)
    # Earlier releases wrote no thresholds.
    check_form(entries, _FORM, tuple(name for name in _FORM if name != "thresholds"))
    description = Description(**{name: entries[name] for name in _FORM if name in entries})
    if "calibration" in entries:
        calibration = read_calibration(entries["calibration"], len(description.classes))
        description = replace(description, calibration=calibration)
    return description


def description_of(path: str | Path, options: Sequence[str] = ()) -> Description | None:
    """Returns the description of weights, or None if nothing describes them.

    A .safetensors file that this toolkit wrote has it in its metadata. For earlier releases it is
    made from the checkpoint's state.json, and for timm's and transformers' weights from the
    config.json beside them. The description of an adapter comes before that of its base.

    Args:
        path: what ``find_weights`` takes.
        options: words as after ``-o``. A key that they set isn't taken from config.json. An adapter
            is named here, by MODEL.PRETRAINED_ADAPTER.

    Raises:
        InputError: there are no weights, or what describes them can't be read.
    """
    file = find_weights(path)
    adapter = dict(pairs(options, ())).get(_ADAPTER)
    description = _stored(file, adapter) or _of_state(file)
    if description is None:
        return _of_timm(path, options)
    try:
        description.to_config()
    except InputError as error:
        raise InputError(
            f"{file}: its description of the model is invalid: {error}; pass -cfg"
        ) from None
    return description


def classes_of(path: str | Path, adapter: str | None = None) -> list[str] | None:
    """Returns the class names of the run that saved ``path``, or an adapter of it.

    It is None if neither the weights nor a checkpoint say them.

    Raises:
        InputError: as ``description_of``.
    """
    file = find_weights(path)
    if description := _stored(file, adapter):
        return description.classes
    state = state_beside(file, "classes")
    return _printable(state["classes"], file) if state else None


def task_of(path: str | Path, adapter: str | None = None) -> str | None:
    """Returns the TASK that weights, or an adapter of them, were trained for.

    Their own description says it, or transformers' config.json beside them. It is None if neither
    does.

    Raises:
        InputError: as ``description_of``.
    """
    description = _stored(find_weights(path), adapter)
    return description.task if description else transformers_task(path)


def check_task(path: str | Path, task: str, adapter: str | None = None) -> None:
    """Raises InputError if weights, or an adapter of them, were trained for another task.

    It also raises what ``description_of`` does.
    """
    trained_for = task_of(path, adapter)
    if trained_for not in (None, task):
        raise InputError(
            f"{adapter or path}: the weights are for TASK {trained_for}, found TASK {task};"
            f" pass -o TASK {trained_for}"
        )


def check_normalisation(config: Configuration, key: str, path: str | Path) -> None:
    """Raises InputError if weights say that they were trained on images that were normalised by
    other numbers than those of ``config``.

    Args:
        key: the key that names the weights.
    """
    description = _stored(find_weights(path))
    for name in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):
        expected = dict(leaves(config))[name]
        trained_with = description.values.get(name, expected) if description else expected
        if trained_with != expected:
            raise InputError(
                f"{key} {path} was trained with {name} {trained_with}, found {expected} in its YAML;"
                " use the config.yaml of its run"
            )


def thresholds_of(path: str | Path, adapter: str | None = None) -> list[float]:
    """Returns the thresholds that are stored with weights, by output; [] if there are none.

    Args:
        adapter: as in ``classes_of``.

    Raises:
        InputError: as ``description_of``.
    """
    description = _stored(find_weights(path), adapter)
    return description.thresholds if description else []


def calibration_of(path: str | Path, adapter: str | None = None) -> Calibration | None:
    """Returns the calibration that is stored with weights; None if there is none.

    Args:
        adapter: as in ``classes_of``.

    Raises:
        InputError: as ``description_of``.
    """
    description = _stored(find_weights(path), adapter)
    return description.calibration if description else None


def _stored(file: Path, adapter: str | None = None) -> Description | None:
    """Returns the description in the metadata of an adapter's file, or else of the weights' own."""
    if adapter and (description := _stored(find_adapter(adapter))):
        return description
    with reading(file, "weights that describe themselves"):
        text = read_metadata(file).get(METADATA)
        return None if text is None else read_description(text.encode())


def _of_state(file: Path) -> Description | None:
    """Returns the description that the state.json beside a checkpoint's file makes."""
    state = state_beside(file, "classes", "config")
    if state is None:
        return None
    values = {key: value for key, value in leaves(state["config"]) if _describes(key)}
    return Description(
        values.get("MODEL.NAME", file.stem),
        "classification",
        _printable(state["classes"], file),
        values,
    )


def _printable(classes: list[str], file: Path | str) -> list[str]:
    """Returns the names of classes, or raises InputError if one can't be printed."""
    if bad := [name for name in classes if not _is_class(name)]:
        raise InputError(
            f"{file}: the class name '{printable(bad[0], 60)}' has unprintable characters;"
            " rename it there"
        )
    return classes


def _of_transformers(path: str | Path, options: Sequence[str]) -> Description | None:
    """Returns the description that transformers' config.json beside weights makes."""
    stored = read_transformers(path)
    kind_and_values = described_model(path) if stored else None
    if kind_and_values is None:
        return None
    kind, values = kind_and_values
    words = ["MODEL.PRETRAINED", str(path), "MODEL.TYPE", kind, "MODEL.NAME", stored["model_type"]]
    words += ["MODEL.NUM_CLASSES", stored["outputs"]]
    for key, value in values.items():
        words += [f"MODEL.{key}", value]
    if head := described_head(path):
        # The default crop isn't one of the task's.
        images = stored["images"]
        crops = [name for name in ("crop_mode", "crop_pct") if name in images]
        words += ["TASK", "segmentation"]
        words += [word for name in crops for word in (f"DATA.{name.upper()}", images[name])]
    for key, value in head.items():
        words += [f"HEAD.{key}", value]
    config = with_preprocessing(get_config(None, [*words, *options]), alone=True)
    classes = _printable(stored["label_names"], f"the config.json of {path}")
    return describe(config, classes, transformers_task(path) or config.TASK)


def _of_openclip(path: str | Path, options: Sequence[str]) -> Description | None:
    """Returns the description that OpenCLIP's open_clip_config.json beside weights makes."""
    stored = read_openclip(path)
    if not stored:
        return None
    words = ["MODEL.PRETRAINED", str(path)]
    name = timm_tower(path)
    if name is not None:
        # SigLIP's pooling makes the embedding itself.
        words += ["MODEL.NUM_CLASSES", 0]
    else:
        kind, values = described_openclip(path) or ("", {})
        words += ["MODEL.TYPE", kind, "MODEL.NAME", "clip"]
        words += ["MODEL.NUM_CLASSES", stored["model_cfg"]["embed_dim"]]
        for key, value in values.items():
            words += [f"MODEL.{key}", value]
    config = with_preprocessing(get_config(name, [*words, *options]), alone=True)
    return describe(config, [], config.TASK)


def _of_timm(path: str | Path, options: Sequence[str]) -> Description | None:
    """Returns the description that timm's config.json beside weights makes.

    Outputs without names there are ImageNet-1k's if there are 1,000, if the tag ends in a training
    on it (``augreg_in21k_ft_in1k``), and if the model wasn't built with a number of classes. timm
    keeps the tag and stores no names when a model is fine-tuned, but it stores the arguments that
    the model was built with.
    """
    stored = read_config(path)
    if "architecture" not in stored:
        return _of_transformers(path, options) or _of_openclip(path, options)
    name = stored["architecture"]
    shipped = shipped_configs()
    if name not in [file.stem for file in shipped] and shipped_model(name) is None:
        raise InputError(
            f"{path}: its config.json names {name}, which isn't a model of this"
            f" toolkit{instead(name, shipped)}"
        )
    words = ["MODEL.PRETRAINED", str(path)]
    if (outputs := stored.get("num_classes")) is not None:
        words += ["MODEL.NUM_CLASSES", outputs]
    config = with_preprocessing(get_config(name, [*words, *options]), alone=True)
    trained = re.findall(r"in\d+k", stored.get("tag") or "")
    built_with = (stored.get("model_args") or {}).get("num_classes")
    imagenet = config.MODEL.NUM_CLASSES == 1000 and built_with is None and trained[-1:] == ["in1k"]
    classes = stored.get("label_names") or (imagenet_names() if imagenet else [])
    return describe(config, _printable(classes, f"the config.json of {path}"), config.TASK)
