"""Fonts for the names of files and classes: DejaVu Sans, and for letters that it lacks a font of
this machine.
"""

import functools
import sys
from collections.abc import Iterable

import training.pages.plain_matplotlib  # noqa: F401

# isort: split
from matplotlib import font_manager

from errors import printable

# DejaVu Sans comes with Matplotlib and has most alphabets. The others have Chinese, Japanese and
# Korean.
_FAMILIES = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Noto Sans JP",
    "Noto Sans KR",
)
_FAMILIES += (
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "SimHei",
)
_FAMILIES += (
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Yu Gothic",
    "Malgun Gothic",
    "Arial Unicode MS",
)
_told: list[str] = []


def families(texts: Iterable[str]) -> list[str]:
    """Returns the families for Matplotlib, which takes each letter from the first that has it."""
    letters = set("".join(texts))
    _tell(set.intersection(*(_lacking(letters, had) for _, _, had in _installed_fonts())))
    return [name for name, _, _ in _installed_fonts()]


def file_for(text: str) -> str:
    """Returns the file of the font that has most of a text's letters, the first of equals: Pillow
    takes one alone.
    """
    lacking, file = min(
        ((_lacking(set(text), had), file) for _, file, had in _installed_fonts()),
        key=lambda one: len(one[0]),
    )
    _tell(lacking)
    return file


@functools.cache
def _installed_fonts() -> list[tuple[str, str, frozenset[int]]]:
    """The machine's: family, file, the letters that it has."""
    known = {font.name for font in font_manager.fontManager.ttflist}
    files = {name: font_manager.findfont(name) for name in _FAMILIES if name in known}
    return [
        (name, file, frozenset(font_manager.get_font(file).get_charmap()))
        for name, file in files.items()
    ]


def _lacking(letters: set[str], had: frozenset[int]) -> set[str]:
    return {letter for letter in letters if not letter.isspace() and ord(letter) not in had}


def _tell(lacking: set[str]) -> None:
    if lacking and not _told:  # once is enough
        _told.append(min(lacking))
        found = f"the fonts of this machine lack the letter {printable(_told[0])} (U+{ord(_told[0]):04X})"
        print(f"{found}: a box is drawn; install Noto Sans CJK, say", file=sys.stderr)
