"""A hook of MkDocs (``make docs``), which builds the site of each language.

The English site is made of ``docs``, the Chinese one of ``docs/zh``, into the folder ``zh`` of the
English one. README.md and README_cn.md are their first pages. A link leads to the same file as on
GitHub: to a page of this site, of the other language's site, or to a file of ``repo_url``.
Comments become tables (docs_tables.py).
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # MkDocs would look in this folder alone

from tools.package import docs_tables  # noqa: E402

# The pages of each site that come from the repository's root, and their addresses there.
PAGES = {
    "docs": {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"},
    "docs/zh": {"README_cn.md": "index.md"},
}
KEYS = "reference/keys.md"
BOOST = 2  # of a row of KEYS in the search
# What the Chinese menu shows of the English site, with the addresses from the Chinese one.
ENGLISH_REFERENCES = [
    ("配置项一览（英文）", "../reference/keys.html"),
    ("Python 接口（英文）", "../reference/python.html"),
]
_CODE = r"^```.*?^```|`[^`]*`"  # has no links
# A character that is written without spaces: Chinese, or full-width punctuation.
_WIDE = r"[\u3000-\u303f\u3400-\u9fff\uff00-\uffef]"
_BREAK = re.compile(rf"^```.*?^```|(?<={_WIDE})\n[ ]*(?={_WIDE})", re.M | re.S)
_LINK = re.compile(
    _CODE + r'|(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s:#][^()\s:]*)\)|src="(?!https?:)([^"]+)"',
    re.M | re.S,
)


def on_config(config: Any) -> Any:
    """Keeps the glossary's terms of three characters whole where Chinese text is cut into words.

    In pieces they would be found everywhere: 多标签 (multi-label) in each page with 多 (many).
    """
    import jieba  # pyright: ignore[reportMissingImports]

    glossary = (ROOT / "tests" / "glossary.yaml").read_text(encoding="utf-8")
    for line in re.findall(r"zh: ([^,}]+)", glossary):
        for term in re.findall(r"[\u3400-\u9fff]+", line):
            if len(term) == 3:
                jieba.add_word(term, 10**7)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the root's pages to MkDocs' files."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    folder = _folder(config)
    for source, page in PAGES[folder].items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Adds the other language's site to the menu, and to the Chinese one the English references."""
    from mkdocs.structure.nav import Link  # pyright: ignore[reportMissingImports]

    for section in nav.items:
        if section.title == "参考":
            section.children += [Link(*page) for page in ENGLISH_REFERENCES]
    others = {"docs": ("中文", "zh/index.html"), "docs/zh": ("English", "../index.html")}
    nav.items.append(Link(*others[_folder(config)]))
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns a page whose links lead to pages, or to files of ``repo_url``; without one these are
    text.

    Raises:
        FileNotFoundError: a link leads to no file.
    """
    folder = _folder(config)
    own = _source(folder, page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        target, _, anchor = (found[3] or found[4]).partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{own}: {target} isn't a file")
        address = _address(path)
        if address is None:
            if not config.repo_url:
                return found[2]
            there = f"{config.repo_url.rstrip('/')}/blob/main/{path}"
            return f"{found[1]}[{found[2]}]({there})"
        there = posixpath.relpath(address, posixpath.dirname(_address(own) or "") or ".")
        if found[4]:
            return f'src="{there}"'
        there += anchor and f"#{anchor}"
        if _site_of(path) == folder:
            return f"{found[1]}[{found[2]}]({there})"
        # MkDocs would look for the other site's file in this one.
        there = there.replace(".md", ".html")
        if found[1]:
            return f'<img alt="{found[2]}" src="{there}">'
        return f'<a href="{there}">{found[2]}</a>'

    markdown = docs_tables.filled(markdown, own, bool(config.repo_url))
    if folder == "docs/zh":
        markdown = _BREAK.sub(
            lambda found: found[0] if found[0].startswith("```") else "", markdown
        )
    return _LINK.sub(lambda found: link(found) if found[3] or found[4] else found[0], markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Returns a page whose code and tables break where a reader would break them.

    - Output without columns wraps (class ``wraps``); a tree or a table scrolls.
    - There is no break after the dash of a flag (class ``flag``).
    - A name in a table may break after "_" and "/".
    - Each row of keys.md has an anchor and is an entry of the search: keys.html#train.base_lr.
    """

    def output(found: re.Match[str]) -> str:
        aligned = re.search(r"── |[^\s>] {2,}\S", found[2])
        return found[0] if aligned else found[1].replace("highlight", "highlight wraps") + found[2]

    html = re.sub(r'(<div class="language-text highlight">)(.*?</pre>)', output, html, flags=re.S)
    inside = {"code": 0, "td": 0}
    parts = re.split(r"(<[^>]*>)", html)
    for index, part in enumerate(parts):
        tag = re.match(r"<(/?)(code|td)\b", part)
        if tag:
            inside[tag[2]] += -1 if tag[1] else 1
        elif index % 2 == 0:
            if inside["td"]:
                part = re.sub(r"(?<=\w)[_/](?=\w)", r"\g<0><wbr>", part)
            if inside["code"]:
                part = re.sub(r"(?<![^\s])--?\w", r'<span class="flag">\g<0></span>', part)
            parts[index] = part
    html = "".join(parts)
    if page.file.src_uri != KEYS:
        return html
    html, page.key_rows = _with_anchors(html)
    return f'<div class="keys">{html}</div>'


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Lets the search find each row of keys.md under its key.

    The search's entry of the page itself has to be there before, so this isn't done earlier. The
    boost is for "TRAIN.BASE_LR", which would find a page that has "train" many times first.
    """
    index = config.plugins["material/search"].search_index
    for row in getattr(page, "key_rows", ()):
        location = f"{page.url}#{row.anchor}"
        index.entries.append(
            {"title": row.title, "text": row.text, "location": location, "boost": BOOST}
        )
    return output


class Row(NamedTuple):
    """A key in a table of keys.md.

    Attributes:
        anchor: train.base_lr; of an architecture's key vit.model.depth.
        title: the key, of an architecture's key with the architecture.
        text: what the key means, in HTML.
    """

    anchor: str
    title: str
    text: str


def _with_anchors(html: str) -> tuple[str, list[Row]]:
    """Returns the page of all keys with an id for each row, and these rows.

    The search leaves the tables out, because it would find a section of fifty keys there.
    """
    rows = []
    parts = []
    architecture = ""
    for part in re.split(r"(?=<h[23][ >])", html):
        if heading := re.match(r"<h([23])[^>]*>([^<]*)", part):
            architecture = heading[2] if heading[1] == "3" else ""

        def anchored(found: re.Match[str], architecture: str = architecture) -> str:
            key = re.sub(r"<[^>]*>", "", found[1])
            anchor = f"{architecture}.{key}" if architecture else key
            title = f"{key} ({architecture})" if architecture else key
            meaning = re.findall(r"<td>(.*?)</td>", found[2], re.S)[-1].replace("<wbr>", "")
            rows.append(Row(anchor.lower(), title, meaning))
            return f'<tr id="{anchor.lower()}">\n<td>{found[1]}</td>{found[2]}</tr>'

        part = re.sub(r"<tr>\s*<td>(<code>.*?</code>)</td>(.*?)</tr>", anchored, part, flags=re.S)
        parts.append(part.replace("<table>", "<table data-search-exclude>"))
    return "".join(parts), rows


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Returns a page that isn't made of Markdown; the theme has English words for a missing one."""
    if template_name == "404.html" and _folder(config) == "docs/zh":
        return output_content.replace("404 - Not found", "404：页面不存在")
    return output_content


