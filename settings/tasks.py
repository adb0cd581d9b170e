"""The declarations of a task in its registration: its columns, its classes and answers, its keys.

    @tasks.register("rotation", metrics="acc1", columns="", classes="0 90 180 270")
    class Rotation(Task):

- ``columns``: the columns that a batch needs besides pixels, such as "labels", the default. With ""
  the task trains on images without labels, and ignores the labels of others.
- ``classes``: the names of the model's outputs, for a task that needs no labels. Without it the
  model has no classifier. The outputs of a task that needs labels are the data's classes, and so
  are those of a task that declares "data".
- ``answers``: how the outputs of an image are read. "softmax" (the default where there are classes):
  it has one of the classes; "sigmoid": any number of them; "pixels": each of its pixels has one, and
  the model is one with a HEAD; "": there are no classes, and tools offer features alone.
- ``reads``: keys, or shell patterns of keys, that are declared with the need ``LABELS`` and that the
  task reads though it needs no labels.
- ``views``: the columns that hold several views of each image, such as "pixels local", for a task
  that sets ``ImageDataset.views``. It doesn't read keys with the need ``ONE_VIEW``.
- ``metrics``: the metrics that BEST_METRIC may name.
- ``loss``: "relative" if it is measured against a teacher that changes. Such losses can't be compared,
  and a collapsed model has the lowest.

All of these are literal texts, with spaces between words. ``check_tasks`` refuses others.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from errors import InputError
from settings.configuration import Configuration, leaves
from settings.keys import Key
from settings.needs import CLASSIFIER, LABELS, MAPS, MIXING, ONE_VIEW, Need
from settings.registry import datasets, losses, refuse_other, tasks
from settings.suggestions import nearest
from settings.values import quoted

# The value of ``classes`` for a task whose outputs are the data's classes.
DATA_CLASSES = "data"
_KEYWORDS = ("columns", "classes", "answers", "reads", "views", "metrics", "loss")


def columns_of(task: str) -> tuple[str, ...]:
    """Returns the names of the columns that a task needs of the data, besides pixels."""
    return tuple(_declared(task).get("columns", "labels").split())


def own_classes(task: str) -> list[str] | None:
    """Returns the names of the outputs of a task; None: they are the data's classes."""
    classes = _declared(task).get("classes", "")
    if "labels" in columns_of(task) or classes == DATA_CLASSES:
        return None
    return classes.split()


def answers_of(task: str) -> str:
    """Returns what a task's outputs give of an image: "softmax", "sigmoid", "pixels", or "" for no
    classes.
    """
    if own_classes(task) == []:
        return ""
    return _declared(task).get("answers", "softmax")


def view_columns(task: str) -> tuple[str, ...]:
    """Returns the names of the columns that hold several views of each image; (): there is one."""
    return tuple(_declared(task).get("views", "").split())


def loss_is_relative(task: str) -> bool:
    """Returns whether a lower loss of a task doesn't mean a better model."""
    return _declared(task).get("loss") == "relative"


def is_read_by(task: str, key: str, need: Need = LABELS) -> bool:
    """Returns whether a task reads a key that is declared with the need ``LABELS``, ``CLASSIFIER``,
    ``ONE_VIEW`` or ``MAPS``.
    """
    if need == MAPS:
        return answers_of(task) == "pixels"
    if need == CLASSIFIER:
        return answers_of(task) not in ("", "pixels")
    if need == ONE_VIEW:
        return not view_columns(task)
    if "labels" in columns_of(task):
        return True
    patterns = _declared(task).get("reads", "").split()
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def dataset_columns(dataset: str) -> tuple[str, ...]:
    """Returns the names of the columns that a dataset declares, besides pixels.

    "*" stands for further ones that its files name, as those of shards do.
    """
    return tuple(datasets.components[dataset].given.get("columns", "labels").split())


def check_tasks(shared: Mapping[str, Key]) -> None:
    """Checks what tasks declare where they are registered.

    Args:
        shared: config.py's keys.

    Raises:
        InputError: a keyword or a value isn't one that is described at the top of this file, or has
            no effect beside the others.
    """
    keys = [name for name, key in shared.items() if LABELS in key.needs]
    keys += losses.readers()
    for task, component in tasks.components.items():
        where = f"{component.module}: TASK {task}: "
        declared = component.given
        for word, value in declared.items():
            refuse_other(f"{where}a keyword", word, _KEYWORDS)
            if not isinstance(value, str):
                raise InputError(f"{where}{word} is {quoted(value)}, expected a text")
        if declared.get("answers", "") not in ("softmax", "sigmoid", "pixels", ""):
            raise InputError(
                f"{where}answers is {quoted(declared['answers'])}, expected softmax, sigmoid, pixels"
                " or ''"
            )
        if declared.get("loss", "relative") != "relative":
            raise InputError(f"{where}loss is {quoted(declared['loss'])}, expected relative")
        has_labels = "labels" in columns_of(task)
        for word in ("classes", "reads"):
            if has_labels and word in declared:
                raise InputError(
                    f"{where}{word} has no effect, because columns has labels; leave one out"
                )
        if "views" in declared and "pixels" not in view_columns(task):
            raise InputError(
                f"{where}views is {quoted(declared['views'])}, expected pixels among the columns"
            )
        if declared.get("answers") and own_classes(task) == []:
            raise InputError(f"{where}answers has no effect without classes; leave it out")
        for pattern in declared.get("reads", "").split():
            if not any(fnmatchcase(key, pattern) for key in keys):
                raise InputError(
                    f"{where}reads has {quoted(pattern)}, which isn't a key with the need LABELS"
                    f"{nearest(pattern, keys)}"
                )


def mixes(config: Configuration) -> bool:
    """Returns whether training mixes its images: mixup or CutMix is on, and the task reads them."""
    values = dict(leaves(config.TRAIN, "TRAIN."))
    return MIXING.met(values) and is_read_by(config.TASK, "TRAIN.MIXUP_ALPHA")


def _declared(task: str) -> Mapping[str, Any]:
    return tasks.components[task].given
