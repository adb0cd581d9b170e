"""The tasks that PaddleViT has and this toolkit doesn't.

Their files are refused by a line that names the family and the task, before their keys are read.
"""

import re
from collections.abc import Collection
from typing import NamedTuple


class _Family(NamedTuple):
    """A family of PaddleViT's models for a task that isn't supported.

    Attributes:
        name: what PaddleViT calls it.
        task: what the task is called in messages.
        types: a pattern of MODEL.TYPE in its files, in lower case; None: they have none, or that of
            a supported family.
        keys: keys of its files. Another family's have none of these, or not all. One that ends with
            a dot is a section.
    """

    name: str
    task: str
    types: str | None
    keys: tuple[str, ...]

    def has(self, keys: Collection[str]) -> bool:
        """Returns whether a file with these dotted keys is one of the family's."""
        return all(
            own in keys or (own.endswith(".") and any(key.startswith(own) for key in keys))
            for own in self.keys
        )


_GANS = "GANs"
_DETECTION = "object detection"
# A file belongs to the first one whose keys it has.
_FAMILIES = (
    _Family("TransGAN", _GANS, "transgan", keys=("MODEL.GEN_MODEL",)),
    _Family("Styleformer", _GANS, "styleformer", keys=("DATA.MAX_GEN_NUM",)),
    _Family("DETR", _DETECTION, "detr", keys=("MODEL.NUM_QUERIES",)),
    _Family("PVTv2", _DETECTION, "pvtv2_det", keys=("FPN.",)),
    _Family("Swin", _DETECTION, None, keys=("MODEL.TRANS.WINDOW_SIZE",)),
)
_ADVICE = "; docs/migrate/paddlevit.md lists the supported ones"


def absent_type(model_type: str) -> str:
    """Returns the error's line for a MODEL.TYPE that only PaddleViT has; "" for any other."""
    lowered = model_type.strip().lower()
    for family in _FAMILIES:
        if family.types is not None and re.fullmatch(family.types, lowered):
            return _line(family)
    return ""


def absent_task(keys: Collection[str]) -> str:
    """Returns the error's line for a file of PaddleViT's whose task isn't supported; "" for any other.

    Args:
        keys: the dotted keys that the file sets.
    """
    for family in _FAMILIES:
        # PaddleViT's files for classification all have a TYPE. Those of Swin for detection have none.
        is_classifier = family.types is None and "MODEL.TYPE" in keys
        if family.has(keys) and not is_classifier:
            return _line(family)
    return ""


def _line(family: _Family) -> str:
    return f"it is PaddleViT's {family.name} for {family.task}, which isn't supported{_ADVICE}"
