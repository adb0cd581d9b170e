"""What features are worth, against scikit-learn and formulas in NumPy."""

import numpy as np
import paddle
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from support.ranks import run_ranks

from errors import InputError, RunError
from training.probing import knn, linear
from training.probing.collapse import Spread, rankme, spread_of
from training.probing.features import Features, compute_features
from training.probing.linear import Labelled
from utils import rank, world_size

CLASSES = 5


def clouds(count, seed, channels=16):
    """(values, labels) of overlapping clouds of points, which don't lie around zero."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(CLASSES, channels))
    labels = rng.integers(0, CLASSES, count)
    values = centres[labels] + 1.5 * rng.normal(size=(count, channels)) + 0.5
    return values.astype(np.float32), labels


def share(values, labels):
    """What this rank holds of a dataset's features."""
    places = np.arange(rank(), len(labels), world_size())
    return Features(values[places], places, labels)


def measured(train, val, ks=(3, 10, 20)):
    trained, validated = share(*train), share(*val)
    spread = spread_of(trained)
    rows, labels = validated.gathered()
    np.testing.assert_array_equal(labels, val[1] if rank() == 0 else [])
    return knn.knn_accuracies(trained, validated, ks), tuple(spread), rows


def test_knn_equals_scikit_learns_neighbours():
    train, val = clouds(700, 1), clouds(301, 2)
    accuracies, _, _ = measured(train, val)
    for k, accuracy in accuracies.items():
        neighbours = KNeighborsClassifier(
            k,
            metric="cosine",
            algorithm="brute",
            weights=lambda distances: np.exp((1 - distances) / 0.07),
        )
        assert accuracy == pytest.approx(100 * neighbours.fit(*train).score(*val), abs=1e-9)
    assert 50 < accuracies[20] < 99


def test_neighbours_equal_brute_force_however_blocks_are_cut(monkeypatch):
    train, val = clouds(100, 3), clouds(40, 4)
    rows = [values / np.linalg.norm(values, axis=1, keepdims=True) for values, _ in (train, val)]
    expected = np.argsort(-(rows[1] @ rows[0].T), axis=1, kind="stable")[:, :7]
    for block in (4, 33, 1000):
        monkeypatch.setattr(knn, "_BLOCK", block)
        keys = knn._nearest(rows[1], rows[0], np.arange(100), 7)
        similarities, places = knn._decoded(keys)
        np.testing.assert_array_equal(places, expected)
        exact = np.take_along_axis(rows[1] @ rows[0].T, expected, 1)
        np.testing.assert_allclose(similarities, exact, atol=2e-7)


def test_equal_neighbours_are_taken_in_their_order_and_equal_votes_by_class(monkeypatch):
    monkeypatch.setattr(knn, "_BLOCK", 2)
    # Six copies of one image: the first two count.
    bank = np.ones((6, 3), np.float32)
    labels = np.array([4, 2, 0, 0, 0, 0])
    query = (np.ones((1, 3), np.float32), np.array([2]))
    assert measured((bank, labels), query, ks=(2,))[0] == {2: 100.0}
    assert measured((bank, labels), query, ks=(6,))[0] == {6: 0.0}
    chosen = knn.elected(np.array([[3, 1, 1, 3], [0, 1, 1, 2]]), np.array([[1.0, 2, 1, 2]] * 2))
    assert chosen.tolist() == [1, 1]


def test_similarities_below_zero_and_images_without_a_direction():
    bank = np.array([[-1, 0], [0, -1], [0, 0]], np.float32)
    keys = knn._nearest(np.array([[1, 0]], np.float32), bank, np.array([5, 7, 9]), 3)
    similarities, places = knn._decoded(keys)
    assert similarities.tolist() == [[0, 0, -1]]
    assert places.tolist() == [[7, 9, 5]]


def test_two_processes_equal_one():
    train, val = clouds(701, 1), clouds(301, 2)
    accuracies, spread, rows = measured(train, val)
    for number, result in enumerate(run_ranks(measured, train, val)):
        assert result[0] == accuracies
        np.testing.assert_allclose(result[1], spread, rtol=1e-12)
        np.testing.assert_array_equal(result[2], rows if number == 0 else np.zeros((0, 16)))
    np.testing.assert_array_equal(rows, val[0])


def gathered_without_some(values, labels):
    places = np.setdiff1d(np.arange(rank(), len(labels), world_size()), [3, 4])
    return Features(values[places], places, labels).gathered()


def test_images_that_were_left_out_are_not_gathered():
    values, labels = clouds(11, 1)
    for found in (
        gathered_without_some(values, labels),
        run_ranks(gathered_without_some, values, labels)[0],
    ):
        np.testing.assert_array_equal(found[0], np.delete(values, [3, 4], 0))
        np.testing.assert_array_equal(found[1], np.delete(labels, [3, 4]))


