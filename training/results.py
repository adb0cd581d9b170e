"""result.json: the results of a run's last evaluation, which are checked as they are read.

Paddle isn't imported here.
"""

from pathlib import Path
from typing import Any

from errors import reading
from settings.plain import (
    Form,
    Rule,
    check_form,
    is_list,
    is_real,
    is_whole,
    parsed_json,
    whole_file,
)

FILE = "result.json"
# The largest number: near the limits of floats no curve can be drawn and no mean computed.
LARGEST = 1e30
# The most classes that a run's files may list.
MOST_CLASSES = 1 << 20
# The largest size of the file, in bytes.
_LONGEST = 64 << 20
# The metrics of an evaluation and their titles, in the order in which they are shown.
METRIC_TITLES = {
    "acc1": "accuracy, top 1 (%)",
    "acc5": "accuracy, top 5 (%)",
    "mean_class_acc": "accuracy, mean of the classes (%)",
    "mAP": "mean average precision (%)",
    "f1_micro": "F1, micro (%)",
    "f1_macro": "F1, macro (%)",
    "f1_micro_at_half": "F1, micro, all thresholds 0.5 (%)",
    "f1_macro_at_half": "F1, macro, all thresholds 0.5 (%)",
    "mIoU": "intersection over union, mean of the classes (%)",
    "mean_acc": "pixel accuracy, mean of the classes (%)",
    "pixel_acc": "pixel accuracy (%)",
    "boundary_iou": "boundaries' intersection over union, mean of the classes (%)",
    "loss": "loss",
    "knn": "k-NN of features (%)",
    "rankme": "RankMe of features",
    "feature_std": "deviation of normalised features",
}


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number of a size that an evaluation may have."""
    return is_real(value, -LARGEST, LARGEST)


def is_text(value: Any) -> bool:
    """Returns whether a value is a text that a table can hold.

    JSON may hold half a character (a surrogate), which can't be encoded.
    """
    return type(value) is str and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_table(value: Any) -> bool:
    if type(value) is not dict:
        return False
    return all(
        type(name) is str and (number is None or is_number(number))
        for name, number in value.items()
    )


NUMBER = Rule("a number", is_number)
_TABLE = Rule("numbers by name", _is_table)
_DICTIONARY = Rule("a dictionary", lambda value: type(value) is dict)
_THRESHOLDS = Rule("a list of numbers", lambda value: is_list(value, is_real, high=MOST_CLASSES))
_FORM: Form = {
    **dict.fromkeys(METRIC_TITLES, NUMBER),
    "num_samples": Rule("a number from 1 on", lambda value: is_whole(value, 1)),
    "best": _DICTIONARY,
    "ended": Rule("a text", lambda value: type(value) is str),
    "class_acc": _TABLE,
    "class_ap": _TABLE,
    "class_f1": _TABLE,
    "class_iou": _TABLE,
    "class_boundary_iou": _TABLE,
    "thresholds": _THRESHOLDS,
    "versions": _DICTIONARY,
    "environment": _DICTIONARY,
    "ema": _DICTIONARY,
}
_BEST: Form = {
    **dict.fromkeys(METRIC_TITLES, NUMBER),
    "epoch": Rule("a number of epochs", is_whole),
    "checkpoint": Rule("a text", is_text),
}


def read_result(folder: Path, advice: str) -> dict[str, Any]:
    """Returns the content of a run's result.json.

    Args:
        advice: the end of an error's line: "; is it a run's folder?".

    Raises:
        InputError: it holds something that no run writes.
    """
    file = folder / FILE
    with reading(file, "a run's result", advice):
        result = parsed_json(whole_file(file, _LONGEST))
        _check_evaluation(result)
        if "ema" in result:
            _check_evaluation(result["ema"], "ema.")
        return result


def _check_evaluation(evaluation: Any, where: str = "") -> None:
    check_form(evaluation, _FORM, ("loss", "num_samples"), where)
    if "best" in evaluation:
        check_form(evaluation["best"], _BEST, ("epoch",), f"{where}best.")
