"""The text that --explain prints for keys."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from errors import InputError
from settings.architectures import all_keys, architecture
from settings.configuration import COMMAND_LINE, CONFIG_DIR, Configuration, leaves
from settings.idle import unmet
from settings.keys import meanings
from settings.merging import Keys
from settings.needs import Need
from settings.registry import choices_of
from settings.suggestions import nearest_key


def explanation(config: Configuration, names: Sequence[str], keys: Keys) -> str:
    """Returns a paragraph for each key: its value, where that came from, what it means and needs.

    Args:
        names: keys, sections, or shell patterns of keys.

    Raises:
        InputError: there is no such key.
    """
    kind = config.MODEL.TYPE
    own = architecture(kind).arguments
    for name in names:
        if name in all_keys() and name not in own:
            raise InputError(f"{COMMAND_LINE}: {kind} takes no {name.removeprefix('MODEL.')}")
    texts = {name: key.text for name, key in (keys.shared | own).items()}
    texts |= meanings((CONFIG_DIR.parent / "config.py").read_text(encoding="utf-8"))
    values = dict(leaves(config))
    defaults = keys.defaults_of(config)
    needs = keys.needs_of(config)
    matching = dict.fromkeys(key for name in names for key in _matching(name, values))
    paragraphs = []
    for key in matching:
        sources = config.origins.get(key, ())
        lines = [
            f"{key}: {values[key]}",
            f"from     {sources[-1].text() if sources else 'the default'}",
        ]
        lines += [f"over     {source.value}, from {source.text()}" for source in sources[-2::-1]]
        if texts.get(key):
            lines.append(f"means    {texts[key]}")
        if choices := choices_of(key):
            lines.append(f"one of   {', '.join(choices)}")
        lines.append(f"default  {defaults[key]}")
        lines += _effect(needs.get(key, ()), values)
        paragraphs.append("\n  ".join(lines))
    return "\n\n".join(paragraphs)


def _matching(name: str, keys: Iterable[str]) -> list[str]:
    """Returns the keys that a key, a section or a shell pattern means."""
    matching = [
        key
        for key in keys
        if f"{key}.".startswith(f"{name}.") or fnmatchcase(key.lower(), name.lower())
    ]
    if not matching:
        raise InputError(f"{COMMAND_LINE}: unknown key {name}{nearest_key(name, keys)}")
    return matching


def _effect(needs: tuple[Need, ...], values: Mapping[str, Any]) -> list[str]:
    """Returns the lines on what a key needs to have an effect, and whether it has one."""
    lines = []
    if needs:
        lines.append(f"effect   none {', or '.join(need.text for need in needs)}")
    missing = unmet(needs, values)
    lines.append(f"here     no effect {missing.text}" if missing else "here     has an effect")
    return lines
