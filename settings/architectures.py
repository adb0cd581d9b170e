"""The keys of MODEL that an architecture takes: the arguments of its class's constructor, in
capitals.

They are read from the sources of models/*.py, not from the classes. Importing those imports Paddle,
and ``-h`` or a typing error would be answered seconds later; and the configuration stands below
models. ``tests/test_architectures.py`` holds this reading to what Python says of the classes.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from errors import InputError
from launch.startup import without_collection
from settings.keys import Key
from settings.options import Configuration, leaves, value_sources
from settings.paddlevit.absent import absent_type
from settings.signatures import argument, descriptions
from settings.values import parse_value, quoted

# keys of DATA, and what config.py has
_SHARED = ("self", "image_size", "in_channels", "num_classes")
_FILES = sorted((Path(__file__).resolve().parent.parent / "models").glob("*.py"))


class Architecture(NamedTuple):
    """What a class of models/ says of itself."""

    module: str  # the file's name
    arguments: dict[str, Key]  # by dotted key


def architecture(kind: str, by: str = "") -> Architecture:
    """Returns the architecture that MODEL.TYPE names, in any case.

    Args:
        by: the file or the program that names it; the error begins with it.

    Raises:
        InputError: there is none.
    """
    found = architectures().get(kind.lower())
    if found is None:
        told = f"{by}MODEL.TYPE is {quoted(kind)}"
        if absent := absent_type(kind):
            raise InputError(f"{told}: {absent}")
        raise InputError(f"{told}, expected one of {', '.join(sorted(architectures()))}")
    return found


@functools.cache
def all_keys() -> dict[str, Key]:
    """Returns the keys of all architectures by dotted key; of several that take a key, one's
    argument.
    """
    return {key: found for one in architectures().values() for key, found in one.arguments.items()}


def kept_values(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration that a run kept, by dotted key, with what its architecture takes
    today.

    Runs wrote all architectures' keys once, and None for the constructor's default.
    """
    values = dict(leaves(tree))
    own = architecture(str(values.get("MODEL.TYPE"))).arguments
    kept = {
        key: value
        for key, value in values.items()
        if key not in all_keys() or (key in own and value is not None)
    }
    return {key: argument.default for key, argument in own.items()} | kept


def keep_model_keys(config: Configuration) -> None:
    """Leaves in MODEL the keys that all share and the architecture's: as they were set, or as its
    constructor has them.

    Raises:
        InputError: a value isn't what the constructor takes, or a key was set that the architecture
            doesn't take, whatever its value. It is no error below the TYPE that was set over it,
            such as a recipe's DROPPATH; None takes a key back.
    """
    model = config.MODEL
    found = value_sources(config)
    taken = architecture(model.TYPE).arguments
    own = max(0, found["MODEL.TYPE"].level) if "MODEL.TYPE" in found else 0
    values = {key: argument.default for key, argument in taken.items()}
    for key in all_keys():
        name = key.removeprefix("MODEL.")
        # Most keys are other architectures'.
        if name not in model:
            continue
        value = model.pop(name)
        where = found.get(key)
        value = parse_value(value) if isinstance(value, str) else value
        if where and value is not None and key in taken:
            values[key] = taken[key].value(value, where.source)
        elif where and value is not None and where.level >= own:
            raise InputError(
                f"{where.source}: {key} is {quoted(value)}, but {model.TYPE} takes no {name}; leave it out"
            )
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
        InputError: a constructor has an argument that can't be a key: without a default, or of an
            unknown type.
    """
    with without_collection():
        trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in _FILES}
    classes = {
        node.name: node
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
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
    return [
        ast.literal_eval(name)
        for call in calls
        if ast.unparse(call.func) == "register"
        for name in call.args
    ]


def _arguments(
    node: ast.ClassDef, classes: dict[str, ast.ClassDef], file: Path
) -> Iterator[tuple[str, Key]]:
    line = list(_line(node, classes))
    made = next(
        f
        for one in line
        for f in one.body
        if isinstance(f, ast.FunctionDef) and f.name == "__init__"
    )
    meant: dict[str, str] = {}
    for one in reversed(line):
        meant |= descriptions(ast.get_docstring(one) or "")
    found = made.args.args + made.args.kwonlyargs
    defaults = (
        [None] * (len(made.args.args) - len(made.args.defaults))
        + made.args.defaults
        + made.args.kw_defaults
    )
    for word, default in zip(found, defaults, strict=True):
        if word.arg in _SHARED:
            continue
        key = f"MODEL.{word.arg.upper()}"
        where = f"{file}:{word.lineno}: {node.name}'s {word.arg}"
        yield key, argument(key, word, default, meant, where)


def _line(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """A class and those of models/ that it inherits from, the nearest first."""
    yield node
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _line(classes[base.id], classes)
