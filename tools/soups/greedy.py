"""The greedy soup: which checkpoints of a model to average (Wortsman et al. 2022, arXiv:2203.05482,
algorithm 1).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Trial(NamedTuple):
    """A candidate that was tried.

    Attributes:
        candidate: its place among the candidates.
        own: the metric of its own weights.
        soup: that of the mean of the candidates that were kept before, and this one.
        kept: whether it stays in the mean.
    """

    candidate: int
    own: float
    soup: float
    kept: bool


def greedy_soup(
    metrics: Sequence[float], evaluate: Callable[[list[int]], float], lower: bool = False
) -> Iterator[Trial]:
    """Yields the trials, the best candidate first.

    The first one is kept. Another one is kept if the mean with it is at least as good as the mean
    without it. Equally good candidates are tried in the order in which they are given.

    Args:
        metrics: of each candidate's own weights, on images that none was trained on.
        evaluate: returns the metric of the mean of candidates, which are given by their places, in
            the order in which they were kept.
        lower: whether a lower metric is better, as of a loss.
    """
    sign = -1 if lower else 1
    order = sorted(range(len(metrics)), key=lambda place: -sign * metrics[place])
    kept: list[int] = []
    best = 0.0
    for place in order:
        soup = evaluate([*kept, place]) if kept else metrics[place]
        is_kept = not kept or sign * soup >= sign * best
        if is_kept:
            kept.append(place)
            best = soup
        yield Trial(place, metrics[place], soup, is_kept)