def test_a_rank_without_an_image():
    train, val = clouds(20, 1), clouds(1, 2)
    alone = measured(train, val, ks=(3,))
    assert [result[0] for result in run_ranks(measured, train, val, (3,))] == [alone[0]] * 2


def test_rankme_and_the_deviation_equal_their_formulas():
    values, labels = clouds(500, 5)
    spread = spread_of(share(values, labels))
    singular = np.linalg.svd(values.astype(np.float64), compute_uv=False)
    shares = singular / singular.sum() + 1e-7
    assert spread.rankme == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-9)
    directions = values / np.linalg.norm(values, axis=1, keepdims=True)
    assert spread.feature_std == pytest.approx(directions.std(0).mean(), rel=1e-5)
    assert spread.healthy == 0.25
    assert spread.warning == ""
    # Fewer images than channels.
    few = spread_of(share(values[:4], labels[:4]))
    singular = np.linalg.svd(values[:4].astype(np.float64), compute_uv=False)
    shares = singular / singular.sum() + 1e-7
    assert few.rankme == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-6)


def test_rankme_counts_directions():
    rng = np.random.default_rng(0)
    for count in (1, 3, 12):
        basis = np.linalg.qr(rng.normal(size=(16, 16)))[0][:count]
        values = np.eye(count).repeat(50, 0) @ basis
        assert rankme(values.T @ values, len(values)) == pytest.approx(count, rel=1e-3)


def test_a_collapse_is_named():
    rng = np.random.default_rng(0)
    spread_out = rng.normal(size=(400, 16)).astype(np.float32)
    labels = np.zeros(400, np.int64)
    healthy = spread_of(share(spread_out, labels))
    assert healthy.feature_std == pytest.approx(0.25, rel=0.02)
    assert not healthy.warning
    equal = spread_of(share(1 + 1e-3 * spread_out, labels))
    assert equal.warning.startswith("collapse: all images have nearly the same features")
    on_a_line = spread_of(share(np.outer(spread_out[:, 0], spread_out[0]), labels))
    assert on_a_line.warning.startswith(
        "collapse: the features vary in one dimension only: RankMe is 1.0"
    )
    assert Spread(2.6, 0.015, 64, 9).warning == ""


class Loaded:
    """A loader of numbers as pixels."""

    def __init__(self, count, batch, skipped=()):
        self.dataset = self
        self.labels = np.arange(count)
        self.batch = batch
        self.skipped = skipped
        self.batch_sampler = self
        self.indices = range(rank(), count, world_size())

    def __len__(self):
        return len(self.labels)

    def __iter__(self):
        places = np.array(self.indices)
        for first in range(0, len(places), self.batch):
            some = places[first : first + self.batch]
            batch = {"pixels": some}
            if self.skipped:
                marks = [place if place in self.skipped else -1 for place in some.tolist()]
                batch["skipped"] = paddle.to_tensor(marks)
            yield batch


def computed(forward, loader):
    return compute_features(forward, loader, loader)


def squares(places):
    return np.stack([places, places**2], 1)


def test_features_of_any_batch_size_have_their_places():
    for batch in (1, 4, 100):
        features = computed(squares, Loaded(11, batch))
        assert features.values[:, 1].tolist() == [place**2 for place in range(11)]
    features = computed(squares, Loaded(11, 4, skipped=(0, 7)))
    assert features.places.tolist() == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert features.values[:, 0].tolist() == features.places.tolist()


def broken(places):
    values = squares(places).astype(np.float32)
    values[places > 8] = np.nan
    return values


def refused():
    with pytest.raises(RunError, match="the features of 2 images aren't finite"):
        computed(broken, Loaded(11, 4))
    return True


def test_features_that_are_not_finite_are_refused_on_every_rank():
    assert refused()
    assert run_ranks(refused) == [True, True]


def linear_data():
    train, val = Labelled(*clouds(600, 6)), Labelled(*clouds(300, 7))
    linear.standardise(train.values, val.values)
    return train, val


def test_features_are_standardised_by_the_training_images():
    train, val = clouds(600, 6), clouds(300, 7)
    train[0][:, 3] = 2
    expected = [
        (values - train[0].mean(0)) / train[0].std(0).clip(1e-30) for values, _ in (train, val)
    ]
    linear.standardise(train[0], val[0])
    for found, values in zip((train[0], val[0]), expected, strict=True):
        others = np.arange(16) != 3
        np.testing.assert_allclose(found[:, others], values[:, others], atol=1e-5)
    # A channel that is constant stays so.
    assert not train[0][:, 3].any()


