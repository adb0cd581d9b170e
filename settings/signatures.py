"""What a definition says of its arguments as keys: its signature and docstring, read from the
source by ``ast``.
"""

import ast
import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from errors import InputError
from settings.values import coerce, quoted


class Range(NamedTuple):
    """The values that a number may have."""

    said: str
    holds: Callable[[float], bool]


def between(low: float, high: float) -> Range:
    """Returns the range of both bounds and what lies between them."""
    return Range(f"{low} to {high}", lambda value: low <= value <= high)


# What an annotation may say besides bool, int, float, str, Literal and Sequence. Ranges end where
# nobody means it any more, and before a run fails of it, or never ends, without naming the key.
Size = Annotated[int, between(1, 1_000_000)]
Depth = Annotated[int, between(1, 200)]  # layers; to build one takes time
Blocks = Annotated[int, between(0, 200)]  # as Depth, or none
Kernel = Annotated[int, between(1, 99)]  # a convolution's side
Epsilon = Annotated[float, between(1e-12, 0.001)]  # of a norm; Paddle takes no larger one
Count = Annotated[int, between(0, 1_000_000)]
Factor = Annotated[float, between(0, 1_000_000)]
Positive = Annotated[float, between(1e-12, 1_000_000)]
Share = Annotated[float, between(0, 1)]
Rate = Annotated[float, Range("0 <= value < 1", lambda value: 0 <= value < 1)]
Part = Annotated[float, Range("0 < value < 1", lambda value: 0 < value < 1)]
_NAMES = {"bool": bool, "int": int, "float": float, "str": str, "Size": Size, "Depth": Depth, "Blocks": Blocks,
          "Kernel": Kernel, "Epsilon": Epsilon, "Count": Count,
          "Factor": Factor, "Positive": Positive, "Rate": Rate, "Share": Share,
          "Part": Part}  # fmt: skip


class Argument(NamedTuple):
    """An argument, as a key."""

    key: str  # dotted
    kind: type | list[type] | tuple  # as ``options.coerce`` takes it
    optional: bool  # None is the default, and a value
    choices: tuple[str, ...]
    range: Range | None
    default: Any
    text: str  # what the docstring says of it

    @property
    def takes(self) -> str:
        """Returns what the constructor takes, in words."""
        kinds = self.kind if isinstance(self.kind, tuple) else (self.kind,)
        words = [
            f"list of {kind[0].__name__}s" if isinstance(kind, list) else kind.__name__
            for kind in kinds
        ]
        words = list(self.choices) or words + ["None"] * self.optional
        return " or ".join(words) + (f", {self.range.said}" if self.range else "")

    def value(self, found: Any, source: str) -> Any:
        """Returns ``found`` as the constructor takes it.

        Raises:
            InputError: it doesn't; ``source`` is where it was found.
        """
        value = coerce(self.key, found, self.kind, self.optional, (), source)
        numbers = value if isinstance(value, list) else [value]
        expected = (
            "one of " + ", ".join(self.choices)
            if self.choices and value not in self.choices
            else ""
        )
        if (
            self.range
            and value is not None
            and not (numbers and all(map(self.range.holds, numbers)))
        ):
            expected = self.range.said
        if expected:
            raise InputError(f"{source}: {self.key} is {quoted(value)}, expected {expected}")
        return value


def argument(
    key: str, word: ast.arg, default: ast.expr | None, told: dict[str, str], where: str
) -> Argument:
    """Returns what a definition says of an argument; raises InputError, naming ``where``, if that
    can't be a key.
    """
    if default is None or word.annotation is None:
        raise InputError(
            f"{where} has no {'type' if default else 'default'}; as a key it needs one"
        )
    value = ast.literal_eval(default)
    found = Argument(key, *_kind(word.annotation, where), None, told.get(word.arg, ""))
    return found if value is None else found._replace(default=found.value(value, where))


def _kind(annotation: ast.expr, where: str) -> tuple[Any, bool, tuple[str, ...], Range | None]:
    """(kind, optional, choices, range) of an annotation such as ``Size | Sequence[Size] | None``."""
    found: list[Any] = []
    optional = False
    choices = ()
    limits = None
    parts = []
    left = annotation
    while isinstance(left, ast.BinOp):
        parts = [left.right, *parts]
        left = left.left
    for part in [left, *parts]:
        several = isinstance(part, ast.Subscript) and ast.unparse(part.value) == "Sequence"
        item = part.slice if several else part
        if ast.unparse(part) == "None":
            optional = True
        elif isinstance(part, ast.Subscript) and ast.unparse(part.value) == "Literal":
            values = ast.literal_eval(part.slice)
            choices = values if isinstance(values, tuple) else (values,)
            found = [*found, str]
        elif ast.unparse(item) in _NAMES:
            named = _NAMES[ast.unparse(item)]
            [limits] = getattr(named, "__metadata__", [limits])
            plain = getattr(named, "__origin__", named)
            found.append([plain] if several else plain)
        else:
            raise InputError(
                f"{where} is {ast.unparse(annotation)}; a key takes {', '.join(_NAMES)}, Literal"
            )
    found.sort(key=lambda kind: isinstance(kind, list))
    return (tuple(found) if len(found) > 1 else found[0]), optional, choices, limits


def descriptions(docstring: str) -> dict[str, str]:
    """Returns what the parts Attributes and Args of a docstring say of each name, on one line."""
    parts = sorted(
        re.findall(r"^(Args|Attributes):\n((?: +.*\n?)+)", docstring, re.M), reverse=True
    )
    entries = [
        e
        for _, part in parts
        for e in re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", part, re.M)
    ]
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
