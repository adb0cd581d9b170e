"""Steps whose loss isn't finite, or is out of all proportion to those before.

A run names them in its log and in bad_steps.json. ``tools/replay.py`` repeats one of them from the
newest checkpoint before it, which is kept for that (``checkpoint.kept``). The repetition is as exact
as a resumed run. The step's batch is loaded once more and saved, to see later whether the data has
changed.
"""

import collections
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from errors import Unreadable, reading
from settings.plain import parsed_json, whole_file

FILE = "bad_steps.json"
# The folder of the batches of these steps, and of the checkpoints that are kept for them.
FOLDER = "bad_steps"
# The most steps that a run records.
MOST = 3
_KINDS = ["not finite", "outlier"]
# The most bytes of the file.
_LONGEST = 10_000


def batch_file(run: Path, step: int, rank: int) -> Path:
    """Returns the file with a rank's batch of a step."""
    return run / FOLDER / f"step_{step}_rank{rank}.npz"


class LossHistory:
    """The losses of a rank's latest steps, which show that one is out of all proportion.

    That is a loss above OUTLYING times the median of the steps before it. The next one is noticed
    only after a loss has been below CALM times the median. The first LEAST losses of a process are
    not judged, and a checkpoint doesn't hold the history.
    """

    KEPT = 100
    LEAST = 50
    OUTLYING = 10.0
    CALM = 5.0

    def __init__(self) -> None:
        self.losses: collections.deque[float] = collections.deque(maxlen=self.KEPT)
        self.is_calm = True

    def first_outlier(self, losses: Iterable[tuple[int, float]]) -> int:
        """Adds losses; returns the number of the first step that is out of all proportion, or 0.

        Args:
            losses: the number of each step, from 1, and its mean loss.
        """
        first = 0
        for step, loss in losses:
            median = statistics.median(self.losses) if len(self.losses) >= self.LEAST else 0.0
            self.losses.append(loss)
            if median <= 0:
                continue
            if loss > self.OUTLYING * median and self.is_calm:
                first = first or step
                self.is_calm = False
            elif loss < self.CALM * median:
                self.is_calm = True
        return first


def read_bad_steps(run: Path) -> list[dict[str, Any]]:
    """Returns the steps that a run recorded in its folder, the oldest first; [] without the file.

    Each has "step", "epoch", "ranks" (the number of processes), and "kind": "not finite" or
    "outlier".

    Raises:
        InputError: the file has content that no run writes.
    """
    file = run / FILE
    if not file.exists():
        return []
    with reading(file, "a run's record of steps", "; remove it"):
        records = parsed_json(whole_file(file, _LONGEST))
        if not isinstance(records, list) or not all(map(_is_record, records)):
            raise Unreadable("not the list that a run writes")
    return records


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or record.get("kind") not in _KINDS:
        return False
    return all(
        type(record.get(name)) is int and 1 <= record[name] < 10**12
        for name in ("step", "epoch", "ranks")
    )
