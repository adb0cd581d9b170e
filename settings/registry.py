"""Components that a key chooses by name: tasks, datasets, heads, optimizers, schedules, losses,
adapters, operations and trackers.

    @schedules.register("poly")
    def poly(at: At, *, warmup_prefix: bool, power: Positive = 2.0) -> float:

A component's keyword arguments are the keys that it reads. They stand beside the key that chooses
it: TRAIN.LR_SCHEDULER.WARMUP_PREFIX and .POWER. Those of a task are in the section METHOD. A
keyword with a default declares a key of the component's own, which its docstring describes; the
others are config.py's. All of this is read from the sources. A component is imported only when it
is used, so that a mistyped key is reported before Paddle is imported.
"""

import ast
import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from errors import InputError
from settings.configuration import Configuration
from settings.keys import Key
from settings.signatures import argument, descriptions
from settings.suggestions import nearest
from settings.values import quoted

ROOT = Path(__file__).resolve().parent.parent
# Empty in the repository; in an installed copy (tools/package) the package's name with a dot.
_PACKAGE = __name__.removesuffix("settings.registry")
Definition = ast.FunctionDef | ast.ClassDef
Made = TypeVar("Made", bound=Callable)


class Component(NamedTuple):
    """A component, as its source declares it.

    Attributes:
        module: the dotted module that defines it.
        given: the keywords of its registration whose values are literals.
        returns: the annotation of its result.
        keys: the keys that it reads, by keyword. None: a key of config.py.
    """

    module: str
    given: dict[str, Any]
    returns: str
    keys: dict[str, Key | None]


class Registry:
    """The components of one kind, in the order of their names.

    Args:
        name: the name of the variable that holds this registry. ``find_decorated`` looks for it.
        key: the key that chooses one of them. The keys that they read are next to it.
        room: the folder that contains their files.
        optional: whether the key may be None, which is its default then.
        section: the section of the keys that they read; None: the one that ``key`` is in.
    """

    def __init__(
        self, name: str, key: str, room: str, optional: bool = False, section: str | None = None
    ) -> None:
        self.name = name
        self.key = key
        self.room = room
        self.optional = optional
        self.section = section or key.rpartition(".")[0]
        self.registered: dict[str, tuple[Callable, dict[str, Any]]] = {}

    def register(self, *names: str, **given: Any) -> Callable[[Made], Made]:
        """Returns a decorator that registers a component under ``names``.

        Args:
            given: what else components of this kind declare (``takes="labels"`` of a loss).
        """

        def keep(component: Made) -> Made:
            self.registered |= dict.fromkeys(names, (component, given))
            return component

        return keep

    @functools.cached_property
    def components(self) -> dict[str, Component]:
        """The components that the sources declare, by name.

        Raises:
            InputError: two have the same name, or a keyword can't be a key.
        """
        components: dict[str, Component] = {}
        for file, node, names, given in find_decorated(ROOT / self.room, f"{self.name}.register"):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            returns, keys = self._signature(file, node)
            for name in names:
                if name in components:
                    other = components[name].module
                    raise InputError(f"{file}, line {node.lineno}: {other} registers {name}, too")
                components[name] = Component(module, given, returns, keys)
        # Messages list them. In the order of files, a new file would change what others say.
        return dict(sorted(components.items(), key=lambda item: item[0].lower()))

    def _signature(self, file: Path, node: Definition) -> tuple[str, dict[str, Key | None]]:
        """Returns the annotation of a definition's result, and the keys that its keywords are."""
        meanings = descriptions(ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef):
            [node] = [
                item
                for item in node.body
                if isinstance(item, ast.FunctionDef) and item.name == "__init__"
            ]
        keys: dict[str, Key | None] = {}
        for word, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            where = f"{file}, line {word.lineno}: {word.arg}"
            key = self.key_of(word.arg)
            keys[word.arg] = default and argument(key, word, default, meanings, where)
        return ast.unparse(node.returns) if node.returns else "", keys

    def names(self, returns: Collection[str] | None = None) -> tuple[str, ...]:
        """Returns the names of the components.

        Args:
            returns: only those whose result has one of these annotations.
        """
        return tuple(
            name
            for name, component in self.components.items()
            if returns is None or component.returns in returns
        )

    def load(self, name: str) -> tuple[Callable, dict[str, Any]]:
        """Imports a component.

        Returns:
            The component, and the keywords of its registration.

        Raises:
            InputError: there is no component of this name.
        """
        if name not in self.registered:
            refuse_other(self.key, name, self.names())
            importlib.import_module(f"{_PACKAGE}{self.components[name].module}")
        return self.registered[name]

    def choose(self, config: Configuration) -> Callable:
        """Returns the component that ``key`` names, with the values of the keys that it reads."""
        name = _value(config, self.key)
        component, _ = self.load(name)
        values = {word: _value(config, self.key_of(word)) for word in self.components[name].keys}
        return functools.partial(component, **values)

    def key_of(self, word: str) -> str:
        """Returns the dotted key of a keyword."""
        return f"{self.section}.{word.upper()}"

    def readers(self) -> dict[str, tuple[str, ...]]:
        """Returns the names of the components that read a key, by dotted key."""
        readers: dict[str, tuple[str, ...]] = {}
        for name, component in self.components.items():
            for word in component.keys:
                key = self.key_of(word)
                readers[key] = (*readers.get(key, ()), name)
        return readers


