"""Builds pages of Markdown, as model and dataset cards are.

Every text that comes from files is escaped, so that it is shown and means nothing in Markdown,
HTML or YAML.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from errors import printable

# Letters of the longest text that is shown.
_LONGEST = 400
# Whatever may have a meaning within a line: emphasis, code, links, tags, cells of tables, entities,
# formulas and addresses.
_SPECIAL = re.compile(r"[\\`*_{}\[\]<>!|~&$@^]|:(?=//)")
# Whatever may have one at the beginning of a line: headings, lists and rules.
_FIRST = re.compile(r"^(?:[-+=#]|\d+(?=[.)](?:\s|$)))")
# GitHub makes a link of such a beginning.
_LINK = re.compile(r"www\.", re.IGNORECASE)


def text(value: Any) -> str:
    """Returns a text or number as Markdown within a line, without control characters.

    A long one is cut.
    """
    shown = printable(str(value), _LONGEST).strip()
    if isinstance(value, (int, float)):
        return shown
    escaped = _SPECIAL.sub(lambda match: f"\\{match[0]}", shown)
    escaped = _LINK.sub(lambda match: f"{match[0][:-1]}\\.", escaped)
    first = _FIRST.match(escaped)
    if first is None:
        return escaped
    # Behind a number, its point is escaped: "1\\. March".
    place = first.end() if first[0].isdigit() else 0
    return f"{escaped[:place]}\\{escaped[place:]}"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], numbers: bool = True) -> str:
    """Returns a table, or an empty string without rows.

    Args:
        heads: of the columns.
        numbers: whether the columns after the first are numbers, which are aligned at the right.
    """
    lines = [[text(value) for value in row] for row in rows]
    if not lines:
        return ""
    side = "---:" if numbers else "---"
    lines = [[text(head) for head in heads], ["---", *[side] * (len(heads) - 1)], *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def bullets(items: Iterable[str]) -> str:
    """Returns a list; the items are Markdown."""
    return "".join(f"- {item}\n" for item in items)


def code(content: str, language: str = "sh") -> str:
    """Returns a block of code.

    Its content can't end the block, and its lines have no control characters.
    """
    lines = [printable(line, 10 * _LONGEST) for line in content.rstrip("\n").split("\n")]
    longest = max((len(run) for run in re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence]) + "\n"


def section(title: str, *parts: str) -> str:
    """Returns parts below a heading, or an empty string if all of them are empty.

    Args:
        parts: Markdown, each in paragraphs of its own.
    """
    held = [part.rstrip("\n") for part in parts if part]
    return "\n\n".join([f"## {text(title)}", *held]) + "\n" if held else ""


def front_matter(values: Mapping[str, Any]) -> str:
    """Returns the YAML at the beginning of a page, between two lines of dashes.

    Texts are cut to one line, so none of them can be the second line of dashes.
    """
    plain = yaml.safe_dump(
        _one_line(values), sort_keys=False, allow_unicode=True, width=1 << 20, line_break="\n"
    )
    return f"---\n{plain}---\n"


def _one_line(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value, _LONGEST)
    if isinstance(value, Mapping):
        return {_one_line(key): _one_line(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_one_line(held) for held in value]
    return value


def page(values: Mapping[str, Any], title: str, *parts: str) -> str:
    """Returns a page: its front matter, its title, and its parts, which are Markdown."""
    held = [part.rstrip("\n") for part in parts if part]
    return front_matter(values) + "\n" + "\n\n".join([f"# {text(title)}", *held]) + "\n"
