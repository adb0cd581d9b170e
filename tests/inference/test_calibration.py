"""Scaling, prediction sets and rejection, as functions of logits: against netcal, mapie, formulas."""

import numpy as np
import pytest
from golden.calibration_problem import COVERAGES, PROBLEMS, problem, softmax
from support.programs import ROOT

from inference.calibration import conformal, scaling

GOLDEN = np.load(ROOT / "tests/golden/calibration.npz")
pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("place", [0, 1])
def test_a_temperature_is_netcals(place):
    logits, labels = problem(place, *PROBLEMS[place])
    found = scaling.fit(logits, labels, "temperature")
    # netcal's optimizer stops at a gradient of 1e-5
    assert found.scale == pytest.approx(GOLDEN[f"scale_{place}"], rel=2e-4)
    assert not found.shift.size


@pytest.mark.parametrize("place", [0, 1])
def test_sets_are_mapies(place):
    images, classes, scale = PROBLEMS[place]
    logits, _ = problem(place, images, classes, scale)
    shape = GOLDEN[f"sets_shape_{place}"]
    expected = np.unpackbits(GOLDEN[f"sets_{place}"])[: shape.prod()].reshape(shape).astype(bool)
    tuning = GOLDEN[f"tuning_{place}"]
    tuning_labels = GOLDEN[f"tuning_labels_{place}"]
    others, other_labels = problem(place + 10, 500, classes, scale)
    others = softmax(others)
    is_tuning = (others[:, None] == tuning[None]).all(2).any(1)
    assert is_tuning.sum() == len(tuning)
    others = others[~is_tuning]
    other_labels = other_labels[~is_tuning]
    for level, coverage in enumerate(COVERAGES):
        _, rank = conformal.tune(tuning, tuning_labels, coverage)
        assert rank == GOLDEN[f"rank_{place}"][level]
        # mapie 1.6.0 puts the penalty in place of the rank while it compares penalties, so it may
        # choose another one than ``tune``.
        penalty = GOLDEN[f"penalty_{place}"][level]
        scores = conformal.scores(others, penalty, rank)[np.arange(len(others)), other_labels]
        threshold = conformal.quantile(scores, coverage)
        assert threshold == pytest.approx(GOLDEN[f"threshold_{place}"][level], abs=1e-12)
        found = conformal.sets(softmax(logits), threshold, penalty, rank)
        assert np.array_equal(found, expected[:, :, level])
