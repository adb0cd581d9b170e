"""The choice of an image's classes, and the rejection of images of something else."""

from collections.abc import Sequence
from typing import NamedTuple

from errors import InputError
from training.checkpoint.calibration import Calibration, PredictionSets, Rejection


class Choice(NamedTuple):
    """How an image's classes are chosen from its probabilities (``Predictor.choice``).

    Attributes:
        top: the number of classes at most; None: 5, or all of a multi-label model.
        threshold: the least probability of a multi-label model's classes; None: the trained one.
        sets: takes the classes of a set that contains the right one with a given probability, in
            place of ``top``; None: it doesn't.
        rejection: says which images are of something else; None: it isn't asked.
    """

    top: int | None = None
    threshold: float | None = None
    sets: PredictionSets | None = None
    rejection: Rejection | None = None


DEFAULT = Choice()
# The best class, also of a multi-label model that finds none.
BEST = Choice(top=1, threshold=0)


def sets_for(calibration: Calibration | None, coverage: float, path: str) -> PredictionSets:
    """Returns the choice of sets that weights were calibrated with for a coverage.

    Args:
        calibration: of the weights; None: they have none.
        path: of the weights, for errors.

    Raises:
        InputError: they weren't, or on too few images.
    """
    stored = calibration.sets if calibration else []
    for sets in stored:
        if sets.coverage == coverage:
            if all(threshold is None for threshold in sets.thresholds):
                raise _too_few("coverage", coverage, path)
            return sets
    levels = [sets.coverage for sets in stored]
    raise _no_such_level("coverage", coverage, levels, path, "-coverage")


def rejection_for(
    calibration: Calibration | None, false_alarm: float, score: str, path: str
) -> Rejection:
    """Returns the threshold that weights were calibrated with for a share of false alarms.

    Args:
        calibration, path: as for ``sets_for``.
        score: one of ``rejection.SCORES``.

    Raises:
        InputError: they weren't, or on too few images.
    """
    stored = calibration.rejections if calibration else []
    stored = [rejection for rejection in stored if rejection.score == score]
    for rejection in stored:
        if rejection.false_alarm == false_alarm:
            if rejection.threshold is None:
                raise _too_few("reject", false_alarm, path)
            return rejection
    levels = [rejection.false_alarm for rejection in stored]
    raise _no_such_level("reject", false_alarm, levels, path, "-false_alarms")


def check_one_view(choice: Choice, tta: str) -> None:
    """Raises InputError if views are averaged, but the calibration was on single views."""
    if tta and (choice.sets or choice.rejection):
        raise InputError(
            f"-tta {tta} averages views, but coverage and rejection were calibrated on single"
            " views;"
            " use one of the two"
        )


def _too_few(name: str, level: float, path: str) -> InputError:
    """Returns the error for a level whose threshold needs more images than there were."""
    return InputError(
        f"{name} is {level:g}, but {path} was calibrated on too few images for it; use another"
        " level, or calibrate on more"
    )


def _no_such_level(
    name: str, found: float, levels: Sequence[float], path: str, flag: str
) -> InputError:
    """Returns the error for a level that wasn't calibrated.

    Args:
        flag: of tools/calibrate.py, for this level.
    """
    if not levels:
        advice = "tools/calibrate.py writes calibrated weights"
        return InputError(f"{name} needs calibrated weights, but {path} isn't calibrated; {advice}")
    expected = ", ".join(f"{level:g}" for level in levels)
    return InputError(
        f"{name} is {found!r}, but {path} was calibrated for {expected}; use one of these, or"
        f" calibrate again with {flag}"
    )
