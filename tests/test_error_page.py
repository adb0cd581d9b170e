"""docs/reference/errors.md quotes messages that the code has, and its commands' errors are real."""

import ast
import functools
import re

import pytest
from conftest import ROOT

PAGE = ROOT / "docs" / "reference" / "errors.md"
# Where messages are written. Makefile checks the version of Python.
SOURCES = ["*.py", "*/*.py", "*/*/*.py", "*/*/*/*.py", "Makefile"]


def quoted():
    """Returns the messages that the page quotes: the first cells of its tables."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.M)


@functools.cache
def messages():
    """Returns the texts of the code, each between two values that it inserts."""
    found = []
    for file in sorted({file for pattern in SOURCES for file in ROOT.glob(pattern)}):
        if file.relative_to(ROOT).parts[0] in ("tests", ".venv", ".venv-paddle26", "output"):
            continue
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".py":
            found.append(text)
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\0".join(found)


def constant_parts(message):
    return [part.strip() for part in message.split("...") if part.strip()]


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_the_codes(message):
    assert [part for part in constant_parts(message) if part not in messages()] == []


def test_the_page_quotes_enough_to_be_found():
    assert len(quoted()) > 30
    assert len(set(quoted())) == len(quoted())
    # A part of one word would be found anywhere.
    assert [m for m in quoted() if max(map(len, constant_parts(m))) < 10] == []
