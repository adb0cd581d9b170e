"""The MLPs of transformer blocks, plain and gated."""

import functools
from collections.abc import Callable

import paddle
from paddle import nn
from paddle.nn.initializer import Constant

import ops
from errors import InputError
from models.layers.activations import GELU, QuickGELU, SiLU, TanhGELU, relu
from models.layers.conv import Conv2D
from models.layers.grn import GlobalResponseNorm
from models.layers.linear import Linear
from models.layers.swiglu import swiglu


class StarReLU(nn.Layer):
    """scale * relu(x) ** 2 + bias, where both are learnt numbers (Yu et al. 2022, arXiv:2210.13452)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=Constant(1.0))
        self.bias = self.create_parameter([1], default_initializer=Constant(0.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if ops.usable(x):
            return ops.star_relu(x, self.scale, self.bias)
        # Under autocast this is float32, since squares would overflow float16.
        return self.scale * relu(x).square() + self.bias


ACTIVATIONS: dict[str, Callable[[], nn.Layer]] = {
    "gelu": GELU,
    "gelu_tanh": TanhGELU,
    "quick_gelu": QuickGELU,
    "silu": SiLU,
    "star_relu": StarReLU,
}


def hidden_width(dim: int, ratio: float) -> int:
    """Returns dim * ratio, the channels between the two layers of an MLP.

    Raises:
        InputError: there would be none.
    """
    width = int(dim * ratio)
    if not width:
        raise InputError(f"MODEL.MLP_RATIO is {ratio:g}, too low for {dim} channels; raise it")
    return width


class Mlp(nn.Layer):
    """Linear, activation, Linear, as timm's ``Mlp`` and ``GlobalResponseNormMlp``.

    Args:
        dim: channels of the input.
        hidden_dim: channels between both layers.
        drop: dropout after each Linear.
        act: the activation. "gelu": exact; "gelu_tanh": its approximation by tanh; "quick_gelu":
            ``QuickGELU``; "silu"; "star_relu": ``StarReLU``.
        conv: whether both layers are 1 x 1 convolutions instead of Linears.
        grn: whether a global response norm follows the activation; x is [B, H, W, dim] then.
        bias: whether both layers have a bias.
        out_dim: channels of the output; None: those of the input.

    Shape: [..., dim] -> [..., out_dim]; with ``conv`` [B, dim, H, W] -> [B, out_dim, H, W].
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        drop: float = 0.0,
        act: str = "gelu",
        conv: bool = False,
        grn: bool = False,
        bias: bool = True,
        out_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.fused = act == "gelu" and not conv and not grn and bias
        layer = functools.partial(Conv2D, kernel_size=1) if conv else Linear
        bias_attr = None if bias else False
        self.fc1 = layer(dim, hidden_dim, bias_attr=bias_attr)
        self.act = ACTIVATIONS[act]()
        self.drop = nn.Dropout(drop)
        self.grn = GlobalResponseNorm(hidden_dim, channels_first=conv) if grn else nn.Identity()
        self.fc2 = layer(hidden_dim, out_dim or dim, bias_attr=bias_attr)

    def forward(self, x: paddle.Tensor, seen: paddle.Tensor | None = None) -> paddle.Tensor:
        """Returns the output for x.

        Args:
            seen: 1.0 at places that the global response norm counts, 0.0 at others, [B, H, W, 1];
                with ``conv`` [B, 1, H, W]. None: all places count.
        """
        if self.fused and ops.usable(x) and not (self.training and self.drop.p):
            return ops.mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        x = self.drop(self.act(self.fc1(x)))
        if seen is not None:
            x = x * seen
        return self.drop(self.fc2(self.grn(x)))


class GatedMlp(nn.Layer):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): ``fc1`` outputs two halves, and the SiLU of the
    first scales the second.

    It is timm's ``SwiGLUPacked``. Shape: [..., dim] -> [..., dim].

    Args:
        dim: channels of input and output.
        hidden_dim: channels of both halves.
        drop: dropout before and after the last Linear.

    Raises:
        InputError: hidden_dim is odd.
    """

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0) -> None:
        super().__init__()
        if hidden_dim % 2:
            raise InputError(
                f"MODEL.MLP_RATIO makes {hidden_dim} channels, a gated MLP needs an even number"
            )
        self.fc1 = Linear(dim, hidden_dim)
        self.drop = nn.Dropout(drop)
        self.fc2 = Linear(hidden_dim // 2, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.drop(self.fc2(self.drop(swiglu(self.fc1(x)))))


def make_mlp(dim: int, hidden_dim: int, drop: float = 0.0, act: str = "gelu") -> Mlp | GatedMlp:
    """Returns ``GatedMlp`` for the activation "swiglu", else ``Mlp``."""
    if act == "swiglu":
        return GatedMlp(dim, hidden_dim, drop)
    return Mlp(dim, hidden_dim, drop, act)
