"""Inputs of the metric losses' comparison with pytorch-metric-learning."""

import numpy as np

IMAGES = 24
CLASSES = 6
WIDTH = 8
# Margin (radians) and scale of ArcFace, margin and alpha of Proxy-Anchor, margin of the triplets.
ARCFACE = ((0.5, 64.0), (0.2, 30.0), (1.2, 16.0))
PROXY_ANCHOR = ((0.1, 32.0), (0.3, 8.0))
TRIPLET = (0.2, 1.0, None)


def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns embeddings [N, D] and the classes' vectors [D, K] in float32, and labels [N].

    The last class has one image, the one before it none. Some angles are beyond pi - margin.
    """
    generator = np.random.default_rng(8)
    embeddings = generator.normal(size=(IMAGES, WIDTH)).astype(np.float32)
    vectors = generator.normal(size=(WIDTH, CLASSES)).astype(np.float32)
    labels = generator.integers(0, CLASSES - 2, IMAGES)
    labels[5] = CLASSES - 1
    noise = generator.normal(size=(4, WIDTH)).astype(np.float32)
    embeddings[:4] = -3 * vectors[:, labels[:4]].T + 0.1 * noise
    return embeddings, vectors, labels
