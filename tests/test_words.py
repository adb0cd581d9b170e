"""Sentences have 25 words at most, in the documents and in what the code says of itself (words.py
counts them).
"""

import pytest
from support.words import LIMIT, files, sentences


def test_no_sentence_is_longer_than_the_limit():
    long = [s for file in files() for s in sentences(file) if s.words > LIMIT]
    assert not [f"{s.file}:{s.line}: {s.words} words: {s.text}" for s in long]


@pytest.mark.smoke
def test_documents_are_counted_as_the_rule_says(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n\nOne `code span`, e.g. two; three: four\nfive. *Six* [seven](http://a.b/c) 8 3.5? `x` nine\n\n"
        "- ten\n- eleven `y`'s twelve\n\n```sh\nno word of it\n```\n\n| a | 12 |\n|---|---|\n| 13 ms | two, 4. `z` |\n"
    )
    found = [(s.line, s.words, s.text) for s in sentences(page)]
    assert found == [
        (1, 2, "A heading"),
        (3, 6, "One `, e.g two; three: four five."),
        (3, 4, "Six seven 8 3.5?"),
        (3, 1, "` nine"),
        (6, 1, "ten"),
        (7, 2, "eleven `'s twelve"),
        (13, 1, "a"),
        (15, 1, "13 ms"),
        (15, 1, "two, 4."),
    ]


def test_docstrings_and_comments_are_counted_as_the_rule_says(tmp_path):
    module = tmp_path / "config.py"
    module.write_text('''"""A module. It has
two sentences.

    python no/word.py

- one item

Args:
    name: three ``x`` words here
        and two
    other (int, optional): word
"""
X = 1  # a comment
# of six words. And
Y = 2  # two


# alone
def f():
    """Public one."""
    # only config.py's comments count


def _f():
    """Private."""
''')
    found = [(s.line, s.words, s.text) for s in sentences(module)]
    assert found == [
        (1, 2, "A module."),
        (1, 4, "It has two sentences."),
        (1, 2, "- one item"),
        (1, 1, "Args:"),
        (1, 5, "three ` words here and two"),
        (1, 1, "word"),
        (20, 2, "Public one."),
        (13, 5, "a comment of six words."),
        (13, 1, "And"),
        (15, 1, "two"),
        (18, 1, "alone"),
        (21, 4, "only config.py's comments count"),
    ]
    module.rename(tmp_path / "module.py")
    assert [s.line for s in sentences(tmp_path / "module.py")] == [1] * 6 + [20]