def on_post_build(config: Any) -> None:
    """Lets the theme's search find Chinese words at a query's end: its loop stops a letter early.

    Raises:
        ValueError: the theme has another loop, which may not need this any more.
    """
    [worker] = Path(config.site_dir).glob("assets/javascripts/workers/search.*.min.js")
    script, loops = re.subn(
        r"(for\(let (\w)=\w\+1;\2<)(\w\.length;\2\+\+\)\w\.slice)", r"\1=\3", worker.read_text()
    )
    if loops != 1:
        raise ValueError(f"{worker}: found {loops} loops over the letters of a query, expected 1")
    worker.write_text(script)


def _folder(config: Any) -> str:
    return Path(config.docs_dir).resolve().relative_to(ROOT).as_posix()


def _source(folder: str, page: str) -> str:
    """Returns the file in the repository of a page of the site."""
    return {site: source for source, site in PAGES[folder].items()}.get(page, f"{folder}/{page}")


def _site_of(path: str) -> str:
    """Returns the site of a page of the repository: its folder."""
    chinese = path in PAGES["docs/zh"] or path.startswith("docs/zh/")
    return "docs/zh" if chinese else "docs"


def _address(path: str) -> str | None:
    """Returns a file's place in the English site's folder; None: the sites don't have it."""
    if path in PAGES["docs"]:
        return PAGES["docs"][path]
    if path in PAGES["docs/zh"]:
        return f"zh/{PAGES['docs/zh'][path]}"
    return path.removeprefix("docs/") if path.startswith("docs/") else None
