"""state.json of a checkpoint. Each value is checked before it is used."""

import contextlib
import os
import re
from collections.abc import Callable
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

# The formats that are read; the last one is written. In format 1 ``window.Record`` had no names.
FORMATS = (1, 2)
# The largest size in bytes. A run's state has some 5,000, and a line for each class.
LONGEST = 16 << 20


def _count(what: str, high: int = 1 << 48) -> Rule:
    return Rule(what, lambda value: is_whole(value, 0, high))


def _is_version(value: Any) -> bool:
    return type(value) is str and re.fullmatch(r"[\w.+!-]{1,64}", value, re.ASCII) is not None


def _is_number(value: Any) -> bool:
    """Returns whether a value may be a metric, which can be NaN or infinite in a failing run."""
    return type(value) is float or is_whole(value, -(1 << 53), 1 << 53)


def _is_setting(value: Any, depth: int = 6) -> bool:
    """Returns whether a value may be in a configuration: a plain one, or a list or dict of them."""
    if type(value) is dict:
        return depth > 0 and all(_is_setting(inner, depth - 1) for inner in value.values())
    if type(value) is list:
        return depth > 0 and all(_is_setting(inner, depth - 1) for inner in value)
    return value is None or type(value) in (bool, int, float, str)


def _is_best(value: Any) -> bool:
    if type(value) is not dict:
        return False
    if not is_whole(value.get("epoch")) or not storage.is_name(value.get("checkpoint")):
        return False
    return all(
        _is_number(metric) for name, metric in value.items() if name not in ("epoch", "checkpoint")
    )


def _is_record(value: Any) -> bool:
    """Returns whether a value may be a rank's ``window.Record``, of either format."""
    if type(value) is not dict or len(value) > 64:
        return False
    if "sums" in value:
        others = ("norm_sum", "finite", "skips", "updates")
        return is_list(value["sums"], _is_number, 4, 4) and all(
            _is_number(value.get(name)) for name in others
        )
    means = value.get("means")
    totals = value.get("totals")
    if type(means) is not dict or type(totals) is not dict:
        return False
    if not all(map(is_name, (*means, *totals))) or not all(map(_is_number, totals.values())):
        return False
    return all(is_list(pair, _is_number, 2, 2) for pair in means.values())


def _is_length(value: Any) -> bool:
    if value == []:
        return True
    return is_list(value, lambda v: is_real(v, 0, 1e6), 2, 2) and value[0] < value[1]


def _is_by_split(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    if type(value) is not dict or not value.keys() <= {"val", "ema"}:
        return False
    return all(map(is_valid, value.values()))


def _are_versions(value: Any) -> bool:
    if type(value) is not dict or len(value) >= 16:
        return False
    return all(map(_is_version, (*value, *value.values())))


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
    "versions": Rule("a dictionary of versions", _are_versions),
    "classes": optional(_CLASSES),
    "model": NAME,
    "config": Rule("a configuration", lambda value: type(value) is dict and _is_setting(value)),
    "best": Rule(
        "a dictionary of a split's epoch, checkpoint and metrics",
        lambda value: _is_by_split(value, _is_best),
    ),
    "stale": _count("a number of evaluations"),
    "marks": Rule("a number for each split", lambda value: _is_by_split(value, _is_number)),
    "seconds": Rule("a number of seconds", lambda value: is_real(value, 0, 1e12)),
    "length": Rule("no number of epochs, or two", _is_length),
    "window": Rule("a list of each process's sums", lambda value: is_list(value, _is_record)),
}
_SCALER: Form = {
    "loss_scale": Rule("a loss scale", lambda value: is_real(value, 1e-5, 2.0**127)),
    "good_updates": _count("a number of updates"),
}
# Earlier releases didn't write these.
_OPTIONAL = ("behaviour", "classes", "model", "stale", "marks", "seconds", "length")


def read_state(chosen: Path) -> dict[str, Any]:
    """Returns the state.json of a verified checkpoint.

    Raises:
        InputError: it can't be read, is of another release's format, or holds a value that no run
            writes.
    """
    with storage.reading_checkpoint(chosen, storage.STATE, "a run's state"):
        state = _content(chosen)
        check_form(state, {"format": _FORM["format"]}, ("format",))
        if state["format"] not in FORMATS:
            formats = " and ".join(map(str, FORMATS))
            raise InputError(f"{chosen} has format {state['format']}, this release reads {formats}")
        check_form(state, _FORM, tuple(name for name in _FORM if name not in _OPTIONAL))
        check_form(state["scaler"], _SCALER, tuple(_SCALER), "scaler.")
        # The ranks take equally many samples: some may be taken twice at an epoch's end.
        if state["samples"] > state["images"] + state["ranks"]:
            raise Unreadable(
                f"its samples are {state['samples']},"
                f" expected no more than its {state['images']} images"
            )
        if len(state["window"]) not in (0, state["ranks"]):
            raise Unreadable(
                f"its window has {len(state['window'])} processes, expected {state['ranks']}"
            )
        name = storage.checkpoint_name(state["epoch"], state["samples"])
        if storage.is_name(chosen.name) and chosen.name != name:
            raise Unreadable(f"it belongs to {name}; the folder was renamed")
    return state


def newest_whole(directory: Path) -> Path | None:
    """Returns the newest undamaged checkpoint under ``directory``, as -resume=auto takes it."""
    for checkpoint in reversed(storage.find_checkpoints(directory)):
        with contextlib.suppress(InputError):
            storage.verify(checkpoint)
            read_state(checkpoint)
            return checkpoint
    return None


def state_beside(weights: Path, *names: str) -> dict[str, Any] | None:
    """Returns the state.json beside the file ``weights``, or None if it isn't a checkpoint's.

    Args:
        names: the entries that are used. These are checked.

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
