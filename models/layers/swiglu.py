"""SwiGLU, an MLP with a gate (Shazeer 2020, arXiv:2002.05202)."""

import paddle
from paddle import nn

import ops
from models.layers.activations import plain_silu
from models.layers.linear import LayerNorm, Linear


def swiglu(gate: paddle.Tensor, x: paddle.Tensor | None = None) -> paddle.Tensor:
    """Returns silu(gate) * x: [..., N].

    Args:
        gate: [..., N]; without x [..., 2 N]: the gate, then x.
        x: [..., N].
    """
    if ops.usable(gate):
        return ops.swiglu(gate, x)
    if x is None:
        gate, x = gate.chunk(2, axis=-1)
    return plain_silu(gate) * x


class SwiGLU(nn.Layer):
    """fc2(norm(silu(fc1_g(x)) * fc1_x(x))), as timm's ``SwiGLU``.

    Args:
        dim: channels of input and output.
        hidden_dim: channels of the gate and of the gated half.
        epsilon: epsilon of the norm; None: there is no norm.
        drop: dropout before the norm and at the end.

    Shape: [..., dim] -> [..., dim].
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
    """A ``SwiGLU`` without a norm whose first two Linears are one, the gate first (timm's
    ``SwiGLUPacked``).

    Shape: [..., dim] -> [..., dim].
    """

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = Linear(dim, 2 * hidden_dim)
        self.drop = nn.Dropout(drop)
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.drop(self.fc2(self.drop(swiglu(self.fc1(x)))))
