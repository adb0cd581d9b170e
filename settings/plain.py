"""Reads small text files that someone else wrote, up to a limit, and checks JSON against a form."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from errors import Allowance, Unreadable, open_file, printable

# The longest number, in characters. Converting thousands of digits takes time.
LONGEST_NUMBER = 40
# Characters of an entry of ``json_entries``: of nearly all, and of the longest.
_ENTRY = 1 << 12
LONGEST_ENTRY = 1 << 20
_SPACES = re.compile(r"\s*")


class Rule(NamedTuple):
    """A condition on a value, in words and as a function."""

    words: str
    holds: Callable[[Any], bool]


Form = Mapping[str, Rule]


def whole_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Returns the content of a regular file.

    Raises:
        Unreadable: it has more than ``most`` bytes.
        OSError: it can't be read.
    """
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Unreadable(f"it has more than {most} bytes")
    return data


def parsed_json(text: bytes, allowance: Allowance | None = None, finite: bool = True) -> Any:
    """Parses JSON in UTF-8. A name that an object has twice is an error.

    Args:
        allowance: of the file that the text is in; None: the text is the file.
        finite: refuse NaN, infinity, and numbers too large for a float.

    Raises:
        Unreadable: it is something else, or would take too much memory.
        ValueError, RecursionError: it isn't JSON, or nested too deep.
    """
    # An object and each of its entries take at most 250 bytes, an item of a list 160, a character
    # 4.
    cost = (
        5 * len(text)
        + 160 * (text.count(b",") + text.count(b"["))
        + 250 * (text.count(b"{") + text.count(b":"))
    )
    (allowance or Allowance(len(text))).take(cost)
    return json.loads(
        text.decode("utf-8"),
        object_pairs_hook=_object,
        parse_int=_whole,
        parse_float=_real if finite else float,
        parse_constant=_constant if finite else float,
    )


def json_entries(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, entry) for the entries of each list of objects at the top of a JSON text.

    Only one entry is in memory at a time. Other values are left out.

    Raises:
        Unreadable: it is something else, or an entry has more than LONGEST_ENTRY characters.
        ValueError, RecursionError: an entry isn't JSON, or nested too deep.
    """
    place = _past(text, 0, "{")
    while True:
        name, place = json_value(text, place)
        place = _past(text, place, ":")
        if text[place : place + 1] != "[":
            _, place = json_value(text, place)
        else:
            place = _past(text, place, "[")
            while text[place : place + 1] != "]":
                entry, place = json_value(text, place)
                if type(entry) is not dict:
                    raise Unreadable("its lists have entries that aren't objects")
                yield str(name), entry
                if text[place : place + 1] != "]":
                    place = _past(text, place, ",")
            place = _past(text, place, "]")
        if text[place : place + 1] == "}":
            return
        place = _past(text, place, ",")


def json_value(text: str, place: int) -> tuple[Any, int]:
    """Returns (the value at a place of a JSON text, the place behind it and behind spaces).

    Raises: as of ``json_entries``.
    """
    for most in (_ENTRY, LONGEST_ENTRY):
        try:
            value, end = _DECODER.raw_decode(text[place : place + most])
            return value, _behind_spaces(text, place + end)
        except json.JSONDecodeError as error:
            if place + most >= len(text):
                raise Unreadable(f"it isn't JSON ({error.msg} at {place + error.pos})") from None
    raise Unreadable(f"it isn't JSON, or has an entry of more than {LONGEST_ENTRY} characters")


_DECODER = json.JSONDecoder()


def _past(text: str, place: int, expected: str) -> int:
    """Returns the place behind a character that has to be there, and behind spaces."""
    place = _behind_spaces(text, place)
    if text[place : place + 1] != expected:
        raise Unreadable(f"it isn't JSON (expected '{expected}' at {place})")
    return _behind_spaces(text, place + 1)


def _behind_spaces(text: str, place: int) -> int:
    match: Any = _SPACES.match(text, place)
    return match.end()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise Unreadable("it has the same name twice")
    return entries


def _whole(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise Unreadable(f"it contains a number of {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise Unreadable(
            f"it contains the number {printable(digits, LONGEST_NUMBER)}, which is too large"
        )
    return number


def _constant(name: str) -> Any:
    raise Unreadable(f"it contains {name}, which isn't a number")


def check_form(values: Any, form: Form, needed: tuple[str, ...] = (), where: str = "") -> None:
    """Checks the entries of a dictionary that a form names. Other entries aren't checked.

    Args:
        needed: names that have to be there.
        where: the dictionary's own name, with a dot behind it.

    Raises:
        Unreadable: names the entry, what it is and what was expected.
    """
    if type(values) is not dict:
        raise Unreadable(
            f"its {where.rstrip('.') or 'content'} is {value_text(values)}, expected a dictionary"
        )
    for name in needed:
        if name not in values:
            raise Unreadable(f"its {where}{name} is missing, expected {form[name].words}")
    for name, rule in form.items():
        if name in values and not rule.holds(values[name]):
            raise Unreadable(
                f"its {where}{name} is {value_text(values[name])}, expected {rule.words}"
            )


def value_text(value: Any) -> str:
    """Returns a short text for a value that someone else wrote, however large or deep it is."""
    if type(value) is dict:
        return f"a dictionary of {len(value)}"
    if type(value) in (list, tuple) and (
        len(value) > 4 or any(type(item) in (dict, list, tuple) for item in value)
    ):
        return f"a list of {len(value)}"
    if type(value) in (list, tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return printable(repr(value[:60] if type(value) is str else value), 60)


def is_whole(value: Any, low: int = 0, high: int = 1 << 48) -> bool:
    """Returns whether a value is a whole number within bounds, both included."""
    return type(value) is int and low <= value <= high


def is_real(value: Any, low: float = -1e300, high: float = 1e300) -> bool:
    """Returns whether a value is a finite number within bounds, both included."""
    return type(value) in (int, float) and low <= value <= high


def is_name(value: Any, most: int = 256) -> bool:
    """Returns whether a value is a text that fits a line: printable, not empty, at most ``most``
    characters.
    """
    return type(value) is str and 0 < len(value) <= most and value.isprintable()


def is_list(value: Any, holds: Callable[[Any], bool], low: int = 0, high: int = 1 << 20) -> bool:
    """Returns whether a value is a list of ``low`` to ``high`` items for which ``holds`` is true."""
    return type(value) is list and low <= len(value) <= high and all(map(holds, value))


def optional(rule: Rule) -> Rule:
    """Returns the rule that admits null, too."""
    return Rule(f"{rule.words}, or null", lambda value: value is None or rule.holds(value))


FLAG = Rule("true or false", lambda value: type(value) is bool)
NAME = Rule("a short text", is_name)
