"""What a checkpoint's state.json says, held to a declared form before anything takes a value of it."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from errors import InputError, Unreadable
from settings.plain import (
    NAME,
    Form,
    Rule,
    check_form,
    is_list,
    is_name,
    is_real,
    is_whole,
    optional,
    parsed_json,
    whole_file,
)
from training.checkpoint import storage

FORMATS = (1, 2)  # the last one is written; in 1, ``window.Record`` had no names
LONGEST = 16 << 20  # bytes; a run's state has some 5,000, and a line for each class


def _count(what: str, high: int = 1 << 48) -> Rule:
    return Rule(what, lambda value: is_whole(value, 0, high))


def _is_version(value: Any) -> bool:
    return type(value) is str and re.fullmatch(r"[\w.+!-]{1,64}", value, re.ASCII) is not None


def _is_number(value: Any) -> bool:
    """Of a metric, which may be NaN or infinite in a run that goes wrong."""
    return type(value) is float or is_whole(value, -(1 << 53), 1 << 53)


def _is_setting(value: Any, depth: int = 6) -> bool:
    """Whether a value is one of a configuration: plain, a list of such, or a dictionary of such."""
    if type(value) is dict:
        return depth > 0 and all(_is_setting(inner, depth - 1) for inner in value.values())
    if type(value) is list:
        return depth > 0 and all(_is_setting(inner, depth - 1) for inner in value)
    return value is None or type(value) in (bool, int, float, str)


def _is_best(value: Any) -> bool:
    if (
        type(value) is not dict
        or not is_whole(value.get("epoch"))
        or not storage.is_name(value.get("checkpoint"))
    ):
        return False
    return all(
        _is_number(metric) for name, metric in value.items() if name not in ("epoch", "checkpoint")
    )


def _is_record(value: Any) -> bool:
    """Whether a value is a rank's ``window.Record``, of either format."""
    if type(value) is not dict or len(value) > 64:
        return False
    if "sums" in value:
        others = ("norm_sum", "finite", "skips", "updates")
        return is_list(value["sums"], _is_number, 4, 4) and all(
            _is_number(value.get(name)) for name in others
        )
    means = value.get("means")
    totals = value.get("totals")
    if (
        type(means) is not dict
        or type(totals) is not dict
        or not all(map(is_name, (*means, *totals)))
    ):
        return False
    return all(is_list(pair, _is_number, 2, 2) for pair in means.values()) and all(
        map(_is_number, totals.values())
    )


def _is_length(value: Any) -> bool:
    return value == [] or (
        is_list(value, lambda v: is_real(v, 0, 1e6), 2, 2) and value[0] < value[1]
    )


_CLASSES = Rule("a list of names", lambda value: is_list(value, lambda name: type(name) is str))
_TREE = Rule("a dictionary", lambda value: type(value) is dict)
_FORM: Form = {
    "format": _count("a whole number"),
    "behaviour": _count("a whole number"),
    "epoch": _count("a number of epochs", 1 << 32),
    "samples": _count("a number of samples"),
    "step": _count("a number of steps"),
    "images": _count("a number of images"),
    "ranks": Rule("a number of processes", lambda value: is_whole(value, 1, 1 << 20)),
    "lr": Rule("a learning rate", lambda value: is_real(value, 0, 1e30)),
    "scaler": _TREE,
    "versions": Rule(
        "a dictionary of versions",
        lambda v: type(v) is dict and len(v) < 16 and all(map(_is_version, (*v, *v.values()))),
    ),
    "classes": optional(_CLASSES),
    "model": NAME,
    "config": Rule("a configuration", lambda value: type(value) is dict and _is_setting(value)),
    "best": Rule(
        "a dictionary of a split's epoch, checkpoint and metrics",
        lambda value: type(value) is dict
        and value.keys() <= {"val", "ema"}
        and all(map(_is_best, value.values())),
    ),
    "stale": _count("a number of evaluations"),
    "marks": Rule(
        "a number for each split",
        lambda value: type(value) is dict
        and value.keys() <= {"val", "ema"}
        and all(map(_is_number, value.values())),
    ),
    "seconds": Rule("a number of seconds", lambda value: is_real(value, 0, 1e12)),
    "length": Rule("no number of epochs, or two", _is_length),
    "window": Rule("a list of each process's sums", lambda value: is_list(value, _is_record)),
}
_SCALER: Form = {
    "loss_scale": Rule("a loss scale", lambda value: is_real(value, 1e-5, 2.0**127)),
    "good_updates": _count("a number of updates"),
}
# earlier releases wrote none
_OPTIONAL = ("behaviour", "classes", "model", "stale", "marks", "seconds", "length")


def read_state(chosen: Path) -> dict[str, Any]:
    """Returns a verified checkpoint's state.json.

    Raises:
        InputError: it can't be read, is another release's, or a value isn't what a run writes.
    """
    with storage.reading_checkpoint(chosen, storage.STATE, "a run's state"):
        state = _content(chosen)
        check_form(state, {"format": _FORM["format"]}, ("format",))
        if state["format"] not in FORMATS:
            read = " and ".join(map(str, FORMATS))
            raise InputError(
                f"{chosen} has the format {state['format']}, this release reads {read}"
            )
        check_form(state, _FORM, tuple(name for name in _FORM if name not in _OPTIONAL))
        check_form(state["scaler"], _SCALER, tuple(_SCALER), "scaler.")
        if state["samples"] > state["images"] + state["ranks"]:  # which share what is left over
            raise Unreadable(
                f"its samples are {state['samples']}, expected no more than its {state['images']} images"
            )
        if len(state["window"]) not in (0, state["ranks"]):
            raise Unreadable(
                f"its window is of {len(state['window'])} processes, expected {state['ranks']}"
            )
        name = storage.checkpoint_name(state["epoch"], state["samples"])
        if storage.is_name(chosen.name) and chosen.name != name:
            raise Unreadable(f"it is of {name}: the folder has another's name")
    return state


def newest_whole(directory: Path) -> Path | None:
    """Returns the newest checkpoint under ``directory`` that isn't damaged, which ``-resume=auto``
    takes.
    """
    for found in reversed(storage.find_checkpoints(directory)):
        with contextlib.suppress(InputError):
            storage.verify(found)
            read_state(found)
            return found
    return None


def state_beside(weights: Path, *names: str) -> dict[str, Any] | None:
    """Returns the state.json of the run that saved the file ``weights``, or None; its entries
    ``names`` are sound.

    Raises:
        InputError: it can't be read, or isn't a run's.
    """
    beside = Path(os.path.realpath(weights)).parent
    if not os.path.lexists(beside / storage.STATE):
        return None
    with storage.reading_checkpoint(beside, storage.STATE, "a run's state"):
        state = _content(beside)
        form = {**_FORM, "classes": _CLASSES}
        check_form(state, {name: form[name] for name in names}, names)
    return state


def _content(chosen: Path) -> Any:
    return parsed_json(whole_file(chosen / storage.STATE, LONGEST), finite=False)
