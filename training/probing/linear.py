"""Linear classifiers of frozen features: logistic regression, a sweep of SGD's rates, few labels.

They run on one process, whose arrays hold all features, standardised by the training images
(``standardise``). What is chosen (a penalty, a rate) is chosen on a part of the training images
that is held out, never on the validation images, whose accuracy is reported.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.nn import functional as F

from errors import InputError
from launch import progress

# Inverse penalties of logistic regression (scikit-learn's C), the strongest penalty first.
CS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
# The C where there are too few labels to choose one.
FEW_C = 1.0
# Rates of SGD, and the passes over the features and updates of a training.
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
EPOCHS = 10
FEWEST_UPDATES = 1000
BATCH = 256
MOMENTUM = 0.9
# The share of each class's training images that is held out.
HELD_OUT = 0.2
_MOST_ITERATIONS = 1000


class Labelled(NamedTuple):
    """Features and their classes.

    Attributes:
        values: [n, channels] float32.
        labels: [n] integers.
    """

    values: np.ndarray
    labels: np.ndarray

    def rows(self, chosen: Any) -> "Labelled":
        """Returns some of the rows; ``chosen`` is what indexes an array."""
        return Labelled(self.values[chosen], self.labels[chosen])


def standardise(train: np.ndarray, val: np.ndarray) -> None:
    """Shifts and scales each channel, in place, by the training features' mean and deviation."""
    mean = train.mean(0, dtype=np.float64)
    deviation = train.std(0, dtype=np.float64)
    deviation[deviation == 0] = 1
    for values in (train, val):
        values -= mean.astype(np.float32)
        values /= deviation.astype(np.float32)


def held_out(labels: np.ndarray, seed: int) -> np.ndarray:
    """Returns which images are held out: [n] booleans, a fifth of each class, rounded.

    Raises:
        InputError: no class has enough images.
    """
    rng = np.random.default_rng([seed, 0])
    mask = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        images = rng.permutation(np.flatnonzero(labels == label))
        mask[images[: round(HELD_OUT * len(images))]] = True
    if not mask.any():
        raise InputError(
            f"{len(labels)} training images are too few to hold out a part for choosing the linear"
            " classifier's penalty and learning rate; remove logistic and sgd from -probes"
        )
    return mask


