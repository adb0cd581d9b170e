"""Matplotlib figures as PNG files.

The same figure gives the same bytes each time. Names in it, which may be anything, are shown as
they are.
"""

import io
import warnings
from typing import Any

import training.pages.plain_matplotlib  # noqa: F401

# isort: split
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter

from training.pages.fonts import families
from training.pages.names import shorten


def figure(width: float, height: float) -> Figure:
    """Returns an empty figure of a size in inches.

    It needs no display, and isn't part of pyplot's global state, so threads can draw.
    """
    return Figure((width, height), layout="constrained")


def figure_png(drawn: Figure, dpi: int = 110) -> bytes:
    """Returns the content of a PNG file of a figure.

    A "$" begins no formula, because names of files, classes and runs may contain one.
    """
    file = io.BytesIO()
    texts: list[Any] = drawn.findobj(Text)
    names = families(text.get_text() for text in texts)
    for text in texts:
        text.set_fontfamily(names)
        text.set_parse_math(False)
    # The setting applies to tick labels, which are only made while the figure is drawn.
    with warnings.catch_warnings(), rc_context({"text.parse_math": False}):
        # Matplotlib warns of letters that the fonts lack. ``families`` has said so already.
        warnings.simplefilter("ignore")
        drawn.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def set_log_scale(axis: Any) -> None:
    """Makes an x-axis logarithmic, with plain numbers as labels: Matplotlib's own are formulas."""
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    # Minor ticks have labels where an axis has fewer than two major ones.
    axis.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))


def legend_name(text: str) -> str:
    """Returns a name for a legend, shortened.

    Matplotlib hides names that begin with "_", so these get a blank before it.
    """
    return f" {shorten(text)}" if text.startswith("_") else shorten(text)
