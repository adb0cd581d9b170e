"""MLPs with a gate: SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

import paddle
from paddle import nn

import ops
from models.layers.activations import plain_silu
from models.layers.linear import LayerNorm, Linear


def swiglu(gate: paddle.Tensor, x: paddle.Tensor | None = None) -> paddle.Tensor:
    """Returns silu(gate) * x, both [..., N]; without x, gate [..., 2 N] has both, the gate first."""
    if ops.usable(gate):
        return ops.swiglu(gate, x)
    if x is None:
        gate, x = gate.chunk(2, axis=-1)
    return plain_silu(gate) * x


class SwiGLU(nn.Layer):
    """fc2(norm(silu(fc1_g(x)) * fc1_x(x))), as timm's ``SwiGLU``. Shape: [..., dim] -> [..., dim].

    Args:
        dim, hidden_dim: channels outside and inside.
        epsilon: the norm's; None: no norm.
        drop: dropout before the norm and at the end.
    """

    def __init__(
        self, dim: int, hidden_dim: int, epsilon: float | None = None, drop: float = 0.0
    ) -> None:
        super().__init__()
        self.fc1_g = Linear(dim, hidden_dim)
        self.fc1_x = Linear(dim, hidden_dim)
        self.drop = nn.Dropout(drop)
        self.norm = nn.Identity() if epsilon is None else LayerNorm(hidden_dim, epsilon=epsilon)
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = swiglu(self.fc1_g(x), self.fc1_x(x))
        return self.drop(self.fc2(self.norm(self.drop(x))))


class PackedSwiGLU(nn.Layer):
    """``SwiGLU`` without a norm, both first layers in one, the gate first (timm's
    ``SwiGLUPacked``).
    """

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = Linear(dim, 2 * hidden_dim)
        self.drop = nn.Dropout(drop)
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.drop(self.fc2(self.drop(swiglu(self.fc1(x)))))
