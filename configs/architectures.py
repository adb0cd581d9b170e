"""The keys of MODEL that an architecture takes: the arguments of its class's constructor, in capitals.

They are read from the sources of models/*.py, not from the classes. Importing those imports Paddle, and ``-h`` or a
typing error would be answered seconds later; and the configuration stands below models. ``tests/test_architectures.py``
holds this reading to what Python says of the classes.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from errors import InputError
from options import Configuration, coerce, given, leaves, parsed


class Range(NamedTuple):
    """The values that a number may have."""

    said: str
    holds: Callable[[float], bool]


# What a constructor's annotation may say besides bool, int, float, str, Literal and Sequence.
Size = Annotated[int, Range("at least 1", lambda value: value >= 1)]
Count = Annotated[int, Range("0 or more", lambda value: value >= 0)]
Factor = Annotated[float, Range("0 or more", lambda value: value >= 0)]
Positive = Annotated[float, Range("above 0", lambda value: value > 0)]
Rate = Annotated[float, Range("0 <= value < 1", lambda value: 0 <= value < 1)]
_NAMES = {"bool": bool, "int": int, "float": float, "str": str, "Size": Size, "Count": Count, "Factor": Factor,
          "Positive": Positive, "Rate": Rate}  # fmt: skip
_SHARED = ("self", "image_size", "in_channels", "num_classes")  # keys of DATA, and what config.py has
_FILES = sorted((Path(__file__).resolve().parent.parent / "models").glob("*.py"))


class Argument(NamedTuple):
    """A key of MODEL, as a constructor has it."""

    key: str  # dotted
    kind: type | list[type] | tuple  # as ``options.coerce`` takes it
    optional: bool  # None is the default, and a value
    choices: tuple[str, ...]
    range: Range | None
    default: Any
    text: str  # what the docstring says of it

    @property
    def takes(self) -> str:
        """What the constructor takes, in words."""
        kinds = self.kind if isinstance(self.kind, tuple) else (self.kind,)
        words = [f"list of {kind[0].__name__}s" if isinstance(kind, list) else kind.__name__ for kind in kinds]
        words = list(self.choices) or words + ["None"] * self.optional
        return " or ".join(words) + (f", {self.range.said}" if self.range else "")

    def value(self, found: Any, source: str) -> Any:
        """Returns ``found`` as the constructor takes it.

        Raises:
            InputError: it doesn't; ``source`` is where it was found.
        """
        value = coerce(self.key, found, self.kind, self.optional, (), source)
        numbers = value if isinstance(value, list) else [value]
        expected = "one of " + ", ".join(self.choices) if self.choices and value not in self.choices else ""
        if self.range and value is not None and not (numbers and all(map(self.range.holds, numbers))):
            expected = self.range.said
        if expected:
            raise InputError(f"{source}: {self.key} is {value!r}, expected {expected}")
        return value


class Architecture(NamedTuple):
    """What a class of models/ says of itself."""

    module: str  # the file's name
    arguments: dict[str, Argument]  # by dotted key


def architecture(kind: str) -> Architecture:
    """Returns the architecture that MODEL.TYPE names, in any case.

    Raises:
        InputError: there is none.
    """
    found = architectures().get(kind.lower())
    if found is None:
        raise InputError(f"MODEL.TYPE is {kind!r}, expected one of {', '.join(sorted(architectures()))}")
    return found


@functools.cache
def all_keys() -> dict[str, Argument]:
    """Returns the keys of all architectures by dotted key; of several that take a key, one's argument."""
    return {key: argument for one in architectures().values() for key, argument in one.arguments.items()}


