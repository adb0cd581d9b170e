"""Logits and labels of models that are too sure, or not sure enough."""

import numpy as np

COVERAGES = (0.5, 0.8, 0.9, 0.95)
# Images, classes, and what the logits are multiplied by.
PROBLEMS = [(400, 5, 2.5), (300, 10, 0.4)]


def problem(seed: int, images: int, classes: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits [images, classes] and labels of a model that is too sure, or not sure enough."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(images, classes)) * 2
    noise = rng.gumbel(size=logits.shape)
    return logits * scale, (logits + noise).argmax(1)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)