datasets = Registry("datasets", "DATA.DATASET", "loading")
operations = Registry("operations", "TRAIN.AUTO_AUGMENT", "loading")
heads = Registry("heads", "HEAD.NAME", "models/heads", optional=True)
optimizers = Registry("optimizers", "TRAIN.OPTIMIZER.NAME", "training")
schedules = Registry("schedules", "TRAIN.LR_SCHEDULER.NAME", "training")
losses = Registry("losses", "TRAIN.LOSS", "training")
tasks = Registry("tasks", "TASK", "training", section="METHOD")
adapters = Registry("adapters", "TRAIN.ADAPTER.NAME", "training", optional=True)
trackers = Registry("trackers", "TRACKERS", "training", optional=True)
# The kinds whose components read keys. Operations and trackers read none.
KINDS = (tasks, datasets, heads, optimizers, schedules, losses, adapters)


@functools.cache
def component_keys() -> dict[str, Key]:
    """Returns the keys that components declare, by dotted name.

    Raises:
        InputError: two components declare the same key otherwise.
    """
    keys: dict[str, Key] = {}
    for kind in KINDS:
        for name, component in kind.components.items():
            for word, key in component.keys.items():
                dotted = kind.key_of(word)
                if key and keys.setdefault(dotted, key) != key:
                    raise InputError(
                        f"{component.module}: {name}'s {dotted} has another default elsewhere"
                    )
    return keys


def choices_of(key: str) -> tuple[str, ...]:
    """Returns the names of the components that a key chooses from; () if it chooses none."""
    return next((kind.names() for kind in KINDS if kind.key == key), ())


def check_keys(shared: Mapping[str, Key]) -> None:
    """Checks that each key that a component reads is declared once: by it, or in config.py.

    Args:
        shared: config.py's keys.

    Raises:
        InputError: a key is declared in both places, or in none.
    """
    for kind in KINDS:
        for name, component in kind.components.items():
            for word in component.keys:
                key = kind.key_of(word)
                if key in shared and key in component_keys():
                    raise InputError(f"{component.module}: {name}'s {key} is config.py's, too")
                if key not in shared and key not in component_keys():
                    raise InputError(f"{component.module}: {name}'s {key} has a default nowhere")


def refuse_other(key: str, value: Any, choices: Collection[Any]) -> None:
    """Raises InputError, naming the nearest, unless ``value`` is one of the choices."""
    if value not in choices:
        known = [str(choice) for choice in choices]
        raise InputError(
            f"{key} is {quoted(value)}, expected one of {', '.join(known)}{nearest(str(value), known)}"
        )


def find_decorated(
    folder: Path, decorator: str
) -> Iterator[tuple[Path, Definition, list[str], dict[str, Any]]]:
    """Yields (file, definition, names, literal keywords) of each ``@decorator("name",
    keyword=...)`` below a folder.
    """
    for file in sorted(folder.rglob("*.py")):
        for node in _definitions(file):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                    given = {word.arg: word.value for word in call.keywords if word.arg}
                    literals = {
                        word: value.value
                        for word, value in given.items()
                        if isinstance(value, ast.Constant)
                    }
                    names = [ast.literal_eval(name) for name in call.args]
                    yield file, node, names, literals


@functools.cache
def _definitions(file: Path) -> list[Definition]:
    text = file.read_text(encoding="utf-8")
    # Most files register nothing, and parsing them all would take a tenth of a second.
    if ".register(" not in text:
        return []
    return [node for node in ast.parse(text, file).body if isinstance(node, Definition)]


def _value(config: Configuration, key: str) -> Any:
    return functools.reduce(getitem, key.split("."), config)
