"""Activations, by the compiled operators (ops/) where there are any: functions, and the layers of
``paddle.nn``.
"""

import paddle
from paddle import nn
from paddle.nn import functional as F

import ops


def relu(x: paddle.Tensor) -> paddle.Tensor:
    return ops.activation(x, "relu") if ops.usable(x) else F.relu(x)


def gelu(x: paddle.Tensor) -> paddle.Tensor:
    """The exact one."""
    return ops.activation(x, "gelu") if ops.usable(x) else F.gelu(x)


def silu(x: paddle.Tensor) -> paddle.Tensor:
    return ops.activation(x, "silu") if ops.usable(x) else plain_silu(x)


def plain_silu(x: paddle.Tensor) -> paddle.Tensor:
    """``silu`` by Paddle's own operators."""
    # On a CPU the gradient of F.silu is infinite at -88 and NaN below.
    on_cpu = paddle.in_dynamic_mode() and x.place.is_cpu_place()
    return x * F.sigmoid(x) if on_cpu else F.silu(x)


def softmax(x: paddle.Tensor) -> paddle.Tensor:
    """Over the last axis."""
    return ops.activation(x, "softmax") if ops.usable(x) else F.softmax(x, axis=-1)


class ReLU(nn.ReLU):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return relu(x)


class GELU(nn.GELU):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return gelu(x)


class TanhGELU(nn.Layer):
    """GELU by its approximation with tanh."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return ops.activation(x, "gelu_tanh") if ops.usable(x) else F.gelu(x, approximate=True)


class SiLU(nn.Silu):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return silu(x)


class Hardswish(nn.Hardswish):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return ops.activation(x, "hardswish") if ops.usable(x) else F.hardswish(x)


class QuickGELU(nn.Layer):
    """x * sigmoid(1.702 x), which OpenAI's CLIP was trained with (arXiv:1606.08415, section 2)."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return ops.activation(x, "quick_gelu") if ops.usable(x) else x * F.sigmoid(1.702 * x)
