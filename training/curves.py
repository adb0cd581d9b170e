"""Reads a run's metrics.jsonl, and draws its curves."""

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from errors import Allowance, open_file, reading
from launch.files import writing_whole
from settings.plain import parsed_json
from training.results import LARGEST

# Seconds of a core that reading a record may take.
_RECORD_SECONDS = 50e-6
# The fields that every record has besides its numbers.
_RECORD_FIELDS = {"split": str, "epoch": int, "step": int}
_COLOURS = {"train": "C0", "val": "C1", "ema": "C2"}
# Steps and values, [n] each.
Points = tuple[array, array]


def records(metrics: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line of metrics.jsonl that holds a record, with the record.

    Other lines are skipped: a crash may leave half a record.

    Raises:
        InputError: the file can't be read, or takes longer than ``Allowance`` permits plus 50 us
            for each record.
    """
    with reading(metrics, "a run's records", "; move it away"), open_file(metrics) as file:
        allowance = Allowance(os.fstat(file.fileno()).st_size)
        for line in file:
            # Checks the time alone: the memory of a line is free again after it.
            allowance.take(0)
            with contextlib.suppress(ValueError, RecursionError):
                record = parsed_json(line, finite=False)
                if type(record) is dict and all(
                    type(record.get(field)) is kind for field, kind in _RECORD_FIELDS.items()
                ):
                    allowance.until += _RECORD_SECONDS
                    yield line.decode().rstrip() + "\n", record


def points(
    metrics: Path, splits: Sequence[str], keys: Sequence[str]
) -> dict[str, dict[str, Points]]:
    """Returns the points of metrics.jsonl by split and key.

    A split or key without a point isn't in the result. Values that can't be drawn are left out.

    Raises:
        InputError: the file can't be read.
    """
    curves: dict[str, dict[str, Points]] = {}
    for _, record in records(metrics):
        split = record["split"]
        step = record["step"]
        if split not in splits:
            continue
        for key in keys:
            value = record.get(key)
            if isinstance(value, int | float) and max(abs(value), step) < LARGEST:
                curve = curves.setdefault(split, {}).setdefault(key, (array("d"), array("d")))
                curve[0].append(step)
                curve[1].append(value)
    return curves


def draw(
    axis: Any,
    curves: dict[str, dict[str, Points]],
    key: str,
    label: str,
    prefix: str = "",
    **style: Any,
) -> None:
    """Draws the values of one key over the steps, a line for each split.

    Args:
        axis: Matplotlib's axes.
        curves: as ``points`` returns them.
        label: of the y-axis.
        prefix: precedes a split's name in the legend.
        style: arguments of Matplotlib's ``plot``.
    """
    for split, split_curves in curves.items():
        if key not in split_curves:
            continue
        steps, values = split_curves[key]
        # Evaluations are few, and a line of one point would be invisible.
        marker = "." if split != "train" or len(steps) == 1 else None
        options = {"color": _COLOURS.get(split), **style}
        axis.plot(steps, values, label=f"{prefix}{split}", marker=marker, **options)
    axis.set_ylabel(label)
    axis.ticklabel_format(useOffset=False, axis="y")
    # Ticks at whole steps.
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.grid(alpha=0.3)


def plot_curves(metrics: Path, picture: Path, curves: dict[str, str]) -> None:
    """Draws curves from metrics.jsonl into a PNG, one below the other.

    Args:
        metrics: the run's metrics.jsonl.
        picture: the file to write.
        curves: the keys to draw, each with the label of its y-axis.
    """
    # Matplotlib's import takes a third of a second, and is needed once, at a run's end.
    from training.pages.plotting import Figure, figure_png

    points_by_split = points(metrics, ("train", "val", "ema"), tuple(curves))
    rows = len(curves)
    figure = Figure((8, 3 * rows))
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
    # Margins in inches over the figure's size. Matplotlib's automatic layout takes as long as the
    # drawing itself.
    figure.subplots_adjust(
        left=1.1 / 8,
        right=1 - 0.2 / 8,
        bottom=0.5 / (3 * rows),
        top=1 - 0.3 / (3 * rows),
        hspace=0.12,
    )
    for axis, (key, label) in zip(axes[:, 0], curves.items(), strict=True):
        draw(axis, points_by_split, key, label)
        if axis.lines:
            axis.legend()
    axes[-1, 0].set_xlabel("step")
    with writing_whole(picture, "wb") as file:
        file.write(figure_png(figure, dpi=120))
