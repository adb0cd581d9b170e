"""Activations as functions and as layers, by the compiled operators (ops/) if they can be used.

The layers keep the class of their counterparts in ``paddle.nn``, if there is one.
"""

import math

import paddle
from paddle import nn
from paddle.nn import functional as F

import ops


def relu(x: paddle.Tensor) -> paddle.Tensor:
    return ops.activation(x, "relu") if ops.usable(x) else F.relu(x)


def gelu(x: paddle.Tensor) -> paddle.Tensor:
    """The exact GELU, not its approximation by tanh."""
    return ops.activation(x, "gelu") if ops.usable(x) else F.gelu(x)


def silu(x: paddle.Tensor) -> paddle.Tensor:
    return ops.activation(x, "silu") if ops.usable(x) else plain_silu(x)


def plain_silu(x: paddle.Tensor) -> paddle.Tensor:
    """``silu`` by Paddle's own operators."""
    # On a CPU, the gradient of F.silu is infinite at x = -88 and NaN below.
    on_cpu = paddle.in_dynamic_mode() and x.place.is_cpu_place()
    return x * F.sigmoid(x) if on_cpu else F.silu(x)


def dynamic_relu(x: paddle.Tensor, lines: paddle.Tensor) -> paddle.Tensor:
    """Returns max(a1 x + b1, a2 x + b2) of x [B, C, H, W]; ``lines`` [B, C, 4] are the a1, a2, b1 and
    b2 of each channel.
    """
    if ops.usable(x) and ops.usable(lines):
        return ops.dynamic_relu(x, lines)
    a1, a2, b1, b2 = lines.unsqueeze(3).split(4, axis=2)
    return paddle.maximum(x * a1 + b1, x * a2 + b2)


def softmax(x: paddle.Tensor) -> paddle.Tensor:
    """The softmax over the last axis."""
    return ops.activation(x, "softmax") if ops.usable(x) else F.softmax(x, axis=-1)


class ReLU(nn.ReLU):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return relu(x)


class GELU(nn.GELU):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return gelu(x)


class TanhGELU(nn.Layer):
    """The approximation of GELU by tanh: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).

    Attributes:
        of_sigmoid: whether it is computed as that product. paddle2onnx 2.1.0 makes the exact GELU of
            Paddle's operator.
    """

    of_sigmoid = False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.of_sigmoid:
            return x * F.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))
        return ops.activation(x, "gelu_tanh") if ops.usable(x) else F.gelu(x, approximate=True)


class SiLU(nn.Silu):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return silu(x)


class Hardswish(nn.Hardswish):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return ops.activation(x, "hardswish") if ops.usable(x) else F.hardswish(x)


class QuickGELU(nn.Layer):
    """The approximation of GELU by x * sigmoid(1.702 x), as in OpenAI's CLIP (arXiv:1606.08415,
    section 2).
    """

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return ops.activation(x, "quick_gelu") if ops.usable(x) else x * F.sigmoid(1.702 * x)
