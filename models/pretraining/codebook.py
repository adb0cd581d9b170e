"""Codes that follow the features which they stand for, as in the tokenizer of BEiT v2 (Peng et al.
2022, arXiv:2208.06366).

Features and codes have the length 1, and the code of a feature is that with the smallest angle.
Codes aren't trained by gradients: each is a moving average of its features. Averages and k-means are
those of the features of all processes.
"""

import numpy as np
import paddle
from paddle.nn import functional as F

from models.layers.linear import float32_matmul
from utils import all_gather, all_reduce_sum

_KMEANS_STEPS = 10


def nearest(features: paddle.Tensor, codes: paddle.Tensor) -> paddle.Tensor:
    """Returns the code of each feature: [..., C], [codes, C] -> [...] int64."""
    return float32_matmul(features, codes, transpose_y=True).argmax(-1)


@paddle.no_grad()
def updated(
    codes: paddle.Tensor, features: paddle.Tensor, tokens: paddle.Tensor, decay: float
) -> paddle.Tensor:
    """Returns the codes after a step: decay * code + (1 - decay) * the mean of its features, both of
    length 1. A code without a feature stays as it is.

    Args:
        codes: [codes, C].
        features: this process's, [N, C].
        tokens: their codes, [N] int64.
    """
    means = _means(codes, features, tokens)
    return F.normalize(decay * codes + (1 - decay) * means, axis=-1)


@paddle.no_grad()
def kmeans(features: paddle.Tensor, means: paddle.Tensor) -> paddle.Tensor:
    """Returns the means after ten steps of k-means by angles: [codes, C].

    Args:
        features: this process's, [N, C].
        means: [codes, C], the same on all processes.
    """
    for _ in range(_KMEANS_STEPS):
        means = _means(means, features, nearest(features, means))
    return means


def sampled(features: paddle.Tensor, count: int, rng: np.random.Generator) -> paddle.Tensor:
    """Returns ``count`` of the features of all processes, [count, C]. If there are fewer, some are
    drawn more than once.

    Args:
        features: this process's, [N, C].
        rng: a generator in the same state on all processes.
    """
    everywhere = np.concatenate(all_gather(features.numpy()))
    enough = len(everywhere) >= count
    return paddle.to_tensor(everywhere[rng.choice(len(everywhere), count, replace=not enough)])


def _means(codes: paddle.Tensor, features: paddle.Tensor, tokens: paddle.Tensor) -> paddle.Tensor:
    """Returns the mean of each code's features, of length 1; the code itself if it has none."""
    ones = paddle.ones_like(features[:, :1])
    assigned = F.one_hot(tokens, len(codes))
    # A product adds in the same order at each call, a scatter on a GPU doesn't.
    sums = float32_matmul(assigned, paddle.concat([features, ones], axis=1), transpose_x=True)
    sums = all_reduce_sum(sums)
    means = F.normalize(sums[:, :-1] / sums[:, -1:].clip(min=1), axis=-1)
    return paddle.where(sums[:, -1:] > 0, means, codes)
