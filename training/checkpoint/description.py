"""What weights are of: their model, its classes, how its images are prepared. It travels within
their own file.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from models.pretrained import with_preprocessing
from models.transformers_arguments import described_model
from settings.names import instead
from settings.options import Configuration, leaves, pairs
from settings.plain import NAME, Form, Rule, check_form, is_list, is_real, parsed_json
from settings.registry import tasks
from training.checkpoint.state import state_beside
from weights import find_weights
from weights.adapters import find_adapter
from weights.formats import METADATA, read_metadata
from weights.hub import read_config
from weights.transformers import read_transformers
from weights.transformers import task_of as transformers_task

TASKS = tasks.names()
_IMAGES = (
    "IMAGE_SIZE",
    "IMAGE_CHANNELS",
    "CROP_PCT",
    "CROP_MODE",
    "INTERPOLATION",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
)
_IMAGES += ("FAST_EVAL", "EXIF_ORIENTATION", "IMAGE_DTYPE")
_ADAPTER = "MODEL.PRETRAINED_ADAPTER"
# MODEL's keys that build nothing.
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
    """What weights are of.

    Attributes:
        model: its name.
        task: "classification" (one class per image) or "multilabel" (any number of them); TASK.
        classes: the outputs' names, in their order; empty: they aren't known.
        values: the keys that build the model and prepare its images, with their dots:
            ``{"MODEL.TYPE": "ViT", ...}``.
        thresholds: multilabel: the probability from which on an output is a yes, by output; empty:
            none were chosen.
    """

    model: str
    task: str
    classes: list[str]
    values: dict[str, Any]
    thresholds: list[float] = field(default_factory=list)

    def to_json(self) -> str:
        """Returns it as JSON; ``read_description`` takes it."""
        return json.dumps(vars(self), ensure_ascii=False)

    def to_config(self, options: Sequence[str] = ()) -> Configuration:
        """Returns the frozen configuration of the model and its images; all else is at its default.

        Args:
            options: words as after ``-o``.

        Raises:
            InputError: a key or a value that this release doesn't take.
        """
        kind = [
            word
            for key in ("MODEL.TYPE", "MODEL.NAME")
            if key in self.values
            for word in (key, self.values[key])
        ]
        config = get_config(None, kind)
        if unknown := sorted(self.values.keys() - default_values(config).keys()):
            raise InputError(
                f"it has the key {printable(unknown[0])}, which {config.MODEL.TYPE} doesn't take"
            )
        values = {key.replace(".", "__"): value for key, value in self.values.items()}
        config = with_values(config, "the weights' description", **values)
        return with_options(config, options) if options else config


def describe(
    config: Configuration,
    classes: list[str],
    task: str = "classification",
    thresholds: Sequence[float] = (),
) -> Description:
    """Returns what a model of ``config`` is, whose outputs are ``classes``."""
    values = {key: value for key, value in leaves(config) if _describes(key)}
    return Description(config.MODEL.NAME, task, list(classes), values, list(thresholds))


def _describes(key: str) -> bool:
    section, _, name = key.partition(".")
    return (section == "MODEL" and name not in _OF_A_RUN) or (section == "DATA" and name in _IMAGES)


def read_description(text: bytes) -> Description:
    """Returns what ``Description.to_json`` wrote.

    Raises:
        Unreadable, Exception: it is something else: within ``errors.reading``.
    """
    found = parsed_json(text)
    # which earlier releases lack
    check_form(found, _FORM, tuple(name for name in _FORM if name != "thresholds"))
    return Description(**{name: found[name] for name in _FORM if name in found})


def description_of(path: str | Path, options: Sequence[str] = ()) -> Description | None:
    """Returns what weights are of, as they tell it themselves, or None.

    A .safetensors file that this toolkit wrote has it in its metadata; earlier releases left a
    checkpoint's state.json; beside timm's weights there is its config.json. An adapter tells of
    itself with its base.

    Args:
        path: what ``find_weights`` takes.
        options: words as after ``-o``; where they set a key, timm's config.json isn't asked for it.
            MODEL.PRETRAINED_ADAPTER is asked first.

    Raises:
        InputError: there are no weights, or what describes them can't be read.
    """
    file = find_weights(path)
    adapter = dict(pairs(options, ())).get(_ADAPTER)
    told = _own(file, adapter) or _of_state(file)
    if told is None:
        return _of_timm(path, options)
    try:
        told.to_config()
    except InputError as error:
        raise InputError(f"{file}: what it says of its model: {error}; give -cfg") from None
    return told


def classes_of(path: str | Path, adapter: str | None = None) -> list[str] | None:
    """Returns the class names of the run that saved ``path``, or an adapter of it; None where no
    checkpoint tells.

    Raises:
        InputError: as ``description_of``.
    """
    file = find_weights(path)
    if own := _own(file, adapter):
        return own.classes
    state = state_beside(file, "classes")
    return _printable(state["classes"], file) if state else None


def task_of(path: str | Path, adapter: str | None = None) -> str | None:
    """Returns what the weights, or an adapter of them, are trained for: one of TASKS.

    Their own description tells it, or transformers' config.json beside them. It is None if neither
    does.

    Raises:
        InputError: as ``description_of``.
    """
    own = _own(find_weights(path), adapter)
    return own.task if own else transformers_task(path)


def check_task(path: str | Path, task: str, adapter: str | None = None) -> None:
    """Raises InputError where weights, or an adapter of them, tell that they were trained for
    another task; also as ``description_of``.
    """
    told = task_of(path, adapter)
    if told not in (None, task):
        raise InputError(
            f"{adapter or path}: weights of TASK {told}, found TASK {task}; give -o TASK {told}"
        )


def thresholds_of(path: str | Path, adapter: str | None = None) -> list[float]:
    """Returns the thresholds that the weights tell, by output; none where they tell none.

    Args:
        adapter: as ``classes_of``.

    Raises:
        InputError: as ``description_of``.
    """
    own = _own(find_weights(path), adapter)
    return own.thresholds if own else []


def _own(file: Path, adapter: str | None = None) -> Description | None:
    if adapter and (told := _own(find_adapter(adapter))):
        return told
    with reading(file, "weights that describe themselves"):
        text = read_metadata(file).get(METADATA)
        return None if text is None else read_description(text.encode())


def _of_state(file: Path) -> Description | None:
    """What the state.json beside a checkpoint's file tells."""
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
    """Returns the names of classes; raises InputError where one can't be printed, as training and
    -classes do.
    """
    if bad := [name for name in classes if not _is_class(name)]:
        raise InputError(
            f"{file}: the name of its class '{printable(bad[0], 60)}' can't be printed; rename it there"
        )
    return classes


