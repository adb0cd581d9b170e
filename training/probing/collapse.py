"""Two numbers that show whether features have collapsed, and a warning.

RankMe (Garrido et al. 2023, arXiv:2210.02885) is the effective rank of the features: 1 if all of
them are multiples of one, and at most the number of channels. The deviation of normalised features
(Chen & He 2021, arXiv:2011.10566) is 0 if all images have the same features, and 1 / sqrt(channels)
if they are spread over all directions.
"""

from typing import NamedTuple

import numpy as np

from training.probing.features import Features, normalised, sums_over_ranks

# Below these, features have collapsed: a share of the healthy deviation, and RankMe. Random weights
# of vit_digits have 0.12 and 2.6.
LEAST_DEVIATION = 0.02
LEAST_RANK = 1.1
# The epsilon of RankMe's paper.
_EPSILON = 1e-7
# The rows whose products are summed at once.
_BLOCK = 8192


class Spread(NamedTuple):
    """How far features are spread.

    Attributes:
        rankme: from 1 to ``channels``.
        feature_std: the mean over the channels of the deviation of l2-normalised features, from 0 on.
        channels, images: the numbers of channels and of images.
    """

    rankme: float
    feature_std: float
    channels: int
    images: int

    @property
    def healthy(self) -> float:
        """The deviation of features that are spread over all directions."""
        return self.channels**-0.5

    @property
    def warning(self) -> str:
        """A line that names a collapse; "": there is none."""
        if self.feature_std < LEAST_DEVIATION * self.healthy:
            return (
                "collapse: all images have nearly the same features: their standard deviation is"
                f" {self.feature_std:.1e}, expected about {self.healthy:.1e}"
            )
        if self.rankme < LEAST_RANK and self.channels > 1:
            return (
                "collapse: the features vary in one dimension only: RankMe is"
                f" {self.rankme:.2f} of {self.channels}"
            )
        return ""


def spread_of(features: Features) -> Spread:
    """Returns how far the features of all ranks are spread; every rank calls it."""
    values = features.values
    channels = values.shape[1]
    gram = np.zeros((channels, channels))
    sums = np.zeros(channels)
    squares = np.zeros(channels)
    for first in range(0, len(values), _BLOCK):
        block = values[first : first + _BLOCK].astype(np.float64)
        gram += block.T @ block
        directions = normalised(block)
        sums += directions.sum(0)
        squares += (directions**2).sum(0)
    total = sums_over_ranks(
        gram=gram, sums=sums, squares=squares, count=np.array([len(values)], np.float64)
    )
    count = int(total["count"][0])
    mean = total["sums"] / count
    variance = np.maximum(total["squares"] / count - mean**2, 0)
    deviation = float(np.sqrt(variance).mean())
    return Spread(rankme(total["gram"], count), deviation, channels, count)


def rankme(gram: np.ndarray, count: int) -> float:
    """Returns RankMe of features Z [count, channels], the exponential of the entropy of their
    singular values.

    Args:
        gram: Z^T Z, [channels, channels] float64. The roots of its eigenvalues are Z's singular
            values.
    """
    singular = np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[-count:], 0))
    shares = singular / max(singular.sum(), np.finfo(np.float64).tiny) + _EPSILON
    return float(np.exp(-(shares * np.log(shares)).sum()))
