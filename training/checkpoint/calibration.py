"""The calibration in the description of weights (``tools/calibrate.py``).

The scaling of logits isn't needed again: it is part of the weights. It is stored to be read by
people, and to say that the weights were calibrated.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from errors import Unreadable
from settings.plain import Form, Rule, check_form, is_list, is_name, is_real, is_whole

SCALINGS = ("none", "temperature", "class", "vector")
# The scores by which pictures of other things are told apart (``inference.calibration.rejection``).
REJECTION_SCORES = ("energy", "max_logit", "knn")
# Levels of coverage, or of false alarms, at most.
_MOST_LEVELS = 100


def _is_inner_share(value: Any) -> bool:
    return is_real(value, 0, 1) and 0 < value < 1


def _is_threshold(value: Any) -> bool:
    return value is None or is_real(value)


@dataclass(frozen=True)
class PredictionSets:
    """How the set of classes of an image is chosen for one coverage (``inference.calibration.conformal``).

    Attributes:
        coverage: the least probability that the right class is in the set.
        penalty, rank: of the scores.
        thresholds: the largest score of a class in the set: one for all classes, or one for each.
            None: there were too few images to choose it, and the class is in every set.
    """

    coverage: float
    penalty: float
    rank: int
    thresholds: list[float | None]


@dataclass(frozen=True)
class Rejection:
    """When a picture is taken for one of something else.

    Attributes:
        score: one of REJECTION_SCORES.
        false_alarm: the largest share of pictures of the model's classes that are rejected.
        threshold: a larger score is rejected. None: there were too few images to choose it.
    """

    score: str
    false_alarm: float
    threshold: float | None


@dataclass(frozen=True)
class Calibration:
    """A calibration of weights.

    Attributes:
        scaling: what the logits were scaled by, one of SCALINGS.
        scale, shift: as ``inference.calibration.scaling.Scaling`` has them.
        images: the number of images that chose the scaling and the thresholds.
        sets: a choice of sets for each coverage.
        rejections: a threshold for each score and share of false alarms.
        neighbours: the k of the score "knn"; 0: there is none.
        neighbours_sha256: of the file with the training images' features; "": there is none.
    """

    scaling: str
    scale: list[float]
    shift: list[float]
    images: int
    sets: list[PredictionSets] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    neighbours: int = 0
    neighbours_sha256: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns the entries that ``read_calibration`` reads."""
        return asdict(self)


_FORM: Form = {
    "scaling": Rule(f"one of {', '.join(SCALINGS)}", lambda value: value in SCALINGS),
    "scale": Rule("positive numbers", lambda value: is_list(value, lambda v: is_real(v, 1e-9), 1)),
    "shift": Rule("a list of numbers", lambda value: is_list(value, is_real)),
    "images": Rule("a number of images", is_whole),
    "sets": Rule("a list", lambda value: is_list(value, _is_dictionary, 0, _MOST_LEVELS)),
    "rejections": Rule("a list", lambda value: is_list(value, _is_dictionary, 0, _MOST_LEVELS)),
    "neighbours": Rule("a number of images", is_whole),
    "neighbours_sha256": Rule("a SHA-256", lambda value: value == "" or is_name(value, 64)),
}
_SETS: Form = {
    "coverage": Rule("a share between 0 and 1", _is_inner_share),
    "penalty": Rule("a number from 0 on", lambda value: is_real(value, 0)),
    "rank": Rule("a place", is_whole),
    "thresholds": Rule("thresholds", lambda value: is_list(value, _is_threshold, 1)),
}
_REJECTION: Form = {
    "score": Rule(f"one of {', '.join(REJECTION_SCORES)}", lambda value: value in REJECTION_SCORES),
    "false_alarm": Rule("a share between 0 and 1", _is_inner_share),
    "threshold": Rule("a threshold", _is_threshold),
}


def _is_dictionary(value: Any) -> bool:
    return type(value) is dict


def read_calibration(entries: Any, outputs: int) -> Calibration:
    """Returns the calibration that ``Calibration.as_json`` wrote.

    Args:
        outputs: the number of the model's classes; 0: it isn't known.

    Raises:
        Unreadable: the entries are something else, or of another number of classes.
    """
    check_form(entries, _FORM, tuple(_FORM), "calibration.")
    sets = []
    for one in entries["sets"]:
        check_form(one, _SETS, tuple(_SETS), "calibration.sets.")
        thresholds = len(one["thresholds"])
        if outputs and thresholds not in (1, outputs):
            raise Unreadable(
                f"its calibration has {thresholds} thresholds per coverage, expected 1 or {outputs}"
            )
        sets.append(PredictionSets(**{name: one[name] for name in _SETS}))
    rejections = []
    for one in entries["rejections"]:
        check_form(one, _REJECTION, tuple(_REJECTION), "calibration.rejections.")
        rejections.append(Rejection(**{name: one[name] for name in _REJECTION}))
    values: dict[str, Any] = {name: entries[name] for name in _FORM}
    values["sets"] = sets
    values["rejections"] = rejections
    return Calibration(**values)
