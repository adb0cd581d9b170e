"""Counts the words of the documents, and finds phrases that nobody says, in the code as well.

    python tests/support/words.py                             # every document
    python tests/support/words.py docs/guides/export.md       # or some
    python tests/support/words.py weights/hub.py              # texts of a module

It prints a line for each document (words, sentences, words per sentence), their sum, and each phrase
of PHRASES with its place.

The rules:

- A sentence ends at ``.``, ``?`` or ``!``. It also ends with its paragraph, list item, heading or
  table cell. A colon or a semicolon doesn't end it.
- A word stands between two spaces and has a letter or a digit. Code spans, blocks of code, the
  addresses of links, and numbers in tables aren't counted.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
# How many English words are written by hand, at most.
HAND_WRITTEN = 40_000
# What isn't written by hand: docs/reference/keys.md is made of the code's declarations.
GENERATED = {"docs/reference/keys.md"}
# Word for word translations and telegrams: patterns, with what an engineer would write.
PHRASES = {
    r"\b(?:go(?:es|ing)?|gone|went) on\b": "continues, resumes",
    r"(?<!there )\b(?:is|are|was|were) no\b(?! (?:longer|more|better|worse|less|fewer|larger|smaller))": "isn't a, has no",
    r"\b(?:is|are|isn't|aren't) here\b": "is included, is supported, is available",
    # A parameter may be called tell, and two things may be told apart.
    r"(?<!`)\b(?:tells?|told)\b(?!:)(?! (?:Paddle|pytest|git|you|the)\b)(?!(?: [^\s.;:]+){0,9} apart\b)": "says, shows, names, reports",
    r"\bcomes? along\b": "is included",
    r"\banew\b": "again",
    r"\bone's own\b": "your own",
    r"\bheld to\b": "compared with, checked against",
    r"\bwhat is (?:lost|there|asked|said)\b": "name the thing",
    r"\bbeside it(?:self)?\b": "next to it",
    r"\bby the way\b": "",
    r"\b(?:holds?|held) no\b": "has no, contains no",
    r"\bnothing (?:tells|says|of it)\b": "is unknown, cannot be determined",
    r"\b(?:isn't|aren't|not) whole\b": "is incomplete",
    r"\bleads? out of\b": "is outside",
    r"\bhas none of\b": "lacks, doesn't have",
    r"\bin vain\b": "",
}


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
    """Returns the documents in English that are written by hand."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(
        file
        for file in documents
        if not file.stem.endswith("_cn")
        and not file.is_relative_to(ROOT / "docs" / "zh")
        and str(file.relative_to(ROOT)) not in GENERATED
    )


def phrases(text: str, name: str | Path) -> list[str]:
    """Returns "file:line: phrase: what to write instead" for each phrase of PHRASES outside code."""
    found = []
    for line, passage, _ in _passages(text):
        for pattern, better in PHRASES.items():
            for phrase in re.finditer(pattern, passage, re.I):
                found.append(f"{name}:{line}: {phrase[0].lower()}: {better}")
    return found


def modules() -> list[Path]:
    """Returns the toolkit's Python files, without its tests."""
    command = ["git", "ls-files", "-z", "*.py", ":!tests"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


def code_phrases(source: str, name: str | Path) -> list[str]:
    """Returns what ``phrases`` does, for the texts of a Python file."""
    return [
        f"{name}:{line}: {phrase[0].lower()}: {better}"
        for line, text in sorted(set(_texts(source)))
        for pattern, better in PHRASES.items()
        for phrase in re.finditer(pattern, text, re.I)
    ]


def _texts(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of a Python file's docstrings, messages and comments. Values within a
    message are replaced by "`", and so is code within a docstring or comment. Consecutive comments
    are one text.
    """
    tree = ast.parse(source)
    # The constants of an f-string are its parts.
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            values = [v.value if isinstance(v, ast.Constant) else "`" for v in node.values]
            yield node.lineno, _plain("".join(map(str, values)))
        elif isinstance(node, ast.Constant) and type(node.value) is str and id(node) not in parts:
            # A single word is a name, not a text.
            if " " in node.value.strip():
                yield node.lineno, _plain(node.value)
    comment: list[str] = []
    first = 0
    last = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            own_line = token.line[:column].isspace() or column == 0
            if not own_line or last != (row - 1, column):
                yield first, _plain(" ".join(comment))
                comment = []
                first = row
            comment.append(token.string.lstrip("#: "))
            last = (row, column) if own_line else None
    yield first, _plain(" ".join(comment))


def _plain(text: str) -> str:
    """Returns a text in one line, its code replaced by "`"."""
    return " ".join(re.sub(r"``[^`]*``", "`", text).split())


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
    total = 0
    said = []
    for file in [Path(name).resolve() for name in names] or files():
        if file.suffix == ".py":
            said += code_phrases(file.read_text(encoding="utf-8"), file.relative_to(ROOT))
            continue
        counts = [sentence.words for sentence in sentences(file)]
        name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
        said += phrases(file.read_text(encoding="utf-8"), name)
        if counts:
            print(
                f"{sum(counts):6,} words {len(counts):6,} sentences {sum(counts) / len(counts):5.1f} words each  {name}"
            )
        total += sum(counts)
    print(f"{total:6,} words in all")
    print("\n".join(said))


if __name__ == "__main__":
    main(sys.argv[1:])