def test_logistic_regression_is_scikit_learns():
    train, val = linear_data()
    fitted = linear.logistic_regression(train, 0.1)
    reference = LogisticRegression(C=0.1, max_iter=1000, penalty="l2", solver="lbfgs")
    reference.fit(train.values.astype(np.float64), train.labels)
    np.testing.assert_array_equal(fitted.coef_, reference.coef_)
    np.testing.assert_array_equal(fitted.intercept_, reference.intercept_)
    probe = linear.logistic_probe(train, val, 0)
    reference = LogisticRegression(C=probe["C"], max_iter=1000)
    reference.fit(train.values.astype(np.float64), train.labels)
    assert probe["accuracy"] == pytest.approx(100 * reference.score(*val))
    assert probe["converged"]
    held = linear.held_out(train.labels, 0)
    scores = []
    for c in linear.CS:
        reference = LogisticRegression(C=c, max_iter=1000)
        reference.fit(train.values[~held].astype(np.float64), train.labels[~held])
        scores.append(100 * reference.score(train.values[held], train.labels[held]))
    assert probe["held_out_accuracy"] == pytest.approx(max(scores))
    assert probe["C"] == linear.CS[scores.index(max(scores))]


def test_a_fifth_of_each_class_is_held_out():
    labels = np.repeat([0, 1, 2], [10, 25, 2])
    held = linear.held_out(labels, 0)
    assert [held[labels == label].sum() for label in range(3)] == [2, 5, 0]
    assert (linear.held_out(labels, 0) == held).all()
    assert (linear.held_out(labels, 1) != held).any()
    with pytest.raises(InputError, match="4 training images are too few to hold out a part"):
        linear.held_out(np.array([0, 0, 1, 1]), 0)


def test_sgd_equals_a_loop_over_each_rate(monkeypatch):
    monkeypatch.setattr(linear, "FEWEST_UPDATES", 30)
    train, val = linear_data()
    rates = (0.01, 0.3)
    heads = linear.SgdHeads(16, CLASSES, rates)
    heads.fit(train, seed=3)
    weights = heads.weight.numpy().reshape(16, 2, CLASSES)
    for number, rate in enumerate(rates):
        weight, bias = alone(train, rate, 3)
        np.testing.assert_allclose(weights[:, number], weight, atol=2e-5)
        predicted = (val.values @ weight + bias).argmax(1)
        expected = 100 * (predicted == val.labels).mean()
        assert heads.accuracies(val)[number] == pytest.approx(expected)


def alone(train, rate, seed):
    """SGD of one linear classifier, in NumPy: 30 updates, of 3 batches a pass."""
    weight, bias = np.zeros((16, CLASSES)), np.zeros(CLASSES)
    speeds = [np.zeros_like(weight), np.zeros_like(bias)]
    for update in range(30):
        order = np.random.default_rng([seed, 1, update // 3]).permutation(600)
        rows = order[update % 3 * 256 :][:256]
        logits = train.values[rows] @ weight + bias
        shares = np.exp(logits - logits.max(1, keepdims=True))
        errors = shares / shares.sum(1, keepdims=True) - np.eye(CLASSES)[train.labels[rows]]
        errors /= len(rows)
        scale = 0.5 * (1 + np.cos(np.pi * update / 30))
        gradients = [train.values[rows].T @ errors, errors.sum(0)]
        speeds = [0.9 * speed + each for speed, each in zip(speeds, gradients, strict=True)]
        weight = weight - rate * scale * speeds[0]
        bias = bias - rate * scale * speeds[1]
    return weight, bias


def test_the_rate_is_chosen_on_the_held_out_part(monkeypatch):
    monkeypatch.setattr(linear, "FEWEST_UPDATES", 100)
    train, val = linear_data()
    probe = linear.sgd_probe(train, val, 0)
    held = linear.held_out(train.labels, 0)
    heads = linear.SgdHeads(16, CLASSES, linear.RATES)
    heads.fit(train.rows(~held), 0)
    scores = heads.accuracies(train.rows(held))
    assert probe["rate"] == linear.RATES[scores.index(max(scores))]
    assert probe["accuracy"] == heads.accuracies(val)[scores.index(max(scores))]
    # The validation images choose nothing.
    shuffled = val._replace(labels=val.labels[::-1].copy())
    assert linear.sgd_probe(train, shuffled, 0)["rate"] == probe["rate"]


def test_few_labels_are_drawn_by_seed():
    train, val = linear_data()
    rows = linear.drawn_labels(train.labels, 5, 0)
    assert np.bincount(train.labels[rows]).tolist() == [5] * CLASSES
    assert set(linear.drawn_labels(train.labels, 1, 0)) < set(rows)
    assert set(linear.drawn_labels(train.labels, 5, 1)) != set(rows)
    probe = linear.few_shot_probe(train, val, 5, range(3))
    assert probe["mean"] == pytest.approx(np.mean(probe["accuracies"]))
    assert probe["deviation"] == pytest.approx(np.std(probe["accuracies"]))
    fitted = LogisticRegression(C=1.0, max_iter=1000)
    fitted.fit(train.values[rows].astype(np.float64), train.labels[rows])
    assert probe["accuracies"][0] == pytest.approx(100 * fitted.score(*val))
