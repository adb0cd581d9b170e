"""Scores that separate pictures of other things from those of the model's classes.

The higher a score, the less the picture is like those that the model was trained on.
"""

import numpy as np

from training.checkpoint.calibration import Rejection

# From logits: the energy (Liu et al. 2020, arXiv:2010.03759) and the largest logit (Hendrycks et
# al. 2022, arXiv:1911.11132).
OF_LOGITS = ("energy", "max_logit")
# From features: the distance to the k-th nearest training image (Sun et al. 2022, arXiv:2204.06507).
KNN = "knn"
SCORES = (*OF_LOGITS, KNN)
# The bytes of similarities that are held at once.
_BLOCK = 64 << 20


def score(name: str, logits: np.ndarray, has_several: bool = False) -> np.ndarray:
    """Returns a score of each image, [n] float64.

    Args:
        name: one of OF_LOGITS.
        logits: [n, K].
        has_several: whether an image may have several classes. The energy is then the sum of the
            classes' energies (Wang et al. 2021, arXiv:2111.12797).
    """
    logits = logits.astype(np.float64)
    if name == "max_logit":
        return -logits.max(1)
    if has_several:
        return -np.logaddexp(0, logits).sum(1)
    return -np.logaddexp.reduce(logits, 1)


def is_rejected(value: float | None, rejection: Rejection) -> bool:
    """Returns whether a score is above a rejection's threshold. Without a threshold none is."""
    return value is not None and rejection.threshold is not None and value > rejection.threshold


def knn_distances(features: np.ndarray, bank: np.ndarray, k: int) -> np.ndarray:
    """Returns the distance of each image to its k-th nearest image of a bank, [n] float64.

    Args:
        features: [n, channels], of length 1 (``training.probing.features.normalised``).
        bank: [m, channels], likewise, with m >= k.
    """
    distances = np.empty(len(features))
    rows = max(1, _BLOCK // (4 * len(bank)))
    for first in range(0, len(features), rows):
        similarity = features[first : first + rows] @ bank.T
        nearest = np.partition(similarity, len(bank) - k, 1)[:, len(bank) - k]
        # Rounding may make the similarity of equal features larger than 1.
        squares = np.maximum(0.0, 2 - 2 * nearest.astype(np.float64))
        distances[first : first + rows] = np.sqrt(squares)
    return distances


def auroc(known: np.ndarray, others: np.ndarray) -> float:
    """Returns the probability that a picture of something else has the higher score, from 0 to 1.

    Ties count half.

    Args:
        known: [n] scores of pictures of the model's classes.
        others: [m] scores of pictures of other things.
    """
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([0, 1], [len(known), len(others)])
    return float(roc_auc_score(truth, np.concatenate([known, others])))


def fpr95(known: np.ndarray, others: np.ndarray) -> float:
    """Returns the share of other pictures that are accepted where 95 % of the known ones are.

    Args:
        known, others: as for ``auroc``.
    """
    threshold = np.quantile(known, 0.95, method="higher")
    return float((others <= threshold).mean())
