"""The keys of MODEL that an architecture takes: its constructor's arguments, in capitals.

They are read from the sources of models/*.py, not from the classes. Importing those imports Paddle,
and ``-h`` or a typing error would be answered seconds later; and the configuration stands below
models. ``tests/test_architectures.py`` holds this reading to what Python says of the classes.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from errors import InputError
from launch.startup import without_collection
from settings.configuration import CONFIG_DIR, Configuration, Given, leaves, value_sources
from settings.keys import Key
from settings.paddlevit.absent import absent_type
from settings.signatures import argument, descriptions
from settings.values import parse_value, quoted

# Arguments that aren't keys of their own: config.py has them in DATA and MODEL.
_SHARED = ("self", "image_size", "in_channels", "num_classes")
_FILES = sorted((Path(__file__).resolve().parent.parent / "models").glob("*.py"))


class Architecture(NamedTuple):
    """An architecture of models/.

    Attributes:
        module: the name of its file.
        arguments: its keys, by dotted key.
    """

    module: str
    arguments: dict[str, Key]


def architecture(kind: str, by: str = "") -> Architecture:
    """Returns the architecture that MODEL.TYPE names, in any case.

    Args:
        by: what names it; the error begins with it.

    Raises:
        InputError: there is none.
    """
    chosen = architectures().get(kind.lower())
    if chosen is not None:
        return chosen
    message = f"{by}MODEL.TYPE is {quoted(kind)}"
    if absent := absent_type(kind):
        raise InputError(f"{message}: {absent}")
    raise InputError(f"{message}, expected one of {', '.join(sorted(architectures()))}")


@functools.cache
def all_keys() -> dict[str, Key]:
    """Returns the keys of all architectures, by dotted key. If several architectures take a key,
    the declaration of the last one is returned.
    """
    keys: dict[str, Key] = {}
    for chosen in architectures().values():
        keys |= chosen.arguments
    return keys


def kept_values(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a configuration that a run kept, by dotted key, with the keys that its
    architecture takes today.

    Earlier releases wrote the keys of all architectures, and None for a constructor's default.
    """
    values = dict(leaves(tree))
    taken = architecture(str(values.get("MODEL.TYPE"))).arguments
    kept = {
        key: value
        for key, value in values.items()
        if key not in all_keys() or (key in taken and value is not None)
    }
    return {key: argument.default for key, argument in taken.items()} | kept


def keep_model_keys(config: Configuration) -> None:
    """Leaves in MODEL the shared keys and those of the chosen architecture, with the values that
    they were given, or the constructor's defaults.

    A key that the architecture doesn't take is dropped where MODEL.TYPE was set later, where its value
    is None, which takes a key back, and where it is of a shipped recipe for any model, such as the
    DROPPATH of finetune.yaml.

    Raises:
        InputError: a value isn't one that the constructor takes, or somebody set a key that the
            architecture doesn't take.
    """
    model = config.MODEL
    sources = value_sources(config)
    taken = architecture(model.TYPE).arguments
    level_of_type = max(0, sources["MODEL.TYPE"].level) if "MODEL.TYPE" in sources else 0
    values = {key: argument.default for key, argument in taken.items()}
    for key in all_keys():
        name = key.removeprefix("MODEL.")
        # Most keys are other architectures'.
        if name not in model:
            continue
        value = model.pop(name)
        if isinstance(value, str):
            value = parse_value(value)
        source = sources.get(key)
        if source and value is not None and key in taken:
            values[key] = taken[key].value(value, source.source)
        elif (
            source
            and value is not None
            and source.level >= level_of_type
            and not _is_for_any_model(source, sources)
        ):
            raise InputError(
                f"{source.source}: {key} is {quoted(value)}, but {model.TYPE} takes no {name}; "
                "leave it out"
            )
        else:
            config.origins.pop(key, None)
    for key, value in values.items():
        model[key.removeprefix("MODEL.")] = list(value) if isinstance(value, list) else value


def _is_for_any_model(source: Given, sources: Mapping[str, Given]) -> bool:
    """Returns whether a value is of a shipped recipe that another file's model is trained by."""
    is_recipe = Path(source.source).parent == CONFIG_DIR / "recipes"
    model = sources.get("MODEL.TYPE")
    return is_recipe and (model is None or model.source != source.source)


def add_file(file: str | Path) -> None:
    """Adds the architectures of a file that isn't in models/."""
    if (file := Path(file).resolve()) not in _FILES:
        _FILES.append(file)
        architectures.cache_clear()
        all_keys.cache_clear()


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Returns all architectures, by the names that ``models.base.register`` gives them.

    Raises:
        InputError: an argument of a constructor can't be a key: it has no default, or an unknown
            type.
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
    """Returns the names in ``@register(...)`` above a class."""
    names = []
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "register":
            names += [ast.literal_eval(name) for name in call.args]
    return names


def _arguments(
    node: ast.ClassDef, classes: dict[str, ast.ClassDef], file: Path
) -> Iterator[tuple[str, Key]]:
    """Yields (dotted key, key) of each argument of a class's constructor."""
    lineage = list(_lineage(node, classes))
    constructor = next(
        item
        for ancestor in lineage
        for item in ancestor.body
        if isinstance(item, ast.FunctionDef) and item.name == "__init__"
    )
    meanings: dict[str, str] = {}
    for ancestor in reversed(lineage):
        meanings |= descriptions(ast.get_docstring(ancestor) or "")
    signature = constructor.args
    # Python lists the defaults of the last positional arguments alone.
    without_default = [None] * (len(signature.args) - len(signature.defaults))
    defaults = [*without_default, *signature.defaults, *signature.kw_defaults]
    for word, default in zip(signature.args + signature.kwonlyargs, defaults, strict=True):
        if word.arg in _SHARED:
            continue
        key = f"MODEL.{word.arg.upper()}"
        where = f"{file}:{word.lineno}: {node.name}'s {word.arg}"
        yield key, argument(key, word, default, meanings, where)


def _lineage(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yields a class and those of models/ that it inherits from, the nearest first."""
    yield node
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _lineage(classes[base.id], classes)
