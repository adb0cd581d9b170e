"""What --explain prints of a key: its value, where that came from, what it means, and whether it
does something.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from errors import InputError
from settings.architectures import all_keys, architecture
from settings.idle import unmet
from settings.keys import meanings
from settings.merging import Keys
from settings.needs import Need
from settings.options import COMMAND_LINE, CONFIG_DIR, Configuration, leaves, nearest_key


def explanation(config: Configuration, names: Sequence[str], keys: Keys) -> str:
    """Returns what ``config.explain`` does."""
    kind = config.MODEL.TYPE
    own = architecture(kind).arguments
    if foreign := next((name for name in names if name in all_keys().keys() - own.keys()), None):
        raise InputError(f"{COMMAND_LINE}: {kind} takes no {foreign.removeprefix('MODEL.')}")
    meant = {name: key.text for name, key in (keys.shared | own).items()}
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
            "\n  ".join(
                [
                    *lines,
                    f"default  {keys.defaults_of(config)[key]}",
                    *_use(keys.needs.get(key, ()), values),
                ]
            )
        )
    return "\n\n".join(parts)


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
    told = [f"needs    does nothing {', or '.join(need.text for need in needs)}"] if needs else []
    return [*told, f"here     {f'does nothing {idle.text}' if idle else 'does something'}"]
