"""The families of models, and the tasks, that PaddleViT has and this toolkit doesn't.

Their files are refused by a line that names the family or the task, before their keys are read.
"""

import re
from collections.abc import Collection
from typing import NamedTuple


class _Family(NamedTuple):
    """A family of PaddleViT's models that isn't here.

    Attributes:
        name: what PaddleViT calls it.
        types: a pattern of MODEL.TYPE in its files of any year, in lower case.
        models: a pattern of the beginnings of its models' names, in lower case.
    """

    name: str
    types: str
    models: str


class _Task(NamedTuple):
    """A task of PaddleViT's that isn't here.

    Attributes:
        name: what it is called in messages.
        keys: keys that only its files have. One that ends with a dot is a section.
        types: a pattern of MODEL.TYPE in its files, in lower case; None: it is no sign of the task.
    """

    name: str
    keys: tuple[str, ...]
    types: str | None = None

    def is_sign(self, key: str) -> bool:
        """Returns whether only files of this task have a dotted key."""
        return any(key == own or (own.endswith(".") and key.startswith(own)) for own in self.keys)


_FAMILIES = (
    _Family("BoTNet", types="botnet", models="botnet50"),
    _Family("ConvMLP", types="convmlp", models="convmlp_"),
    _Family("CycleMLP", types="cyclemlp", models="cyclemlp_"),
    _Family("HVT", types="hvt", models="(scale_)?hvt_"),
    _Family("MobileFormer", types="mobileformer", models="mobileformer_"),
    _Family("RepLKNet", types="replknet", models="replknet_"),
    _Family("RepMLP", types="repmlp|repmlp_resnet", models="repmlp_"),
    _Family("ResT", types="rest|rest_v2", models="rest(v2)?_"),
    _Family("T2T-ViT", types="t2t-vit|t2t_vit", models="t2t[-_]vit[-_]"),
)
_DETECTION = _Task("object detection", keys=("FPN.", "MODEL.NUM_QUERIES"), types="detr|pvtv2_det")
_TASKS = (
    _Task("GANs", keys=("DATA.MAX_GEN_NUM",), types="transgan|styleformer"),
    _DETECTION,
)
FAMILIES = tuple(family.name for family in _FAMILIES)
_ADVICE = "; docs/paddlevit.md lists what is"


def absent_type(model_type: str) -> str:
    """Returns the error's line for a MODEL.TYPE that only PaddleViT has; "" for any other."""
    lowered = model_type.strip().lower()
    for family in _FAMILIES:
        if re.fullmatch(family.types, lowered):
            return _family_line(family)
    for task in _TASKS:
        if task.types is not None and re.fullmatch(task.types, lowered):
            return _task_line(task)
    return ""


def absent_name(name: str) -> str:
    """Returns the error's line for a model's name that only PaddleViT has; "" for any other."""
    for family in _FAMILIES:
        if re.match(family.models, name.lower()):
            return _family_line(family)
    return ""


def absent_task(keys: Collection[str]) -> str:
    """Returns the error's line for a file of PaddleViT's whose task isn't here; "" for any other.

    Args:
        keys: the dotted keys that the file sets.
    """
    for task in _TASKS:
        if any(map(task.is_sign, keys)):
            return _task_line(task)
    # PaddleViT's files for classification all have a TYPE. Those for detection with Swin have none.
    if "MODEL.TRANS.WINDOW_SIZE" in keys and "MODEL.TYPE" not in keys:
        return _task_line(_DETECTION)
    return ""


def _family_line(family: _Family) -> str:
    return f"PaddleViT's {family.name} isn't here{_ADVICE}"


def _task_line(task: _Task) -> str:
    return f"it is PaddleViT's for {task.name}, a task that isn't here{_ADVICE}"
