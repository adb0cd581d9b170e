"""What a definition says of its arguments as keys: its signature and docstring, read from the
source by ``ast``.

Nothing is imported: an architecture imports Paddle, and ``-h`` or a typing error would be answered
seconds later.
"""

import ast
import functools
import re

from errors import InputError
from settings.keys import VOCABULARY, Key, key_of


def argument(
    name: str, word: ast.arg, default: ast.expr | None, told: dict[str, str], where: str
) -> Key:
    """Returns the key that an argument of a definition is.

    Args:
        name: the key's, dotted.
        told: what the docstring says, by argument.
        where: the definition, named in errors.

    Raises:
        InputError: it can't be a key.
    """
    if default is None or word.annotation is None:
        raise InputError(
            f"{where} has no {'type' if default else 'default'}; as a key it needs one"
        )
    try:
        found = _of_annotation(ast.unparse(word.annotation))
    except (NameError, TypeError, SyntaxError):
        said = ast.unparse(word.annotation)
        raise InputError(f"{where} is {said}; a key takes {', '.join(VOCABULARY)}") from None
    found = found._replace(name=name, text=told.get(word.arg, ""))
    value = ast.literal_eval(default)
    return found if value is None else found._replace(default=found.value(value, where))


@functools.cache
def _of_annotation(said: str) -> Key:
    """Returns a key without a name, of a type as it is written."""
    return key_of("", eval(said, {"__builtins__": {}}, VOCABULARY), None)


def descriptions(docstring: str) -> dict[str, str]:
    """Returns what the parts Attributes and Args of a docstring say of each name, on one line."""
    parts = sorted(
        re.findall(r"^(Args|Attributes):\n((?: +.*\n?)+)", docstring, re.M), reverse=True
    )
    found = {}
    for _, part in parts:
        for names, text in re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", part, re.M):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found
