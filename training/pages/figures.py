"""Figures as PNG files, which are the same bytes each time, and strangers' texts in them."""

import io
import unicodedata
import warnings
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from errors import printable
from training.pages.fonts import families


def figure(width: float, height: float) -> Figure:
    """Returns an empty figure, sizes in inches; it needs no display, and no other thread sees it."""
    return Figure((width, height), layout="constrained")


def figure_png(drawn: Figure) -> bytes:
    """Returns a figure as a PNG file."""
    file = io.BytesIO()
    texts: list[Any] = drawn.findobj(Text)
    names = families(text.get_text() for text in texts)
    for text in texts:
        text.set_fontfamily(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks become boxes
        drawn.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def write_title(axis: Any, text: str, **how: Any) -> None:
    """Writes a title: "$" in a file's name begins no formula."""
    axis.set_title(text, parse_math=False, **how)


def shorten(text: str, most: int = 24) -> str:
    """Returns a stranger's text, and of one longer than ``most`` letters both ends; wide letters count twice."""
    text = printable(text, len(text))
    most = most * len(text) // max(1, sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text))
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 + 3 :]}"
