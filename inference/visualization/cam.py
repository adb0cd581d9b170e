"""What of an image speaks for a class: class activation maps by gradients, for every architecture."""

from collections.abc import Callable

import numpy as np
import paddle

from errors import InputError
from models.base import ImageModel


def grad_cam(activations: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Weighs channels by their mean gradient (Selvaraju et al. 2017, arXiv:1610.02391)."""
    return (gradients.mean((0, 1)) * activations).sum(2)


def hires_cam(activations: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Draelos et al. 2020, arXiv:2011.08891: each activation times its own gradient."""
    return (gradients * activations).sum(2)


def layer_cam(activations: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Multiplies each activation by its own gradient, where that is positive (Jiang et al. 2021)."""
    return (np.maximum(gradients, 0) * activations).sum(2)


def grad_cam_pp(activations: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Weighs positive gradients by their place's share (Grad-CAM++, Chattopadhay et al. 2018,
    arXiv:1710.11063).
    """
    squared = gradients**2
    cubed = gradients**3
    shares = squared / (2 * squared + activations.sum((0, 1)) * cubed + 1e-6)
    weights = (np.maximum(gradients, 0) * np.where(gradients != 0, shares, 0)).sum((0, 1))
    return (weights * activations).sum(2)


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "gradcam": grad_cam,
    "hirescam": hires_cam,
    "gradcam++": grad_cam_pp,
    "layercam": layer_cam,
}


def cam(
    model: ImageModel, image: paddle.Tensor, output: int | None = None, method: str = "gradcam"
) -> np.ndarray:
    """Returns how much each place of an image speaks for a class: [rows, columns] float32, 0 or
    more.

    It is taken where the classifier's pooling reads. If the model reads a class token, it is taken
    at the last block's first norm: after it, patches matter only for the class token. All are 0
    where nothing speaks for the class.

    Args:
        image: [1, C, H, W], normalised.
        output: the class; None: the predicted one.
        method: one of METHODS.

    Raises:
        InputError: the model has no classifier, or not so many outputs.
    """
    if not model.num_classes:
        raise InputError(
            "the model has no classifier (NUM_CLASSES 0): no class has a map; use attention or features"
        )
    if output is not None and not 0 <= output < model.num_classes:
        raise InputError(
            f"-class is {output}, the model has the outputs 0 to {model.num_classes - 1}"
        )
    activations, gradients = (
        _places(model, x)[0] for x in _output_and_gradient(model, image, output)
    )
    return np.maximum(METHODS[method](activations, gradients), 0).astype(np.float32)


def _output_and_gradient(
    model: ImageModel, image: paddle.Tensor, output: int | None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """What the target layer gives, and the gradient of the class's logit by it."""
    kept: list[paddle.Tensor] = []

    def cut(x: paddle.Tensor) -> paddle.Tensor:
        kept.append(x.detach())
        kept[0].stop_gradient = False  # nothing before it needs a gradient
        return kept[0]

    if (layer := model.cam_layer()) is not None:
        hook = layer.register_forward_post_hook(lambda _, __, x: cut(x))
        try:
            logits = model(image)
        finally:
            hook.remove()
    else:
        with paddle.no_grad():
            features = model.forward_features(image)
        logits = model.forward_head(cut(features))
    output = int(logits[0].argmax()) if output is None else output
    [gradient] = paddle.grad(logits[0, output], kept)
    return kept[0], gradient


def _places(model: ImageModel, x: paddle.Tensor) -> np.ndarray:
    """Features by image, row, column and channel, float64."""
    features = x.astype("float64").numpy()
    if features.ndim == 3:  # of tokens those of places are the last
        rows, columns = model.grid(features.shape[1] - model.num_prefix_tokens)
        return features[:, -rows * columns :].reshape(len(features), rows, columns, -1)
    return features.transpose(0, 2, 3, 1) if model.layout == "NCHW" else features
