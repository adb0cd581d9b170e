"""MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601), which is also the base of gMLP and ResMLP.

Parameter names and the order of operations are those of timm's ``MlpMixer``. The weight of a Linear
is [in, out] here and [out, in] there. The initialisation is that of the authors
(google-research/big_vision); timm's Linears have Xavier's.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Constant

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Mlp, PatchEmbed, set_norm_eps
from models.layers.init import init_lecun
from models.layers.layout import swap_axes
from models.layers.linear import in_float32
from models.layers.mlp import hidden_width
from models.layers.stages import drop_path_rates, feature_info
from settings.keys import Depth, Epsilon, Factor, InTraining, OfClassifier, Positive, Rate, Size
from settings.needs import above_zero
from weights.names import mixer as names


class MixerBlock(nn.Layer):
    """x + mlp_tokens(norm1(x)), then x + mlp_channels(norm2(x)), each branch with drop path.

    ``mlp_tokens`` reads all places of a channel, ``mlp_channels`` all channels of a place.

    Args:
        dim: channels D.
        num_patches: places N.
        mlp_ratio: hidden widths of both MLPs over dim: of the one over places, then of the one over
            channels; or one number for both.
        drop: dropout in both MLPs.
        drop_path: rate of stochastic depth.

    Shape: [B, N, D] -> [B, N, D].

    Raises:
        InputError: another number of ratios.
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
        ratios = mlp_ratio if isinstance(mlp_ratio, Sequence) else (mlp_ratio, mlp_ratio)
        if len(ratios) != 2:
            raise InputError(
                f"MLP_RATIO is {mlp_ratio}, expected one number, or two: for tokens and for"
                " channels"
            )
        tokens_ratio, channels_ratio = ratios
        self.norm1 = LayerNorm(dim, epsilon=1e-6)
        self.mlp_tokens = Mlp(num_patches, hidden_width(dim, tokens_ratio), drop)
        self.drop_path = DropPath(drop_path)
        self.norm2 = LayerNorm(dim, epsilon=1e-6)
        self.mlp_channels = Mlp(dim, hidden_width(dim, channels_ratio), drop)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        mixed = swap_axes(self.mlp_tokens(swap_axes(self.norm1(x))))
        x = self.drop_path(mixed, onto=x)
        return self.drop_path(self.mlp_channels(self.norm2(x)), onto=x)


@register("mixer")
class MlpMixer(ImageModel):
    """MLP-Mixer: patches, then blocks of MLPs over places and over channels.

    It takes images of image_size only, because the layers over places have as many inputs as there
    are patches. Its features are the normalised patch tokens: [B, N, embed_dim].

    Args:
        patch_size: side of a patch, in pixels.
        embed_dim: number of channels of a token.
        depth: number of blocks.
        mlp_ratio: ratios of the MLPs' hidden widths to embed_dim: of the MLP over tokens, then of
            the MLP over channels; or one number for both. None: 0.5 and 4, as in the paper.
        dropout: dropout rate in the MLPs.
        droppath: stochastic depth rate of the last block.
        droppath_shape: how the stochastic depth rates of the blocks are set. "linear": they grow
            from 0 at the first block; "constant": all blocks have droppath.
        norm_eps: epsilon of all layer norms. None: timm's values, which are 1e-6, and 1e-5 in
            gMLP's gates.

    Attributes:
        default_mlp_ratio: the value of mlp_ratio where it is None.
    """

    weight_names = names
    first_conv = "stem.proj"
    layout = "NLC"
    default_mlp_ratio: float | Sequence[float] = (0.5, 4.0)

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 768,
        depth: Depth = 12,
        mlp_ratio: Positive | Sequence[Positive] | None = None,
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
        norm_eps: Epsilon | None = None,
        droppath_shape: Annotated[
            InTraining[Literal["linear", "constant"]], above_zero("MODEL.DROPPATH")
        ] = "constant",
        head_init_bias: InTraining[OfClassifier[float]] = 0.0,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        self.num_features = embed_dim
        self.norm_eps = norm_eps
        self.head_init_bias = head_init_bias
        self.stem = PatchEmbed(self.image_size, patch_size, in_channels, embed_dim)
        mlp_ratio = mlp_ratio or self.default_mlp_ratio
        [rates] = drop_path_rates(droppath, [depth], droppath_shape)
        self.blocks = nn.LayerList(
            self._block(embed_dim, self.stem.num_patches, mlp_ratio, dropout, rate)
            for rate in rates
        )
        modules = [f"blocks.{i}" for i in range(depth)]
        self.feature_info = feature_info(modules, embed_dim, patch_size)
        self.norm = self._norm(embed_dim)
        self._add_classifiers()
        set_norm_eps(self, norm_eps)
        self.apply(self._init_weights)
        self._scale_classifiers()

    def _block(
        self,
        dim: int,
        num_patches: int,
        mlp_ratio: float | Sequence[float],
        drop: float,
        drop_path: float,
    ) -> nn.Layer:
        return MixerBlock(dim, num_patches, mlp_ratio, drop, drop_path)

    def _norm(self, dim: int) -> nn.Layer:
        return LayerNorm(dim, epsilon=1e-6)

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return in_float32(self.stem(x))

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x.mean(axis=1))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each block, the classifier with its norm."""
        return [("stem",), *((f"blocks.{i}",) for i in range(len(self.blocks))), ("norm", "head")]

    def _init_weights(self, layer: nn.Layer) -> None:
        """Initialises as the authors do: as Flax by itself, and the classifier with zeros."""
        init_lecun(layer)
        if layer is self.head:
            self._init_head()

    def _init_head(self) -> None:
        """Sets the classifier to zeros, which leaves nothing for head_init_scale to scale."""
        for parameter in self.head.parameters():
            Constant(0.0)(parameter)
