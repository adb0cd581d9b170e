"""LoRA (Hu et al. 2021, arXiv:2106.09685): frozen Linears, each with a trained low-rank update."""

import math

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Uniform

from errors import InputError
from models.layers.linear import Linear, linear
from models.layers.mlp import Mlp


class LoRALinear(Linear):
    """x W + b + scale * (dropout(x) A) B, where W and b are those of a ``Linear`` and frozen.

    ``weight`` is W + scale * A B. So fused operators that read it compute with both, and gradients
    reach A and B through the sum. In training, the layer itself multiplies by A and B, so that the
    gradient of W isn't needed.

    Attributes:
        lora_A, lora_B: Linears [in, rank] and [rank, out], with the names of the library peft.
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
                "TRAIN.ADAPTER.DROPOUT: this model reads the weights of a target directly; set"
                " it to 0"
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
    """Turns a ``Linear`` into a ``LoRALinear`` in place. Its output and its names stay the same.

    A is uniform between -1 / sqrt(in) and 1 / sqrt(in), as the authors' Kaiming initialisation
    draws it. B is 0.

    Args:
        layer: the Linear.
        rank: channels between A and B.
        alpha: the product is multiplied by alpha / rank.
        dropout: dropout of the input of A.
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
    """Makes each ``Mlp`` with an adapted layer call its layers one by one.

    Dropout of the layers' inputs needs that, since a fused operator has none.
    """
    for layer in model.sublayers():
        if isinstance(layer, Mlp) and any(
            isinstance(part, LoRALinear) for part in layer.children()
        ):
            layer.fused = False
