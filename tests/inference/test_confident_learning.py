"""Confident learning against cleanlab (golden/make_label_errors.py), and by hand."""

from pathlib import Path

import numpy as np
import pytest

from inference import confident_learning
from inference.confident_learning import (
    FILTERS,
    SCORES,
    binary,
    calibrated,
    confident_classes,
    confident_joint,
    label_errors,
    quality,
    suggested,
    thresholds,
)

GOLDEN = np.load(Path(__file__).parent.with_name("golden") / "label_errors.npz")
CASES = ("peaked", "random", "ties", "empty", "right")


def case(name):
    return GOLDEN[f"{name}/labels"], GOLDEN[f"{name}/probabilities"]


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", FILTERS)
def test_filters_choose_what_cleanlab_chooses(name, method):
    labels, probabilities = case(name)
    chosen = label_errors(labels, probabilities, method)
    np.testing.assert_array_equal(chosen, GOLDEN[f"{name}/{method}"])
    assert chosen.any() == (name != "right")


@pytest.mark.parametrize("name", CASES)
def test_the_joint_is_cleanlabs(name):
    labels, probabilities = case(name)
    guesses = confident_classes(probabilities, thresholds(labels, probabilities))
    classes = probabilities.shape[1]
    joint = confident_joint(labels, guesses, classes)
    np.testing.assert_array_equal(joint, GOLDEN[f"{name}/joint"])
    counts = np.bincount(labels, minlength=classes)
    found = calibrated(joint, counts)
    np.testing.assert_array_equal(found, GOLDEN[f"{name}/calibrated"])
    np.testing.assert_array_equal(found.sum(1), counts)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("score", SCORES)
def test_scores_and_ranks_are_cleanlabs(name, score):
    labels, probabilities = case(name)
    scores = quality(labels, probabilities, score)
    expected = GOLDEN[f"{name}/{score}"]
    np.testing.assert_allclose(scores, expected, atol=1e-12, rtol=0)
    order = np.argsort(scores, kind="stable")
    np.testing.assert_array_equal(order, np.argsort(expected, kind="stable"))


@pytest.mark.smoke
def test_several_labels_are_cleanlabs_class_by_class():
    sets, probabilities = case("several")
    for label in range(sets.shape[1]):
        both = binary(probabilities[:, label])
        for method in FILTERS:
            chosen = label_errors(sets[:, label], both, method)
            np.testing.assert_array_equal(chosen, GOLDEN[f"several/{method}"][:, label])
        for score in SCORES:
            scores = quality(sets[:, label], both, score)
            expected = GOLDEN[f"several/{score}"][:, label]
            np.testing.assert_allclose(scores, expected, atol=1e-12, rtol=0)
    assert not GOLDEN["several/labels"][:, 3].any()


def test_blocks_change_nothing(monkeypatch):
    labels, probabilities = case("peaked")
    expected = [label_errors(labels, probabilities, method) for method in FILTERS]
    others = suggested(labels, probabilities)
    monkeypatch.setattr(confident_learning, "_VALUES", 70)
    for method, chosen in zip(FILTERS, expected, strict=True):
        np.testing.assert_array_equal(label_errors(labels, probabilities, method), chosen)
    np.testing.assert_array_equal(suggested(labels, probabilities), others)


def test_a_suggestion_is_the_best_other_class_and_of_equal_ones_the_first():
    probabilities = np.array([[0.6, 0.2, 0.2], [0.2, 0.6, 0.2], [0, 0, 1], [1 / 3] * 3])
    assert suggested(np.array([0, 0, 2, 0]), probabilities).tolist() == [1, 1, 0, 1]


def test_an_order_of_the_images_changes_no_choice():
    labels, probabilities = case("peaked")
    order = np.random.default_rng(3).permutation(len(labels))
    for method in FILTERS:
        chosen = label_errors(labels, probabilities, method)
        moved = label_errors(labels[order], probabilities[order], method)
        np.testing.assert_array_equal(moved, chosen[order])


@pytest.mark.parametrize("method", FILTERS)
def test_no_image_and_one_image_are_no_errors(method):
    assert label_errors(np.zeros(0, np.int64), np.zeros((0, 3)), method).tolist() == []
    assert label_errors(np.array([0]), np.array([[0.1, 0.9]]), method).tolist() == [False]
