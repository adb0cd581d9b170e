"""Group norm, by the compiled operators (ops/) if they can be used."""

from typing import Any

import paddle
from paddle import nn

import ops


class GroupNorm(nn.GroupNorm):
    """``paddle.nn.GroupNorm`` with a scale. Shape: [B, C, H, W] -> the same."""

    def __init__(self, *sizes: Any, bias_attr: Any = None, **settings: Any) -> None:
        super().__init__(*sizes, bias_attr=bias_attr, **settings)
        if bias_attr is False:
            # Paddle 2.6 makes a bias all the same, which isn't trained.
            self.bias = None  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if ops.usable(x):
            bias = paddle.zeros_like(self.weight) if self.bias is None else self.bias
            return ops.group_norm(x, self._num_groups, self.weight, bias, self._epsilon)
        # Not super(), which Paddle 2.6 can't trace.
        return nn.GroupNorm.forward(self, x)
