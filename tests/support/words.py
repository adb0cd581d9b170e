"""Counts the words of each sentence: in the documents, in public docstrings and in the comments of
config.py.

    python tests/support/words.py                      # every file
    python tests/support/words.py docs/own_data.md     # or some

It prints a line for each file (words, sentences, words per sentence, the longest) and the ten
longest sentences.

The rules:

- A sentence ends at ``.``, ``?`` or ``!``. It also ends with its paragraph, list item, heading or
  table cell. A colon or a semicolon doesn't end it.
- A word stands between two spaces and has a letter or a digit. Code spans, blocks of code, the
  addresses of links, and numbers in tables aren't counted.
- An argument's name (``name:`` below ``Args:``) isn't counted. Other indented lines of a docstring
  are examples. Lines with a gap of two spaces are rows of a table.
- A comment of config.py continues in the lines below it that have only a comment.
"""

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 25

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Notes?):$")
_ENTRY = re.compile(r"\*{0,2}[\w., ]+(\([^)]*\))?: ")


class Sentence(NamedTuple):
    file: str
    line: int  # where its paragraph begins
    words: int
    text: str


def files() -> list[Path]:
    """Returns the documents in English and the modules of the toolkit; tests aren't among them."""
    folders = [
        entry
        for entry in ROOT.iterdir()
        if entry.is_dir() and not re.match(r"\.|(tests|output|logs?)$", entry.name)
    ]
    modules = [*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(modules) + sorted(file for file in documents if not file.stem.endswith("_cn"))


def sentences(file: Path) -> Iterator[Sentence]:
    """Yields the sentences of a Markdown file or of a module."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        passages = _of_markdown(text)
    else:
        passages = [
            *_of_docstrings(text),
            *(_of_comments(text) if file.name == "config.py" else []),
        ]
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
    for line, passage, in_table in passages:
        for text in re.split(
            r"(?<=[.?!])[\"')]*\s+", re.sub(r"\b(e\.g|i\.e|et al|vs)\.", r"\1", passage)
        ):
            words = [word for word in text.split() if re.search(r"\w", word) and "`" not in word]
            number = sum(not in_table or re.search(r"[^\W\d_]", word) is not None for word in words)
            if number:
                yield Sentence(name, line, number, " ".join(text.split()))


def _of_markdown(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, passage, whether it is a table's cell); "`" stands for code."""
    line = 1
    in_table = False
    for token in MarkdownIt().enable("table").parse(text):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            shown = {"text": None, "code_inline": "`", "softbreak": " ", "hardbreak": ". "}
            parts = [
                shown[child.type] or child.content
                for child in token.children or []
                if child.type in shown
            ]
            yield line, "".join(parts), in_table
        in_table = token.type in ("th_open", "td_open")


def _of_docstrings(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields those of a module and of what it has in public."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        public = isinstance(node, ast.Module) or not node.name.startswith("_")
        if public and (docstring := ast.get_docstring(node, clean=False)):
            for passage in _passages(inspect.cleandoc(docstring).splitlines()):
                yield node.body[0].lineno, re.sub(r"``.+?``|`.+?`", "`", passage), False


def _passages(lines: Iterable[str]) -> Iterator[str]:
    """Yields a docstring's paragraphs, list items and arguments, each in one line."""
    passage = ""
    section = False
    for line in lines:
        entry = _ENTRY.match(line.strip())
        indented = line.startswith("  ")
        begins = (
            not line
            or line.startswith("- ")
            or _SECTION.match(line)
            or re.search(r"\S {2,}\S", line)
        )
        if begins or (indented and section and entry):
            yield passage
            passage = ""
        section = bool(_SECTION.match(line)) or (section and (indented or not line))
        if section and entry:
            line = line.strip()[entry.end() :]
        if section or not re.match(r" {4}", line):
            passage += line.strip() + " "
    yield passage


def _of_comments(text: str) -> Iterator[tuple[int, str, bool]]:
    first = 0
    last = 0
    passage = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0]
            comment = token.string.removeprefix("#").strip()
            goes_on = row == last + 1 and token.line.lstrip().startswith("#")
            if not goes_on:
                yield first, passage, False
                first = row
                passage = ""
            last = row
            passage = f"{passage} {comment}"
    yield first, passage, False


def main(names: list[str]) -> None:
    found = []
    for file in [Path(name).resolve() for name in names] or files():
        if of_file := list(sentences(file)):
            counts = [sentence.words for sentence in of_file]
            mean = f"{sum(counts) / len(counts):5.1f} words each, longest {max(counts):3}"
            print(f"{sum(counts):6,} words {len(counts):6,} sentences {mean}  {of_file[0].file}")
            found += of_file
    for sentence in sorted(found, key=lambda sentence: -sentence.words)[:10]:
        print(f"{sentence.words} words, {sentence.file}:{sentence.line}: {sentence.text}")


if __name__ == "__main__":
    main(sys.argv[1:])
