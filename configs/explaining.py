"""What --explain prints of a key: its value, where that came from, what it means, and whether it does something."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from config_checks import NEEDS, unmet
from errors import InputError
from options import COMMAND_LINE, Configuration, leaves, nearest_key

_LINE = re.compile(r"_C\.(\S+) = .*?(?:  # (.*))?")  # of config.py


def explained(config: Configuration, names: Sequence[str], defaults: Mapping[str, Any], page: Path) -> str:
    """Returns a paragraph for each key that ``names`` name.

    Args:
        names: keys, sections, or shell patterns of keys.
        defaults: by dotted key.
        page: config.py, whose comments say what keys mean.

    Raises:
        InputError: there is no such key.
    """
    meant, values = meanings(page.read_text(encoding="utf-8")), dict(leaves(config))
    keys = dict.fromkeys(key for name in names for key in _keys(name, defaults))
    return "\n\n".join(
        "\n  ".join([f"{key}: {values[key]}", *_told(config, key, values, defaults, meant)]) for key in keys
    )


def meanings(page: str) -> dict[str, str]:
    """Returns what the comments of config.py say of each key: behind it, in the lines after it, or in those before."""
    found: dict[str, str] = {}
    before, last = "", ""
    for line in page.splitlines():
        if declared := _LINE.fullmatch(line):
            before, last, found[declared[1]] = "", declared[1], before + (declared[2] or "")
        elif line.startswith("# ") and last:
            found[last] = f"{found[last]} {line[2:]}".strip()
        elif line.startswith("# "):
            before = f"{before} {line[2:]}".strip()
        else:
            before, last = "", ""
    return found


def _keys(name: str, known: Iterable[str]) -> list[str]:
    found = [key for key in known if f"{key}.".startswith(f"{name}.") or fnmatchcase(key.lower(), name.lower())]
    if not found:
        raise InputError(f"{COMMAND_LINE}: unknown key {name}{nearest_key(name, known)}")
    return found


def _told(
    config: Configuration, key: str, values: Mapping[str, Any], defaults: Mapping[str, Any], meant: Mapping[str, str]
) -> list[str]:
    """The lines under a key."""
    found = config.origins.get(key, ())
    lines = [f"from     {found[-1].told() if found else 'the default in config.py'}"]
    lines += [f"over     {where.value}, from {where.told()}" for where in reversed(found[:-1])]
    text = meant.get(key, meant.get(key.rpartition(".")[0], ""))
    lines += [f"means    {text}"] if text else []
    lines.append(f"default  {defaults[key]}")
    needs = NEEDS.get(key)
    if needs is None:
        return [*lines, "needs    an architecture that takes it"]
    lines += [f"needs    does nothing {', or '.join(need.said for need in needs)}"] if needs else []
    idle = unmet(key, values)
    return [*lines, f"here     {f'does nothing {idle.said}' if idle else 'does something'}"]
