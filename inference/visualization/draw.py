"""Pictures: maps over images, sheets of panels, PNG files that are the same bytes each time."""

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import training.pages.plain_matplotlib  # noqa: F401

# isort: split
import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from PIL import Image

from loading.transforms import visible
from training.pages.figures import figure_png

LEAST = 224  # pixels along an image's shorter side, so that one sees something
LONGEST = 8 * LEAST  # pixels along its longer side, if it is enlarged
COLOURS = "inferno"  # dark to bright: read in grey and by the colour-blind, too
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


class Panel(NamedTuple):
    """An image of a sheet, [H, W, 3] uint8, and the lines above it. ``frame``: a colour."""

    title: str
    image: np.ndarray
    frame: str = ""


def enlarge(pixels: np.ndarray) -> np.ndarray:
    """Returns an image [H, W] or [H, W, C] as [H', W', 3] uint8, of floats what is ``visible`` of
    them. Each pixel is repeated until LEAST is reached, or the longer side would be beyond LONGEST.
    """
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    pixels = pixels if pixels.dtype == np.uint8 else visible(pixels)
    times = max(1, min(math.ceil(LEAST / min(pixels.shape[:2])), LONGEST // max(pixels.shape[:2])))
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3)).repeat(times, 0).repeat(times, 1)


def resize_map(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns a map [h, w] at another size, float32, bilinear."""
    image = Image.fromarray(values.astype(np.float32))
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def heat(
    base: np.ndarray, values: np.ndarray, box: Box | None = None, least: float = 0.0
) -> np.ndarray:
    """Returns an image [H, W, 3] uint8 in grey with a map [h, w] over it, from 0 to its largest
    value.

    Args:
        box: where of the image the map lies; None: everywhere. The rest is darkened.
        least: the brightest colour is of this value, where none is larger.
    """
    left, top, right, bottom = (round(edge) for edge in box or (0, 0, base.shape[1], base.shape[0]))
    grey = base.mean(2, keepdims=True).repeat(3, 2) / 255
    drawn = grey / 3
    shares = resize_map(values, bottom - top, right - left) / max(float(values.max()), least, 1e-12)
    drawn[top:bottom, left:right] = 0.3 * grey[top:bottom, left:right] + 0.7 * to_colours(shares)
    return (255 * drawn + 0.5).astype(np.uint8)


def to_colours(shares: np.ndarray) -> np.ndarray:
    """Returns the colours of values from 0 to 1: [...] -> [..., 3]."""
    return matplotlib.colormaps[COLOURS](np.clip(shares, 0, 1))[..., :3]


def png(image: np.ndarray) -> bytes:
    """Returns an image [H, W, 3] uint8 as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def sheet(
    rows: Sequence[Sequence[Panel]], title: str, bar: str = "", columns: int = 7, side: float = 1.9
) -> bytes:
    """Returns a PNG of panels: each row begins on a new line, and goes on in the next after
    ``columns`` at most.

    Args:
        bar: what the colours of maps say; "": there are none.
        side: of a panel, in inches.
    """
    # lines of one length
    columns = max(math.ceil(len(row) / math.ceil(len(row) / columns)) for row in rows)
    lines = [row[start : start + columns] for row in rows for start in range(0, len(row), columns)]
    width = max(columns * side, 4.5)
    words = textwrap.fill(title, int(13 * width))
    told = textwrap.fill(bar, int(15 * width))
    texts = [0.1 + 0.15 * max(panel.title.count("\n") + 1 for panel in line) for line in lines]
    highs = [
        side * min(2, max(panel.image.shape[0] / panel.image.shape[1] for panel in line))
        for line in lines
    ]
    above = 0.15 + 0.18 * (words.count("\n") + 1)
    below = 0.6 + 0.15 * told.count("\n") if bar else 0.1
    high = above + sum(texts) + sum(highs) + below
    drawn = Figure((width, high))
    drawn.text(0.5, 1 - 0.1 / high, words, fontsize=10, ha="center", va="top")
    bottom = high - above
    for line, text, own in zip(lines, texts, highs, strict=True):
        bottom -= text + own
        for place, panel in enumerate(line):
            left = (width - columns * side) / 2 + place * side
            place = ((left + 0.05) / width, bottom / high, (side - 0.1) / width, own / high)
            _draw(panel, drawn.add_axes(place, anchor="N"))
    if bar:
        axis = drawn.add_axes((0.5 - 1.2 / width, (below - 0.2) / high, 2.4 / width, 0.1 / high))
        made = drawn.colorbar(
            ScalarMappable(cmap=COLOURS), cax=axis, orientation="horizontal", ticks=[0, 1]
        )
        made.ax.set_xticklabels(["0", "most"], fontsize=8)
        made.set_label(told, fontsize=8, labelpad=1)
    return figure_png(drawn)


def _draw(panel: Panel, axis: Any) -> None:
    axis.imshow(panel.image, interpolation="nearest")
    axis.set_title(panel.title, fontsize=8)
    axis.axis("on" if panel.frame else "off")
    axis.set(xticks=[], yticks=[])
    for edge in axis.spines.values():
        edge.set(color=panel.frame or "none", linewidth=3)
