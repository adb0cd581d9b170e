"""Reads the values of the recipes' sources, key by key, with file and line (sources/*.yaml, a file
for each repository).

This command compares the quotations with the repositories, each cloned (bare or not) as
FOLDER/<owner>+<name>:

    PYTHONPATH=.:tests python tests/support/recipe_sources.py FOLDER

The site shows them in docs/evidence/recipe_sources.md (tools/package/docs_tables.py).
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from config import get_config, shipped_configs
from settings.configuration import leaves
from settings.values import parse_value
from training.optim import build_schedule

FOLDER = Path(__file__).resolve().parents[1] / "sources"


class Row(NamedTuple):
    """What a source says about one key of a recipe.

    Attributes:
        source: the source's value, in the key's terms.
        ours: the value of our recipe.
        at: "file:line" or "file:first-last"; or a place in a paper.
        text: the text of that line; None for a paper.
        remark: how the value follows from the text, or why ours differs.
    """

    source: Any
    ours: Any
    at: str
    text: str | None
    remark: str


class Recipe(NamedTuple):
    """The rows of a recipe by key, and its published acc1.

    Attributes:
        commit: None: the source is a paper.
    """

    repository: str
    commit: str | None
    rows: dict[str, Row]
    accuracy: Row | None


def sources() -> dict[str, Recipe]:
    """Returns the recipes by name. If several groups have a row for the same key of a recipe, the
    last row counts.
    """
    found: dict[str, Recipe] = {}
    for file in sorted(FOLDER.glob("*.yaml")):
        # This takes a second less than the loader in Python.
        content = yaml.load(file.read_text(), yaml.CSafeLoader)
        for group in content["recipes"]:
            for name in group["names"]:
                recipe = found.setdefault(
                    name, Recipe(content["repository"], content["commit"], {}, None)
                )
                if recipe.repository != content["repository"]:
                    raise ValueError(f"{file.name}: {name} is {recipe.repository}'s already")
                recipe.rows.update(
                    {key: _row(value) for key, value in group.get("rows", {}).items()}
                )
                if name in group.get("accuracy", {}):
                    found[name] = recipe._replace(accuracy=_row(group["accuracy"][name]))
    return found


def _row(value: list | dict) -> Row:
    if isinstance(value, dict):
        return Row(
            _value(value["source"]), _value(value["ours"]), value["at"], value["text"], value["why"]
        )
    source, at, text, *remark = value
    return Row(_value(source), _value(source), at, text, *(remark or [""]))


def _value(value: Any) -> Any:
    """Returns a value of YAML 1.1, to which 1e-3 is a text, as a value of the configuration."""
    if isinstance(value, list):
        return [_value(item) for item in value]
    return parse_value(value) if isinstance(value, str) else value


def values(name: str, batch: int) -> dict[str, Any]:
    """Returns a recipe's values by key, with the rates that its schedule gives at an effective
    batch of ``batch``.
    """
    config = get_config(name)
    schedule = build_schedule(config, 1000, batch)
    # Such a schedule is late by an epoch.
    late = config.TRAIN.LR_SCHEDULER.PER_EPOCH == "late"
    ends = {
        "RATE.START": 0,
        "RATE.PEAK": config.TRAIN.WARMUP_EPOCHS + late,
        "RATE.END": config.TRAIN.NUM_EPOCHS + late,
    }
    rates = {key: schedule(round(1000 * epoch)) for key, epoch in ends.items()}
    return dict(leaves(config)) | rates | {"BATCH": batch}


def tables() -> str:
    """Returns a table for each group of recipes."""
    lines = []
    for file in sorted(FOLDER.glob("*.yaml")):
        content = yaml.safe_load(file.read_text())
        commit = f" at {content['commit'][:7]}" if content["commit"] else ""
        lines += [f"\n## {content['repository']}{commit}"]
        for group in content["recipes"]:
            lines += [f"\n{', '.join(f'`{name}`' for name in group['names'])}\n"]
            lines += ["| key | ours | the source's | where | |", "|---|---|---|---|---|"]
            lines += [_line(key, _row(value)) for key, value in group.get("rows", {}).items()]
            published = {
                f"acc1 of `{name}`": _row(value)
                for name, value in group.get("accuracy", {}).items()
            }
            lines += [
                _cells(key, "not run", _shown(row.source), row.at, row.remark)
                for key, row in published.items()
            ]
    if names := without_source():
        lines += ["\n## No source yet\n", ", ".join(f"`{name}`" for name in names)]
    return "\n".join(lines).lstrip() + "\n"


def without_source() -> list[str]:
    """Returns the names of the recipes whose head says ``Source: none yet``."""
    return sorted(
        file.stem
        for file in shipped_configs()
        if re.search(r"^#.*\bsource: none yet\b", file.read_text(), re.M | re.I)
    )


def _line(key: str, row: Row) -> str:
    same = "equal" if row.source == row.ours else "**differs**"
    return _cells(
        key,
        _shown(row.ours),
        _shown(row.source),
        row.at,
        f"{same}: {row.remark}" if row.remark else same,
    )


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def quotations() -> Iterator[tuple[str, str, str, int, int, str]]:
    """Yields (repository, commit, file, first line, last line, text) of each quotation from a
    repository, once.
    """
    seen = set()
    for recipe in sources().values():
        for row in (*recipe.rows.values(), *filter(None, [recipe.accuracy])):
            if row.text is not None:
                file, _, place = row.at.rpartition(":")
                first, _, last = place.partition("-")
                seen.add(
                    (
                        recipe.repository,
                        recipe.commit,
                        file,
                        int(first),
                        int(last or first),
                        row.text,
                    )
                )
    yield from sorted(seen)


@cache
def lines(clone: Path, commit: str, file: str) -> list[str]:
    shown = subprocess.run(
        ["git", "-C", clone, "show", f"{commit}:{file}"], capture_output=True, text=True
    )
    return shown.stdout.splitlines()


def differences(folder: Path) -> list[str]:
    """Returns a line for each quotation that isn't at its place."""
    found = []
    for repository, commit, file, first, last, text in quotations():
        clone = folder / repository.replace("/", "+")
        if not any(text in line for line in lines(clone, commit, file)[first - 1 : last]):
            found.append(f"{repository}@{commit[:7]} {file}:{first}-{last} has no {text!r}")
    return found


if __name__ == "__main__":
    wrong = differences(Path(sys.argv[1]))
    print(*wrong, f"{len(list(quotations()))} quotations, {len(wrong)} wrong", sep="\n")
    sys.exit(bool(wrong))
