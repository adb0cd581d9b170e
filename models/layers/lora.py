"""Linears that learn through a product of two narrow ones beside them: LoRA (Hu et al. 2021,
arXiv:2106.09685).
"""

import math

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Uniform

from errors import InputError
from models.layers.linear import Linear, linear
from models.layers.mlp import Mlp


class LoRALinear(Linear):
    """x W + b + scale * (dropout(x) A) B, of which W and b are a ``Linear``'s own, and frozen.

    ``weight`` is W + scale * A B: whoever reads it, as fused operators do, computes with both, and
    gradients reach A and B through the sum. In training the layer itself takes the narrow way: W
    then needs no gradient.

    Attributes:
        lora_A, lora_B: Linears [in, rank] and [rank, out], named as peft's.
        scale: alpha / rank.
    """

    lora_A: Linear
    lora_B: Linear
    lora_dropout: nn.Dropout
    scale: float

    @property
    def weight(self) -> paddle.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.training and self.lora_dropout.p:
            raise InputError(
                "TRAIN.ADAPTER.DROPOUT: this model reads a target's weights themselves; set it to 0"
            )
        return (
            self._parameters["weight"]
            + paddle.matmul(self.lora_A.weight, self.lora_B.weight) * self.scale
        )

    def forward(self, x: paddle.Tensor, bias: paddle.Tensor | None = None) -> paddle.Tensor:
        if not self.training:
            return super().forward(x, bias)
        added = self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scale
        return linear(x, self._parameters["weight"], self.bias if bias is None else bias) + added


def adapt(layer: Linear, rank: int, alpha: float, dropout: float) -> None:
    """Makes a ``Linear`` a ``LoRALinear``, in place and under its names; it computes what it did.

    A is drawn uniformly within +-1 / sqrt(in), as the authors' Kaiming initialisation does; B is 0.
    """
    ins, outs = layer.weight.shape
    bound = 1 / math.sqrt(ins)
    layer.lora_A = Linear(
        ins, rank, paddle.ParamAttr(initializer=Uniform(-bound, bound)), bias_attr=False
    )
    layer.lora_B = Linear(rank, outs, paddle.ParamAttr(initializer=Constant(0.0)), bias_attr=False)
    layer.lora_dropout = nn.Dropout(dropout)
    layer.scale = alpha / rank
    layer.__class__ = LoRALinear


def call_by_layer(model: nn.Layer) -> None:
    """Lets each ``Mlp`` with an adapted layer call its layers one by one, which dropout on their
    inputs needs.
    """
    for layer in model.sublayers():
        if isinstance(layer, Mlp) and any(
            isinstance(part, LoRALinear) for part in layer.children()
        ):
            layer.fused = False
