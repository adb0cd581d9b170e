"""Each Chinese page (``NAME_cn.md``) says what its English page says: section by section, with the
same facts.

Alone: ``pytest tests/test_chinese.py -k weights``. What is compared:

- the levels of the headings, in their order; the sections between them by
- their code blocks, where comments and what stands right of a gap may be translated;
- their code in a line and their numbers, each as a set: where English has a word ("eight"), so has
  Chinese;
- their tables' rows and columns, and their links.
"""

import calendar
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt
from support.links import ROOT

PAGES = sorted(
    str(file.relative_to(ROOT)) for file in [*ROOT.glob("*_cn.md"), *ROOT.glob("docs/*_cn.md")]
)
HAN = r"[\u3000-\u303f\u3400-\u9fff\uff00-\uffef]"  # characters and full-width punctuation
_MONTHS = [calendar.month_name[month] for month in range(1, 13)]
_NUMBER = r"\d+(?:[.,]\d+)*(?:e-?\d+)?"


class Section(NamedTuple):
    level: int
    title: str
    blocks: list[str]
    spans: set[str]
    numbers: set[str]
    tables: list[list[int]]  # of each row, how many cells it has
    links: set[str]


def sections(text: str) -> list[Section]:
    tokens = MarkdownIt().enable("table").parse(text)
    found = [Section(0, "", [], set(), set(), [], set())]
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        of = found[-1]
        if token.type == "heading_open" and after:
            found.append(Section(int(token.tag[1]), after.content, [], set(), set(), [], set()))
        elif token.type == "fence":
            of.blocks.append(f"{token.info}\n{token.content}")
        elif token.type == "html_block":
            of.links.update(re.findall(r'src="([^"]+)"', token.content))
        elif token.type == "table_open":
            of.tables.append([])
        elif token.type == "tr_open":
            of.tables[-1].append(0)
        elif token.type in ("th_open", "td_open"):
            of.tables[-1][-1] += 1
        elif token.type == "inline":
            of.numbers.update(re.findall(_NUMBER, dated(prose(token))))
            for child in token.children or []:
                if child.type == "code_inline":
                    of.spans.add(child.content)
                link = child.attrs.get("href", child.attrs.get("src", ""))
                if link and not link.startswith("#"):
                    of.links.add(re.sub(r"_cn(?=\.md$)|(?<=\.cn)/en", "", link.partition("#")[0]))
    return found


def prose(inline) -> str:
    """Returns a paragraph's or cell's text in one line, with "`" for each code."""
    shown = {"text": None, "code_inline": "`", "softbreak": " ", "image": None}
    return "".join(shown[c.type] or c.content for c in inline.children or [] if c.type in shown)


def dated(text: str) -> str:
    """Returns the text with months as numbers: 23 11 2026."""
    return re.sub(
        rf"\b({'|'.join(_MONTHS)})\b", lambda found: str(_MONTHS.index(found[0]) + 1), text
    )


def without_comments(chinese: str, english: str) -> tuple[str, str]:
    """Returns two blocks of code; of the lines that are Chinese, what stands before the comment or
    gap.
    """
    lines = chinese.splitlines()
    others = english.splitlines()
    for row, line in enumerate(lines[: len(others)]):
        if re.search(HAN, line):
            lines[row], others[row] = (
                re.split(r"(?:^|\s)\s*# |(?<=\S) {2,}", text)[0] for text in (line, others[row])
            )
    return "\n".join(lines), "\n".join(others)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def english_of(page: str) -> str:
    return page.replace("_cn.md", ".md")


def test_the_pages_that_newcomers_read_are_there():
    names = "quick_start own_data recipes distributed weights paddlevit gpu"
    assert {"README_cn.md", *(f"docs/{name}_cn.md" for name in names.split())} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_chinese_page_has_what_the_english_page_has(page):
    chinese = sections(read(page))
    english = sections(read(english_of(page)))
    assert [section.level for section in chinese] == [section.level for section in english]
    for ours, theirs in zip(chinese, english, strict=True):
        title = ours.title
        pairs = zip(ours.blocks, theirs.blocks, strict=True)
        for block, other in (without_comments(*pair) for pair in pairs):
            assert block == other, title
        # (what only Chinese has, what only English has)
        assert (ours.spans - theirs.spans, theirs.spans - ours.spans) == (set(), set()), title
        assert (ours.numbers - theirs.numbers, theirs.numbers - ours.numbers) == (set(), set()), (
            title
        )
        assert ours.tables == theirs.tables, title
        assert (ours.links - theirs.links, theirs.links - ours.links) == (set(), set()), title


@pytest.mark.parametrize("page", PAGES)
def test_a_chinese_page_and_its_english_page_lead_to_each_other_and_on_in_chinese(page):
    name = Path(page).name
    english = Path(english_of(page)).name
    assert f"[English]({english})" in read(page)
    assert f"[中文]({name})" in read(english_of(page))
    targets = re.findall(r"\]\(([\w./]+\.md)", read(page))
    there = [
        target
        for target in targets
        if (ROOT / page).parent.joinpath(target.replace(".md", "_cn.md")).exists()
    ]
    assert [target for target in there if target != english] == []


@pytest.mark.parametrize("page", PAGES)
def test_chinese_sentences_have_full_width_punctuation(page):
    assert narrow(read(page)) == []


def narrow(text: str) -> list[str]:
    """Returns the half-width punctuation in Chinese paragraphs and cells, with what stands around
    it.

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
def test_sections_are_read_as_the_head_says():
    first, second = sections(
        "On 23 November 2026 `a b` took 1,797.5 s, 3e-6: [c](d_cn.md#e), ![7](f.png)\n\n"
        "## Two `g`\n\n```sh\nh  # 8\n```\n\n| 1 | `i` |\n|---|---|\n| [2](#x) | |\n"
    )
    assert first == (
        0,
        "",
        [],
        {"a b"},
        {"23", "11", "2026", "1,797.5", "3e-6", "7"},
        [],
        {"d.md", "f.png"},
    )
    assert second == (2, "Two `g`", ["sh\nh  # 8\n"], {"g", "i"}, {"1", "2"}, [[2, 2]], set())
    assert sections("2026 年 11 月 23 日")[0].numbers == {"2026", "11", "23"}


@pytest.mark.parametrize(
    ("chinese", "english", "same"),
    [
        ("make x   # 训练", "make x   # trains", True),
        ("make y   # 训练", "make x   # trains", False),
        ("make x   # trains it", "make x   # trains", False),
        ("a()   构建\n # 训练", "a()   builds\n # trains", True),
        ("a\nb", "a", False),
    ],
)
def test_only_what_explains_code_may_be_translated(chinese, english, same):
    chinese, english = without_comments(chinese, english)
    assert (chinese == english) is same


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
