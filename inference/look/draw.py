"""Pictures: maps over images, sheets of panels, PNG files that are the same bytes each time."""

import io
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from PIL import Image

LEAST = 224  # pixels along an image's shorter side, so that one sees something
COLOURS = "inferno"  # dark to bright: read in grey and by the colour-blind, too
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


class Panel(NamedTuple):
    """An image of a sheet, [H, W, 3] uint8, and the lines above it. ``frame``: a colour."""

    title: str
    image: np.ndarray
    frame: str = ""


def enlarged(pixels: np.ndarray) -> np.ndarray:
    """Returns an image [H, W] or [H, W, C] uint8 as [H', W', 3], each pixel repeated until LEAST is reached."""
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    times = max(1, math.ceil(LEAST / min(pixels.shape[:2])))
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3)).repeat(times, 0).repeat(times, 1)


def resized(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns a map [h, w] at another size, float32, bilinear."""
    image = Image.fromarray(values.astype(np.float32))
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def heat(base: np.ndarray, values: np.ndarray, box: Box | None = None, least: float = 0.0) -> np.ndarray:
    """Returns an image [H, W, 3] uint8 in grey with a map [h, w] over it, from 0 to its largest value.

    Args:
        box: where of the image the map lies; None: everywhere. The rest is darkened.
        least: the brightest colour is of this value, where none is larger.
    """
    left, top, right, bottom = (round(edge) for edge in box or (0, 0, base.shape[1], base.shape[0]))
    grey = base.mean(2, keepdims=True).repeat(3, 2) / 255
    drawn = grey / 3
    shares = resized(values, bottom - top, right - left) / max(float(values.max()), least, 1e-12)
    drawn[top:bottom, left:right] = 0.3 * grey[top:bottom, left:right] + 0.7 * coloured(shares)
    return (255 * drawn + 0.5).astype(np.uint8)


def coloured(shares: np.ndarray) -> np.ndarray:
    """Returns the colours of values from 0 to 1: [...] -> [..., 3]."""
    return matplotlib.colormaps[COLOURS](np.clip(shares, 0, 1))[..., :3]


def png(image: np.ndarray) -> bytes:
    """Returns an image [H, W, 3] uint8 as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def figure(width: float, height: float) -> Figure:
    """Returns an empty figure, sizes in inches; it needs no display, and no other thread sees it."""
    return Figure((width, height), layout="constrained")


def figure_png(drawn: Figure) -> bytes:
    """Returns a figure as a PNG file."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks become boxes
        drawn.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def titled(axis: Any, text: str, **how: Any) -> None:
    """Writes a title: "$" in a file's name begins no formula."""
    axis.set_title(text, parse_math=False, **how)


def sheet(rows: Sequence[Sequence[Panel]], title: str, bar: str = "", columns: int = 7, side: float = 1.9) -> bytes:
    """Returns a PNG of panels: each row begins on a new line, and goes on in the next after ``columns`` at most.

    Args:
        bar: what the colours of maps say; "": there are none.
        side: of a panel, in inches.
    """
    columns = max(math.ceil(len(row) / math.ceil(len(row) / columns)) for row in rows)  # lines of one length
    lines = [row[start : start + columns] for row in rows for start in range(0, len(row), columns)]
    text = max(panel.title.count("\n") + 1 for row in rows for panel in row)
    high = side * min(2, max(panel.image.shape[0] / panel.image.shape[1] for row in rows for panel in row))
    drawn = figure(max(columns * side, 4.5), len(lines) * (high + 0.17 * text) + 0.4 + 0.5 * bool(bar))
    axes = drawn.subplots(len(lines), columns, squeeze=False)
    for line, places in zip(lines, axes, strict=True):
        for axis in places:
            axis.axis("off")
        for panel, axis in zip(line, places, strict=False):
            axis.imshow(panel.image, interpolation="nearest")
            titled(axis, panel.title, fontsize=8)
            if panel.frame:
                axis.axis("on")
                axis.set(xticks=[], yticks=[])
                for edge in axis.spines.values():
                    edge.set(color=panel.frame, linewidth=3)
    drawn.suptitle(title, fontsize=10, parse_math=False)
    if bar:
        scale = ScalarMappable(cmap=COLOURS)
        made = drawn.colorbar(scale, ax=axes, location="bottom", shrink=min(0.8, 2 / columns), aspect=25, ticks=[0, 1])
        made.ax.set_xticklabels(["0", "most"], fontsize=8)
        made.set_label(bar, fontsize=8)
    return figure_png(drawn)
