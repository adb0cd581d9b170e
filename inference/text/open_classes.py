"""Classes that are given with each call, for models of images and texts (CLIP, SigLIP)."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import paddle

from errors import InputError
from inference.predictor import Predictor
from inference.text.encoder import TextEncoder
from inference.text.names import check_classes
from inference.text.prompts import TEMPLATES, text_classifier
from models.layers.linear import linear
from models.text_pretrained import has_text_tower

# The sets of classes whose weights are kept.
_KEPT = 64


def gives_embeddings(predictor: Predictor) -> bool:
    """Returns whether a predictor's weights hold a text tower beside the image tower."""
    return predictor.model is not None and has_text_tower(predictor.path)


class OpenClasses:
    """Predicts which of the given classes images belong to, without a trained classifier.

    Args:
        predictor: of weights of images and texts.
        templates: sentences that stand for a class, with {} in place of its name.

    Raises:
        InputError: the weights have no text tower, or have no tokenizer beside them.
    """

    def __init__(self, predictor: Predictor, templates: Sequence[str] = TEMPLATES) -> None:
        self.predictor = predictor
        self.templates = templates
        self.encoder = predictor.encoder or TextEncoder(predictor.path)
        self._weights: OrderedDict[tuple[str, ...], tuple[paddle.Tensor, paddle.Tensor]] = (
            OrderedDict()
        )

    @staticmethod
    def of(predictor: Predictor) -> "OpenClasses | None":
        """Returns an ``OpenClasses`` for a predictor, or None if its weights have no text tower."""
        return OpenClasses(predictor) if gives_embeddings(predictor) else None

    def embeddings(self, pixels: np.ndarray) -> np.ndarray:
        """Returns images' embeddings of length 1: [B, H, W, C] -> [B, D] float32."""
        if self.predictor.encoder:
            # What the classifier of the given classes reads.
            return self.predictor.features(pixels)
        outputs = self.predictor.logits(pixels)
        lengths = np.linalg.norm(outputs, axis=1, keepdims=True)
        return outputs / np.maximum(lengths, np.finfo(np.float32).tiny)

    def logits(self, embeddings: np.ndarray, classes: Sequence[str]) -> np.ndarray:
        """Returns the logits of classes: [B, D] -> [B, K] float32.

        Raises:
            InputError: as ``check_classes``, or no image tells two of the classes apart.
        """
        weights, biases = self._of_classes(tuple(classes))
        with paddle.no_grad():
            # The classifier's own operator: the same bits.
            return linear(paddle.to_tensor(embeddings), weights, biases).numpy()

    def _of_classes(self, classes: tuple[str, ...]) -> tuple[paddle.Tensor, paddle.Tensor]:
        if classes in self._weights:
            self._weights.move_to_end(classes)
            return self._weights[classes]
        check_classes(classes)
        made = text_classifier(self.encoder, classes, self.templates)
        if made.alike:
            raise InputError(f"{made.alike}; leave one out")
        self._weights[classes] = paddle.to_tensor(made.weights), paddle.to_tensor(made.biases)
        if len(self._weights) > _KEPT:
            self._weights.popitem(last=False)
        return self._weights[classes]
