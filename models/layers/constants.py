"""Constant tensors that depend on the size of the images at hand."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle

# Sizes of images whose constants are kept: those of the views of one training, and some more.
_KEPT = 16


class Constants:
    """Computes constant tensors, and keeps those of the last few sizes.

    So a training that takes turns between sizes copies no constants to its device at each step.

    Args:
        compute: returns the arrays for a size.
    """

    def __init__(self, compute: Callable[[Any], Sequence[np.ndarray]]) -> None:
        self.compute = compute
        self.kept: dict[Any, list[paddle.Tensor]] = {}

    def at(self, size: Any) -> list[paddle.Tensor]:
        """Returns the tensors for a size."""
        # A constant of a static graph belongs to this graph alone.
        if not paddle.in_dynamic_mode():
            return self._tensors(size)
        if size not in self.kept:
            if len(self.kept) == _KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[size] = self._tensors(size)
        return self.kept[size]

    def _tensors(self, size: Any) -> list[paddle.Tensor]:
        return [paddle.to_tensor(array) for array in self.compute(size)]
