"""How the values of options are read: YAML files, words of a command line, and one strict coercion for both."""

import ast
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from yacs.config import CfgNode

from errors import InputError


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises:
        InputError: the file can't be read, isn't YAML or isn't a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read ({error})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a mapping of keys, found {type(content).__name__}")
    return content


def coerce(
    key: str, value: Any, kind: type | list[type] | tuple, optional: bool, words: Iterable[str], source: str
) -> Any:
    """Returns ``value`` in the type of ``key``; a whole number serves as a float, a single value as a list of one.

    Args:
        kind: a type, [type] for a list of it, or (type, [type]) for either.
        optional: whether None is a value.
        words: strings that are values whatever ``kind`` is, such as "auto".
        source: where the value was found, named in errors.

    Raises:
        InputError: the value is of another type.
    """
    if isinstance(value, str) and (kind is not str or value.lower() in ("none", "null")):
        value = parsed(value)
    if (value is None and optional) or (isinstance(value, str) and value in words):
        return value
    is_list = isinstance(value, list | tuple)
    if isinstance(kind, tuple):
        kind = kind[1] if is_list else kind[0]
    item = kind[0] if isinstance(kind, list) else kind
    values = list(value) if isinstance(kind, list) and is_list else [value]
    if all(type(v) is item or (item is float and type(v) is int) for v in values):
        values = [item(v) for v in values]
        return values if isinstance(kind, list) else values[0]
    expected = f"a list of {item.__name__}s" if isinstance(kind, list) else item.__name__
    raise InputError(f"{source}: {key} takes {expected}, found {value!r} ({type(value).__name__})")


def parsed(text: str) -> Any:
    """The value that a word means: on the command line, or in YAML, whose version 1.1 takes 1e-6 for a string."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def leaves(node: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every leaf of a tree."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def plain(node: CfgNode) -> dict[str, Any]:
    """Returns a configuration as nested dicts, for JSON."""
    return {key: plain(value) if isinstance(value, CfgNode) else value for key, value in node.items()}


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" for the known name that is nearest, or nothing."""
    found = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {found[0]}?" if found else ""
