"""How documents and code are written: the documents' length in all, and phrases that nobody says."""

import re

import pytest
from conftest import ROOT
from support.words import (
    HAND_WRITTEN,
    PHRASES,
    code_phrases,
    files,
    modules,
    phrases,
    sentences,
)


def test_the_documents_are_no_longer_than_they_may_be():
    words = {file: sum(s.words for s in sentences(file)) for file in files()}
    assert sum(words.values()) <= HAND_WRITTEN, sorted(words.items(), key=lambda item: -item[1])[:9]


def test_nobody_says_so():
    assert [
        line
        for file in files()
        for line in phrases(file.read_text(encoding="utf-8"), file.relative_to(ROOT))
    ] == []


def test_nobody_says_so_in_the_code():
    assert [
        line
        for file in modules()
        for line in code_phrases(file.read_text(encoding="utf-8"), file.relative_to(ROOT))
    ] == []


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""A run that\ngoes on."""', ["1: goes on"]),
        ('"""What ``goes on`` does.\n\nArgs:\n    tell: is called."""', []),
        ("# The run\n# goes on.\nx = 1  # It is no file.", ["1: goes on", "3: is no"]),
        ('x = 1\ny = f"{x}: the {x} tells"\n', ["2: tells"]),
        ('x = ("it goes"\n  " on")\n', ["1: goes on"]),
        ('tell = goes.on(f"{told}")\n', []),
        ('"Scores that tell two kinds of pictures apart."', []),
    ],
)
def test_a_phrase_is_found_in_every_text_of_a_module(source, found):
    lines = [line.split(":", 3) for line in code_phrases(source, "a.py")]
    assert [f"{line}:{phrase}" for _, line, phrase, _ in lines] == found


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The run goes on.", ["goes on"]),
        ("There is no file.", []),
        ("It is no file.", ["is no"]),
        ("The models that are here", ["are here"]),
        ("The message tells it", ["tells"]),
        ("what the patterns match hold no path of one", ["hold no"]),
        ("A `goes on` in code, and in\n\n```\nit goes on\n```", []),
        ("the run\ngoes\non", ["goes on"]),
    ],
)
def test_a_phrase_is_found_wherever_its_line_breaks(text, found):
    assert [line.split(": ")[1] for line in phrases(text, "page.md")] == found
    assert all(re.compile(pattern) for pattern in PHRASES)


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
