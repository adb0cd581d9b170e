"""Recall@K and mean average precision, against pytorch-metric-learning, scikit-learn and the
definitions.
"""

from pathlib import Path

import numpy as np
import pytest
from golden.metric_problem import problem
from sklearn.metrics import average_precision_score
from sklearn.neighbors import NearestNeighbors

from training import retrieval
from training.retrieval import normalised, percentages, retrieval_sums

GOLDEN = np.load(Path(__file__).parent.with_name("golden") / "metric_losses.npz")
KS = (1, 2, 4, 8)


def metrics(embeddings, labels, ks=KS):
    rows = np.arange(len(labels))
    return percentages(retrieval_sums(normalised(embeddings), labels, rows, ks), ks)


def by_definition(embeddings, labels, ks=KS):
    """The same by a sort of all similarities, of embeddings whose products are exact."""
    similarities = embeddings.astype(np.float64) @ embeddings.astype(np.float64).T
    rows = []
    for query, own in enumerate(labels):
        others = np.delete(np.arange(len(labels)), query)
        order = others[np.argsort(-similarities[query, others], kind="stable")]
        right = labels[order] == own
        if not right.any():
            continue
        found = right.cumsum() / np.arange(1, len(right) + 1) * right
        relevant = right.sum()
        recalls = [right[:k].any() for k in ks]
        rows.append([*recalls, found.sum() / relevant, found[:relevant].sum() / relevant])
    return 100 * np.mean(rows, axis=0)


@pytest.mark.smoke
def test_the_metrics_are_those_of_pytorch_metric_learning():
    embeddings, _, labels = problem()
    found = metrics(embeddings, labels)
    assert found["mAP"] == pytest.approx(100 * GOLDEN["mean_average_precision"], abs=1e-10)
    assert found["mAP_R"] == pytest.approx(100 * GOLDEN["mean_average_precision_at_r"], abs=1e-10)
    assert found["recall_1"] == pytest.approx(100 * GOLDEN["precision_at_1"], abs=1e-10)


def test_neighbours_are_scikit_learns():
    generator = np.random.default_rng(3)
    embeddings = generator.normal(size=(300, 12)).astype(np.float32)
    labels = generator.integers(0, 60, 300)
    found = metrics(embeddings, labels)
    search = NearestNeighbors(n_neighbors=299, metric="cosine").fit(embeddings.astype(np.float64))
    order = search.kneighbors(return_distance=False)
    right = labels[order] == labels[:, None]
    counts = right.any(1)
    for k in KS:
        recall = 100 * right[counts, :k].any(1).mean()
        assert found[f"recall_{k}"] == pytest.approx(recall, abs=1e-10)
    scores = -np.arange(299)
    precision = np.mean([average_precision_score(row, scores) for row in right[counts]])
    assert found["mAP"] == pytest.approx(100 * precision, abs=1e-10)


@pytest.mark.smoke
@pytest.mark.parametrize("seed", range(4))
def test_ties_rank_by_their_order(seed, monkeypatch):
    """Many images have equal embeddings, and many others equal similarities."""
    monkeypatch.setattr(retrieval, "_ROWS", 17)
    generator = np.random.default_rng(seed)
    places = np.array([[1, 0], [0, 1], [-1, 0], [0, -1], [0.6, 0.8], [0.8, 0.6], [0, 0]])
    embeddings = normalised(places[generator.integers(0, len(places), 80)])
    labels = generator.integers(0, 9, 80)
    labels[7] = 9
    found = list(metrics(embeddings, labels).values())
    np.testing.assert_allclose(found, by_definition(embeddings, labels), rtol=1e-12)


@pytest.mark.smoke
@pytest.mark.parametrize("similarities", [1, 1000, 1 << 22])
def test_any_blocks_and_any_shares_of_the_queries_give_the_same_sums(similarities, monkeypatch):
    generator = np.random.default_rng(1)
    embeddings = generator.normal(size=(90, 7)).astype(np.float32)
    embeddings[40:60] = embeddings[:20]
    labels = generator.integers(0, 12, 90)
    expected = retrieval_sums(normalised(embeddings), labels, np.arange(90), KS)
    monkeypatch.setattr(retrieval, "_SIMILARITIES", similarities)
    monkeypatch.setattr(retrieval, "_ROWS", 13)
    for ranks in (1, 3):
        parts = [
            retrieval_sums(normalised(embeddings), labels, np.arange(rank, 90, ranks), KS)
            for rank in range(ranks)
        ]
        np.testing.assert_allclose(np.sum(parts, axis=0), expected, rtol=1e-12)
        # Counts are whole numbers, and equal.
        assert np.sum(parts, axis=0)[[0, 1, 2, 3, 6]].tolist() == expected[[0, 1, 2, 3, 6]].tolist()


def test_similarities_are_exact():
    generator = np.random.default_rng(2)
    rows = normalised(generator.normal(size=(50, 1024)))
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    found = retrieval._similarities(rows, np.arange(50))
    steps = (rows.astype(np.float64) * 2**24).astype(np.int64).astype(object)
    expected = steps.dot(steps.T)
    assert (found * 2.0**48 == expected.astype(np.float64)).all()
    turned = np.random.default_rng(0).permutation(1024)
    assert (retrieval._similarities(rows[:, turned].copy(), np.arange(50)) == found).all()


def test_a_query_that_nothing_can_find_does_not_count():
    embeddings = np.array([[1, 0], [1, 0.1], [0, 1], [0.1, 1], [1, 1]], np.float32)
    labels = np.array([0, 0, 1, 1, 2])
    sums = retrieval_sums(normalised(embeddings), labels, np.arange(5), (1,))
    assert sums[-1] == 4
    assert metrics(embeddings, labels, (1,)) == {"recall_1": 100, "mAP": 100, "mAP_R": 100}
    assert retrieval_sums(normalised(embeddings), np.arange(5), np.arange(5), (1,))[-1] == 0
    # A rank may have no query.
    assert not retrieval_sums(normalised(embeddings), labels, np.arange(0), (1,)).any()
