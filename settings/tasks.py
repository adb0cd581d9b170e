"""What a task declares where it is registered: its columns, its classes and answers, its keys.

    @tasks.register("rotation", metrics="acc1", columns="", classes="0 90 180 270")
    class Rotation(Task):

- ``columns``: the columns that a batch needs besides pixels, such as "labels", the default. With ""
  the task trains on images without labels, and ignores the labels of others.
- ``classes``: the names of the model's outputs, for a task that needs no labels. Without it the
  model has no classifier. The outputs of a task that needs labels are the data's classes.
- ``answers``: what the outputs give of an image: "softmax" (the default where there are classes): one
  of the classes; "sigmoid": any number of them; "": no classes. Tools then offer features alone.
- ``reads``: keys, or shell patterns of keys, that are declared with the need ``LABELS`` and that the
  task reads though it needs no labels.
- ``metrics``: the metrics that BEST_METRIC may name.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from settings.configuration import Configuration, leaves
from settings.needs import MIXING
from settings.registry import tasks


def columns_of(task: str) -> tuple[str, ...]:
    """Returns the names of the columns that a task needs of the data, besides pixels."""
    return tuple(_declared(task).get("columns", "labels").split())


def own_classes(task: str) -> list[str] | None:
    """Returns the names of the outputs of a task; None: they are the data's classes."""
    if "labels" in columns_of(task):
        return None
    return _declared(task).get("classes", "").split()


def answers_of(task: str) -> str:
    """Returns what a task's outputs give of an image: "softmax", "sigmoid", or "" for no classes."""
    if own_classes(task) == []:
        return ""
    return _declared(task).get("answers", "softmax")


def reads(task: str, key: str) -> bool:
    """Returns whether a task reads a key that is declared with the need ``LABELS``."""
    if "labels" in columns_of(task):
        return True
    patterns = _declared(task).get("reads", "").split()
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def mixes(config: Configuration) -> bool:
    """Returns whether training mixes its images: mixup or CutMix is on, and the task reads them."""
    values = dict(leaves(config.TRAIN, "TRAIN."))
    return MIXING.met(values) and reads(config.TASK, "TRAIN.MIXUP_ALPHA")


def _declared(task: str) -> Mapping[str, Any]:
    return tasks.components[task].given