def kept_values(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration that a run kept, by dotted key, with what its architecture takes today.

    Runs wrote all architectures' keys once, and None for the constructor's default.
    """
    values = dict(leaves(tree))
    own = architecture(str(values.get("MODEL.TYPE"))).arguments
    kept = {key: value for key, value in values.items() if key not in all_keys() or (key in own and value is not None)}
    return {key: argument.default for key, argument in own.items()} | kept


def settle(config: Configuration) -> None:
    """Leaves in MODEL the keys that all share and the architecture's: as they were set, or as its constructor has them.

    Raises:
        InputError: a value isn't what the constructor takes, or a key was set that the architecture doesn't take,
            whatever its value. It is no error below the TYPE that was set over it, such as a recipe's DROPPATH; None
            takes a key back.
    """
    model, found = config.MODEL, given(config)
    taken = architecture(model.TYPE).arguments
    own = max(0, found["MODEL.TYPE"].level) if "MODEL.TYPE" in found else 0
    values = {key: argument.default for key, argument in taken.items()}
    for key in all_keys():
        name = key.removeprefix("MODEL.")
        value, where = model.pop(name, None), found.get(key)
        value = parsed(value) if isinstance(value, str) else value
        if where and value is not None and key in taken:
            values[key] = taken[key].value(value, where.source)
        elif where and value is not None and where.level >= own:
            raise InputError(f"{where.source}: {key} is {value!r}, but {model.TYPE} takes no {name}; leave it out")
        else:
            config.origins.pop(key, None)
    for key, value in values.items():
        model[key.removeprefix("MODEL.")] = list(value) if isinstance(value, list) else value


def add_file(file: str | Path) -> None:
    """Reads the architectures of a file that isn't in models/, too."""
    if (file := Path(file).resolve()) not in _FILES:
        _FILES.append(file)
        architectures.cache_clear()
        all_keys.cache_clear()


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Returns what each name of ``models.base.register`` stands for.

    Raises:
        InputError: a constructor has an argument that can't be a key: without a default, or of an unknown type.
    """
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in _FILES}
    classes = {node.name: node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        name: Architecture(file.stem, dict(_arguments(node, classes, file)))
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for name in _names(node)
    }


def _names(node: ast.ClassDef) -> list[str]:
    """What ``@register(...)`` above a class calls it."""
    calls = [found for found in node.decorator_list if isinstance(found, ast.Call)]
    return [ast.literal_eval(name) for call in calls if ast.unparse(call.func) == "register" for name in call.args]


def _arguments(node: ast.ClassDef, classes: dict[str, ast.ClassDef], file: Path) -> Iterator[tuple[str, Argument]]:
    line = list(_line(node, classes))
    made = next(f for one in line for f in one.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    told: dict[str, str] = {}
    for one in reversed(line):
        told |= _told(ast.get_docstring(one) or "")
    found = made.args.args + made.args.kwonlyargs
    defaults = [None] * (len(made.args.args) - len(made.args.defaults)) + made.args.defaults + made.args.kw_defaults
    for argument, default in zip(found, defaults, strict=True):
        if argument.arg in _SHARED:
            continue
        key, where = f"MODEL.{argument.arg.upper()}", f"{file}:{argument.lineno}: {node.name}'s {argument.arg}"
        if default is None or argument.annotation is None:
            raise InputError(f"{where} has no {'type' if default else 'default'}; as a key of MODEL it needs one")
        value = ast.literal_eval(default)
        value = list(value) if isinstance(value, tuple) else value
        yield key, Argument(key, *_kind(argument.annotation, where), value, told.get(argument.arg, ""))


def _line(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """A class and those of models/ that it inherits from, the nearest first."""
    yield node
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _line(classes[base.id], classes)


def _kind(annotation: ast.expr, where: str) -> tuple[Any, bool, tuple[str, ...], Range | None]:
    """(kind, optional, choices, range) of an annotation such as ``Size | Sequence[Size] | None``."""
    found: list[Any] = []
    optional, choices, limits = False, (), None
    parts, left = [], annotation
    while isinstance(left, ast.BinOp):
        parts, left = [left.right, *parts], left.left
    for part in [left, *parts]:
        several = isinstance(part, ast.Subscript) and ast.unparse(part.value) == "Sequence"
        item = part.slice if several else part
        if ast.unparse(part) == "None":
            optional = True
        elif isinstance(part, ast.Subscript) and ast.unparse(part.value) == "Literal":
            values = ast.literal_eval(part.slice)
            choices, found = values if isinstance(values, tuple) else (values,), [*found, str]
        elif ast.unparse(item) in _NAMES:
            named = _NAMES[ast.unparse(item)]
            [limits] = getattr(named, "__metadata__", [limits])
            plain = getattr(named, "__origin__", named)
            found.append([plain] if several else plain)
        else:
            raise InputError(f"{where} is {ast.unparse(annotation)}; a key of MODEL takes {', '.join(_NAMES)}, Literal")
    found.sort(key=lambda kind: isinstance(kind, list))
    return (tuple(found) if len(found) > 1 else found[0]), optional, choices, limits


def _told(docstring: str) -> dict[str, str]:
    """What the parts Attributes and Args of a docstring say of each name, on one line."""
    parts = sorted(re.findall(r"^(Args|Attributes):\n((?: +.*\n?)+)", docstring, re.M), reverse=True)
    entries = [e for _, part in parts for e in re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", part, re.M)]
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
