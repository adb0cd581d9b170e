"""gMLP (Liu et al. 2021, arXiv:2105.08050).

Parameter names, the order of operations and the initialisation are those of timm's ``MlpMixer``
with ``SpatialGatingBlock``.
"""

from collections.abc import Sequence

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal, XavierUniform

from errors import InputError
from models.base import register
from models.layers import DropPath, LayerNorm, Linear
from models.layers.activations import GELU
from models.layers.init import init_lecun
from models.layers.layout import split, swap_axes
from models.layers.mlp import hidden_width
from models.layers.scale import multiply
from models.mixer import MlpMixer


class SpatialGatingUnit(nn.Layer):
    """Multiplies one half of the channels by the other half, after a norm and a Linear over places.

    Shape: [B, N, D] -> [B, N, D / 2].
    """

    def __init__(self, dim: int, num_patches: int) -> None:
        super().__init__()
        self.norm = LayerNorm(dim // 2, epsilon=1e-5)
        self.proj = Linear(num_patches, num_patches)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        half = x.shape[-1] // 2
        x, gate = split(x, [half, half], axis=-1)
        return multiply(x, swap_axes(self.proj(swap_axes(self.norm(gate)))))


class GatedMlp(nn.Layer):
    """Linear, GELU, gate, Linear, as timm's ``GatedMlp``.

    Args:
        dim: channels of input and output.
        hidden_dim: channels before the gate, which halves them.
        num_patches: places N.
        drop: dropout before the gate and at the end.

    Shape: [B, N, dim] -> [B, N, dim].
    """

    def __init__(self, dim: int, hidden_dim: int, num_patches: int, drop: float) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden_dim)
        self.act = GELU()
        self.drop = nn.Dropout(drop)
        self.gate = SpatialGatingUnit(hidden_dim, num_patches)
        self.fc2 = Linear(hidden_dim // 2, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.drop(self.fc2(self.gate(self.drop(self.act(self.fc1(x))))))


class SpatialGatingBlock(nn.Layer):
    """x + mlp_channels(norm(x)), with drop path.

    Args:
        dim: channels D.
        num_patches: places N.
        mlp_ratio: hidden width of the MLP over D, before its gate.
        drop: dropout in the MLP.
        drop_path: rate of stochastic depth.

    Shape: [B, N, D] -> [B, N, D].

    Raises:
        InputError: several ratios, or an odd hidden width, which can't be halved.
    """

    def __init__(
        self,
        dim: int,
        num_patches: int,
        mlp_ratio: float | Sequence[float],
        drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        if isinstance(mlp_ratio, Sequence):
            raise InputError(f"MLP_RATIO is {mlp_ratio}, but gMLP takes one number")
        hidden_dim = hidden_width(dim, mlp_ratio)
        if hidden_dim % 2:
            raise InputError(
                f"MLP_RATIO {mlp_ratio} x EMBED_DIM {dim} is {hidden_dim}, expected an even number"
            )
        self.norm = LayerNorm(dim, epsilon=1e-6)
        self.mlp_channels = GatedMlp(dim, hidden_dim, num_patches, drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.drop_path(self.mlp_channels(self.norm(x)), onto=x)


@register("gmlp")
class GMlp(MlpMixer):
    """gMLP: an ``MlpMixer`` whose blocks mix places in the gate of their MLP.

    Args:
        mlp_ratio: ratio of the MLPs' hidden width to embed_dim. None: 6, as in the paper.
    """

    default_mlp_ratio = 6.0

    def _block(
        self,
        dim: int,
        num_patches: int,
        mlp_ratio: float | Sequence[float],
        drop: float,
        drop_path: float,
    ) -> nn.Layer:
        return SpatialGatingBlock(dim, num_patches, mlp_ratio, drop, drop_path)

    def _init_weights(self, layer: nn.Layer) -> None:
        """Initialises as timm does, because the authors' code is unpublished. The gate starts at 1,
        as in the paper, so that a fresh block is a plain MLP.
        """
        if isinstance(layer, nn.Conv2D):
            init_lecun(layer)
        elif layer is self.head:
            self._init_head()
        elif isinstance(layer, nn.Linear):
            XavierUniform()(layer.weight)
            Normal(std=1e-6)(layer.bias)
        elif isinstance(layer, SpatialGatingUnit):
            Normal(std=1e-6)(layer.proj.weight)
            Constant(1.0)(layer.proj.bias)