def logistic_regression(train: Labelled, c: float) -> Any:
    """Returns scikit-learn's logistic regression (L2, lbfgs), fitted to ``train``."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # It computes in the features' type. float32 ends some searches early.
    values = train.values.astype(np.float64)
    with warnings.catch_warnings():
        # What isn't converged is reported as such, by its number of iterations.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return LogisticRegression(C=c, max_iter=_MOST_ITERATIONS).fit(values, train.labels)


def logistic_probe(train: Labelled, val: Labelled, seed: int) -> dict[str, Any]:
    """Returns the accuracy of logistic regression on ``val``.

    The penalty is chosen on the held-out part, of equal ones the strongest. The classifier is then
    fitted to all of ``train``.
    """
    held = held_out(train.labels, seed)
    scores = []
    for c in CS:
        progress.pause()
        model = logistic_regression(train.rows(~held), c)
        scores.append(_accuracy(model.predict(train.values[held]), train.labels[held]))
    chosen = CS[int(np.argmax(scores))]
    model = logistic_regression(train, chosen)
    return {
        "accuracy": _accuracy(model.predict(val.values), val.labels),
        "C": chosen,
        "held_out_accuracy": max(scores),
        "converged": bool(model.n_iter_.max() < _MOST_ITERATIONS),
    }


def sgd_probe(
    train: Labelled, val: Labelled, seed: int, rates: Sequence[float] = RATES
) -> dict[str, Any]:
    """Returns the accuracy on ``val`` of a linear classifier that SGD trained.

    As in DINOv2 (arXiv:2304.07193), one classifier for each rate is trained at the same time, so
    the features are read once for all. The one that is best on the held-out part is reported; of
    equal ones that with the lowest rate. It isn't trained on the held-out part.
    """
    held = held_out(train.labels, seed)
    classes = int(max(train.labels.max(), val.labels.max())) + 1
    heads = SgdHeads(train.values.shape[1], classes, rates)
    heads.fit(train.rows(~held), seed)
    scores = heads.accuracies(train.rows(held))
    best = int(np.argmax(scores))
    return {
        "accuracy": heads.accuracies(val)[best],
        "rate": rates[best],
        "held_out_accuracy": scores[best],
    }


class SgdHeads:
    """Linear classifiers, one for each rate, which SGD trains together on the device.

    The loss is cross-entropy. SGD has a momentum of 0.9, no weight decay, and rates that fall to 0
    along a cosine.

    Attributes:
        weight: [channels, rates * classes]; ``bias``: [rates * classes]. Both begin with zeros.
    """

    def __init__(self, channels: int, classes: int, rates: Sequence[float]) -> None:
        self.classes = classes
        self.rates = paddle.to_tensor(np.repeat(np.asarray(rates, np.float32), classes))
        self.weight = paddle.zeros([channels, len(rates) * classes])
        self.bias = paddle.zeros([len(rates) * classes])

    @paddle.no_grad()
    def fit(self, train: Labelled, seed: int) -> None:
        """Trains for EPOCHS passes, and for FEWEST_UPDATES at least."""
        count = len(train.labels)
        epochs = max(EPOCHS, math.ceil(FEWEST_UPDATES / math.ceil(count / BATCH)))
        updates = epochs * math.ceil(count / BATCH)
        speeds = [paddle.zeros_like(self.weight), paddle.zeros_like(self.bias)]
        update = 0
        for epoch in range(epochs):
            order = np.random.default_rng([seed, 1, epoch]).permutation(count)
            for first in range(0, count, BATCH):
                progress.beat(progress.EVALUATING)
                batch = train.rows(order[first : first + BATCH])
                scale = 0.5 * (1 + math.cos(math.pi * update / updates))
                gradients = self._gradients(batch)
                for parameter, speed, gradient in zip(
                    (self.weight, self.bias), speeds, gradients, strict=True
                ):
                    speed.scale_(MOMENTUM)
                    speed.add_(gradient)
                    parameter.subtract_(speed * (self.rates * scale))
                update += 1

    def _gradients(self, batch: Labelled) -> list[paddle.Tensor]:
        """Returns the gradients of each head's mean loss, of the weight and the bias."""
        values = paddle.to_tensor(batch.values)
        labels = F.one_hot(paddle.to_tensor(batch.labels), self.classes)
        errors = F.softmax(self._logits(values), axis=2) - labels.unsqueeze(1)
        errors = errors.flatten(1) / len(batch.labels)
        return [paddle.matmul(values, errors, transpose_x=True), errors.sum(0)]

    def _logits(self, values: paddle.Tensor) -> paddle.Tensor:
        """Returns the logits [B, rates, classes]."""
        logits = paddle.matmul(values, self.weight) + self.bias
        return logits.reshape([len(values), -1, self.classes])

    @paddle.no_grad()
    def accuracies(self, data: Labelled) -> list[float]:
        """Returns each head's accuracy in percent."""
        correct: Any = 0
        for first in range(0, len(data.labels), BATCH):
            batch = data.rows(slice(first, first + BATCH))
            logits = self._logits(paddle.to_tensor(batch.values)).numpy()
            correct = correct + (logits.argmax(2) == batch.labels[:, None]).sum(0)
        return (100 * correct / len(data.labels)).tolist()


def few_shot_probe(
    train: Labelled, val: Labelled, shots: int, seeds: Sequence[int]
) -> dict[str, Any]:
    """Returns the accuracy on ``val`` of logistic regression with ``shots`` labels a class.

    C is 1: so few labels leave none to choose it by.

    Args:
        seeds: each draws its own images.

    Returns:
        the ``mean`` and the ``deviation`` over the seeds (ddof 0), and each seed's ``accuracies``.
    """
    accuracies = []
    for seed in seeds:
        progress.pause()
        rows = drawn_labels(train.labels, shots, seed)
        model = logistic_regression(train.rows(rows), FEW_C)
        accuracies.append(_accuracy(model.predict(val.values), val.labels))
    return {
        "mean": float(np.mean(accuracies)),
        "deviation": float(np.std(accuracies)),
        "accuracies": accuracies,
    }


def drawn_labels(labels: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Returns the places of ``shots`` random images of each class that has images.

    The first of more shots are those of fewer.
    """
    rng = np.random.default_rng([seed, 2])
    drawn = [
        rng.permutation(np.flatnonzero(labels == label))[:shots] for label in np.unique(labels)
    ]
    return np.concatenate(drawn)


def _accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    return 100 * float((predicted == labels).mean())
