"""Fonts for the names of files and classes.

Letters are drawn in DejaVu Sans, or in a font of this machine that has letters which it lacks.
"""

import functools
import sys
from collections.abc import Iterable
from typing import NamedTuple

import training.pages.plain_matplotlib  # noqa: F401

# isort: split
from matplotlib import font_manager

from errors import printable

# DejaVu Sans comes with Matplotlib and has most alphabets. The others have Chinese, Japanese or
# Korean letters.
_FAMILIES = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Noto Sans JP",
    "Noto Sans KR",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "SimHei",
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Yu Gothic",
    "Malgun Gothic",
    "Arial Unicode MS",
)
# The letter of the warning, once it was printed.
_warned: list[str] = []


class _Font(NamedTuple):
    """A font of this machine. ``characters``: the code points that it has."""

    family: str
    file: str
    characters: frozenset[int]

    def missing(self, letters: set[str]) -> set[str]:
        """Returns the letters that the font lacks."""
        return {
            letter
            for letter in letters
            if not letter.isspace() and ord(letter) not in self.characters
        }


def families(texts: Iterable[str]) -> list[str]:
    """Returns the font families for Matplotlib, which takes a letter from the first that has it."""
    letters = set("".join(texts))
    fonts = _installed_fonts()
    _warn(set.intersection(*(font.missing(letters) for font in fonts)))
    return [font.family for font in fonts]


def file_for(text: str) -> str:
    """Returns the file of the font that has most letters of a text, for Pillow, which takes one."""
    letters = set(text)
    font = min(_installed_fonts(), key=lambda font: len(font.missing(letters)))
    _warn(font.missing(letters))
    return font.file


@functools.cache
def _installed_fonts() -> list[_Font]:
    """Returns the fonts of this machine, in the order of _FAMILIES."""
    known = {font.name for font in font_manager.fontManager.ttflist}
    files = {name: font_manager.findfont(name) for name in _FAMILIES if name in known}
    return [
        _Font(name, file, frozenset(font_manager.get_font(file).get_charmap()))
        for name, file in files.items()
    ]


def _warn(missing: set[str]) -> None:
    """Prints a warning about missing letters, once in a process."""
    if missing and not _warned:
        letter = min(missing)
        _warned.append(letter)
        print(
            f"the fonts of this machine lack the letter {printable(letter)} (U+{ord(letter):04X}):"
            " a box is drawn instead; install a font such as Noto Sans CJK",
            file=sys.stderr,
        )
