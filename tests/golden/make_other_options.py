"""Stores timm's options, and the keys of PaddleClas that docs/migrate/paddleclas.md names.

python tests/golden/make_other_options.py TIMM PADDLECLAS    # clones of both; it needs PyYAML alone
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

FILE = Path(__file__).with_name("other_options.json")


def flags(file: Path) -> set[str]:
    return set(
        re.findall(r"add_argument\(.*?[\"'](--[\w-]+)[\"']", file.read_text(encoding="utf-8"))
    )


def keys(tree: object, above: str = "") -> Iterator[str]:
    """Yields the dotted keys of a tree, and the names of operations in its lists."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from (f"{above}{key}", str(key))
            yield from keys(value, f"{above}{key}.")
    elif isinstance(tree, list):
        for item in tree:
            yield from keys(item)


def main(timm: Path, paddleclas: Path) -> None:
    found = {"timm": sorted(flags(timm / "train.py") | flags(timm / "validate.py"))}
    names: set[str] = set()
    for file in (paddleclas / "ppcls" / "configs").rglob("*.yaml"):
        names |= set(keys(yaml.safe_load(file.read_text(encoding="utf-8"))))
    for file in (paddleclas / "ppcls").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        names |= set(re.findall(r"^class (\w+)", text, re.M))
        names |= {
            f"{section}.{key}"
            for section, key in re.findall(r"""\[["'](\w+)["']\]\.get\(\s*["'](\w+)""", text)
        }
        names |= set(
            re.findall(r"\w+", " ".join(re.findall(r"def __init__\(self,([^)]*)\)", text)))
        )
    page = (FILE.parents[2] / "docs" / "migrate" / "paddleclas.md").read_text(encoding="utf-8")
    found["paddleclas"] = sorted(names & set(re.findall(r"`([\w.]+)`", page)))
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
