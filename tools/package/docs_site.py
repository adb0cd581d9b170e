"""A hook of MkDocs (``make docs``): the pages at the repository's root become pages of the site, and
links that leave docs/ lead to them.

README.md becomes the site's first page, index.md. On GitHub the same links work as they stand in
the files. Chinese pages get the theme's Chinese words, and a menu of the Chinese pages.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "README_cn.md": "README_cn.md", "CHANGELOG.md": "CHANGELOG.md"}
_CODE = r"^```.*?^```|`[^`]*`"  # has no links
# A character that is written without spaces: Chinese, or full-width punctuation.
_WIDE = r"[\u3000-\u303f\u3400-\u9fff\uff00-\uffef]"
_BREAK = re.compile(rf"^```.*?^```|(?<={_WIDE})\n[ ]*(?={_WIDE})", re.M | re.S)
_LINK = re.compile(
    _CODE + r'|(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s:#][^()\s:]*)\)|src="(?!https?:)([^"]+)"',
    re.M | re.S,
)


def on_files(files: Any, config: Any) -> Any:
    """Adds the root's pages to mkdocs' files."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for source, page in PAGES.items():
        files.append(
            File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8"))
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns a page whose links lead to pages of the site, or to files of ``repo_url``; without
    one they are text.

    Raises:
        FileNotFoundError: a link leads to no file.
    """
    own = {site: source for source, site in PAGES.items()}.get(
        page.file.src_uri, f"docs/{page.file.src_uri}"
    )

    def link(found: re.Match[str]) -> str:
        target, _, anchor = (found[3] or found[4]).partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{own}: {target} isn't a file")
        if path in PAGES or path.startswith("docs/"):
            site = PAGES.get(path, path.removeprefix("docs/"))
            there = posixpath.relpath(site, posixpath.dirname(page.file.src_uri) or ".") + (
                anchor and f"#{anchor}"
            )
        elif config.repo_url:
            there = f"{config.repo_url.rstrip('/')}/blob/main/{path}"
        else:
            return found[2]
        return f'src="{there}"' if found[4] else f"{found[1]}[{found[2]}]({there})"

    if _is_chinese(page):
        markdown = _BREAK.sub(
            lambda found: found[0] if found[0].startswith("```") else "", markdown
        )
    return _LINK.sub(lambda found: link(found) if found[3] or found[4] else found[0], markdown)


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """Gives a Chinese page the theme's Chinese words, and the menu of the Chinese pages."""
    from mkdocs.structure.nav import Link, Navigation  # pyright: ignore[reportMissingImports]

    config.theme["language"] = "zh" if _is_chinese(page) else "en"
    if _is_chinese(page):
        [section] = [item for item in nav.items if item.title == "中文"]
        up = "../" * page.file.src_uri.count("/")
        pages = [item for item in section.children if item.is_page]
        context["nav"] = Navigation([*section.children, Link("English", f"{up}index.html")], pages)
        context["nav"].homepage = pages[0]
    return context


def _is_chinese(page: Any) -> bool:
    return page.file.src_uri.startswith(("zh/", "README_cn"))
