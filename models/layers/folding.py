"""Layers whose batch norm can be folded into the convolution or Linear next to it, for inference.

Parameter names are those of timm's ``Levit``.
"""

import copy
from typing import TypeVar

import paddle
from paddle import nn

from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.linear import Linear

_Model = TypeVar("_Model", bound=nn.Layer)
_Layer = TypeVar("_Layer", bound="nn.Conv2D | nn.Linear")


def fold(model: _Model) -> _Model:
    """Returns a copy of ``model`` in evaluation mode, in which each layer with a method ``fold`` is
    replaced by its result. A model without such layers is returned itself.
    """
    if not any(hasattr(layer, "fold") for layer in model.sublayers()):
        return model
    folded = copy.deepcopy(model)
    folded.eval()
    for parent in folded.sublayers(include_self=True):
        for name, layer in list(parent.named_children()):
            if hasattr(layer, "fold"):
                setattr(parent, name, layer.fold())
    return folded


@paddle.no_grad()
def scale_and_shift(norm: BatchNorm2D) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns the factor and the addend of each channel of a batch norm in evaluation, both [C]."""
    scale = norm.weight / (norm._variance + norm._epsilon).sqrt()
    return scale, norm.bias - norm._mean * scale


def fill(layer: _Layer, weight: paddle.Tensor, bias: paddle.Tensor) -> _Layer:
    """Returns ``layer`` with these values, in evaluation mode."""
    layer.weight.set_value(weight)
    layer.bias.set_value(bias)
    layer.eval()
    return layer


class ConvNorm(nn.Layer):
    """A 3 x 3 convolution of stride 2 without a bias, then batch norm.

    Shape: [B, in_dim, H, W] -> [B, dim, H / 2, W / 2], rounded up.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.linear = Conv2D(in_dim, dim, 3, stride=2, padding=1, bias_attr=False)
        self.bn = BatchNorm2D(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.bn(self.linear(x))

    @paddle.no_grad()
    def fold(self) -> nn.Layer:
        scale, shift = scale_and_shift(self.bn)
        dim, in_dim, *_ = self.linear.weight.shape
        conv = Conv2D(in_dim, dim, 3, stride=2, padding=1)
        return fill(conv, self.linear.weight * scale.reshape([-1, 1, 1, 1]), shift)


class LinearNorm(nn.Layer):
    """A Linear without a bias, then batch norm over all tokens.

    Args:
        in_dim: channels of the input.
        dim: channels of the output.
        norm_weight: initial value of the norm's weights.

    Shape: [B, N, in_dim] -> [B, N, dim].
    """

    def __init__(self, in_dim: int, dim: int, norm_weight: float = 1.0) -> None:
        super().__init__()
        self.norm_weight = norm_weight
        self.linear = Linear(in_dim, dim, bias_attr=False)
        self.bn = BatchNorm2D(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.linear(x)
        return self.bn(x.flatten(0, 1)).reshape([-1, *x.shape[1:]])

    @paddle.no_grad()
    def fold(self) -> nn.Layer:
        scale, shift = scale_and_shift(self.bn)
        return fill(Linear(*self.linear.weight.shape), self.linear.weight * scale, shift)


class NormLinear(nn.Layer):
    """A classifier: batch norm, dropout, then a Linear.

    Shape: [B, dim] -> [B, num_classes].
    """

    def __init__(self, dim: int, num_classes: int, drop: float) -> None:
        super().__init__()
        self.bn = BatchNorm2D(dim)
        self.drop = nn.Dropout(drop)
        self.linear = Linear(dim, num_classes)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.linear(self.drop(self.bn(x)))

    @paddle.no_grad()
    def fold(self) -> nn.Layer:
        scale, shift = scale_and_shift(self.bn)
        weight = self.linear.weight
        bias = shift @ weight + self.linear.bias
        return fill(Linear(*weight.shape), weight * scale.unsqueeze(1), bias)
