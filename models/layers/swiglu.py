"""MLPs with a gate: SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

import paddle
from paddle import nn

from models.layers.activations import silu
from models.layers.linear import LayerNorm, Linear


class SwiGLU(nn.Layer):
    """fc2(norm(silu(fc1_g(x)) * fc1_x(x))), as timm's ``SwiGLU``. Shape: [..., dim] -> [..., dim].

    Args:
        dim, hidden_dim: channels outside and inside.
        epsilon: the norm's; None: no norm.
        drop: dropout before the norm and at the end.
    """

    def __init__(self, dim: int, hidden_dim: int, epsilon: float | None = None, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1_g = Linear(dim, hidden_dim)
        self.fc1_x = Linear(dim, hidden_dim)
        self.drop = nn.Dropout(drop)
        self.norm = nn.Identity() if epsilon is None else LayerNorm(hidden_dim, epsilon=epsilon)
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = silu(self.fc1_g(x)) * self.fc1_x(x)
        return self.drop(self.fc2(self.norm(self.drop(x))))


class PackedSwiGLU(nn.Layer):
    """``SwiGLU`` without a norm, both first layers in one, the gate first (timm's ``SwiGLUPacked``)."""

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = Linear(dim, 2 * hidden_dim)
        self.drop = nn.Dropout(drop)
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        gate, x = self.fc1(x).chunk(2, axis=-1)
        return self.drop(self.fc2(self.drop(silu(gate) * x)))
