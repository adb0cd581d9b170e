"""Builds a page of HTML that needs no network, with tables and pictures.

Every text that comes from files is escaped.
"""

import base64
import html
from collections.abc import Iterable, Sequence
from typing import Any

from errors import printable

# Letters of the longest text that is shown.
_LONGEST = 400
# A browser loads nothing for such a page and runs nothing in it, whatever a name contains.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
* { box-sizing: border-box }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 70rem; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem } h1, h2, p { overflow-wrap: anywhere }
table { border-collapse: collapse } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }
th { font-weight: 600; min-width: 9rem } td, th { overflow-wrap: anywhere }
td.n, th.n { text-align: right; min-width: 0; overflow-wrap: normal }
.scroll { max-height: 26rem; overflow: auto; max-width: 100% }
img { max-width: 100%; height: auto } li { overflow-wrap: anywhere } small { color: #666 }
.stops { color: #a40000 } .good { color: #2e7d32 }
@media (max-width: 40rem) { table { font-size: 13px } td, th { padding-right: .5rem; min-width: 0 } }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: .5rem 1rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 1rem .8rem }
.tiles figure { margin: 0; overflow-wrap: anywhere; font-size: .85rem; line-height: 1.3 }
.tiles img { width: 100%; height: 9.5rem; object-fit: contain; background: #f2f2f2 }
.small img { image-rendering: pixelated }
"""


def text(value: Any) -> str:
    """Returns a text or number as HTML, without control characters; a long one is cut."""
    return html.escape(printable(str(value), _LONGEST))


def page(title: str, *parts: str) -> str:
    """Returns the page that consists of these parts, each of them HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{text(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Returns parts below a heading, or an empty string if all of them are empty."""
    return f"<h2>{text(title)}</h2>{''.join(parts)}" if any(parts) else ""


def paragraph(words: Any, kind: str = "") -> str:
    """Returns a paragraph. A ``kind`` of "good" or "stops" gives it a colour."""
    return f'<p class="{kind}">{text(words)}</p>' if kind else f"<p>{text(words)}</p>"


def table(heads: Sequence[Any], rows: Iterable[Sequence[Any]], numbers: bool = True) -> str:
    """Returns a table whose first column names the rows, or an empty string without rows.

    Args:
        heads: of the columns; empty: the table has no line of heads.
        numbers: whether the columns after the first are numbers, which are aligned at the right.
    """
    kind = ' class="n"' if numbers else ""
    lines = []
    for name, *values in rows:
        cells = "".join(f"<td{kind}>{text(value)}</td>" for value in values)
        lines.append(f"<tr><th>{text(name)}</th>{cells}</tr>")
    if not lines:
        return ""
    if heads:
        first, *others = heads
        cells = "".join(f"<th{kind}>{text(head)}</th>" for head in others)
        lines.insert(0, f"<tr><th>{text(first)}</th>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def scroll_box(part: str) -> str:
    """Returns a part in a box that scrolls on its own."""
    return f'<div class="scroll">{part}</div>' if part else ""


def picture(title: str, data: bytes, kind: str = "png") -> str:
    """Returns a picture, whose data are in the page itself."""
    encoded = base64.b64encode(data).decode()
    return f'<img alt="{text(title)}" src="data:image/{kind};base64,{encoded}">'


def grid(parts: Iterable[str]) -> str:
    """Returns parts side by side where there is space, and one below the other elsewhere."""
    cells = "".join(f"<div>{part}</div>" for part in parts)
    return f'<div class="grid">{cells}</div>' if cells else ""
