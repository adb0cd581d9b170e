"""Scales logits so that probabilities match the accuracy of predictions.

``fit`` minimises the negative log-likelihood of held-out images: over one factor (temperature
scaling), a factor for each class, or a factor and a shift for each class (vector scaling; Guo et
al. 2017, arXiv:1706.04599).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# From the fewest parameters to the most.
KINDS = ("none", "temperature", "class", "vector")
# The least and the largest factor. A class that is always right in a few images would have an
# infinite one.
_BOUNDS = (0.01, 100.0)
_PARTS = 5
# Images for each class from which on ``choose`` tries the kinds with parameters of each class.
_LEAST_BY_CLASS = 20

# Returns the mean loss of logits [n, K], and its gradient by them [n, K].
_Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]


class Scaling(NamedTuple):
    """The factors of logits, and the terms that are added afterwards.

    Attributes:
        kind: one of KINDS.
        scale: [1] or [K], positive. A temperature of T is a scale of 1 / T.
        shift: [K], or [0]: nothing is added.
    """

    kind: str
    scale: np.ndarray
    shift: np.ndarray

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Returns the scaled logits, [n, K] float64."""
        scaled = logits.astype(np.float64) * self.scale
        return scaled + self.shift if self.shift.size else scaled


NONE = Scaling("none", np.ones(1), np.zeros(0))


def fit(logits: np.ndarray, labels: np.ndarray, kind: str) -> Scaling:
    """Returns the scaling with the lowest negative log-likelihood, or none if that is better.

    If every image is right, the best temperature would be 0. So may be that of a class, if all of
    its images are right. Labels are then smoothed as Platt (1999) does: the probability of the right
    class is (n + 1) / (n + 2).

    Args:
        logits: [n, K].
        labels: [n] classes, or [n, K] of 0 and 1 for images of several classes each.
        kind: one of KINDS.
    """
    # SciPy comes with scikit-learn. Its import takes a second.
    from scipy.optimize import minimize

    if kind == "none":
        return NONE
    logits = logits.astype(np.float64)
    outputs = logits.shape[1]
    factors = 1 if kind == "temperature" else outputs
    shifts = outputs if kind == "vector" else 0
    smoothing = 0.0
    if kind != "temperature" or are_right(logits, labels).all():
        smoothing = 1 / (len(labels) + 2)
    loss = _loss_of(labels, smoothing)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        scaled = logits * parameters[:factors]
        if shifts:
            scaled = scaled + parameters[factors:]
        value, gradient = loss(scaled)
        by_factor = (gradient * logits).sum(0)
        if factors == 1:
            by_factor = by_factor.sum(keepdims=True)
        by_shift = gradient.sum(0)[:shifts]
        return value, np.concatenate([by_factor, by_shift])

    start = np.concatenate([np.ones(factors), np.zeros(shifts)])
    found = minimize(
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[_BOUNDS] * factors + [(None, None)] * shifts,
        options={"maxiter": 300, "ftol": 1e-11, "gtol": 1e-7},
    )
    if not np.isfinite(found.x).all():
        return NONE
    shift = found.x[factors:]
    if shifts and labels.ndim == 1:
        # A softmax doesn't depend on what is added to all classes.
        shift = shift - shift.mean()
    scaling = Scaling(kind, found.x[:factors], shift)
    before = losses_of(logits, labels).mean()
    after = losses_of(scaling(logits), labels).mean()
    return scaling if after <= before else NONE


def choose(
    logits: np.ndarray, labels: np.ndarray, seed: int = 0
) -> tuple[Scaling, dict[str, float]]:
    """Returns the scaling of the kind that cross-validation chooses, and the loss of each kind.

    A kind of more parameters is chosen only if its loss on images that it wasn't fitted to is lower
    by more than a standard error of the difference. Kinds with parameters of each class need 20
    images of a class, on average.

    Args:
        logits, labels: as for ``fit``.
        seed: of the parts.
    """
    parts = np.random.default_rng(seed).permutation(len(logits)) % _PARTS
    kinds = KINDS
    if len(logits) < _LEAST_BY_CLASS * logits.shape[1]:
        kinds = KINDS[:2]
    losses = {}
    for kind in kinds:
        held_out = np.empty(len(logits))
        for part in range(_PARTS):
            inside = parts == part
            scaling = fit(logits[~inside], labels[~inside], kind)
            held_out[inside] = losses_of(scaling(logits[inside]), labels[inside])
        losses[kind] = held_out
    best = "none"
    for kind in kinds[1:]:
        gain = losses[best] - losses[kind]
        if gain.mean() > gain.std(ddof=1) / np.sqrt(len(gain)):
            best = kind
    means = {kind: float(values.mean()) for kind, values in losses.items()}
    return fit(logits, labels, best), means


def losses_of(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the negative log-likelihood of each image, [n] float64.

    Of images of several classes each, it is the mean over the classes.

    Args:
        logits, labels: as for ``fit``.
    """
    logits = logits.astype(np.float64)
    if labels.ndim == 2:
        return (np.logaddexp(0, logits) - labels * logits).mean(1)
    of_label = np.take_along_axis(logits, labels[:, None].astype(np.int64), 1)[:, 0]
    return np.logaddexp.reduce(logits, 1) - of_label


def are_right(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns which predictions are correct: [n] bool, or [n, K] with several classes per image.

    Args:
        logits, labels: as for ``fit``.
    """
    if labels.ndim == 2:
        return (logits > 0) == (labels > 0)
    return logits.argmax(1) == labels


def _loss_of(labels: np.ndarray, smoothing: float) -> _Loss:
    """Returns the mean of ``losses_of`` with its gradient, as a function of the logits."""

    def loss(logits: np.ndarray) -> tuple[float, np.ndarray]:
        if labels.ndim == 2:
            targets = labels * (1 - smoothing) + smoothing / 2
            value = losses_of(logits, targets).mean()
            gradient = np.exp(-np.logaddexp(0, -logits)) - targets
            return float(value), gradient / logits.size
        totals = np.logaddexp.reduce(logits, 1)
        of_classes = totals - logits.mean(1)
        value = (1 - smoothing) * losses_of(logits, labels) + smoothing * of_classes
        gradient = np.exp(logits - totals[:, None]) - smoothing / logits.shape[1]
        gradient[np.arange(len(labels)), labels] -= 1 - smoothing
        return float(value.mean()), gradient / len(logits)

    return loss


def scaled_thresholds(thresholds: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Returns the probabilities that give the same answers after scaling as ``thresholds`` before.

    Args:
        thresholds: [K] probabilities of a multi-label model, by output.
    """
    thresholds = np.asarray(thresholds, np.float64)
    # The ends stay: every logit is above a probability of 0.
    inside = (thresholds > 0) & (thresholds < 1)
    safe = np.where(inside, thresholds, 0.5)
    logits = scaling(np.log(safe / (1 - safe))[None])[0]
    return np.where(inside, np.exp(-np.logaddexp(0, -logits)), thresholds)
