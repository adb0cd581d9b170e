"""ConvMLP (Li et al. 2021, arXiv:2109.04454): a stage of convolutions, then MLPs over channels with
depthwise convolutions between them.

Parameter names, the order of operations and the initialisation are those of the authors' code.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, init_linear
from models.layers.activations import relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D, MaxPool2D
from models.layers.init import init_as_torch
from models.layers.layout import channels_last
from models.layers.mlp import Mlp, hidden_width
from models.layers.scale import add_branch
from models.layers.stages import check_counts, drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size


class Convolutions(nn.Layer):
    """Convolutions without biases, each with batch norm and ReLU. Sublayers have the numbers of a
    sequence of all three: "0", "1", "3", "4", "6", ...

    Args:
        dims: channels of the input and of each convolution's output.
        kernels: side of each convolution's kernels.
        stride: stride of the first one.

    Shape: [B, dims[0], H, W] -> [B, dims[-1], H / stride, W / stride], rounded up.
    """

    def __init__(self, dims: Sequence[int], kernels: Sequence[int], stride: int = 1) -> None:
        super().__init__()
        self.count = len(kernels)
        for i, side in enumerate(kernels):
            step = stride if i == 0 else 1
            conv = Conv2D(dims[i], dims[i + 1], side, step, side // 2, bias_attr=False)
            self.add_sublayer(f"{3 * i}", conv)
            self.add_sublayer(f"{3 * i + 1}", BatchNorm2D(dims[i + 1]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for i in range(self.count):
            conv = self._sub_layers[f"{3 * i}"]
            norm = self._sub_layers[f"{3 * i + 1}"]
            x = norm(conv(x), relu)
        return x


class ConvTokenizer(nn.Layer):
    """Three 3 x 3 convolutions, the first of stride 2, then a maximum of stride 2.

    Shape: [B, in_channels, H, W] -> [B, dim, H / 4, W / 4], rounded up.
    """

    def __init__(self, in_channels: int, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.block = Convolutions((in_channels, half, half, dim), (3, 3, 3), stride=2)
        self.pool = MaxPool2D(3, 2, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.pool(self.block(x))


class ConvStage(nn.Layer):
    """Residual blocks of convolutions. ``downsample``, which leads to the next stage, isn't applied.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, depth: int, dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        dims = (dim, hidden_dim, hidden_dim, dim)
        self.conv_blocks = nn.LayerList(Convolutions(dims, (1, 3, 1)) for _ in range(depth))
        self.downsample = Conv2D(dim, out_dim, 3, 2, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.conv_blocks:
            x = add_branch(x, block(x))
        return x


class Block(nn.Layer):
    """Two MLPs with a residual connection each, and a depthwise 3 x 3 convolution without one
    between them. Each has a norm before it.

    Shape: [B, H, W, dim] -> the same.
    """

    def __init__(self, dim: int, hidden_dim: int, rate: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.channel_mlp1 = Mlp(dim, hidden_dim)
        self.norm2 = LayerNorm(dim)
        self.connect = Conv2D(dim, dim, 3, padding=1, groups=dim, bias_attr=False)
        self.connect_norm = LayerNorm(dim)
        self.channel_mlp2 = Mlp(dim, hidden_dim)
        self.drop_path = DropPath(rate)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path(self.channel_mlp1(self.norm1(x)), onto=x)
        x = self.connect(self.connect_norm(x), last=True)
        return self.drop_path(self.channel_mlp2(self.norm2(x)), onto=x)


class Downsample(nn.Layer):
    """A 3 x 3 convolution of stride 2.

    Shape: [B, H, W, dim] -> [B, H / 2, W / 2, out_dim], rounded up.
    """

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.downsample = Conv2D(dim, out_dim, 3, 2, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.downsample(x, last=True)


class Stage(nn.Layer):
    """Blocks. ``downsample_mlp`` leads to the next stage, if there is one."""

    def __init__(self, blocks: Iterable[nn.Layer], downsample: nn.Layer) -> None:
        super().__init__()
        self.blocks = nn.LayerList(blocks)
        self.downsample_mlp = downsample


@register("convmlp")
class ConvMLP(ImageModel):
    """ConvMLP. It takes images of any size.

    Its intermediates are the outputs of the stage of convolutions and of each stage of MLPs. Its
    features are the last one, normalised: [B, H / 32, W / 32, embed_dims[-1]] with three stages of
    MLPs, rounded up.

    Args:
        stage_depths: number of blocks in each stage of MLPs.
        embed_dims: number of channels of each stage of MLPs.
        mlp_ratio: ratio of the MLPs' hidden width to their input width, for each stage.
        stem_dim: number of channels of the stage of convolutions.
        n_conv_blocks: number of blocks in the stage of convolutions.
        droppath: stochastic depth rate of each stage's last block; the rates grow linearly from 0
            at the stage's first block.

    Raises:
        InputError: a wrong count of numbers.
    """

    first_conv = "tokenizer.block.0"
    min_image_size = 1
    layout = "NHWC"

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 4, 2),
        embed_dims: Sequence[Size] = (128, 256, 512),
        mlp_ratio: Sequence[Positive] = (2.0, 2.0, 2.0),
        stem_dim: Size = 64,
        n_conv_blocks: Depth = 2,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        count = len(stage_depths)
        check_counts(count, EMBED_DIMS=embed_dims, MLP_RATIO=mlp_ratio)
        self.num_features = embed_dims[-1]
        self.feature_info = feature_info(
            ["conv_stages", *(f"stages.{i}" for i in range(count))],
            [stem_dim, *embed_dims],
            [4 * 2**i for i in range(count + 1)],
        )
        self.tokenizer = ConvTokenizer(in_channels, stem_dim)
        self.conv_stages = ConvStage(n_conv_blocks, stem_dim, embed_dims[0], embed_dims[0])
        self.stages = nn.LayerList()
        for i, dim in enumerate(embed_dims):
            [rates] = drop_path_rates(droppath, [stage_depths[i]])
            hidden_dim = hidden_width(dim, mlp_ratio[i])
            downsample: nn.Layer = nn.Identity()
            if i + 1 < count:
                downsample = Downsample(dim, embed_dims[i + 1])
            self.stages.append(Stage((Block(dim, hidden_dim, rate) for rate in rates), downsample))
        self.norm = LayerNorm(self.num_features)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.tokenizer(x)

    def _stages(self) -> Iterable[Any]:
        return range(len(self.feature_info))

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage == 0:
            return channels_last(self._run(self.conv_stages, x))
        if stage == 1:
            x = self.conv_stages.downsample(x, last=True)
        else:
            x = self.stages[stage - 2].downsample_mlp(x)
        return self._run_all(self.stages[stage - 1].blocks, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x.flatten(1, 2).mean(axis=1))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the tokenizer, each block, and the last norm with the classifier. A
        layer between two stages belongs to the group before it.
        """
        groups: list[tuple[str, ...]] = [("tokenizer",)]
        groups += [
            (f"conv_stages.conv_blocks.{i}",) for i in range(len(self.conv_stages.conv_blocks))
        ]
        groups[-1] += ("conv_stages.downsample",)
        for i, stage in enumerate(self.stages):
            groups += [(f"stages.{i}.blocks.{j}",) for j in range(len(stage.blocks))]
            groups[-1] += (f"stages.{i}.downsample_mlp",)
        return [*groups, ("norm", "head")]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            # The biases are PyTorch's. Its variance of 2 / fan out doesn't count groups.
            init_as_torch(layer)
            out_channels, _, height, width = layer.weight.shape
            Normal(std=(2.0 / (out_channels * height * width)) ** 0.5)(layer.weight)
