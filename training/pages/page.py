"""Builds a page of HTML that needs no network, with tables and pictures.

Every text that comes from files is escaped.
"""

import base64
import datetime
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

from errors import printable

# Letters of the longest text that is shown.
_LONGEST = 400
# A browser loads nothing for such a page, and runs nothing in it but RELOAD, whatever a name contains.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --faint: #666; --box: #f2f2f2; --bad: #a40000; --good: #2e7d32 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --faint: #999; --box: #2a2a2a; --bad: #ff8a80; --good: #81c784 }
  body { background: #181818 } .plot { filter: invert(.9) hue-rotate(180deg) }
  body > img:not(.plot) { filter: brightness(.85) }
}
* { box-sizing: border-box }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 70rem; color: var(--ink) }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem } h1, h2, p { overflow-wrap: anywhere }
table { border-collapse: collapse } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }
th { font-weight: 600; min-width: 9rem } td, th { overflow-wrap: anywhere }
td.n, th.n { text-align: right; min-width: 0; overflow-wrap: normal }
.scroll { max-height: 26rem; overflow: auto; max-width: 100% }
img { max-width: 100%; height: auto } li { overflow-wrap: anywhere } small { color: var(--faint) }
.stops { color: var(--bad) } .good { color: var(--good) }
.state { background: var(--box); padding: .6rem .9rem; border-radius: .4rem } .state small { display: block }
@media (max-width: 40rem) { table { font-size: 13px } td, th { padding-right: .5rem; min-width: 0 } }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: .5rem 1rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 1rem .8rem }
.tiles figure { margin: 0; overflow-wrap: anywhere; font-size: .85rem; line-height: 1.3 }
.tiles img { width: 100%; height: 9.5rem; object-fit: contain; background: var(--box) }
.small img { image-rendering: pixelated }
"""
# Seconds between two reloads of a page that is renewed.
_EVERY = 10
# A browser keeps the place in a page that it reloads. A page that nobody sees waits until it is seen.
RELOAD = f"""
"use strict";
const renewed = document.querySelector("time");
let due = false;
function reload() {{ if (due && !document.hidden) location.reload(); }}
function showAge() {{
  const minutes = Math.floor((Date.now() - Date.parse(renewed.dateTime)) / 60000);
  const age = minutes < 1 ? "" : minutes < 120 ? `, ${{minutes}} min ago` : `, ${{Math.floor(minutes / 60)}} h ago`;
  renewed.textContent = new Date(renewed.dateTime).toLocaleString() + age;
}}
showAge();
setTimeout(() => {{ due = true; reload(); }}, {1000 * _EVERY});
document.addEventListener("visibilitychange", reload);
"""
_RELOADING = (
    f'<noscript><meta http-equiv="refresh" content="{_EVERY}"></noscript>',
    f"<script>{RELOAD}</script>",
)


def text(value: Any) -> str:
    """Returns a text or number as HTML, without control characters; a long one is cut."""
    return html.escape(printable(str(value), _LONGEST))


def script_hash(script: str) -> str:
    """Returns the source of a Content-Security-Policy that permits a script of this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def page(title: str, *parts: str, reloads: bool = False) -> str:
    """Returns the page that consists of these parts, each of them HTML.

    Args:
        reloads: whether it reloads itself; one of the parts is ``renewal``.
    """
    policy = _POLICY
    head = ""
    end = ""
    if reloads:
        policy += f"; script-src {script_hash(RELOAD)}"
        head, end = _RELOADING
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{head}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{text(title)}</h1>{''.join(parts)}{end}"
        "</body></html>\n"
    )


def renewal(words: str, seconds: float) -> str:
    """Returns a box that says what a page shows that is renewed, and when it was written.

    Args:
        seconds: the time, since 1970.
    """
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    shown = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    when = f'<time datetime="{moment:%Y-%m-%dT%H:%M:%SZ}">{shown}</time>'
    return f'<p class="state">{text(words)} <small>This page is from {when}.</small></p>'


def ended(content: str, words: str) -> str:
    """Returns a page that reloads itself with other words in its box, and without the reloads."""
    for part in _RELOADING:
        content = content.replace(part, "", 1)
    box = f'<p class="state">{text(words)} <small>'
    # A function, because the words may contain a backslash.
    return re.sub(r'<p class="state">.*? <small>', lambda _: box, content, count=1)


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
    return _image(title, data, kind, "")


def plot(title: str, data: bytes) -> str:
    """Returns a plot on white paper (a PNG). Where a reader prefers dark pages, it is inverted."""
    return _image(title, data, "png", ' class="plot"')


def _image(title: str, data: bytes, kind: str, style: str) -> str:
    encoded = base64.b64encode(data).decode()
    return f'<img alt="{text(title)}"{style} src="data:image/{kind};base64,{encoded}">'


def grid(parts: Iterable[str]) -> str:
    """Returns parts side by side where there is space, and one below the other elsewhere."""
    cells = "".join(f"<div>{part}</div>" for part in parts)
    return f'<div class="grid">{cells}</div>' if cells else ""
