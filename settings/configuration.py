"""The tree of a run's values, which knows where each value came from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from yacs.config import CfgNode

CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs"


def leaves(node: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """Returns (dotted key, value) of every leaf of a tree."""
    found = []
    for key, value in node.items():
        if isinstance(value, dict):
            found += leaves(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Returns (height, width) of a size given as one number or as two."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def size_text(size: int | Sequence[int]) -> str:
    """Returns a size as a person reads it: "224", or "224 x 160" (height x width)."""
    height, width = pair(size)
    return str(height) if height == width else f"{height} x {width}"


def plain(node: CfgNode) -> dict[str, Any]:
    """Returns a configuration as nested dicts, for JSON."""
    return {
        key: plain(value) if isinstance(value, CfgNode) else value for key, value in node.items()
    }


class Option(NamedTuple):
    """A key's value as the command line gives it."""

    key: str
    value: Any
    # a flag, or -o
    by: str = ""


# The level of a value that nobody set, which a resolved configuration has because it has every key.
WRITTEN_OUT = -1
# Sources that aren't files.
COMMAND_LINE = "command line"
WITH_VALUES = "with_values"
# What ``Given.first`` is for a key that -o sets, and how it begins for a key that a flag sets.
# Either names the key.
NAMED = "-o"
FLAG = "flag -"


class Given(NamedTuple):
    """A value that a key was given, and where it came from.

    Attributes:
        level: of two levels, the higher one was read later.
        source: a file or the command line, as errors name it.
        first: the flag that gave it. In a run's own file: where the run had it from.
    """

    level: int
    source: str
    first: str = ""
    value: Any = None

    def text(self) -> str:
        """Returns where the value came from, in words."""
        if self.source in (COMMAND_LINE, WITH_VALUES) or not self.first:
            return self.origin()
        return f"{_short_path(self.source)}, which took it from {self.first}"

    def origin(self) -> str:
        """Returns where it came from first, as a run's file keeps it."""
        return self.first or _short_path(self.source)


def _short_path(source: str) -> str:
    path = Path(source)
    shown = str(path.relative_to(CONFIG_DIR.parent)) if path.is_relative_to(CONFIG_DIR) else source
    return shown if shown.isprintable() else ascii(shown)


_PLAIN = {int, float, str, bool, type(None)}


class Configuration(CfgNode):
    """The tree of all keys, which knows where its values came from; so do its copies and pickles.

    Attributes:
        origins: the values that each key was given, by dotted key. The last one holds.
        notes: lines about how the configuration was read, which the run logs once at its start.
        families: the families of PaddleViT as whose files its files were read.
    """

    def __init__(self) -> None:
        super().__init__()
        # Beside the tree's keys, as yacs keeps its own marks.
        self.__dict__.update(origins={}, notes=[], families=[])

    def clone(self) -> "Configuration":
        """Returns a copy that shares no list and no section with this one; deepcopy takes four
        times as long.
        """
        return _copied(self)

    def put(self, key: str, value: Any, where: Given) -> None:
        """Sets a dotted key, whose value is of its type already."""
        section, _, name = key.rpartition(".")
        node = self
        for part in filter(None, section.split(".")):
            node = node[part]
        node[name] = value
        self.origins.setdefault(key, []).append(where._replace(value=value))


def _copied(value: Any) -> Any:
    if isinstance(value, Given):
        if isinstance(value.value, list):
            return value._replace(value=_copied(value.value))
        return value
    if isinstance(value, CfgNode):
        node = type(value).__new__(type(value))
        node.__dict__.update(_copied(value.__dict__))
        dict.update(node, _copied(dict(value)))
        return node
    # Most values are plain, and a call for each of them would take half of the time.
    if isinstance(value, dict):
        return {key: item if type(item) in _PLAIN else _copied(item) for key, item in value.items()}
    if isinstance(value, (list, set)):
        return type(value)([item if type(item) in _PLAIN else _copied(item) for item in value])
    return value


def value_sources(config: Configuration) -> dict[str, Given]:
    """Returns where the value of each dotted key came from that was given one."""
    return {key: given[-1] for key, given in config.origins.items()}


def is_given(config: Configuration, key: str) -> bool:
    """Returns whether a file, a flag or an option set the dotted key, be it to the default."""
    return key in config.origins


def explicit_sources(config: Configuration) -> dict[str, Given]:
    """Returns ``value_sources`` without what is only written out: what a file, a flag or an option
    set.
    """
    return {key: where for key, where in value_sources(config).items() if where.level > WRITTEN_OUT}


def is_users(config: Configuration, key: str) -> bool:
    """Returns whether the user set the dotted key: the command line, or a YAML file that isn't one
    of configs/.
    """
    where = value_sources(config).get(key)
    return (
        where is not None
        and where.level > WRITTEN_OUT
        and not Path(where.source).is_relative_to(CONFIG_DIR)
    )


def option_keys(config: Configuration) -> set[str]:
    """Returns the keys that a flag or -o names on the command line: what a resumed run may
    change.
    """
    return {
        key
        for key, given in config.origins.items()
        if any(
            where.source == COMMAND_LINE and where.first.startswith((NAMED, FLAG))
            for where in given
        )
    }


def add_note(config: Configuration, note: str) -> None:
    """Adds a line on how the configuration was read, which the run logs once when it starts."""
    if note not in config.notes:
        config.notes.append(note)
