"""The transformer's MLP."""

import paddle
from paddle import nn


class Mlp(nn.Layer):
    """Linear, GELU (exact), Linear, as in timm's ``Mlp``. Shape: [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU()
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))
