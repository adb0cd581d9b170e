"""CycleMLP (Chen et al. 2021, arXiv:2107.10224): Linears over channels that read each channel from
another place nearby.

Parameter names, the order of operations and the initialisation are those of the authors' code. A
deformable convolution with fixed offsets shifts the channels there. Here it is a depthwise one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal

from models.base import ImageModel, register
from models.layers import LayerNorm, Linear, init_linear
from models.layers.block import Block
from models.layers.conv import Conv2D, depthwise
from models.layers.init import init_as_torch
from models.layers.layout import channels_last
from models.layers.reweight import Reweight
from models.layers.stages import check_counts, check_stages, drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import cyclemlp as names


class CycleFC(Conv2D):
    """A 1 x 1 convolution that reads each channel from another place of a row or column.

    Channel i is read from ``(i + 1) % 3 - 1`` places further: the first from the place itself, the
    second from the next one, the third from the one before, and so on. Beyond the map are zeros.

    Args:
        dim: channels.
        axis: 0: the places are those of a column; 1: of a row.

    Shape: [B, H, W, dim] -> the same.
    """

    def __init__(self, dim: int, axis: int) -> None:
        super().__init__(dim, dim, 1)
        channels = np.arange(dim)
        kernels = np.zeros([dim, 3], np.float32)
        kernels[channels, (channels + 1) % 3] = 1
        shape = [dim, 1, 3, 1] if axis == 0 else [dim, 1, 1, 3]
        self.register_buffer("shift", paddle.to_tensor(kernels.reshape(shape)), persistable=False)

    def forward(self, x: paddle.Tensor, last: bool = True) -> paddle.Tensor:
        # Not super(), which Paddle 2.6 can't trace.
        return Conv2D.forward(self, depthwise(x, self.shift.astype(x.dtype)), last=True)


class CycleMlp(nn.Layer):
    """Three Linears over channels, two of which read shifted channels. Their outputs are summed with
    weights that depend on the image.

    Shape: [B, H, W, dim] -> the same.
    """

    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.mlp_c = Linear(dim, dim, bias_attr=None if bias else False)
        self.sfc_h = CycleFC(dim, axis=1)
        self.sfc_w = CycleFC(dim, axis=0)
        self.reweight = Reweight(dim)
        self.proj = Linear(dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        _, height, width, dim = x.shape
        outputs = [layer(x).flatten(1, 2) for layer in (self.sfc_h, self.sfc_w, self.mlp_c)]
        x = self.proj(self.reweight(*outputs))
        return x.reshape([-1, height, width, dim])


class PatchEmbed(nn.Layer):
    """Overlapping patches of 7 x 7 pixels, 4 apart.

    Shape: [B, C, H, W] -> [B, (H + 1) / 4, (W + 1) / 4, dim], rounded down.
    """

    def __init__(self, in_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = Conv2D(in_channels, dim, 7, 4, 2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return channels_last(self.proj(x))


class Downsample(nn.Layer):
    """A 3 x 3 convolution of stride 2.

    Shape: [B, H, W, in_dim] -> [B, H / 2, W / 2, dim], rounded up.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = Conv2D(in_dim, dim, 3, 2, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.proj(x, last=True)


@register("cyclemlp")
class CycleMLP(ImageModel):
    """CycleMLP. It takes images of any size from 3 x 3 on.

    Its features are the normalised output of the last stage: [B, H / 32, W / 32, embed_dims[3]].

    Args:
        stage_depths: number of blocks in each of the four stages.
        embed_dims: number of channels of each of the four stages.
        mlp_ratio: ratio of the MLPs' hidden width to their input width, for each stage.
        qkv_bias: whether the Linear that reads each position alone has a bias.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: a wrong count of numbers.
    """

    weight_names = names
    min_image_size = 3
    layout = "NHWC"

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 2, 4, 2),
        embed_dims: Sequence[Size] = (64, 128, 320, 512),
        mlp_ratio: Sequence[Positive] = (4.0, 4.0, 4.0, 4.0),
        qkv_bias: bool = False,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        check_counts(4, MLP_RATIO=mlp_ratio)
        self.num_features = embed_dims[-1]
        # The layers between the stages are in the same list.
        self.feature_info = feature_info(
            [f"network.{2 * i}" for i in range(4)], embed_dims, (4, 8, 16, 32)
        )
        self.patch_embed = PatchEmbed(in_channels, embed_dims[0])
        self.network = nn.LayerList()
        rates = drop_path_rates(droppath, stage_depths)
        for i, dim in enumerate(embed_dims):
            if i > 0:
                self.network.append(Downsample(embed_dims[i - 1], dim))
            blocks = (
                Block(
                    dim,
                    CycleMlp(dim, qkv_bias),
                    mlp_ratio[i],
                    init_values=None,
                    drop=0.0,
                    drop_path=rate,
                    epsilon=1e-5,
                )
                for rate in rates[i]
            )
            self.network.append(nn.LayerList(blocks))
        self.norm = LayerNorm(self.num_features)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.patch_embed(x)

    def _stages(self) -> Iterable[Any]:
        return [(i, self.network[2 * i]) for i in range(4)]

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        index, blocks = stage
        if index > 0:
            x = self.network[2 * index - 1](x)
        return self._run_all(blocks, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x.flatten(1, 2).mean(axis=1))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the patches, each block, the classifier with its norm. The first block
        of a stage has the downsampling before it.
        """
        groups: list[tuple[str, ...]] = [("patch_embed",)]
        for i, stage in self._stages():
            blocks: list[tuple[str, ...]] = [
                (f"network.{2 * i}.{j}",) for j, _ in enumerate(stage.children())
            ]
            if i > 0:
                blocks[0] += (f"network.{2 * i - 1}",)
            groups += blocks
        return [*groups, ("norm", "head")]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, CycleFC):
            Normal(std=0.02)(layer.weight)
            Constant(0.0)(layer.bias)
        elif isinstance(layer, nn.Conv2D):
            init_as_torch(layer)
