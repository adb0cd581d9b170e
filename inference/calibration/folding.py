"""Folds a scaling of logits into a model's classifiers.

The model's own logits are then the scaled ones: evaluations, predictions, exports and other
toolkits don't need to know about it.
"""

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from inference.calibration.scaling import Scaling
from models.base import ImageModel, sublayer
from ops.device import exact_float32

# The largest difference from the scaled logits, as a share of their range.
TOLERANCE = 1e-4


@paddle.no_grad()
def fold(model: ImageModel, scaling: Scaling, images: np.ndarray) -> None:
    """Multiplies a model's logits by a scale and adds a shift, by changing its classifiers.

    Args:
        model: in evaluation mode.
        images: [n, C, H, W] float32, normalised. The scaled logits of these are compared.

    Raises:
        InputError: the model's logits can't be scaled so.
    """
    expected = scaling(_logits(model, images))
    classifiers = [_last_linear(sublayer(model, name)) for name in model.classifier_names()]
    for classifier in classifiers:
        _multiply(classifier, scaling.scale)
    if scaling.shift.size:
        if any(classifier.bias is None for classifier in classifiers):
            raise InputError(
                "the model's classifier has no bias to shift; use -scaling temperature or class"
            )
        # Logits may be the mean of several classifiers, or a sum in which one counts half.
        before = _logits(model, images)
        for classifier in classifiers:
            _add(classifier, np.ones_like(scaling.shift))
        gain = float((_logits(model, images) - before).mean())
        for classifier in classifiers:
            _add(classifier, scaling.shift / gain - 1)
    found = _logits(model, images)
    difference = np.abs(found - expected).max() / max(np.ptp(expected), 1e-12)
    if not difference <= TOLERANCE:
        raise InputError(
            "the logits of the model aren't linear in its classifiers: after scaling, they"
            " differ by"
            f" {difference:.1e} of their range; use -scaling none"
        )


def _logits(model: ImageModel, images: np.ndarray) -> np.ndarray:
    with exact_float32():
        return model(paddle.to_tensor(images)).numpy().astype(np.float64)


def _last_linear(classifier: nn.Layer) -> nn.Linear:
    """Returns the linear layer of a classifier, which may have a norm before it."""
    layers = classifier.sublayers(include_self=True)
    return [layer for layer in layers if isinstance(layer, nn.Linear)][-1]


def _multiply(classifier: nn.Linear, scale: np.ndarray) -> None:
    for parameter in (classifier.weight, classifier.bias):
        if parameter is not None:
            # A Linear's weight is [in, out] here.
            product = parameter.numpy().astype(np.float64) * scale
            parameter.set_value(product.astype(np.float32))


def _add(classifier: nn.Linear, shift: np.ndarray) -> None:
    total = classifier.bias.numpy().astype(np.float64) + shift
    classifier.bias.set_value(total.astype(np.float32))