def _of_transformers(path: str | Path, options: Sequence[str]) -> Description | None:
    """What transformers' config.json beside weights tells."""
    found = described_model(path)
    stored = read_transformers(path)
    if found is None:
        return None
    kind, values = found
    words = ["MODEL.PRETRAINED", str(path), "MODEL.TYPE", kind, "MODEL.NAME", stored["model_type"]]
    words += ["MODEL.NUM_CLASSES", stored["outputs"]]
    words += [word for key, value in values.items() for word in (f"MODEL.{key}", value)]
    config = with_preprocessing(get_config(None, [*words, *options]), alone=True)
    classes = _printable(stored["label_names"], f"the config.json of {path}")
    return describe(config, classes, transformers_task(path) or config.TASK)


def _of_timm(path: str | Path, options: Sequence[str]) -> Description | None:
    """What timm's config.json beside weights tells.

    Outputs without names there are ImageNet-1k's where they are 1,000, their tag ends in a training
    on it (``augreg_in21k_ft_in1k``), and nobody asked for so many: timm keeps the tag and no names
    of what is fine-tuned, but writes the arguments that it was built with.
    """
    stored = read_config(path)
    if "architecture" not in stored:
        return _of_transformers(path, options)
    name = stored["architecture"]
    shipped = shipped_configs()
    if name not in [file.stem for file in shipped] and shipped_model(name) is None:
        raise InputError(
            f"{path}: its config.json names {name}, which is no model here{instead(name, shipped)}"
        )
    outputs = stored.get("num_classes")
    asked = (stored.get("model_args") or {}).get("num_classes")
    words = ["MODEL.PRETRAINED", str(path)] + (
        [] if outputs is None else ["MODEL.NUM_CLASSES", outputs]
    )
    config = with_preprocessing(get_config(name, [*words, *options]), alone=True)
    trained = re.findall(r"in\d+k", stored.get("tag") or "")
    imagenet = config.MODEL.NUM_CLASSES == 1000 and asked is None and trained[-1:] == ["in1k"]
    classes = stored.get("label_names") or (imagenet_names() if imagenet else [])
    return describe(config, _printable(classes, f"the config.json of {path}"), config.TASK)
