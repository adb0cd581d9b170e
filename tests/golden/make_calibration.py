"""Makes calibration.npz: temperatures of netcal 1.4.0, and prediction sets of mapie 1.6.0.

    PYTHONPATH=.:tests python tests/golden/make_calibration.py     # needs netcal, mapie, torch

mapie subtracts a random share of the right class's probability from its scores. Here these shares
are 0, as in ``inference.calibration.conformal``.
"""

import sys
import types
from pathlib import Path

import numpy as np

# netcal imports it for a log that isn't written here.
tensorboard = types.ModuleType("torch.utils.tensorboard")
tensorboard.SummaryWriter = object
sys.modules["torch.utils.tensorboard"] = tensorboard

from mapie.classification import SplitConformalClassifier  # noqa: E402
from mapie.conformity_scores import RAPSConformityScore  # noqa: E402
from netcal.metrics import ECE  # noqa: E402
from netcal.scaling import TemperatureScaling  # noqa: E402
from sklearn.base import BaseEstimator, ClassifierMixin  # noqa: E402

from golden.calibration_problem import COVERAGES, PROBLEMS, problem, softmax  # noqa: E402


class Given(ClassifierMixin, BaseEstimator):
    """A classifier whose features are the probabilities."""

    def __init__(self, classes: int) -> None:
        self.classes_ = np.arange(classes)

    def fit(self, inputs, labels):
        return self

    def predict_proba(self, inputs):
        return inputs

    def predict(self, inputs):
        return inputs.argmax(1)


class Zeros(np.random.RandomState):
    """Random numbers for mapie's scores, which are all 0."""

    def uniform(self, low=0.0, high=1.0, size=None):
        return np.zeros(size)


def main() -> None:
    found = {}
    for place, (images, classes, scale) in enumerate(PROBLEMS):
        logits, labels = problem(place, images, classes, scale)
        probabilities = softmax(logits)
        scaling = TemperatureScaling()
        scaling.fit(probabilities, labels)
        # netcal's weight is what logits are multiplied by.
        found[f"scale_{place}"] = np.asarray(scaling.weights, np.float64)
        found[f"ece_{place}"] = np.float64(ECE(15).measure(probabilities, labels))
        others, other_labels = problem(place + 10, 500, classes, scale)
        classifier = SplitConformalClassifier(
            Given(classes),
            confidence_level=list(COVERAGES),
            conformity_score=RAPSConformityScore(0.2),
            prefit=True,
            random_state=Zeros(place),
        )
        parameters = {"include_last_label": False}
        classifier.conformalize(softmax(others), other_labels)
        _, sets = classifier.predict_set(probabilities, conformity_score_params=parameters)
        inner = classifier._mapie_classifier
        score = inner.conformity_score_function_
        found[f"sets_{place}"] = np.packbits(sets, axis=None)
        found[f"sets_shape_{place}"] = np.array(sets.shape)
        # The images that mapie tuned the penalty and the rank on; the others chose thresholds.
        found[f"tuning_{place}"] = score.X_raps
        found[f"tuning_labels_{place}"] = score.y_raps
        found[f"penalty_{place}"] = np.atleast_1d(score.lambda_star)
        found[f"rank_{place}"] = np.atleast_1d(score.k_star)
        found[f"threshold_{place}"] = np.atleast_1d(score.quantiles_)
    np.savez_compressed(Path(__file__).with_name("calibration.npz"), **found)
    for name, values in found.items():
        print(name, values if values.size < 6 else values.shape)


if __name__ == "__main__":
    main()
