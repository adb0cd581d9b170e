"""Sentences of the documents have at most 25 words (support/words.py counts them)."""

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
