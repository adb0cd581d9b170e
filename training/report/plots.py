"""The plots of a report: curves, confusions, calibration."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from training.curves import Points, draw
from training.pages.names import shorten
from training.pages.plotting import figure, figure_png, legend_name
from training.report.statistics import BINS, Calibration

_BLUE = "#3465a4"
_ORANGE = "#d9822b"
# Inches of a plot of curves, whose letters can still be read on a telephone.
_WIDTH = 5.4
_HEIGHT = 3.2


def curve(
    runs: Mapping[str, Mapping[str, dict[str, Points]]], key: str, label: str
) -> bytes | None:
    """Returns a PNG of the values of one key over the steps, or None if there are no values.

    Each run has a colour of its own. The plot of a single run has a colour for each split, and
    doesn't show the run's name.

    Args:
        runs: curves by split and key, by the names of the runs.
        label: of the y-axis.
    """
    if not any(key in by_key for curves in runs.values() for by_key in curves.values()):
        return None
    drawn = figure(_WIDTH, _HEIGHT)
    axis = drawn.add_subplot()
    for place, (name, curves) in enumerate(runs.items()):
        if len(runs) == 1:
            draw(axis, dict(curves), key, label)
            continue
        styles: dict[str, dict[str, Any]] = {"train": {}, "val": {}, "ema": {"linestyle": "--"}}
        if key in curves.get("val", {}):
            # The training curve stays in the background.
            styles["train"] = {"alpha": 0.3, "linewidth": 1}
        prefix = f"{legend_name(name)} "
        for split, style in styles.items():
            one_split = {split: curves[split]} if split in curves else {}
            draw(axis, one_split, key, label, prefix, color=f"C{place % 10}", **style)
    axis.legend(fontsize=7 if len(runs) > 1 else 9)
    axis.set_xlabel("step")
    return figure_png(drawn)


def confusion(
    matrix: np.ndarray, names: Sequence[str], whole: bool, in_percent: bool = False
) -> bytes:
    """Returns a PNG of a confusion matrix.

    A colour is the share of a label's images, so that classes of few images can be seen, too.

    Args:
        matrix: [n, n] numbers of images or pixels, whose rows are labels.
        names: of the n classes.
        whole: whether these are all classes.
        in_percent: whether cells show the share in percent, where it is 1 % or more.
    """
    count = len(matrix)
    side = min(9.0, 3.2 + 0.32 * count)
    drawn = figure(side, side)
    axis = drawn.add_subplot()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = max(4.0, min(9.0, 180 / max(count, 1)))
    for row, column in zip(*np.nonzero(matrix), strict=True):
        colour = "white" if shares[row, column] > 0.5 else "black"
        number = f"{matrix[row, column]:,}"
        if in_percent:
            number = f"{100 * shares[row, column]:.0f}"
            if shares[row, column] < 0.01:
                continue
        # Long numbers have smaller letters, to stay within their cell.
        style = {"ha": "center", "va": "center", "fontsize": size * min(1, 4 / len(number))}
        axis.text(column, row, number, color=colour, **style)
    short_names = [shorten(name, 18) for name in names]
    axis.set_xticks(range(count), short_names, rotation=90, fontsize=size)
    axis.set_yticks(range(count), short_names, fontsize=size)
    axis.set_xlabel("predicted" if whole else f"predicted, of the {count} most confused classes")
    axis.set_ylabel("label")
    return figure_png(drawn)


def reliability(calibration: Calibration) -> bytes:
    """Returns a PNG of a reliability diagram.

    It shows the share of right predictions over their probability, and the number of images.
    """
    drawn = figure(_WIDTH, 4.6)
    above, below = drawn.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    centres = (np.arange(BINS) + 0.5) / BINS
    filled = calibration.images > 0
    right = calibration.right[filled]
    mean = calibration.probability[filled]
    width = 0.92 / BINS
    above.bar(centres[filled], right, width, color=_BLUE, label="accuracy")
    above.plot(mean, right, ".", color=_ORANGE, label="at the mean probability of the bin")
    above.plot(
        [0, 1], [0, 1], color="#666", linewidth=1, linestyle="--", label="perfect calibration"
    )
    above.set(ylim=(0, 1.02), xlim=(0, 1), ylabel="right")
    above.legend(fontsize=8, loc="upper left")
    below.bar(centres, calibration.images, width, color="#888")
    below.set(xlabel="probability of the predicted class", ylabel="images")
    return figure_png(drawn)
