"""The transformer's MLP."""

import paddle
from paddle import nn

import ops
from errors import InputError
from models.layers.linear import Linear


def hidden_width(dim: int, ratio: float) -> int:
    """Returns the channels between an MLP's two layers; raises InputError where there are none."""
    width = int(dim * ratio)
    if not width:
        raise InputError(f"MODEL.MLP_RATIO is {ratio:g}, which leaves nothing of {dim} channels; raise it")
    return width


class Mlp(nn.Layer):
    """Linear, GELU (exact), Linear, as in timm's ``Mlp``. Shape: [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden_dim)
        self.act = nn.GELU()
        self.drop = nn.Dropout(drop)
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if ops.usable(x) and not (self.training and self.drop.p):
            return ops.mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))
