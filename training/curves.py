"""metrics.jsonl, read and drawn."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from errors import opened, reading
from utils import written_whole
from weights.plain import parsed_json

_RECORD = {"split": str, "epoch": int, "step": int}  # what a line of metrics.jsonl has, besides its numbers


def records(metrics: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line of metrics.jsonl that is a record, with the record: a crash leaves half a one."""
    with reading(metrics, "a run's records", "; move it away"), opened(metrics) as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                record = parsed_json(line, finite=False)
                if type(record) is dict and all(type(record.get(key)) is kind for key, kind in _RECORD.items()):
                    yield line.decode().rstrip() + "\n", record


def plot_curves(metrics: Path, picture: Path, curves: dict[str, str]) -> None:
    """Draws values over steps from metrics.jsonl into a PNG; ``curves`` gives the axis' label of each."""
    import matplotlib  # takes a second to import, once, at a run's end

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = [record for _, record in records(metrics)]
    size = (8, 3 * len(curves))
    figure, axes = plt.subplots(len(curves), 1, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for axis, (key, label) in zip(axes[:, 0], curves.items(), strict=True):
        for split in ("train", "val", "ema"):
            points = [(r["step"], r[key]) for r in found if r["split"] == split and isinstance(r.get(key), int | float)]
            if points:
                axis.plot(*zip(*points, strict=True), label=split, marker=None if split == "train" else ".")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[-1, 0].set_xlabel("step")
    with written_whole(picture, "wb") as file:
        figure.savefig(file, format="png", dpi=120)
    plt.close(figure)
