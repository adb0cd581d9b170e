"""Computes class activation maps by gradients, for every architecture."""

from collections.abc import Callable

import numpy as np
import paddle

from errors import InputError
from inference.visualization.attention import refuse_merged
from models.base import ImageModel


def grad_cam(activations: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Grad-CAM: channels weighted by their mean gradient (Selvaraju et al. 2017, arXiv:1610.02391).

    Shape, as for all methods: activations and gradients [rows, columns, C] -> [rows, columns].
    """
    return (gradients.mean((0, 1)) * activations).sum(2)


def hires_cam(activations: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """HiResCAM: each activation times its gradient (Draelos et al. 2020, arXiv:2011.08891)."""
    return (gradients * activations).sum(2)


def layer_cam(activations: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """LayerCAM: each activation times its gradient, if that is positive (Jiang et al. 2021)."""
    return (np.maximum(gradients, 0) * activations).sum(2)


def grad_cam_pp(activations: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Grad-CAM++: channels weighted by their positive gradients, each with a share of its place
    (Chattopadhay et al. 2018, arXiv:1710.11063).
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
    """Returns how much each place of an image contributes to a class: [rows, columns] float32.

    Values are 0 or more; all are 0 if nothing contributes. The map is computed from the input of
    the classifier's pooling. If the classifier reads a class token, the map is computed at the last
    block's first norm instead. After it, patches have no influence on the class token.

    Args:
        image: [1, C, H, W], normalised.
        output: the class; None: the predicted one.
        method: one of METHODS.

    Raises:
        InputError: the model has no classifier, or no such output; or it merges tokens, and its
            classifier reads the class token.
    """
    if model.cam_layer() is not None:
        refuse_merged(model)
    if not model.num_classes:
        raise InputError("the model has no classifier (NUM_CLASSES 0): use attention or features")
    if output is not None and not 0 <= output < model.num_classes:
        raise InputError(
            f"-class is {output}, but the model has the outputs 0 to {model.num_classes - 1}"
        )
    features, gradient = _features_and_gradient(model, image, output)
    values = METHODS[method](_by_place(model, features)[0], _by_place(model, gradient)[0])
    return np.maximum(values, 0).astype(np.float32)


def _features_and_gradient(
    model: ImageModel, image: paddle.Tensor, output: int | None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns the output of the target layer, and the gradient of the class's logit with respect to
    it.
    """
    kept: list[paddle.Tensor] = []

    def detach(x: paddle.Tensor) -> paddle.Tensor:
        # The gradient isn't needed before the target layer.
        kept.append(x.detach())
        kept[0].stop_gradient = False
        return kept[0]

    if (layer := model.cam_layer()) is not None:
        hook = layer.register_forward_post_hook(lambda _, __, x: detach(x))
        try:
            logits = model(image)
        finally:
            hook.remove()
    else:
        with paddle.no_grad():
            features = model.forward_features(image)
        logits = model.forward_head(detach(features))
    if output is None:
        output = int(logits[0].argmax())
    [gradient] = paddle.grad(logits[0, output], kept)
    return kept[0], gradient


def _by_place(model: ImageModel, x: paddle.Tensor) -> np.ndarray:
    """Returns features as [B, rows, columns, C] float64."""
    features = x.astype("float64").numpy()
    if features.ndim == 3:
        # Tokens [B, prefix + rows * columns, C].
        rows, columns = model.grid(features.shape[1] - model.num_prefix_tokens)
        return features[:, -rows * columns :].reshape(len(features), rows, columns, -1)
    if model.layout == "NCHW":
        return features.transpose(0, 2, 3, 1)
    return features
