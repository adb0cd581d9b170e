"""metrics.jsonl, read and drawn."""

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from errors import Allowance, open_file, reading
from settings.plain import parsed_json
from training.results import LARGEST
from utils import writing_whole

_TIME = 50e-6  # seconds of a core that a record may take
# what a line of metrics.jsonl has, besides its numbers
_RECORD = {"split": str, "epoch": int, "step": int}


def records(metrics: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line of metrics.jsonl that is a record, with the record: a crash leaves half a
    one.

    Raises:
        InputError: it can't be read, or takes more than ``Allowance``'s time and 50 us for each
            record.
    """
    with reading(metrics, "a run's records", "; move it away"), open_file(metrics) as file:
        allowance = Allowance(os.fstat(file.fileno()).st_size)
        for line in file:
            allowance.take(0)  # of time alone: a line is parsed in a memory of its own
            with contextlib.suppress(ValueError, RecursionError):
                record = parsed_json(line, finite=False)
                if type(record) is dict and all(
                    type(record.get(key)) is kind for key, kind in _RECORD.items()
                ):
                    allowance.until += _TIME
                    yield line.decode().rstrip() + "\n", record


_COLOURS = {"train": "C0", "val": "C1", "ema": "C2"}
Points = tuple[array, array]  # steps, values: [n] each


def points(
    metrics: Path, splits: Sequence[str], keys: Sequence[str]
) -> dict[str, dict[str, Points]]:
    """Returns what metrics.jsonl holds of these keys, by split and key; nothing of what isn't
    there.

    Raises:
        InputError: it can't be read.
    """
    found: dict[str, dict[str, Points]] = {}
    for _, record in records(metrics):
        for key in keys if record["split"] in splits else ():
            if (
                isinstance(value := record.get(key), int | float)
                and max(abs(value), record["step"]) < LARGEST
            ):
                steps, values = found.setdefault(record["split"], {}).setdefault(
                    key, (array("d"), array("d"))
                )
                steps.append(record["step"])
                values.append(value)
    return found


def draw(
    axis: Any,
    curves: dict[str, dict[str, Points]],
    key: str,
    label: str,
    prefix: str = "",
    **how: Any,
) -> None:
    """Draws the splits' values of one key over the steps; a split's name follows ``prefix`` in the
    legend.
    """
    for split, own in curves.items():
        if key in own:
            marker = "." if split != "train" or len(own[key][0]) == 1 else None
            axis.plot(
                *own[key],
                label=f"{prefix}{split}",
                marker=marker,
                **{"color": _COLOURS.get(split), **how},
            )
    axis.set_ylabel(label)
    axis.ticklabel_format(useOffset=False, axis="y")
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # no step 1.5
    axis.grid(alpha=0.3)


def plot_curves(metrics: Path, picture: Path, curves: dict[str, str]) -> None:
    """Draws values over steps from metrics.jsonl into a PNG; ``curves`` gives the axis' label of
    each.
    """
    # takes a third of a second to import, once, at a run's end
    from training.pages.plotting import Figure, figure_png

    found = points(metrics, ("train", "val", "ema"), tuple(curves))
    rows = len(curves)
    figure = Figure((8, 3 * rows))
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
    # In inches: 1.1 and 0.2 beside, 0.5 below, 0.3 above. Matplotlib's own layout takes as long as
    # the drawing.
    figure.subplots_adjust(
        1.1 / 8, 0.5 / (3 * rows), 1 - 0.2 / 8, 1 - 0.3 / (3 * rows), hspace=0.12
    )
    for axis, (key, label) in zip(axes[:, 0], curves.items(), strict=True):
        draw(axis, found, key, label)
        if axis.lines:
            axis.legend()
    axes[-1, 0].set_xlabel("step")
    with writing_whole(picture, "wb") as file:
        file.write(figure_png(figure, dpi=120))
