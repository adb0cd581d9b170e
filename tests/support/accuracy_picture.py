"""Draws docs/accuracy.svg: the accuracy of timm's weights (golden/published.json) against the
number of parameters.

PYTHONPATH=.:tests python tests/support/accuracy_picture.py
"""

import colorsys
import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from config import model_files
from tools.list_models import TABLE

TESTS = Path(__file__).resolve().parents[1]
PUBLISHED = json.loads((TESTS / "golden" / "published.json").read_text(encoding="utf-8"))
PICTURE = TESTS.parent / "docs" / "accuracy.svg"
# Parts of tags of weights that were trained on more images than ImageNet-1k's.
MORE_IMAGES = r"in2[12]k|in12k|laion|openai|ig1b|m30m|m38m|merged|clip"


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


def draw() -> None:
    """Writes the picture, with a panel for ImageNet-1k alone and one for more images."""
    plt.rcParams |= {"svg.hashsalt": "accuracy", "font.size": 8}
    figure, panels = plt.subplots(1, 2, figsize=(11, 6), sharey=True, layout="constrained")
    for number, (family, points) in enumerate(sorted(families().items())):
        # Steps of the golden ratio give neighbours in the legend very different hues.
        hue = number * 0.618 % 1
        lightness = 0.3 + 0.15 * (number % 2)
        color = colorsys.hls_to_rgb(hue, lightness, 0.9)
        marker = "os^Dv"[number % 5]
        for panel, more in zip(panels, (False, True), strict=True):
            chosen = sorted(point[:2] for point in points if point[2] is more)
            if chosen:
                panel.plot(
                    *zip(*chosen, strict=True),
                    f"{marker}-",
                    color=color,
                    label=family,
                    lw=0.5,
                    ms=5,
                )
    for panel, title in zip(
        panels, ("ImageNet-1k alone", "pre-trained on more images"), strict=True
    ):
        panel.set(xscale="log", title=title, xlabel="parameters (millions)")
        panel.grid(alpha=0.3)
        panel.legend(loc="lower right", ncols=3)
    panels[0].set_ylabel("acc1 (%) of timm's weights on ImageNet-1k")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    draw()
