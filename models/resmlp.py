"""ResMLP (Touvron et al. 2021, arXiv:2105.03404).

Parameter names and the order of operations are those of timm's ``MlpMixer`` with ``ResBlock``. The
initialisation is that of the authors (facebookresearch/deit); timm's is Xavier's, with a classifier
that starts at 0.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Constant

from models.base import register
from models.layers import DropPath, Linear, Mlp, init_linear
from models.layers.init import init_as_torch
from models.layers.layout import swap_axes
from models.layers.mlp import hidden_width
from models.layers.scale import scale_channels
from models.mixer import MlpMixer
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from settings.needs import above_zero


class Affine(nn.Layer):
    """alpha * x + beta, with two numbers per channel, in the place of a norm.

    Shape: [..., dim] -> [..., dim].
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = self.create_parameter([1, 1, dim], default_initializer=Constant(1.0))
        self.beta = self.create_parameter([1, 1, dim], default_initializer=Constant(0.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return scale_channels(x, self.alpha.flatten(), self.beta.flatten())


class ResBlock(nn.Layer):
    """x + ls1 * linear_tokens(norm1(x)), then x + ls2 * mlp_channels(norm2(x)), each branch with
    drop path.

    ``linear_tokens`` reads all places of a channel, ``mlp_channels`` all channels of a place.

    Args:
        dim: channels D.
        num_patches: places N.
        mlp_ratio: hidden width of the MLP over D.
        init_values: initial value of layer scale.
        drop: dropout in the MLP.
        drop_path: rate of stochastic depth.

    Shape: [B, N, D] -> [B, N, D].
    """

    def __init__(
        self,
        dim: int,
        num_patches: int,
        mlp_ratio: float,
        init_values: float,
        drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = Affine(dim)
        self.linear_tokens = Linear(num_patches, num_patches)
        self.drop_path = DropPath(drop_path)
        self.norm2 = Affine(dim)
        self.mlp_channels = Mlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.ls1 = self.create_parameter([dim], default_initializer=Constant(init_values))
        self.ls2 = self.create_parameter([dim], default_initializer=Constant(init_values))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        mixed = swap_axes(self.linear_tokens(swap_axes(self.norm1(x))))
        x = self.drop_path(scale_channels(mixed, self.ls1), onto=x)
        return self.drop_path(scale_channels(self.mlp_channels(self.norm2(x)), self.ls2), onto=x)


@register("resmlp")
class ResMlp(MlpMixer):
    """ResMLP: an ``MlpMixer`` whose blocks have affine layers instead of norms.

    Args:
        init_values: initial value of layer scale.
        mlp_ratio: ratio of the MLP's hidden width to embed_dim.
    """

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 384,
        depth: Depth = 12,
        mlp_ratio: Positive = 4.0,
        init_values: Positive = 1e-4,
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
        droppath_shape: Annotated[
            InTraining[Literal["linear", "constant"]], above_zero("MODEL.DROPPATH")
        ] = "constant",
    ) -> None:
        # The base class's constructor calls ``_block``, which reads this.
        self.init_values = init_values
        super().__init__(
            image_size=image_size,
            patch_size=patch_size,
            in_channels=in_channels,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            droppath=droppath,
            head_init_scale=head_init_scale,
            recompute=recompute,
            droppath_shape=droppath_shape,
        )

    def _block(
        self, dim: int, num_patches: int, mlp_ratio: float, drop: float, drop_path: float
    ) -> nn.Layer:
        return ResBlock(dim, num_patches, mlp_ratio, self.init_values, drop, drop_path)

    def _norm(self, dim: int) -> nn.Layer:
        return Affine(dim)

    def _init_weights(self, layer: nn.Layer) -> None:
        """Initialises as the authors do: the stem as PyTorch by itself, the Linears and the
        classifier by N(0, 0.02).
        """
        if isinstance(layer, nn.Conv2D):
            init_as_torch(layer)
        init_linear(layer)

    def no_weight_decay(self) -> set[str]:
        """Returns alpha and beta. In the authors' code they are vectors, which don't decay; timm's
        have three axes and decay.
        """
        return {name for name, _ in self.named_parameters() if name.endswith((".alpha", ".beta"))}
