"""Counts the words of each sentence of the documents.

    python tests/support/words.py                      # every document
    python tests/support/words.py docs/own_data.md     # or some

It prints a line for each file (words, sentences, words per sentence, the longest) and the ten
longest sentences.

The rules:

- A sentence ends at ``.``, ``?`` or ``!``. It also ends with its paragraph, list item, heading or
  table cell. A colon or a semicolon doesn't end it.
- A word stands between two spaces and has a letter or a digit. Code spans, blocks of code, the
  addresses of links, and numbers in tables aren't counted.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 25


class Sentence(NamedTuple):
    """A sentence of a document.

    Attributes:
        line: the first line of its paragraph.
        words: the number of its words.
    """

    file: str
    line: int
    words: int
    text: str


def files() -> list[Path]:
    """Returns the documents in English, without docs/keys.md, which is made of docstrings."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(
        file for file in documents if not file.stem.endswith("_cn") and file.name != "keys.md"
    )


def sentences(file: Path) -> Iterator[Sentence]:
    """Yields the sentences of a Markdown file."""
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
    for line, passage, in_table in _passages(file.read_text(encoding="utf-8")):
        for text in re.split(
            r"(?<=[.?!])[\"')]*\s+", re.sub(r"\b(e\.g|i\.e|et al|vs)\.", r"\1", passage)
        ):
            words = [word for word in text.split() if re.search(r"\w", word) and "`" not in word]
            number = sum(not in_table or re.search(r"[^\W\d_]", word) is not None for word in words)
            if number:
                yield Sentence(name, line, number, " ".join(text.split()))


def _passages(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, passage, whether it is a cell of a table). Code is replaced by "`"."""
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
