"""What a subject of ``growth`` is: work of a size that can be chosen, whose cost is then compared
from size to size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Cost(NamedTuple):
    """What the measured function may return where its own time and memory aren't what is meant,
    such as a rank's.

    Args:
        seconds: instead of the time that the function takes.
        memory: MB, instead of what the peak memory rises by meanwhile; None: that.
        busy: CPU seconds, instead of what this process takes; None: that.
    """

    seconds: float
    memory: float | None = None
    busy: float | None = None


class Growth(NamedTuple):
    """Work whose cost is measured at growing sizes.

    Args:
        unit: what ``sizes`` count ("images", "points").
        sizes: growing, of a full measurement.
        prepare: takes a size and an empty folder, makes the inputs there, and returns what is then
            timed.
        expected: the exponent that it should have: 1 where the cost grows as the size does, 0 where
            it is flat.
        quick: growing sizes that take about a second, for tests; they need not show the exponent.
        memory: the exponent that its memory should have; None: the same.
        needs: a package that may not be installed, without which it isn't measured.
    """

    unit: str
    sizes: tuple[int, ...]
    prepare: Callable[[int, Path], Callable[[], object]]
    expected: float
    quick: tuple[int, ...]
    memory: float | None = None
    needs: str = ""
