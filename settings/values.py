"""Parses the value of a key from a command line or a YAML file, and formats values for messages.

Nothing here recurses into a given text, and the time is proportional to its length.
"""

import math
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from errors import InputError

# The largest number that every library takes, and that Paddle's kernels count with.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 1e9
# The longest text of a value, in characters. A path has 4,096 at most.
LONGEST_TEXT = 10_000
# The depth of lists within lists.
_DEEPEST = 5
_LONGEST_NUMBER = 40
_INT = re.compile(r"[-+]?\d[\dA-Za-z_]*")
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?")
# Two sides, such as 224x160.
_SIDES = re.compile(r"[1-9]\d{0,9}x[1-9]\d{0,9}")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
# Unicode categories: control characters, surrogates, ends of lines.
_NOT_ALLOWED = ("Cc", "Cs", "Zl", "Zp")
_BRACKETS = {"[": "]", "(": ")"}


class _Shown(reprlib.Repr):
    """A ``repr`` that fits into one line."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = 160
        self.maxother = 160
        self.maxlong = 60
        self.maxlist = self.maxtuple = self.maxdict = 12


# As ``repr``, but without the middle of a long value.
quoted = _Shown().repr


def parse_value(text: str, depth: int = 0) -> Any:
    """Returns the value that a word means: on the command line, or in YAML, whose version 1.1 takes
    1e-6 for a string.

    Numbers and lists are written as Python's; 224x160 is [224, 160]. Whatever isn't one is the word
    itself.
    """
    stripped = text.strip()
    if stripped.lower() in _WORDS:
        return _WORDS[stripped.lower()]
    if len(stripped) <= _LONGEST_NUMBER and (number := _number(stripped)) is not None:
        return number
    if (
        len(stripped) > 1
        and stripped[0] in "'\""
        and stripped[-1] == stripped[0] not in stripped[1:-1]
    ):
        return stripped[1:-1]
    if depth < _DEEPEST and len(stripped) > 1 and _BRACKETS.get(stripped[0]) == stripped[-1]:
        items = list(_items(stripped[1:-1]))
        # ( 3 ) is the number 3 in parentheses, not a list.
        if stripped[0] == "[" or len(items) != 1:
            return [parse_value(item.strip(), depth + 1) for item in items]
        return parse_value(items[0].strip(), depth + 1)
    if _SIDES.fullmatch(stripped):
        return [int(side) for side in stripped.split("x")]
    if "," in stripped and stripped[0] not in "[({":
        values = [_number(item.strip()) for item in _items(stripped)]
        if None not in values:
            return values
    return text


def _number(text: str) -> int | float | None:
    try:
        if _INT.fullmatch(text):
            return int(text, 0)
        return float(text) if _FLOAT.fullmatch(text) else None
    except ValueError:
        # ``int`` refuses 007 and 0xyz.
        return float(text) if _FLOAT.fullmatch(text) and "e" in text.lower() else None


def _items(text: str) -> Iterator[str]:
    """Yields the items of a list's text. Commas within brackets or quotes don't separate, and a
    trailing comma adds no item: [1, 2, ].
    """
    depth = 0
    begun = 0
    quote = ""
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and not text[begun:place].strip():
            quote = letter
        elif letter in "[(":
            depth += 1
        elif letter in "])":
            depth -= 1
        elif letter == "," and depth <= 0:
            yield text[begun:place]
            begun = place + 1
    if text[begun:].strip():
        yield text[begun:]


def coerce(
    key: str,
    value: Any,
    kind: type | list[type] | tuple,
    optional: bool,
    words: Iterable[str],
    source: str,
) -> Any:
    """Returns ``value`` in the type of ``key``; a whole number serves as a float, a single value as
    a list of one.

    Args:
        kind: a type, [type] for a list of it, or (type, [type]) for either.
        optional: whether None is a value.
        words: strings that are values whatever ``kind`` is, such as "auto".
        source: where the value was found, named in errors.

    Raises:
        InputError: the value is of another type. Or no configuration has such a value: a number
            that isn't finite or is too large, a text with control characters or without an end.
    """
    if isinstance(value, str) and (kind is not str or value.lower() in ("none", "null")):
        value = parse_value(value)
    if (value is None and optional) or (isinstance(value, str) and value in words):
        return value
    is_list = isinstance(value, list | tuple)
    named = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(kind, tuple):
        kind = kind[1] if is_list else kind[0]
    item: Any = kind[0] if isinstance(kind, list) else kind
    values: list[Any] = list(value) if isinstance(kind, list) and is_list else [value]
    if all(type(v) is item or (item is float and type(v) is int) for v in values):
        if problem := next(filter(None, map(_problem, values)), ""):
            raise InputError(f"{source}: {key} is {quoted(value)}, expected {problem}")
        values = [item(v) for v in values]
        return values if isinstance(kind, list) else values[0]
    expected = [
        f"a list of {one[0].__name__}s" if isinstance(one, list) else one.__name__ for one in named
    ]
    expected = " or ".join([*expected, *words])
    raise InputError(
        f"{source}: {key} takes {expected}, found {quoted(value)} ({type(value).__name__})"
    )


def _problem(value: Any) -> str:
    """Returns what is expected instead of a value of the right type, or "" if it is allowed."""
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return f"at most {LONGEST_TEXT} letters, found {len(value)}"
        for letter in value:
            if unicodedata.category(letter) in _NOT_ALLOWED:
                return f"text without control characters, found {letter!a}"
        return ""
    if isinstance(value, float) and not (math.isfinite(value) and abs(value) <= LARGEST_FLOAT):
        return f"a number of at most {LARGEST_FLOAT:g}"
    if type(value) is int and abs(value) > LARGEST_INT:
        return f"a whole number of at most {LARGEST_INT}"
    return ""
