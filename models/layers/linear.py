"""Linear, LayerNorm and matrix products, by the compiled operators (ops/) if they can be used."""

import functools

import paddle
from paddle import nn
from paddle.nn import functional as F

import ops
from models.layers.layout import channels_first, channels_last


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """Returns x [..., K] @ weight [K, N] + bias [N]: [..., N]."""
    if not ops.usable(x):
        return plain_linear(x, weight, bias)
    frozen = weight.stop_gradient and (bias is None or bias.stop_gradient)
    if frozen and not x.stop_gradient:
        return ops.frozen_linear(x, weight, bias)
    return ops.linear(x, weight, bias)


def plain_linear(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None
) -> paddle.Tensor:
    """Returns the output of ``linear``, computed by Paddle's own operators."""
    if bias is None or _bias_is_fused():
        return F.linear(x, weight, bias)
    # Faster than F.linear of Paddle 3.3, which looks up a flag at each call (6 us).
    return add_bias(paddle.matmul(x, weight), bias)


def matmul(
    x: paddle.Tensor,
    y: paddle.Tensor,
    transpose_x: bool = False,
    transpose_y: bool = False,
    scale: float = 1.0,
    bias: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Returns scale * x @ y + bias.

    Args:
        x: [..., M, K], or [M, K]: the same matrix for all of y.
        y: [..., K, N].
        transpose_x: whether x is [..., K, M].
        transpose_y: whether y is [..., N, K].
        scale: factor of the product.
        bias: [M], a number for each row of the product.

    Returns:
        [..., M, N].
    """
    if ops.usable(x):
        return ops.matmul(x, y, transpose_x, transpose_y, scale, bias)
    product = paddle.matmul(x if scale == 1 else x * scale, y, transpose_x, transpose_y)
    return product if bias is None else add_bias(product, bias.unsqueeze(1))


def row_lengths(x: paddle.Tensor) -> paddle.Tensor:
    """Returns the Euclidean length of each row: [K, n] -> [K]."""
    return ops.row_lengths(x) if ops.usable(x) else x.square().sum(1).sqrt()


def float32_matmul(x: paddle.Tensor, y: paddle.Tensor, **transposed: bool) -> paddle.Tensor:
    """Returns ``paddle.matmul`` in float32, under autocast, too."""
    # Paddle 2.6 has no autocast while it traces.
    if not paddle.in_dynamic_mode() and paddle.__version__.startswith("2."):
        return paddle.matmul(x, y, **transposed)
    with paddle.amp.auto_cast(enable=False):
        return paddle.matmul(x, y, **transposed)


def add_bias(product: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """Returns product + bias in the type of the product, as PyTorch's layers do under autocast.

    Under Paddle's autocast the sum of a product in half precision and a float32 bias would be
    float32. Flash attention refuses that, and everything after it would take twice the memory.
    """
    return product + (bias if bias.dtype == product.dtype else bias.astype(product.dtype))


def in_float32(x: paddle.Tensor) -> paddle.Tensor:
    """Returns x in float32, if autocast made it half precision.

    It is used where the output of a Linear or a convolution goes into residual blocks directly. So
    the sums of the blocks are float32, too. PyTorch's autocast would round each of them.
    """
    return x.astype("float32") if x.dtype in (paddle.float16, paddle.bfloat16) else x


@functools.cache
def _bias_is_fused() -> bool:
    """Returns whether F.linear is one operator, whose inputs autocast casts together.

    That holds for Paddle 3.3 on GPUs. Otherwise it is a product and a sum.
    """
    try:
        [legacy] = paddle.get_flags("FLAGS_use_legacy_linear").values()
    except ValueError:
        # Paddle 2.6 doesn't have the flag.
        return False
    return paddle.is_compiled_with_cuda() and not legacy


class Linear(nn.Linear):
    """``paddle.nn.Linear``, whose bias may be replaced at each call.

    Shape: [..., in_features] -> [..., out_features].
    """

    def forward(self, x: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
        return linear(x, self.weight, self.bias if bias is None else bias)


class LayerNorm(nn.LayerNorm):
    """``paddle.nn.LayerNorm`` over the last axis.

    Shape: [..., dim] -> [..., dim].
    """

    weight: paddle.Tensor
    bias: paddle.Tensor | None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if ops.usable(x):
            return ops.layer_norm(x, self.weight, self.bias, self._epsilon)
        # On a CPU, Paddle's gradient of x lacks the weight as a factor where the weight needs no
        # gradient: if it is frozen, or if paddle.grad is asked for that of x alone.
        on_cpu = paddle.in_dynamic_mode() and x.place.is_cpu_place()
        if not x.stop_gradient and (on_cpu or self.weight.stop_gradient):
            x = F.layer_norm(x, self._normalized_shape, None, None, self._epsilon) * self.weight
            return x if self.bias is None else x + self.bias
        return F.layer_norm(x, self._normalized_shape, self.weight, self.bias, self._epsilon)


class ChannelNorm(LayerNorm):
    """Layer norm over the channels of each place (timm's ``LayerNorm2d``).

    Shape: [B, C, H, W] -> the same.
    """

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return channels_first(LayerNorm.forward(self, channels_last(x)))


def set_norm_eps(model: nn.Layer, epsilon: float | None) -> None:
    """Sets the epsilon of every layer norm of ``model``; None: leaves them as they are."""
    for layer in model.sublayers():
        if isinstance(layer, LayerNorm) and epsilon is not None:
            layer._epsilon = epsilon
