"""What --explain prints of a key: its value, where that came from, what it means, and whether it
does something.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from errors import InputError
from settings.architectures import all_keys, architecture
from settings.needs import Need, unmet
from settings.options import COMMAND_LINE, CONFIG_DIR, Configuration, leaves, nearest_key
from settings.registry import own_keys

Needs = Mapping[str, tuple[Need, ...]]

_LINE = re.compile(r"_C\.(\S+) = .*?(?:  # (.*))?")  # of config.py


def explanation(
    config: Configuration, names: Sequence[str], defaults: Mapping[str, Any], needs: Needs
) -> str:
    """Returns a paragraph for each key that ``names`` name.

    Args:
        names: keys, sections, or shell patterns of keys.
        defaults, needs: by dotted key.

    Raises:
        InputError: there is no such key.
    """
    kind = config.MODEL.TYPE
    own = architecture(kind).arguments
    if foreign := next((name for name in names if name in all_keys().keys() - own.keys()), None):
        raise InputError(f"{COMMAND_LINE}: {kind} takes no {foreign.removeprefix('MODEL.')}")
    meant = {key: declared.text for key, declared in (own | own_keys()).items()}
    meant |= meanings((CONFIG_DIR.parent / "config.py").read_text(encoding="utf-8"))
    values = dict(leaves(config))
    parts = []
    for key in dict.fromkeys(key for name in names for key in _keys(name, values)):
        found = config.origins.get(key, ())
        lines = [
            f"{key}: {values[key]}",
            f"from     {found[-1].text() if found else 'the default'}",
        ]
        lines += [f"over     {where.value}, from {where.text()}" for where in reversed(found[:-1])]
        text = meant.get(key, meant.get(key.rpartition(".")[0], ""))
        lines += [f"means    {text}"] if text else []
        parts.append(
            "\n  ".join([*lines, f"default  {defaults[key]}", *_use(needs.get(key, ()), values)])
        )
    return "\n\n".join(parts)


def meanings(page: str) -> dict[str, str]:
    """Returns what the comments of config.py say of each key: behind it, in the lines after it, or
    in those before.
    """
    found: dict[str, str] = {}
    before = ""
    last = ""
    for line in page.splitlines():
        if declared := _LINE.fullmatch(line):
            before, last, found[declared[1]] = "", declared[1], before + (declared[2] or "")
        elif line.startswith("# ") and last:
            found[last] = f"{found[last]} {line[2:]}".strip()
        elif line.startswith("# "):
            before = f"{before} {line[2:]}".strip()
        else:
            before = ""
            last = ""
    return found


def _keys(name: str, known: Iterable[str]) -> list[str]:
    found = [
        key
        for key in known
        if f"{key}.".startswith(f"{name}.") or fnmatchcase(key.lower(), name.lower())
    ]
    if not found:
        raise InputError(f"{COMMAND_LINE}: unknown key {name}{nearest_key(name, known)}")
    return found


def _use(needs: tuple[Need, ...], values: Mapping[str, Any]) -> list[str]:
    """What a key needs so as to do something, and whether it does."""
    idle = unmet(needs, values)
    told = [f"needs    does nothing {', or '.join(need.said for need in needs)}"] if needs else []
    return [*told, f"here     {f'does nothing {idle.said}' if idle else 'does something'}"]
