"""Writes docs/reference/keys.md: all keys with their types, defaults, needs and meanings, as
config.py, the components and the models declare them.

This command writes the page:

    PYTHONPATH=.:tests python tests/support/keys_page.py
"""

import functools
import re
from collections.abc import Iterable
from pathlib import Path

import config
from settings.architectures import all_keys, architectures
from settings.idle import with_tasks
from settings.keys import Key, meanings
from settings.needs import TRAINING, Need
from settings.registry import component_keys

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "keys.md"
HEAD = """# All keys

Every key that a YAML file or `-o` can set. [Configuration](configuration.md) describes how to set them. The column
*Needs* names what has to be set for a key to have an effect: setting a key that would do nothing is an error. Keys of
TRAIN and METHOD have an effect in training alone, which isn't repeated.
"""
MODELS = """
## Keys of the architectures

Besides the keys above, each architecture takes these keys of MODEL. `MODEL.TYPE` names the architecture.
`python tools/list_models.py --keys NAME` prints the values of a model. This page is generated from the declarations in the
code, by `PYTHONPATH=.:tests python tests/support/keys_page.py`.
"""
COLUMNS = "| Key | Type | Default | Needs | Meaning |"
LONGEST_TYPE = 60  # of more letters, the choices stand at the end of the meaning


def cell(text: object) -> str:
    """Returns text that Markdown shows as it is, in a cell of a table."""
    return re.sub(r"([|*\[\]\\])", r"\\\1", str(text).strip()).replace("<", "&lt;")


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [head, re.sub(r"[^|]+", "---", head), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def type_of(key: Key) -> str:
    """Returns what a key takes, for its cell; long lists of choices stand in the meaning."""
    if key.choices and len(key.takes) > LONGEST_TYPE:
        return "a name or None" if key.optional else "a name"
    takes = re.sub(r"(\d) to 2147483647\b", r"\1 or more", key.takes)
    if ", a path of" in takes:
        takes = takes.partition(",")[0].replace("str", "path")
    return cell(takes)


def need_of(need: Need, key: str) -> str:
    """Returns what a need asks for, or "" where the page's head says it of the key."""
    if need == TRAINING:
        return "" if key.startswith(("TRAIN.", "METHOD.")) else "training"
    kind, _, rest = need.text.partition(" ")
    if kind == "with":
        rest = re.sub(r", (of )?which .*", "", rest)
    asked = re.sub(r"\b[A-Z]{2,}(?:[._]\w+)*", lambda found: f"`{found[0]}`", cell(rest))
    if asked == "`EVAL` True":
        return "evaluation"
    return {"without": asked, "with": f"not {asked}"}[kind]


def of_docstring(text: str) -> str:
    """Returns a text of a docstring's section Args as a sentence that names keys in capitals."""

    def as_key(found: re.Match) -> str:
        return found[0].upper() if found[0].upper() in last_names() else found[0]

    text = re.sub(r"(?<![`.\w])(?:[a-z]+(?:_[a-z]+)+|droppath)\b", as_key, text)
    return text[:1].upper() + text[1:]


@functools.cache
def last_names() -> set[str]:
    """Returns the last parts of all keys."""
    return {key.rpartition(".")[2] for key in (*config.default_values(), *all_keys())}


def row(key: Key, default: object, needs: Iterable[Need], text: str) -> tuple[str, ...]:
    asked = "; ".join(filter(None, (need_of(need, key.name) for need in needs)))
    return (f"`{key.name}`", type_of(key), f"`{default}`", asked, text)


def page() -> str:
    """Returns the text of docs/reference/keys.md."""
    keys = config._KEYS
    texts = {key: of_docstring(declared.text) for key, declared in component_keys().items()}
    texts |= meanings((ROOT / "config.py").read_text(encoding="utf-8"))
    sections: dict[str, list[tuple[str, ...]]] = {}
    for name, default in config.default_values().items():
        if name not in all_keys():
            key = keys.shared[name]
            text = cell(texts.get(name, ""))
            if type_of(key).startswith("a name"):
                text += f" One of `{'`, `'.join(map(str, key.choices))}`."
            sections.setdefault(name.rpartition(".")[0], []).append(
                row(key, default, keys.needs.get(name, ()), text)
            )
    parts = [HEAD]
    for section, rows in sections.items():
        parts.append(f"\n## {section or 'Keys without a section'}\n\n{table(COLUMNS, rows)}")
    parts.append(MODELS)
    for name, architecture in sorted(architectures().items()):
        needs = with_tasks({key: found.needs for key, found in architecture.arguments.items()})
        rows = [
            row(argument, argument.default, needs[key], cell(of_docstring(argument.text)))
            for key, argument in sorted(architecture.arguments.items())
        ]
        parts.append(f"\n### {name}\n\n{table(COLUMNS, rows)}")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
