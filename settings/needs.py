"""Whether a key does something where it stands: what it needs is declared beside the checks of its
values.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from errors import InputError
from settings.options import COMMAND_LINE, Given


class Need(NamedTuple):
    """What a key needs so as to do something."""

    said: str  # goes on after "does nothing"
    keys: tuple[str, ...]  # that decide whether it is met
    met: Callable[[Mapping[str, Any]], bool]  # of the values by dotted key
    files_wait: bool = False  # a file may have the key where this isn't met


def unmet(needs: tuple[Need, ...], values: Mapping[str, Any]) -> Need | None:
    """Returns the first need that isn't met by all keys' values, or None."""
    return next((need for need in needs if not need.met(values)), None)


def refuse_idle(
    values: Mapping[str, Any], given: Mapping[str, Given], needs: Mapping[str, tuple[Need, ...]]
) -> None:
    """Raises InputError for a key that was set and does nothing, whatever its value.

    It is no error where what takes its use away was set over it: ``-o TRAIN.OPTIMIZER.NAME SGD``
    over a recipe's BETAS. EVAL may also stand in the file that trains, and a file may say how
    weights are read where none are given. None takes back what a lower file set, and isn't asked
    for a use.

    Args:
        values: a configuration's, by dotted key.
        given: what somebody set, by dotted key.
        needs: of each key.
    """
    for key, where in given.items():
        for need in needs.get(key, ()) if values[key] is not None else ():
            above = any(given[k].level > where.level for k in need.keys if k in given)
            in_file = need.files_wait and where.source != COMMAND_LINE
            if not (above or in_file or need.met(values)):
                change = ", or set that" if need.said.startswith("without") else ""
                raise InputError(
                    f"{where.source}: {key} does nothing {need.said}; leave it out{change}"
                )
