"""Figures as PNG files, which are the same bytes each time, and strangers' texts in them."""

import io
import unicodedata
import warnings
from typing import Any

import training.pages.plain_matplotlib  # noqa: F401

# isort: split
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter

from errors import printable
from training.pages.fonts import families


def figure(width: float, height: float) -> Figure:
    """Returns an empty figure, sizes in inches; it needs no display, and no other thread sees it."""
    return Figure((width, height), layout="constrained")


def figure_png(drawn: Figure, dpi: int = 110) -> bytes:
    """Returns a figure as a PNG file. "$" begins no formula in it: names of files, classes and runs
    may have one.
    """
    file = io.BytesIO()
    texts: list[Any] = drawn.findobj(Text)
    names = families(text.get_text() for text in texts)
    for text in texts:
        text.set_fontfamily(names)
        text.set_parse_math(False)
    # The settings are for labels of ticks that are made as it is drawn.
    with warnings.catch_warnings(), rc_context({"text.parse_math": False}):
        warnings.simplefilter("ignore")  # letters that the font lacks become boxes
        drawn.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def set_log_scale(axis: Any) -> None:
    """Makes an x-axis logarithmic. Matplotlib's own labels of such an axis are formulas."""
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    # where there are less than two of the others
    axis.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))


def legend_name(text: str) -> str:
    """Returns a stranger's name for a legend: shortened, and shown even where it begins with "_"."""
    return f" {shorten(text)}" if text.startswith("_") else shorten(text)


def shorten(text: str, most: int = 24) -> str:
    """Returns a stranger's text, and of one longer than ``most`` letters both ends; wide letters
    count twice.
    """
    text = printable(text, len(text))
    most = (
        most
        * len(text)
        // max(1, sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text))
    )
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 + 3 :]}"
