"""Of what is seen of the ranks, the cause is told, and not what followed from it."""

import math
import signal
import time

import pytest

from errors import Failure
from launch import progress
from launch.progress import COMPUTING, LOADING
from launch.verdict import GRACE, PATIENCE, START_UP, RankState, Verdict, how_it_ended, judge


def seen(place, age=0.0, step=7.0, doing=COMPUTING, **more):
    """A rank that was heard of ``age`` seconds ago."""
    return RankState(place, 40 + place, time=time.monotonic() - age, step=step, doing=doing, **more)


UNFORESEEN = Failure(1, "rank 0: Traceback", True)
FORESEEN = Failure(1, "rank 1: error: so", False)
ABORTED = {"gone": "was killed by SIGABRT"}
WAITING = "rank 1 (process 41) is waiting for data at step 7"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([{"failure": UNFORESEEN}, {"failure": FORESEEN}], "rank 1: error: so"),
        ([{"failure": UNFORESEEN}, {}], "rank 0: Traceback"),
        (
            [{"failure": UNFORESEEN}, {"gone": "was killed by SIGKILL"}],
            "error: rank 1 was killed by SIGKILL at step 7",
        ),
        (
            [{"failure": UNFORESEEN}, {"trouble": "sleeps"}],
            "error: rank 1 (process 41) sleeps at step 7, and",
        ),
        (
            [{"failure": UNFORESEEN}, {"doing": LOADING, "age": PATIENCE + 1}],
            f"error: {WAITING}, and the other ranks",
        ),
        ([{"failure": UNFORESEEN}, {"doing": LOADING, "age": PATIENCE - 1}], "rank 0: Traceback"),
        (
            [ABORTED | {"gone_at": -GRACE}, {}],
            "error: rank 0 aborted (SIGABRT) at step 7; see the end of log_0.txt",
        ),
        (
            [ABORTED | {"gone_at": -GRACE}, ABORTED | {"gone_at": -GRACE}],
            "error: ranks 0 and 1 aborted (SIGABRT) at step 7; see the end of log_0.txt and log_1.txt",
        ),
        ([ABORTED | {"gone_at": 1e9}, {}], None),  # a cause may turn up
        (
            [{"age": 61}, {"age": 61, "doing": LOADING}],
            f"error: no progress in 60 s (DIST.TIMEOUT): {WAITING}",
        ),
        ([{"age": 61}, {"age": 59, "doing": LOADING}], None),
        ([{"age": -math.inf}, {"age": 61}], None),  # ``progress.pause``
        (
            [{"gone": "was lost", "host": "far"}, {}],
            "error: rank 0 (process 40 on far) was lost at step 7",
        ),
    ],
)
def test_the_cause_is_named_and_not_what_followed_from_it(ranks, text):
    found = judge([seen(place, **given) for place, given in enumerate(ranks)], 0.0, 60.0)
    assert (found and found.text[: len(text)]) == text
    assert not found or found.lost == (found.text != FORESEEN.text)


@pytest.mark.parametrize("code", [143, -signal.SIGTERM])
def test_a_rank_that_was_stopped_is_why_its_peers_aborted(code):
    """One that ended itself with the status of a stop, or that the signal ended."""
    stopped = RankState(1, 41, gone=how_it_ended(code))
    fresh = [RankState(0, 40, gone="was killed by SIGABRT"), stopped]
    said = "stopped by SIGTERM before the first step; there is nothing to save"
    assert judge(fresh, 0.0, 60.0) == Verdict(143, said, lost=False)
    fresh[0].gone, fresh[0].failure = "", UNFORESEEN
    assert judge(fresh, 0.0, 60.0) == Verdict(143, said, lost=False)
    begun = seen(0, gone=how_it_ended(code))
    assert judge([begun], 0.0, 60.0) == Verdict(143, "stopped by SIGTERM at step 7", lost=False)


def test_other_ends_are_no_stops():
    assert how_it_ended(130) == how_it_ended(-signal.SIGINT) == "was stopped by SIGINT"
    assert how_it_ended(-signal.SIGKILL) == "was killed by SIGKILL (out of memory?)"
    assert (how_it_ended(1), how_it_ended(137)) == ("ended with status 1", "ended with status 137")


def test_a_start_may_take_longer_than_the_timeout():
    now = time.monotonic()
    both = [RankState(0, 40), seen(1, 100)]
    assert judge(both, now - START_UP + 1, 60.0) is None
    expected = f"error: no progress in {START_UP:g} s (DIST.TIMEOUT): rank 0 (process 40) is starting at step 0"
    assert judge([RankState(0, 40), RankState(1, 41, step=1.0)], now - START_UP, 60.0) == Verdict(
        1, expected, True
    )
    assert judge([RankState(0, 40)], now - START_UP, 60.0).text == expected  # alone


def test_a_pause_lasts_until_the_next_beat(monkeypatch):
    beats = [0.0] * progress.FIELDS
    progress.pause()  # of a process that isn't watched it is nothing
    monkeypatch.setattr(progress, "_beats", beats)
    progress.pause()
    assert beats[0] == math.inf
    progress.beat(progress.EVALUATING, 3)
    assert 0 < time.monotonic() - beats[0] < 5
    assert beats[1] == 3
