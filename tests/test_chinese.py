"""The Chinese pages: which there are, the facts that they share with the English ones, and terms.

A Chinese page has the place of its English page below ``docs/zh`` (README_cn.md that of README.md).
Its structure is its own. These are compared, of the whole page:

- the commands, without their comments, and the outputs that are shown;
- the paths of the trees that are shown, without their comments;
- the keys and flags that are named in code;
- the numbers outside code, with months as numbers.

``glossary.yaml`` has the terms, and translations that aren't used.
"""

import calendar
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from conftest import ROOT
from markdown_it import MarkdownIt
from support.document_commands import files_shown, shown_in_markdown

GLOSSARY = yaml.safe_load((ROOT / "tests" / "glossary.yaml").read_text(encoding="utf-8"))
CHINESE = sorted((ROOT / "docs" / "zh").rglob("*.md"))
PAGES = [ROOT / "README_cn.md", *CHINESE]
# Every page below these has a Chinese page.
MIRRORED = ["start", "guides", "models", "migrate"]
# So has each of these.
REFERENCE = ["command_line", "configuration", "errors", "run_folder"]
EVIDENCE = ["guarantees"]
HAN = r"[\u3000-\u303f\u3400-\u9fff\uff00-\uffef]"  # characters and full-width punctuation
_MONTHS = [calendar.month_name[month] for month in range(1, 13)]
_NUMBER = r"\d+(?:[.,]\d+)*(?:e-?\d+)?"
_KEY = r"[A-Z][A-Z_]+(?:\.\w+)+|-{1,2}[a-z][\w-]*"


class Facts(NamedTuple):
    """What a page says in every language."""

    commands: set[str]
    outputs: set[str]
    trees: set[tuple[str, ...]]
    keys: set[str]
    numbers: set[str]


def facts(text: str) -> Facts:
    shown = list(shown_in_markdown(text))
    blocks = re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
    spans = set()
    numbers = set()
    for token in MarkdownIt().enable("table").parse(text):
        if token.type == "inline":
            numbers.update(re.findall(_NUMBER, dated(prose(token))))
            spans.update(c.content for c in token.children or [] if c.type == "code_inline")
    return Facts(
        {each.command for each in shown},
        {each.prints for each in shown if not is_tree(each.prints)},
        {tuple(files_shown(block)) for block in blocks if is_tree(block)},
        {key for span in spans for key in re.findall(_KEY, span)},
        numbers,
    )


def is_tree(block: str) -> bool:
    """Returns whether a block shows a folder's files; comments follow their names."""
    return "── " in block


def prose(inline) -> str:
    """Returns a paragraph's or cell's text in one line, with "`" for each code."""
    shown = {"text": None, "code_inline": "`", "softbreak": " ", "image": None}
    return "".join(shown[c.type] or c.content for c in inline.children or [] if c.type in shown)


def dated(text: str) -> str:
    """Returns the text with months as numbers: 23 11 2026."""
    return re.sub(
        rf"\b({'|'.join(_MONTHS)})\b", lambda found: str(_MONTHS.index(found[0]) + 1), text
    )


def english_of(page: Path) -> Path:
    if page.name == "README_cn.md":
        return page.with_name("README.md")
    return ROOT / "docs" / page.relative_to(ROOT / "docs" / "zh")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_what_a_newcomer_reads_is_there_in_chinese():
    english = {page for folder in MIRRORED for page in (ROOT / "docs" / folder).rglob("*.md")}
    english |= {ROOT / "docs" / "reference" / f"{name}.md" for name in REFERENCE}
    english |= {ROOT / "docs" / "evidence" / f"{name}.md" for name in EVIDENCE}
    assert {english_of(page) for page in CHINESE} == english


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_chinese_page_has_the_facts_of_its_english_page(page):
    chinese = facts(page.read_text(encoding="utf-8"))
    english = facts(english_of(page).read_text(encoding="utf-8"))
    for kind in Facts._fields:
        ours, theirs = getattr(chinese, kind), getattr(english, kind)
        # (what only Chinese has, what only English has)
        assert (ours - theirs, theirs - ours) == (set(), set()), kind


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_lead_to_each_other_and_on_in_chinese(page):
    text = page.read_text(encoding="utf-8")
    links = {
        (page.parent / link).resolve()
        for link in re.findall(r"\]\(([\w./]+\.md)(?:#[^)]*)?\)", text)
    }
    english = english_of(page)
    assert english in links
    back = re.findall(r"\[中文\]\(([\w./]+\.md)\)", english.read_text(encoding="utf-8"))
    assert [(english.parent / link).resolve() for link in back] == [page]
    in_chinese = {english_of(other) for other in PAGES}
    assert links & in_chinese == {english}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_chinese_sentences_have_full_width_punctuation_and_no_stray_spaces(page):
    assert narrow(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_glossarys_terms_are_used(page):
    text = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    refused = {word: term["zh"] for term in GLOSSARY for word in term.get("not", [])}
    assert {word: better for word, better in refused.items() if word in text} == {}


def narrow(text: str) -> list[str]:
    """Returns the half-width punctuation and the spaces between characters in Chinese paragraphs
    and cells, with the text around them.

    Also ``**`` that isn't bold: it isn't, after a full stop and before a character.
    """
    inlines = [
        prose(token) for token in MarkdownIt().enable("table").parse(text) if token.type == "inline"
    ]
    mark = rf"[,;:?!](?=\s|$|{HAN})|(?<={HAN})[,.;:?!]|(?<!\.)\.(?=\s|$)|[()]|\*\*"
    return [
        inline[max(0, found.start() - 10) : found.end() + 10]
        for inline in inlines
        if re.search(HAN, inline)
        for found in re.finditer(mark, inline)
    ]


# ------------------------------------------------------------------ what is compared


@pytest.mark.smoke
def test_facts_are_read_as_the_head_says():
    found = facts(
        "# On 23 November 2026\n\n`a.b`, `-o DATA.FOLD 2`, `--dry-run`: 1,797.5 s, 3e-6\n\n"
        "```sh\nsh run_train_multi.sh -ngpus=2  # two\n```\n\n```text\nacc1: 97.22\n...\n```\n\n"
        "```sh\nsh run_train_multi.sh\n```\n\n```text\nRUN/\n├── a.txt  text\n└── b/\n```\n\n"
        "| 1 | `i` |\n|---|---|\n| [2](#x) | |\n"
    )
    assert found == (
        {"sh run_train_multi.sh -ngpus=2", "sh run_train_multi.sh"},
        {"acc1: 97.22\n...\n"},
        {("RUN", "RUN/a.txt", "RUN/b")},
        {"DATA.FOLD", "-o", "--dry-run"},
        {"23", "11", "2026", "1,797.5", "3e-6", "1", "2"},
    )
    assert facts("2026 年 11 月 23 日").numbers == {"2026", "11", "23"}


def test_half_width_punctuation_is_found():
    assert narrow("用 `a`，`b`。3.3.1 与 timm/x.y：1,000 个（`c`）……") == []
    assert narrow("English, only (here).\n\n```\n中文, 代码.\n```") == []
    ones = (
        "中文,这",
        "中文, 这",
        "ViT, Swin 等",
        "中文.",
        "用 timm. 然后",
        "`a`: 中文",
        "中文:`a`",
    )
    assert [len(narrow(text)) for text in ones] == [1] * len(ones)
    assert narrow("中文 (x)") == ["中文 (x)", "中文 (x)"]
    assert narrow("**中。**文 **文**") == ["**中。**文 文"] * 2
