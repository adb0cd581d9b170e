"""The curves of a run, from its metrics.jsonl, which is read once and followed as it grows."""

import contextlib
import os
import time
from array import array
from typing import Any

from errors import Allowance, Unreadable
from inference.watch.files import Files, Parts
from settings.plain import is_whole, parsed_json
from training.results import METRIC_TITLES, is_number

FILE = "metrics.jsonl"
# The values that are drawn, and the titles of their charts.
TITLES = {
    "loss": "loss",
    **METRIC_TITLES,
    "lr": "learning rate",
    "images_per_s": "images per second",
}
SPLITS = ("train", "val", "ema")
# A curve has between half as many points and so many, however long the run is.
MOST_POINTS = 1000
# Bytes of the longest record, and those that show whether what was read is still in the file.
_LONGEST = 1 << 16
_COMPARED = 1 << 8


class Curve:
    """The values of a key over the steps.

    When it has MOST_POINTS, each two neighbours become one point with their mean. From then on, a
    point stands for twice as many records.
    """

    def __init__(self) -> None:
        self.steps = array("d")
        self.values = array("d")
        # Records that a point stands for, and those of the point that isn't complete.
        self.records = 1
        self.sum = 0.0
        self.count = 0

    def add(self, step: int, value: float) -> None:
        """Adds a record."""
        if not self.count:
            self.steps.append(step)
            self.values.append(value)
        self.sum += value
        self.count += 1
        self.steps[-1] = step
        self.values[-1] = self.sum / self.count
        if self.count < self.records:
            return
        self.sum = 0.0
        self.count = 0
        if len(self.values) >= MOST_POINTS:
            pairs = zip(self.values[::2], self.values[1::2], strict=True)
            self.values = array("d", [(one + other) / 2 for one, other in pairs])
            self.steps = self.steps[1::2]
            self.records *= 2


class Curves:
    """The curves of a run.

    Attributes:
        by_split: by split and key.
        last: the newest number of each key, by split; "epoch" and "step" among them.
        best: of each key, the best value of the weights' evaluations and its epoch.
        unread: bytes of the file that haven't been read; 0 if they are half a record.
    """

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self.by_split: dict[str, dict[str, Curve]] = {}
        self.last: dict[str, dict[str, float]] = {}
        self.best: dict[str, tuple[float, int]] = {}
        self.unread = 0
        # How far the file was read, and the last bytes up to there.
        self._position = 0
        self._last = b""

    def follow(self, files: Files, parts: Parts, until: float) -> None:
        """Reads the records that were added, as long as ``time.monotonic()`` is below ``until``.

        A resumed run replaces the file by one without the records after its checkpoint, and a copy
        of a run may be renewed in place. Such a file is read from its beginning.
        """
        with contextlib.suppress(OSError), files.opened(parts, FILE) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(self._position - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._restart()
                file.seek(0)
            while time.monotonic() < until:
                line = file.readline(_LONGEST)
                # A crash may have left half a record, and a stranger a line without an end.
                if not line or (not line.endswith(b"\n") and len(line) < _LONGEST):
                    self.unread = 0
                    return
                self._position += len(line)
                self._last = line[-_COMPARED:]
                self._add(line)
            self.unread = max(0, size - self._position)

    def _add(self, line: bytes) -> None:
        try:
            record: Any = parsed_json(line, Allowance(_LONGEST), finite=False)
        except (ValueError, RecursionError, Unreadable):
            return
        if type(record) is not dict or record.get("split") not in SPLITS:
            return
        split = record["split"]
        if not (is_whole(record.get("step")) and is_whole(record.get("epoch"))):
            return
        last = self.last.setdefault(split, {})
        last["step"] = record["step"]
        last["epoch"] = record["epoch"]
        curves = self.by_split.setdefault(split, {})
        for key in TITLES:
            value: Any = record.get(key)
            if not is_number(value):
                continue
            last[key] = value
            curves.setdefault(key, Curve()).add(record["step"], value)
            if split == "val":
                best = self.best.get(key)
                sign = -1 if key == "loss" else 1
                if best is None or sign * value > sign * best[0]:
                    self.best[key] = (value, record["epoch"])

    def points(self) -> dict[str, dict[str, list[list[float]]]]:
        """Returns [steps, values] by key and split."""
        found: dict[str, dict[str, list[list[float]]]] = {}
        for key in TITLES:
            for split, curves in self.by_split.items():
                if key in curves:
                    curve = curves[key]
                    points = [curve.steps.tolist(), curve.values.tolist()]
                    found.setdefault(key, {})[split] = points
        return found
