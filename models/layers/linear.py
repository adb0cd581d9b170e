"""Linear and LayerNorm, by the compiled operators (ops/) where there are any."""

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
    frozen = not x.stop_gradient and weight.stop_gradient and (bias is None or bias.stop_gradient)
    return (ops.frozen_linear if frozen else ops.linear)(x, weight, bias)


def plain_linear(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None
) -> paddle.Tensor:
    """``linear`` by Paddle's own operators."""
    if bias is None or _bias_is_fused():
        return F.linear(x, weight, bias)
    return add_bias(paddle.matmul(x, weight), bias)  # F.linear of 3.3 looks up a flag first: 6 us


def matmul(
    x: paddle.Tensor,
    y: paddle.Tensor,
    transpose_x: bool = False,
    transpose_y: bool = False,
    scale: float = 1.0,
    bias: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Products of scale * [..., M, K] and [..., K, N], or of one [M, K] and all of y, plus a bias
    [M] of their rows.
    """
    if ops.usable(x):
        return ops.matmul(x, y, transpose_x, transpose_y, scale, bias)
    product = paddle.matmul(x if scale == 1 else x * scale, y, transpose_x, transpose_y)
    return product if bias is None else add_bias(product, bias.unsqueeze(1))


def add_bias(product: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """Returns product + bias in the product's type, as PyTorch's Linear and convolutions do under
    autocast.

    Under Paddle's autocast a half product plus a float32 bias would be float32. Flash attention
    refuses that, and all that follows would take twice the memory.
    """
    return product + (bias if bias.dtype == product.dtype else bias.astype(product.dtype))


def in_float32(x: paddle.Tensor) -> paddle.Tensor:
    """Returns x, autocast's half types as float32: for what blocks add to, where no norm or float32
    position comes between a Linear and the blocks. PyTorch's autocast would round each sum to half
    there.
    """
    return x.astype("float32") if x.dtype in (paddle.float16, paddle.bfloat16) else x


@functools.cache
def _bias_is_fused() -> bool:
    """Whether F.linear is one operator that autocast casts whole: Paddle 3.3's on GPUs. Before, it
    is two.
    """
    try:
        [legacy] = paddle.get_flags("FLAGS_use_legacy_linear").values()
    except ValueError:  # a Paddle that hasn't got it
        return False
    return paddle.is_compiled_with_cuda() and not legacy


class Linear(nn.Linear):
    """x [..., in_features] -> [..., out_features], as ``paddle.nn.Linear``; a ``bias`` counts in
    place of its own.
    """

    def forward(self, x: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
        return linear(x, self.weight, self.bias if bias is None else bias)


class LayerNorm(nn.LayerNorm):
    """Normalises over the last axis, as ``paddle.nn.LayerNorm``."""

    weight: paddle.Tensor
    bias: paddle.Tensor | None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if ops.usable(x):
            return ops.layer_norm(x, self.weight, self.bias, self._epsilon)
        # On a CPU, Paddle's gradient of x leaves the weight out where nobody wants the weight's: if
        # it is frozen, or if paddle.grad is asked for x alone.
        on_cpu = paddle.in_dynamic_mode() and x.place.is_cpu_place()
        if not x.stop_gradient and (on_cpu or self.weight.stop_gradient):
            x = F.layer_norm(x, self._normalized_shape, None, None, self._epsilon) * self.weight
            return x if self.bias is None else x + self.bias
        return F.layer_norm(x, self._normalized_shape, self.weight, self.bias, self._epsilon)


class ChannelNorm(LayerNorm):
    """Layer norm over the channels of [B, C, H, W] at each place (timm's ``LayerNorm2d``)."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return channels_first(LayerNorm.forward(self, channels_last(x)))


def set_norm_eps(model: nn.Layer, epsilon: float | None) -> None:
    """Gives every layer norm of ``model`` this epsilon; None leaves them as they are."""
    for layer in model.sublayers():
        if isinstance(layer, LayerNorm) and epsilon is not None:
            layer._epsilon = epsilon
