"""Copies of a network's layers that follow their originals, as teachers and momentum encoders do."""

import copy
from collections.abc import Iterable
from typing import Any

import paddle
from paddle import nn

from models.layers.batch_norm import BATCH_NORMS
from models.layers.drop import DropPath
from models.layers.moving_average import MovingAverage


class FrozenCopy(nn.Layer):
    """Copies of some layers of a network, which are moving averages of the originals.

    The copies have no gradients, and drop nothing at random. In training their batch norms
    normalise by the batch, as the originals do, and have running statistics of their own.

    Args:
        network: has the layers.
        names: of the layers, which are also those of the copies. What is None there is None here.
    """

    def __init__(self, network: nn.Layer, names: Iterable[str]) -> None:
        super().__init__()
        self.copied = tuple(names)
        for name in self.copied:
            setattr(self, name, copy.deepcopy(getattr(network, name)))
        for parameter in self.parameters():
            parameter.stop_gradient = True
        for layer in self.sublayers():
            _make_still(layer)
        self._average: MovingAverage | None = None

    def follow(self, network: nn.Layer, momentum: float) -> None:
        """Makes each parameter momentum * itself + (1 - momentum) * the network's, in place.

        Args:
            network: the one whose layers were copied, the same object at every call.
            momentum: 0 copies the network's parameters, 1 changes nothing.
        """
        if self._average is None:
            self._average = MovingAverage(self._pairs(network))
        self._average.update(1 - momentum)

    def _pairs(self, network: nn.Layer) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        originals = dict(network.named_parameters())
        return [(tensor, originals[name]) for name, tensor in self.named_parameters()]


def _make_still(layer: Any) -> None:
    """Switches off the randomness of a layer, and recomputation, which needs gradients."""
    if isinstance(layer, DropPath):
        layer.drop_prob = 0.0
    elif isinstance(layer, nn.Dropout):
        layer.p = 0.0
    elif isinstance(layer, BATCH_NORMS):
        layer.is_average = True
    if hasattr(layer, "recompute"):
        layer.recompute = False
