"""ConvNeXt (Liu et al. 2022, arXiv:2201.03545).

Parameter names, order of operations and initialisation are those of timm's ``ConvNeXt``.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal

from configs.signatures import Depth, Factor, Positive, Rate, Size
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Mlp, init_linear
from models.layers.conv import Conv2D
from models.layers.stages import check_stages, drop_path_rates, feature_info
from weights.names import convnext as names


class ChannelNorm(LayerNorm):
    """Layer norm over the channels of [B, C, H, W] at each place (timm's ``LayerNorm2d``)."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return LayerNorm.forward(self, x.transpose([0, 2, 3, 1])).transpose([0, 3, 1, 2])


class Block(nn.Layer):
    """x + gamma * mlp(norm(conv_dw(x))) with drop path; conv_dw mixes 7 x 7 places, mlp channels.

    Shape: [B, C, H, W] -> [B, C, H, W].
    """

    def __init__(self, dim: int, init_values: float | None, drop_path: float) -> None:
        super().__init__()
        self.conv_dw = Conv2D(dim, dim, 7, padding=3, groups=dim)
        self.norm = LayerNorm(dim, epsilon=1e-6)
        self.mlp = Mlp(dim, 4 * dim)
        self.gamma = None
        if init_values is not None:
            self.gamma = self.create_parameter([dim], default_initializer=Constant(init_values))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.mlp(self.norm(self.conv_dw(x).transpose([0, 2, 3, 1])))
        if self.gamma is not None:
            branch = branch * self.gamma
        return x + self.drop_path(branch.transpose([0, 3, 1, 2]))


class Stage(nn.Layer):
    """Blocks of one width; ``downsample`` halves height and width before them, but in the first stage."""

    def __init__(self, in_dim: int, dim: int, init_values: float | None, rates: Sequence[float]) -> None:
        super().__init__()
        self.downsample = nn.Identity()
        if in_dim:
            self.downsample = nn.Sequential(ChannelNorm(in_dim, epsilon=1e-6), Conv2D(in_dim, dim, 2, stride=2))
        self.blocks = nn.LayerList(Block(dim, init_values, rate) for rate in rates)


@register("convnext")
class ConvNeXt(ImageModel):
    """ConvNeXt: images of any size from 32 x 32.

    Features: the last stage's channels [B, embed_dims[3], H / 32, W / 32], not normalised.

    Args:
        stage_depths: blocks of each of four stages.
        embed_dims: channels of each of four stages.
        init_values: layer scale's initial value; None: no layer scale.
        dropout: before the classifier.
        droppath: rate of stochastic depth at the last block; linear from 0 at the first.

    Raises:
        InputError: not four stages.
    """

    weight_names = names
    first_conv = "stem.0"
    min_image_size = 32

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (3, 3, 9, 3),
        embed_dims: Sequence[Size] = (96, 192, 384, 768),
        init_values: Positive | None = 1e-6,
        dropout: Rate = 0.0,
        droppath: Rate = 0.0,
        head_init_scale: Factor = 1.0,
        recompute: bool = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        self.num_features = embed_dims[-1]
        patches = Conv2D(in_channels, embed_dims[0], 4, stride=4)
        self.stem = nn.Sequential(patches, ChannelNorm(embed_dims[0], epsilon=1e-6))
        sizes = zip((0, *embed_dims), embed_dims, drop_path_rates(droppath, stage_depths), strict=False)
        self.stages = nn.LayerList(Stage(in_dim, dim, init_values, rates) for in_dim, dim, rates in sizes)
        self.feature_info = feature_info([f"stages.{i}" for i in range(4)], embed_dims, (4, 8, 16, 32))
        norm = LayerNorm(self.num_features, epsilon=1e-6)
        self.head = nn.Sequential(("norm", norm), ("drop", nn.Dropout(dropout)), ("fc", nn.Identity()))
        self._add_classifiers()
        self.apply(self._init_weights)
        self._scale_classifiers()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage.blocks, stage.downsample(x))

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x.mean(axis=[2, 3]))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """The stem, every three blocks of a stage (the first with what downsamples before them), the head: the
        authors' (appendix A and optim_factory.py in facebookresearch/ConvNeXt), 12 between stem and head for [3, 3,
        27, 3] blocks.
        """
        groups: list[tuple[str, ...]] = [("stem",)]
        for i, stage in enumerate(self.stages):
            for first in range(0, len(stage.blocks), 3):
                last = min(first + 3, len(stage.blocks))
                blocks = tuple(f"stages.{i}.blocks.{j}" for j in range(first, last))
                groups.append(blocks if first else (f"stages.{i}.downsample", *blocks))
        return [*groups, ("head",)]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """The stem, each block (the first of a stage with what downsamples before it), the head with its norm."""
        groups: list[tuple[str, ...]] = [("stem",)]
        for i, stage in enumerate(self.stages):
            blocks: list[tuple[str, ...]] = [(f"stages.{i}.blocks.{j}",) for j in range(len(stage.blocks))]
            blocks[0] += (f"stages.{i}.downsample",)
            groups += blocks
        return [*groups, ("head",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            Normal(std=0.02)(layer.weight)
