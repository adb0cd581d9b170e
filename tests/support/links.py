"""Lists the links between this repository's Markdown pages that lead nowhere.

python tests/support/links.py [PAGE ...]
"""

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]


def pages() -> Iterator[Path]:
    """Yields the Markdown files at the top and below docs/ and .github/."""
    for pattern in ("*.md", "docs/**/*.md", ".github/**/*.md"):
        yield from sorted(ROOT.glob(pattern))


@functools.cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings: the second "Serve" is
    ``serve-1``.
    """
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*?)\s*$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain).strip().lower().replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return {
        *found,
        *re.findall(r'<a (?:id|name)="([^"]+)"', text),
        *re.findall(r"\{ ?#([\w-]+) ?\}", text),
    }


def broken(page: Path) -> list[str]:
    """Returns a page's relative links whose file or anchor isn't there."""
    text = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = []
    for link in re.findall(r"\]\(<?([^)>\s]+)>?\)", text):
        # The address of another site begins with a scheme.
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            found.append(link)
    return found


if __name__ == "__main__":
    lost = [(page, link) for page in map(Path, sys.argv[1:] or pages()) for link in broken(page)]
    sys.exit("\n".join(f"{page}: {link} leads nowhere" for page, link in lost) or 0)
