"""An image's embedding: the input of its model's classifier."""

from collections.abc import Callable
from typing import Any

import paddle

from errors import InputError
from models.base import ImageModel
from weights.layout import sublayer


class Embeddings:
    """Keeps the embeddings that a model, or a copy of it, computed in its last forward pass.

    Attributes:
        last: [B, D].
    """

    last: paddle.Tensor

    def watch(self, model: ImageModel, key: str) -> None:
        """Keeps the embeddings of a model from now on.

        Args:
            key: the key that needs them, for the error.

        Raises:
            InputError: the model has several classifiers.
        """
        names = model.classifier_names()
        if len(names) != 1:
            raise InputError(
                f"{key} needs the input of one classifier, but {type(model).__name__} has"
                f" {len(names)}: {', '.join(names)}; choose another model"
            )
        sublayer(model, names[0]).register_forward_pre_hook(self._keeper())

    def _keeper(self) -> Callable[..., None]:
        # A function, not a method: a copy of the model (TRAIN.MODEL_EMA) has the same function, where
        # it would have a method of a copy of this object.
        def keep(_: Any, inputs: tuple[paddle.Tensor, ...]) -> None:
            self.last = inputs[0]

        return keep
