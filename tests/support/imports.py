"""The files of the toolkit and what they import."""

import ast
import functools
import re

from support.programs import ROOT

FILES = sorted(
    file
    for file in ROOT.rglob("*.py")
    if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
    and file.relative_to(ROOT).parts[0] not in ("output", "log", "logs")
)
NAMES = [str(file.relative_to(ROOT)) for file in FILES]
# Files of the toolkit without its tests.
HOUSE = {name for name in NAMES if not name.startswith("tests/")}
# The file of each module of the toolkit.
MODULES = {re.sub(r"(/__init__)?\.py$", "", name).replace("/", "."): name for name in HOUSE}


@functools.cache
def tree_of(name):
    """The syntax tree of a file.

    It isn't made while tests are collected, because each worker of pytest collects them all.
    """
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def imported(tree):
    """Yields the dotted names of what a file imports at its top or within functions.

    ``from a import b`` yields ``a.b``. Relative imports aren't allowed.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def targets(name):
    """The files of the toolkit that a file imports."""
    found = set()
    for dotted in imported(tree_of(name)):
        module = dotted if dotted in MODULES else dotted.rpartition(".")[0]
        found |= {MODULES[module]} & HOUSE if module in MODULES else set()
    return found - {name}


@functools.cache
def imports():
    """The files that each file of the toolkit imports."""
    return {name: targets(name) for name in HOUSE}
