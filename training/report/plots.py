"""The pictures of a report: curves, confusions, calibration."""

from collections.abc import Mapping, Sequence

import numpy as np

from training.curves import Points, draw
from training.pages.plotting import figure, figure_png, legend_name, shorten
from training.report.statistics import BINS, Calibration

_BLUE = "#3465a4"
_ORANGE = "#d9822b"
# inches of a curve: on a telephone its letters are still read
_WIDTH = 5.4
_HEIGHT = 3.2


def curve(
    runs: Mapping[str, Mapping[str, dict[str, Points]]], key: str, label: str
) -> bytes | None:
    """Returns the values of one key over the steps, of one run or of several, a colour each; None:
    nobody has any.

    Args:
        runs: curves by the runs' names; of one run the splits have colours, and its name isn't
            shown.
    """
    if not any(key in own for curves in runs.values() for own in curves.values()):
        return None
    drawn = figure(_WIDTH, _HEIGHT)
    axis = drawn.add_subplot()
    for place, (name, curves) in enumerate(runs.items()):
        if len(runs) == 1:
            draw(axis, dict(curves), key, label)
            continue
        beside = {"alpha": 0.3, "linewidth": 1} if key in curves.get("val", {}) else {}
        for split, how in (("train", beside), ("val", {}), ("ema", {"linestyle": "--"})):
            own = {split: curves[split]} if split in curves else {}
            draw(axis, own, key, label, f"{legend_name(name)} ", color=f"C{place % 10}", **how)
    axis.legend(fontsize=7 if len(runs) > 1 else 9)
    axis.set_xlabel("step")
    return figure_png(drawn)


def confusion(matrix: np.ndarray, names: Sequence[str], whole: bool) -> bytes:
    """Returns a picture of the confusions [n, n] between some classes, or between all (``whole``).

    A colour is the share of a label's images here: so a class of few images can be seen.
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
        told = f"{matrix[row, column]:,}"
        axis.text(
            column,
            row,
            told,
            ha="center",
            va="center",
            color=colour,
            fontsize=size * min(1, 4 / len(told)),
        )
    told = [shorten(name, 18) for name in names]
    axis.set_xticks(range(count), told, rotation=90, fontsize=size)
    axis.set_yticks(range(count), told, fontsize=size)
    axis.set_xlabel(
        "predicted" if whole else f"predicted, of the {count} classes that are confused most often"
    )
    axis.set_ylabel("label")
    return figure_png(drawn)


def reliability(found: Calibration) -> bytes:
    """Returns a reliability diagram: the share of right answers over their probability, and how
    many there are.
    """
    drawn = figure(_WIDTH, 4.6)
    above, below = drawn.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    centres = (np.arange(BINS) + 0.5) / BINS
    there = found.images > 0
    above.bar(
        centres[there], found.right[there], 0.92 / BINS, color=_BLUE, label="share of right answers"
    )
    above.plot(
        found.probability[there],
        found.right[there],
        ".",
        color=_ORANGE,
        label="at their mean probability",
    )
    above.plot([0, 1], [0, 1], color="#666", linewidth=1, linestyle="--", label="as it should be")
    above.set(ylim=(0, 1.02), xlim=(0, 1), ylabel="right")
    above.legend(fontsize=8, loc="upper left")
    below.bar(centres, found.images, 0.92 / BINS, color="#888")
    below.set(xlabel="probability of the predicted class", ylabel="images")
    return figure_png(drawn)
