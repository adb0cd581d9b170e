"""PoolFormer (Yu et al. 2021, arXiv:2111.11418).

Parameter names, the order of operations and the initialisation are those of timm's ``MetaFormer``,
as its PoolFormers are built.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Normal

import ops
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Mlp, init_linear
from models.layers.conv import Conv2D
from models.layers.group_norm import GroupNorm
from models.layers.layout import mean_of_places
from models.layers.scale import scale_planes
from models.layers.stages import (
    check_stages,
    drop_path_rates,
    feature_info,
    groups_by_block,
    groups_of_twelve,
)
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import poolformer as names


class Downsampling(nn.Layer):
    """A strided convolution.

    Shape: [B, in_channels, H, W] -> [B, dim, about H / stride, about W / stride].
    """

    def __init__(
        self, in_channels: int, dim: int, kernel_size: int, stride: int, padding: int
    ) -> None:
        super().__init__()
        self.conv = Conv2D(in_channels, dim, kernel_size, stride=stride, padding=padding)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.conv(x)


class Pooling(nn.Layer):
    """The mean of the 3 x 3 places around each place, minus the place itself.

    Places beyond the map aren't counted. Shape: [B, D, H, W] -> the same.
    """

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if ops.usable(x):
            return ops.neighbour_means(x, 1) - x
        return F.avg_pool2d(x, 3, stride=1, padding=1) - x


class Scale(nn.Layer):
    """Layer scale of the channels of maps (Touvron et al. 2021, CaiT, arXiv:2103.17239).

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.scale = self.create_parameter([dim], default_initializer=Constant(init_value))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return scale_planes(x, self.scale.reshape([-1, 1, 1]))


class Block(nn.Layer):
    """x + layer_scale1(token_mixer(norm1(x))), then x + layer_scale2(mlp(norm2(x))), each branch
    with drop path.

    Args:
        dim: channels D.
        init_values: initial value of layer scale.
        drop: dropout in the MLP.
        drop_path: rate of stochastic depth.

    Shape: [B, D, H, W] -> the same.
    """

    def __init__(self, dim: int, init_values: float, drop: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = GroupNorm(1, dim)
        self.token_mixer = Pooling()
        self.drop_path1 = DropPath(drop_path)
        self.layer_scale1 = Scale(dim, init_values)
        self.norm2 = GroupNorm(1, dim)
        self.mlp = Mlp(dim, 4 * dim, drop, conv=True)
        self.drop_path2 = DropPath(drop_path)
        self.layer_scale2 = Scale(dim, init_values)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(self.layer_scale1(self.token_mixer(self.norm1(x))), onto=x)
        return self.drop_path2(self.layer_scale2(self.mlp(self.norm2(x))), onto=x)


class Stage(nn.Layer):
    """``downsample`` (not in the first stage), then blocks of one width."""

    def __init__(self, downsample: nn.Layer, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.LayerList(blocks)


@register("poolformer")
class PoolFormer(ImageModel):
    """PoolFormer. It takes images of any size from 3 x 3 on.

    Its features are the last stage's output: [B, embed_dims[3], about H / 32, about W / 32]. They
    are normalised unless the last norm comes after the pooling.

    Args:
        stage_depths: number of blocks in each of the four stages.
        embed_dims: number of channels of each of the four stages.
        init_values: initial value of layer scale.
        fc_norm: whether the final norm comes after the pooling. It is then a layer norm named
            ``head.norm``, as in timm. Otherwise it comes before the pooling and is a group norm
            over channels and positions named ``norm``, as in the authors' code and PaddleViT. The
            names differ because the same weights give other logits.
        dropout: dropout rate in the MLPs.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: not four stages.
    """

    weight_names = names
    first_conv = "stem.conv"
    min_image_size = 3

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 2, 6, 2),
        embed_dims: Sequence[Size] = (64, 128, 320, 512),
        init_values: Positive = 1e-5,
        fc_norm: bool = False,
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        self.num_features = embed_dims[-1]
        self.fc_norm = fc_norm
        self.stem = Downsampling(in_channels, embed_dims[0], 7, stride=4, padding=2)
        self.stages = nn.LayerList()
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            dim = embed_dims[i]
            downsample: nn.Layer = nn.Identity()
            if i:
                downsample = Downsampling(embed_dims[i - 1], dim, 3, stride=2, padding=1)
            blocks = [Block(dim, init_values, dropout, rate) for rate in rates]
            self.stages.append(Stage(downsample, blocks))
        modules = [f"stages.{i}" for i in range(4)]
        self.feature_info = feature_info(modules, embed_dims, (4, 8, 16, 32))
        if fc_norm:
            self.norm = nn.Identity()
            head_norm = LayerNorm(self.num_features, epsilon=1e-6)
        else:
            self.norm = GroupNorm(1, self.num_features)
            head_norm = nn.Identity()
        self.head = nn.Sequential(("norm", head_norm), ("fc", nn.Identity()))
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage.blocks, stage.downsample(x))

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each block, and the head with its norm. The first block of
        a stage has the downsampling before it.
        """
        return [*groups_by_block("stem", "stages", self.stages), ("norm", "head")]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        return groups_of_twelve(self, "head.fc")

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            Normal(std=0.02)(layer.weight)
            Constant(0.0)(layer.bias)
