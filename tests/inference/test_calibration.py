"""Scaling, prediction sets and rejection, as functions of logits: against netcal, mapie, formulas."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from golden.calibration_problem import COVERAGES, PROBLEMS, problem, softmax
from scipy.stats import betabinom, binom
from sklearn.neighbors import NearestNeighbors
from support.exports import images_for, small_model
from support.programs import ROOT
from support.small_models import SMALL_MODELS

from errors import InputError, Unreadable
from inference.calibration import conformal, rejection, scaling
from inference.calibration.calibrate import rejections
from inference.calibration.choice import sets_for
from inference.calibration.folding import fold
from training.checkpoint.calibration import (
    Calibration,
    PredictionSets,
    Rejection,
    read_calibration,
)
from training.multilabel_metrics import sigmoid
from training.probing.features import normalised

with np.load(ROOT / "tests/golden/calibration.npz") as _stored:
    GOLDEN = dict(_stored)
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
    # The last bits of NumPy's ``exp`` depend on the CPU.
    is_tuning = (np.abs(others[:, None] - tuning[None]) < 1e-12).all(2).any(1)
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


@pytest.mark.parametrize("kind", scaling.KINDS)
def test_a_scaling_is_never_worse_on_its_own_images(kind):
    for seed, scale in enumerate((0.3, 1.0, 4.0)):
        logits, labels = problem(seed, 60, 4, scale)
        several = (np.random.default_rng(seed).random((60, 4)) < 0.4).astype(np.uint8)
        for truth in (labels, several):
            found = scaling.fit(logits, truth, kind)
            before = scaling.losses_of(logits, truth).mean()
            assert scaling.losses_of(found(logits), truth).mean() <= before
            assert (found.scale > 0).all()
            assert len(found.scale) == (4 if found.kind in ("class", "vector") else 1)
            assert len(found.shift) == (4 if found.kind == "vector" else 0)


def test_a_scaling_of_one_class_finds_the_factor_and_the_shift_that_were_applied():
    """Vector scaling undoes what made logits wrong; cross-validation prefers it then."""
    logits, labels = problem(0, 6000, 4, 1.0)
    factor = np.array([0.4, 1.0, 2.0, 1.0])
    shift = np.array([1.0, 0.0, -1.0, 0.0])
    wrong = (logits - shift) / factor
    found, losses = scaling.choose(wrong, labels)
    assert found.kind == "vector"
    assert losses["vector"] < losses["class"] < losses["temperature"] < losses["none"]
    np.testing.assert_allclose(found.scale, factor, rtol=0.1)
    np.testing.assert_allclose(found.shift, shift - shift.mean(), atol=0.15)
    # honest logits stay as they are, or nearly
    found, _ = scaling.choose(logits, labels)
    assert found.kind in ("none", "temperature")
    assert found.scale[0] == pytest.approx(1, abs=0.05)


def test_where_every_image_is_right_the_temperature_is_above_0():
    logits = np.eye(3)[[0, 1, 2, 0, 1, 2]] * 2.0
    labels = logits.argmax(1)
    found = scaling.fit(logits, labels, "temperature")
    # Platt's probability of the right class: (6 + 1) / (6 + 2), less its share of the rest
    right = np.exp(found(logits)[0])[0] / np.exp(found(logits)[0]).sum()
    assert right == pytest.approx(7 / 8 + 1 / 8 / 3, abs=1e-6)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_of_the_loss_is_that_of_its_differences(several, smoothing):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (7, 3)) if several else rng.integers(0, 3, 7)
    logits = rng.normal(size=(7, 3))
    loss = scaling._loss_of(labels, smoothing)
    expected = np.zeros_like(logits)
    for place in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-6
        expected[place] = (loss(logits + step)[0] - loss(logits - step)[0]) / 2e-6
    np.testing.assert_allclose(loss(logits)[1], expected, atol=1e-9)


def test_thresholds_of_several_labels_give_the_same_answers_after_scaling():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 4)) * 3
    thresholds = np.array([0.0, 0.2, 0.7, 1.0])
    scale = scaling.Scaling("vector", np.array([0.5, 2.0, 3.0, 0.1]), rng.normal(size=4))
    found = scaling.scaled_thresholds(thresholds, scale)
    assert found[0] == 0
    assert found[3] == 1
    answers = sigmoid(logits) >= thresholds
    assert np.array_equal(sigmoid(scale(logits)) >= found, answers)


def test_a_quantile_is_the_order_statistic_of_one_more_value():
    values = np.array([3.0, 1.0, 2.0, 4.0])
    # of five equally likely places a new value is at most the third in three
    assert conformal.quantile(values, 0.6) == 3.0
    assert conformal.quantile(values, 0.61) == 4.0
    assert conformal.quantile(values, 0.8) == 4.0
    assert conformal.quantile(values, 0.81) == math.inf
    assert conformal.quantile(np.zeros(0), 0.5) == math.inf
    assert conformal.quantile(np.arange(19.0), 0.95) == 18.0
    assert conformal.quantile(np.arange(18.0), 0.95) == math.inf
    assert conformal.quantile(np.full(5, 7.0), 0.5) == 7.0


def test_scores_add_up_down_to_a_class_and_of_ties_the_lowest_class_is_first():
    probabilities = np.array([[0.1, 0.4, 0.4, 0.1]])
    assert conformal.places(probabilities).tolist() == [[3, 1, 2, 4]]
    scores = conformal.scores(probabilities, penalty=0.5, rank=2)
    np.testing.assert_allclose(scores, [[0.9 + 0.5, 0.4, 0.8, 1.0 + 1.0]])
    assert conformal.sets(probabilities, 0.8 + 1e-9, 0.5, 2).tolist() == [
        [False, True, True, False]
    ]
    # the most probable class is in a set whatever the threshold
    assert conformal.sets(probabilities, 0.0, 0.5, 2).tolist() == [[False, True, False, False]]
    assert conformal.sets(probabilities, math.inf, 0.5, 2).all()
    # a threshold for each class
    thresholds = [2.0, 0.0, 0.0, 0.0]
    assert conformal.sets(probabilities, thresholds, 0.5, 2).tolist() == [
        [True, True, False, False]
    ]


@pytest.mark.parametrize("coverage", [0.8, 0.9])
def test_the_coverage_holds_on_100_splits(coverage):
    """The right class's score is below the threshold as often as asked. As the most probable class
    is in every set, sets have it at least as often.
    """
    logits, labels = problem(3, 2000, 10, 0.5)
    probabilities = softmax(logits)
    count = 0
    covered = 0
    for seed in range(100):
        order = np.random.default_rng(seed).permutation(2000)
        tuning, choosing, others = np.split(order, [300, 1000])
        penalty, rank = conformal.tune(probabilities[tuning], labels[tuning], coverage)
        scores = conformal.scores(probabilities[choosing], penalty, rank)
        of_label = scores[np.arange(len(choosing)), labels[choosing]]
        threshold = conformal.quantile(of_label, coverage)
        found = conformal.sets(probabilities[others], threshold, penalty, rank)
        scores = conformal.scores(probabilities[others], penalty, rank)
        hits = (scores[np.arange(len(others)), labels[others]] <= threshold).sum()
        # A split has the threshold of its own 700 images, which varies like a beta distribution.
        low, high = betabinom.interval(0.9999, 1000, coverage * 701, (1 - coverage) * 701)
        assert low <= hits <= high, seed
        count += len(others)
        covered += hits
        assert found[np.arange(len(others)), labels[others]].sum() >= hits
        assert 1 < found.sum(1).mean() < 8
    assert covered / count == pytest.approx(coverage, abs=0.006)


def test_the_coverage_holds_for_each_class():
    """One class is much harder than the others: its images need a threshold of their own."""
    logits, labels = problem(5, 6000, 4, 1.0)
    logits[:, 3] -= 2.5
    probabilities = softmax(logits)
    half = slice(0, 3000)
    rest = slice(3000, None)
    scores = conformal.scores(probabilities[half], 0.01, 1)
    of_label = scores[np.arange(3000), labels[half]]
    threshold = conformal.quantile(of_label, 0.9)
    together = conformal.sets(probabilities[rest], threshold, 0.01, 1)
    thresholds = conformal.quantiles_by_class(of_label, labels[half], 4, 0.9)
    by_class = conformal.sets(probabilities[rest], thresholds, 0.01, 1)
    hard = labels[rest] == 3
    assert together[hard, 3].mean() < 0.8
    for label in range(4):
        images = labels[rest] == label
        assert by_class[images, label].sum() >= binom.ppf(0.001, images.sum(), 0.9)
    assert conformal.quantiles_by_class(of_label, labels[half], 5, 0.9)[4] == math.inf


def test_scores_of_unknown_pictures_are_their_formulas():
    logits = np.array([[1.0, 2.0, 3.0], [700.0, 0.0, 0.0]], np.float32)
    energies = rejection.score("energy", logits)
    np.testing.assert_allclose(energies, [-np.log(np.exp([1, 2, 3]).sum()), -700])
    np.testing.assert_allclose(rejection.score("max_logit", logits), [-3, -700])
    several = rejection.score("energy", logits, has_several=True)
    assert several[0] == pytest.approx(-np.log1p(np.exp([1, 2, 3])).sum())


@pytest.mark.parametrize("k", [1, 3, 40])
def test_distances_are_those_of_scikit_learns_neighbours(k, monkeypatch):
    rng = np.random.default_rng(0)
    bank = normalised(rng.normal(size=(40, 6)).astype(np.float32))
    features = normalised(rng.normal(size=(25, 6)).astype(np.float32))
    # blocks of two images
    monkeypatch.setattr(rejection, "_BLOCK", 2 * 4 * 40)
    expected = NearestNeighbors(n_neighbors=k).fit(bank).kneighbors(features)[0][:, -1]
    np.testing.assert_allclose(rejection.knn_distances(features, bank, k), expected, atol=1e-6)
    # its own distance is 0, up to rounding
    assert rejection.knn_distances(bank[:1], bank, 1)[0] < 1e-3
    assert not normalised(np.zeros((1, 6))).any()


def test_auroc_and_fpr95_of_ties_and_of_separate_scores():
    known = np.arange(20.0)
    assert rejection.auroc(known, known) == pytest.approx(0.5, abs=1e-12)
    assert rejection.auroc(known, known + 100) == 1
    assert rejection.fpr95(known, known + 100) == 0
    # 19 of 20 known pictures are at most 19 * 0.95 = 18.05 -> 19 by the higher rank
    assert rejection.fpr95(known, np.array([19.0, 19.5])) == 0.5
    assert rejection.auroc(np.zeros(3), np.zeros(2)) == 0.5


def test_a_picture_is_rejected_above_its_threshold_alone():
    known = np.arange(100.0)
    [at_5, at_half_percent] = rejections({"energy": known}, [0.05, 0.005])
    assert at_5.threshold == 95.0
    assert not rejection.is_rejected(95.0, at_5)
    assert rejection.is_rejected(95.1, at_5)
    # 100 images are too few for half a percent
    assert at_half_percent.threshold is None
    assert not rejection.is_rejected(1e9, at_half_percent)


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_every_architectures_classifier_takes_a_scaling(kind):
    """VOLO adds half of a second classifier's largest logit, DeiT's logits are the mean of two."""
    model = small_model(kind)
    images = images_for(model).numpy()
    rng = np.random.default_rng(0)
    classes = model.num_classes
    scale = scaling.Scaling("vector", rng.uniform(0.5, 2, classes), rng.normal(size=classes))
    expected = scale(model(paddle.to_tensor(images)).numpy())
    fold(model, scale, images)
    found = model.inference_model()(paddle.to_tensor(images)).numpy()
    np.testing.assert_allclose(found, expected, atol=5e-6 * np.ptp(expected), rtol=0)


def test_logits_that_no_classifier_scales_are_refused():
    model = small_model("vit")
    images = images_for(model).numpy()
    scale = scaling.Scaling("temperature", np.array([2.0]), np.zeros(0))
    forward = model.forward
    model.forward = lambda inputs: forward(inputs).tanh()
    with pytest.raises(InputError, match="aren't linear in its classifiers.*-scaling none"):
        fold(model, scale, images)
    model = small_model("vit")
    model.head.bias = None
    shift = scaling.Scaling("vector", np.ones(model.num_classes), np.ones(model.num_classes))
    with pytest.raises(InputError, match="has no bias to shift; use -scaling temperature or class"):
        fold(model, shift, images)


def some_calibration(**changes):
    sets = [PredictionSets(0.9, 0.01, 1, [0.8, None])]
    rejected = [Rejection("energy", 0.05, None), Rejection("knn", 0.05, 0.25)]
    return Calibration("temperature", [0.5], [], 100, sets, rejected, 10, "0" * 64, **changes)


def test_a_calibration_is_read_as_it_was_written():
    stored = some_calibration()
    assert read_calibration(json.loads(json.dumps(stored.as_json())), 2) == stored


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("scaling", "more", "scaling is 'more', expected one of none, temperature, class, vector"),
        ("scale", [0.0], "scale is .*, expected positive numbers"),
        ("scale", [], "scale"),
        ("shift", ["a"], "shift"),
        ("sets", {}, "sets is a dictionary of 0, expected a list"),
        ("sets", [{}], "calibration.sets.coverage is missing"),
        (
            "rejections",
            [{"score": "energy", "false_alarm": 1.0, "threshold": 1}],
            "false_alarm is 1.0",
        ),
        ("neighbours", -1, "neighbours"),
        ("neighbours_sha256", "x\n", "neighbours_sha256"),
    ],
)
def test_a_calibration_of_another_form_is_named(name, value, problem):
    entries = some_calibration().as_json() | {name: value}
    with pytest.raises(Unreadable, match=problem):
        read_calibration(entries, 2)


def test_thresholds_of_other_classes_are_named():
    with pytest.raises(Unreadable, match="2 thresholds per coverage, expected 1 or 3"):
        read_calibration(some_calibration().as_json(), 3)


@pytest.mark.parametrize("thresholds", [[None], [None, None]])
def test_sets_that_would_have_every_class_are_refused(thresholds):
    stored = replace(some_calibration(), sets=[PredictionSets(0.9, 0.01, 1, thresholds)])
    with pytest.raises(InputError, match="coverage is 0.9, but RUN was calibrated on too few"):
        sets_for(stored, 0.9, "RUN")


def test_sets_are_given_where_a_class_has_a_threshold():
    assert sets_for(some_calibration(), 0.9, "RUN").thresholds == [0.8, None]


def test_a_search_for_a_scaling_that_fails_changes_nothing(monkeypatch):
    logits, labels = problem(0, 50, 3, 1.0)
    monkeypatch.setattr(
        "scipy.optimize.minimize", lambda *_, **__: SimpleNamespace(x=np.full(1, np.nan))
    )
    assert scaling.fit(logits, labels, "temperature") == scaling.NONE
