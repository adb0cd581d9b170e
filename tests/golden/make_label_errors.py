"""Writes label_errors.npz beside this file: what cleanlab finds in random labels (made with
cleanlab 2.9.0).

The probabilities of "ties" are multiples of 1/16, so that many are equal. Which of equal ones
cleanlab takes depends on NumPy's unstable sort, so a stable one takes its place here.

PYTHONPATH=.:tests python tests/golden/make_label_errors.py
"""

from pathlib import Path

import numpy as np
from cleanlab.count import calibrate_confident_joint, compute_confident_joint
from cleanlab.filter import find_label_issues
from cleanlab.multilabel_classification.filter import find_multilabel_issues_per_class
from cleanlab.multilabel_classification.rank import get_label_quality_scores_per_class
from cleanlab.rank import (
    get_normalized_margin_for_each_label,
    get_self_confidence_for_each_label,
)

FILTERS = ("both", "prune_by_noise_rate", "prune_by_class", "confident_learning")
_argsort = np.argsort


def stable(values: np.ndarray, **how: object) -> np.ndarray:
    return _argsort(values, kind="stable")


def inputs() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns labels [n] and probabilities [n, K] by the name of their case."""
    rng = np.random.default_rng(0)
    cases = {}
    truth = rng.integers(0, 10, 600)
    probabilities = rng.dirichlet(np.full(10, 0.2), 600)
    probabilities[np.arange(600), truth] += rng.uniform(0, 3, 600)
    probabilities /= probabilities.sum(1, keepdims=True)
    flipped = np.where(rng.random(600) < 0.15, rng.integers(0, 10, 600), truth)
    cases["peaked"] = flipped, probabilities
    cases["random"] = rng.integers(0, 4, 200), rng.dirichlet(np.ones(4), 200)
    ties = np.array([rng.multinomial(16, row) for row in rng.dirichlet(np.ones(5), 300)]) / 16
    cases["ties"] = rng.integers(0, 5, 300), ties
    # No image is labelled 2 or 5, and one alone is labelled 4.
    labels = rng.choice([0, 1, 3], 120)
    labels[7] = 4
    cases["empty"] = labels, rng.dirichlet(np.ones(6), 120)
    # Nothing is wrong.
    sure = np.full((30, 3), 0.1)
    sure[np.arange(30), np.arange(30) % 3] = 0.8
    cases["right"] = np.arange(30) % 3, sure
    return cases


def several() -> tuple[np.ndarray, np.ndarray]:
    """Returns label sets [n, K] of 0 and 1, and probabilities [n, K]. No image has class 3."""
    rng = np.random.default_rng(1)
    truth = rng.random((150, 5)) < 0.3
    probabilities = np.where(truth, rng.beta(4, 2, truth.shape), rng.beta(1, 6, truth.shape))
    sets = truth ^ (rng.random(truth.shape) < 0.1)
    sets[:, 3] = False
    return sets.astype(np.int64), probabilities


def main() -> None:
    np.argsort = stable
    arrays = {}
    for name, (labels, probabilities) in inputs().items():
        arrays[f"{name}/labels"] = labels
        arrays[f"{name}/probabilities"] = probabilities
        joint = compute_confident_joint(labels, probabilities, calibrate=False)
        arrays[f"{name}/joint"] = joint
        arrays[f"{name}/calibrated"] = calibrate_confident_joint(joint, labels)
        arrays[f"{name}/self_confidence"] = get_self_confidence_for_each_label(
            labels, probabilities
        )
        arrays[f"{name}/normalized_margin"] = get_normalized_margin_for_each_label(
            labels, probabilities
        )
        for method in FILTERS:
            arrays[f"{name}/{method}"] = find_label_issues(
                labels, probabilities, filter_by=method, n_jobs=1
            )
    sets, probabilities = several()
    lists = [np.flatnonzero(row).tolist() for row in sets]
    arrays["several/labels"] = sets
    arrays["several/probabilities"] = probabilities
    for method in FILTERS:
        arrays[f"several/{method}"] = find_multilabel_issues_per_class(
            lists, probabilities, filter_by=method, n_jobs=1
        )
    for score in ("self_confidence", "normalized_margin"):
        arrays[f"several/{score}"] = get_label_quality_scores_per_class(
            lists, probabilities, method=score
        )
    np.savez_compressed(Path(__file__).with_name("label_errors.npz"), **arrays)


if __name__ == "__main__":
    main()
