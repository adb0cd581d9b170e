"""Sheets of panels in rows, as a PNG with the same bytes each time."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import training.pages.plain_matplotlib  # noqa: F401

# isort: split
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from training.pages.panels import Panel
from training.pages.plotting import figure_png

# A colour map from dark to bright, so that it can be read in grey and by the colour-blind.
COLOURS = "inferno"


def sheet(
    rows: Sequence[Sequence[Panel]], title: str, bar: str = "", columns: int = 7, side: float = 1.9
) -> bytes:
    """Returns a PNG of panels in rows.

    Args:
        rows: each begins on a new line. A row of more than ``columns`` panels takes several lines.
        bar: the label of the bar of colours; "": no bar.
        side: the side of a panel in inches.
    """
    # Lines of about the same length, instead of a last one with a few panels.
    columns = max(math.ceil(len(row) / math.ceil(len(row) / columns)) for row in rows)
    lines = [row[start : start + columns] for row in rows for start in range(0, len(row), columns)]
    width = max(columns * side, 4.5)
    wrapped_title = textwrap.fill(title, int(13 * width))
    wrapped_label = textwrap.fill(bar, int(15 * width))

    # Heights in inches: of each line's titles and images, and of what is above and below them.
    title_heights = [
        0.1 + 0.15 * max(panel.title.count("\n") + 1 for panel in line) for line in lines
    ]
    image_heights = [
        side * min(2, max(panel.image.shape[0] / panel.image.shape[1] for panel in line))
        for line in lines
    ]
    above = 0.15 + 0.18 * (wrapped_title.count("\n") + 1)
    below = 0.6 + 0.15 * wrapped_label.count("\n") if bar else 0.1
    height = above + sum(title_heights) + sum(image_heights) + below

    # Matplotlib's places are shares of the figure's width and height.
    drawn = Figure((width, height))
    drawn.text(0.5, 1 - 0.1 / height, wrapped_title, fontsize=10, ha="center", va="top")
    bottom = height - above
    for line, title_height, image_height in zip(lines, title_heights, image_heights, strict=True):
        bottom -= title_height + image_height
        for number, panel in enumerate(line):
            left = (width - columns * side) / 2 + number * side
            place = (
                (left + 0.05) / width,
                bottom / height,
                (side - 0.1) / width,
                image_height / height,
            )
            _draw(panel, drawn.add_axes(place, anchor="N"))
    if bar:
        place = (0.5 - 1.2 / width, (below - 0.2) / height, 2.4 / width, 0.1 / height)
        colorbar = drawn.colorbar(
            ScalarMappable(cmap=COLOURS),
            cax=drawn.add_axes(place),
            orientation="horizontal",
            ticks=[0, 1],
        )
        colorbar.ax.set_xticklabels(["0", "most"], fontsize=8)
        colorbar.set_label(wrapped_label, fontsize=8, labelpad=1)
    return figure_png(drawn)


def _draw(panel: Panel, axis: Any) -> None:
    axis.imshow(panel.image, interpolation="nearest")
    axis.set_title(panel.title, fontsize=8)
    axis.axis("on" if panel.frame else "off")
    axis.set(xticks=[], yticks=[])
    for edge in axis.spines.values():
        edge.set(color=panel.frame or "none", linewidth=3)
