"""Pages of Markdown: whatever a name holds, it is shown as it is."""

import re

import pytest
import yaml
from huggingface_hub import DatasetCard, ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from training.pages import markdown

HOSTILE = [
    "---",
    "a|b",
    "<script>alert(1)</script>",
    "line\nbreak",
    "\r\n---\r\n",
    "[a](http://evil.example)",
    "![a](http://evil.example/a.png)",
    "`code`",
    "```",
    "**bold** _x_ ~~y~~",
    "# heading",
    "1. item",
    "- item",
    "&lt;b&gt;",
    "https://evil.example www.evil.example",
    "{{ jinja }} {% x %}",
    "a\\|b",
    "\x00\x1b[31m\u202e\ud800",
    ": key: value",
    "$x$",
    "|",
    "",
]


def rendered(text):
    """Returns the tokens of Markdown with GitHub's tables and strikethrough."""
    return MarkdownIt().enable(["table", "strikethrough"]).parse(text)


def cells(text):
    """Returns the texts of a table's cells, and the kinds of what is within them."""
    inline = [token for token in rendered(text) if token.type == "inline"]
    kinds = {child.type for token in inline for child in token.children}
    return ["".join(child.content for child in token.children) for token in inline], kinds


def shown(name):
    """Returns what a reader has to see of a name."""
    return markdown.printable(str(name), 400).strip()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_one_cell_and_only_text(name):
    found, kinds = cells(markdown.table(["class", "images"], [[name, 3], ["next", 4]]))
    assert found == ["class", "images", shown(name), "3", "next", "4"]
    assert kinds <= {"text", "text_special"}


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_any_name_is_one_cell_and_only_text(name):
    found, kinds = cells(markdown.table(["class", "images"], [[name, 3]]))
    # Markdown itself joins spaces at the ends.
    assert [text.strip() for text in found] == ["class", "images", shown(name).strip(), "3"]
    assert kinds <= {"text", "text_special"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_begins_no_list_and_no_heading(name):
    tokens = rendered(f"- {markdown.text(name)}\n- next\n")
    assert [token.type for token in tokens].count("list_item_open") == 2
    assert not {"heading_open", "hr", "fence", "html_block"} & {token.type for token in tokens}
    assert not re.search("<(?!li|/li|ul|/ul|p|/p)", MarkdownIt().render(f"- {markdown.text(name)}"))


@pytest.mark.parametrize("name", HOSTILE)
def test_front_matter_holds_any_text(name, tmp_path):
    values = {"license": "other", "license_name": name, "tags": [name, "b"], "pretty_name": name}
    page = markdown.page(values, name, f"text {markdown.text(name)}")
    (tmp_path / "README.md").write_text(page, encoding="utf-8")
    expected = markdown.printable(name, 400)
    for kind in (ModelCard, DatasetCard):
        card = kind.load(tmp_path / "README.md")
        assert card.data.to_dict()["license_name"] == expected
        assert card.data.tags == [expected, "b"]
        assert "license" not in card.text
    block = re.match(r"---\n(.*?)\n---\n", page, re.DOTALL)
    assert yaml.safe_load(block[1]) == {
        "license": "other",
        "license_name": expected,
        "tags": [expected, "b"],
        "pretty_name": expected,
    }


@pytest.mark.parametrize("content", ["a", "```\nb", "`````", "x\x1b[0m\ny"])
def test_code_ends_where_it_should(content):
    tokens = rendered(f"{markdown.code(content)}\nafter\n")
    assert [token.type for token in tokens][:2] == ["fence", "paragraph_open"]
    assert tokens[0].info == "sh"
    lines = [markdown.printable(line) for line in content.split("\n")]
    assert tokens[0].content.splitlines() == lines


def test_empty_parts_are_left_out():
    assert markdown.table(["a", "b"], []) == ""
    assert markdown.section("title", "", "") == ""
    assert markdown.section("title", "", "text\n") == "## title\n\ntext\n"
    assert markdown.bullets([]) == ""
    assert markdown.page({"a": 1}, "t", "", "x") == "---\na: 1\n---\n\n# t\n\nx\n"
    assert markdown.text(0.25) == "0.25"
    assert markdown.text("0.25") == "0.25"
    assert markdown.text("x" * 500) == f"{'x' * 400} ..."
