"""Draws docs/accuracy.svg: the accuracy of timm's weights (golden/published.json) against the
number of parameters.

PYTHONPATH=.:tests python tests/support/accuracy_picture.py
"""

import colorsys
import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")  # places are known in pixels; the picture is saved as SVG
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter
from matplotlib.transforms import Bbox

from config import model_files
from tools.list_models import TABLE

TESTS = Path(__file__).resolve().parents[1]
PUBLISHED = json.loads((TESTS / "golden" / "published.json").read_text(encoding="utf-8"))
PICTURE = TESTS.parent / "docs" / "accuracy.svg"
# Parts of tags of weights that were trained on more images than ImageNet-1k's.
MORE_IMAGES = r"in2[12]k|in12k|laion|openai|ig1b|m30m|m38m|merged|clip|webli|swag|seer"


def families() -> dict[str, list[tuple[float, float, bool]]]:
    """Returns (millions of parameters, acc1, whether the weights saw more images) of each family's
    models.
    """
    costs = json.loads(TABLE.read_text(encoding="utf-8"))
    found: dict[str, list[tuple[float, float, bool]]] = {}
    for file in model_files():
        if file.stem in PUBLISHED:
            tag, _, accuracy = PUBLISHED[file.stem]
            point = (
                costs[file.stem]["parameters"] / 1e6,
                accuracy,
                bool(re.search(MORE_IMAGES, tag)),
            )
            found.setdefault(file.parent.name, []).append(point)
    return found


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points that no smaller one surpasses."""
    best: list[tuple[float, float]] = []
    for size, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or accuracy > best[-1][1]:
            best.append((size, accuracy))
    return best


def label(axes: Axes, lines: dict[str, list[tuple[float, float]]], colors: dict[str, Any]) -> None:
    """Names each line at one of its points, where the name covers neither a point nor a name."""
    to_pixels = axes.transData.transform
    scale = axes.figure.dpi / 72
    dots = [
        Bbox.from_extents(x - 4, y - 4, x + 4, y + 4)
        for points in lines.values()
        for x, y in to_pixels(dense(frontier(points)))
    ]
    ways = [
        (round(far * math.cos(turn)), round(far * math.sin(turn)))
        for far in (12, 20, 30, 42, 56, 74, 95, 120, 150)
        for turn in (0.5, 1.2, 0, 2, -0.5, 2.6, math.pi, -1.2, -2, -2.6)
    ]
    taken: list[Bbox] = []
    for name, points in sorted(lines.items(), key=lambda item: -max(p[1] for p in item[1])):
        # bold letters of 11 points
        width, height = 7.4 * len(name) * scale + 6, 15 * scale
        found = []
        for rank, place in enumerate(reversed(frontier(points))):
            for way, (right, up) in enumerate(ways):
                x, y = to_pixels(place) + np.multiply((right, up), scale)
                side = "left" if right > 3 else "right" if right < -3 else "center"
                x -= {"left": 0, "right": width, "center": width / 2}[side]
                box = Bbox.from_extents(x, y - height / 2, x + width, y + height / 2)
                covered = 50 * box.count_overlaps(taken) + 3 * box.count_overlaps(dots)
                outside = not all(axes.bbox.contains(*corner) for corner in (box.p0, box.p1))
                cost = covered + 1000 * outside + way / 8 + rank / 2
                found.append((cost, place, (right, up), side, box))
        _, place, offset, side, box = min(found, key=lambda one: one[0])
        taken.append(box)
        axes.annotate(
            name, place, offset, textcoords="offset points", color=colors[name], ha=side, va="center",
            fontweight="bold", arrowprops={"arrowstyle": "-", "lw": 0.7, "color": colors[name], "shrinkA": 0},
        )  # fmt: skip


def dense(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns points along the lines between the points of a logarithmic axis."""
    found = points[:1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        for step in range(1, 13):
            found.append((x0 * (x1 / x0) ** (step / 12), y0 + (y1 - y0) * step / 12))
    return found


def draw() -> None:
    """Writes the picture, with a panel for ImageNet-1k alone and one for more images."""
    plt.rcParams |= {"svg.hashsalt": "accuracy", "font.size": 11}
    figure, panels = plt.subplots(2, 1, figsize=(11, 15), layout="constrained", facecolor="white")
    found = families()
    colors = {}
    for number, family in enumerate(sorted(found)):
        # Steps of the golden ratio give neighbours very different hues.
        colors[family] = colorsys.hls_to_rgb(number * 0.618 % 1, 0.27 + 0.1 * (number % 2), 0.85)
    titles = ("Trained on ImageNet-1k alone", "Pre-trained on more images")
    for axes, more, title in zip(panels, (False, True), titles, strict=True):
        lines = {
            family: [point[:2] for point in points if point[2] is more]
            for family, points in found.items()
        }
        lines = {family: points for family, points in lines.items() if points}
        for family, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o", color=colors[family], ms=2.5, alpha=0.3)
            axes.plot(
                *zip(*frontier(points), strict=True), "o-", color=colors[family], ms=4, lw=1.2
            )
        axes.set(xscale="log", title=title, xlabel="parameters (millions)", ylabel="acc1 (%)")
        low = min(accuracy for points in lines.values() for _, accuracy in frontier(points))
        axes.set_ylim(max(low - 0.5, 73 if more else 68), None)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(3, 1)))
        axes.grid(which="both", alpha=0.25)
        axes.set_xlim(None, axes.get_xlim()[1] * 1.5)
        figure.canvas.draw()
        label(axes, lines, colors)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    draw()
