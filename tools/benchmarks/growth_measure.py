"""The subjects of ``growth``: work whose size can be chosen, so that its cost can be compared
between sizes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Cost(NamedTuple):
    """The cost of a subject, which the measured function may return if its own cost isn't the one
    to measure. An example is the cost of a rank that it started.

    Args:
        seconds: the elapsed time.
        memory: MB; None: the rise of the peak memory while the function runs.
        busy: CPU seconds; None: those of this process.
    """

    seconds: float
    memory: float | None = None
    busy: float | None = None


class Growth(NamedTuple):
    """Work whose cost is measured at growing sizes.

    Args:
        unit: what ``sizes`` counts, such as "images".
        sizes: the sizes of a full measurement, in rising order.
        prepare: a function of a size and an empty folder. It makes the inputs there, and returns
            the
            function to measure.
        expected: the expected exponent of the times: 1 if they grow as the size does, 0 if they
            stay
            the same.
        quick: sizes in rising order that take about a second, for tests. They need not show the
            exponent.
        memory: the expected exponent of the memory; None: the same.
        needs: the name of an optional package without which this can't be measured; "": none.
    """

    unit: str
    sizes: tuple[int, ...]
    prepare: Callable[[int, Path], Callable[[], object]]
    expected: float
    quick: tuple[int, ...]
    memory: float | None = None
    needs: str = ""
