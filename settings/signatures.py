"""Reads keys from the signatures and docstrings of definitions, by ``ast``.

The definitions aren't imported: they import Paddle, and ``-h`` or a mistyped key would be answered
seconds later.
"""

import ast
import functools
import re

from errors import InputError
from settings.keys import VOCABULARY, Key, key_of


def argument(
    name: str, word: ast.arg, default: ast.expr | None, meanings: dict[str, str], where: str
) -> Key:
    """Returns the key that an argument of a definition declares.

    Args:
        name: the dotted key.
        meanings: the docstring's text, by argument.
        where: the definition, named in errors.

    Raises:
        InputError: the argument has no default, or no type that a key can have.
    """
    if default is None or word.annotation is None:
        missing = "default" if default is None else "type"
        raise InputError(f"{where} has no {missing}, which a key needs")
    annotation = ast.unparse(word.annotation)
    try:
        key = _of_annotation(annotation)
    except (AttributeError, NameError, TypeError, SyntaxError):
        raise InputError(
            f"{where} is {annotation}; the type of a key is one of {', '.join(VOCABULARY)}"
        ) from None
    key = key._replace(name=name, text=meanings.get(word.arg, ""))
    value = ast.literal_eval(default)
    return key if value is None else key._replace(default=key.value(value, where))


@functools.cache
def _of_annotation(annotation: str) -> Key:
    """Returns a key without a name, of the type that ``annotation`` writes."""
    return key_of("", eval(annotation, {"__builtins__": {}}, VOCABULARY), None)


def descriptions(docstring: str) -> dict[str, str]:
    """Returns the text of each name in the sections Attributes and Args of a docstring, on one
    line. Args count for more.
    """
    sections = re.findall(r"^(Args|Attributes):\n((?: +.*\n?)+)", docstring, re.M)
    meanings = {}
    for _, section in sorted(sections, reverse=True):
        for names, text in re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", section, re.M):
            meanings |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return meanings
