"""Writes docs/reference/keys.md: all keys with their defaults and meanings, as config.py, the components and
the models declare them.

This command writes the page:

    PYTHONPATH=.:tests python tests/support/keys_page.py
"""

import re
from collections.abc import Iterable
from pathlib import Path

import config
from settings.architectures import all_keys, architectures
from settings.keys import meanings
from settings.registry import KINDS, choices_of, component_keys

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "keys.md"
HEAD = """# All keys

Every key with its default and its meaning. [Configuration](configuration.md) says how to set them. This page is written
by `PYTHONPATH=.:tests python tests/support/keys_page.py`. Its sources are `config.py`, the components that a key chooses, and
the constructors of the models.
"""
MODELS = """
## Keys of the architectures

Each architecture takes these keys of MODEL besides those above. `MODEL.TYPE` names the architecture.
`python tools/list_models.py --keys NAME` prints the values of a model beside the defaults.
"""


def cell(text: object) -> str:
    """Returns text that Markdown shows as it is, in a cell of a table."""
    return re.sub(r"([|*\[\]\\])", r"\\\1", str(text).strip()).replace("<", "&lt;")


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [head, re.sub(r"[^|]+", "---", head), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Returns the text of docs/reference/keys.md."""
    texts = {key: declared.text for key, declared in component_keys().items()}
    texts |= meanings((ROOT / "config.py").read_text(encoding="utf-8"))
    readers = {
        key: names
        for kind in KINDS
        for key, names in kind.readers().items()
        if key in component_keys()
    }
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for key, default in config.default_values().items():
        if key not in all_keys():
            text = cell(texts.get(key, ""))
            if key in readers:
                text += f" (`{'`, `'.join(readers[key])}`)"
            if choices := choices_of(key):
                text += f" One of `{'`, `'.join(choices)}`."
            sections.setdefault(key.rpartition(".")[0], []).append(
                (f"`{key}`", f"`{default}`", text)
            )
    parts = [HEAD]
    for section, rows in sections.items():
        parts.append(
            f"\n## {section or 'Keys without a section'}\n\n{table('| Key | Default | Meaning |', rows)}"
        )
    parts.append(MODELS)
    for name, architecture in sorted(architectures().items()):
        rows = [
            (f"`{key}`", cell(argument.takes), f"`{argument.default}`", cell(argument.text))
            for key, argument in sorted(architecture.arguments.items())
        ]
        parts.append(f"\n### {name}\n\n{table('| Key | Takes | Default | Meaning |', rows)}")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
