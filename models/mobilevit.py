"""MobileViT (Mehta and Rastegari 2021, arXiv:2110.02178): MobileNetV2's blocks with attention.

A place attends to the places that have the same position within other patches. Parameter names, the
order of operations and the initialisation are those of MobileViT in timm's ``ByobNet``.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import Attention, DropPath, LayerNorm
from models.layers.activations import silu
from models.layers.block import Block
from models.layers.conv import Conv2D
from models.layers.conv_norm import ConvNorm
from models.layers.init import init_convolution
from models.layers.layout import mean_of_places
from models.layers.linear import in_float32
from models.layers.resize import interpolate
from models.layers.stages import check_counts, drop_path_rates, feature_info
from settings.keys import Depth, Epsilon, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import mobilevit as names

# Places along a patch's side.
PATCH = 2
# Inverted residuals of each stage.
RESIDUALS = (1, 3, 1, 1, 1)


def expanded_channels(dim: int, ratio: float) -> int:
    """Returns dim * ratio, rounded to a multiple of 8, but not down by more than 10 %."""
    exact = int(dim * ratio)
    rounded = max(8, int(dim * ratio + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * exact else rounded + 8


class InvertedResidual(nn.Layer):
    """The inverted residual of MobileNetV2 (arXiv:1801.04381), with SiLU.

    It is a depthwise 3 x 3 convolution between two 1 x 1 convolutions, which widen and narrow its
    input. The input is added if it has the shape of the output; this branch has drop path.

    Args:
        in_dim: channels of the input.
        dim: channels of the output.
        stride: stride of the depthwise convolution.
        expand_ratio: channels of the depthwise convolution over in_dim.
        drop_path: rate of stochastic depth.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(
        self, in_dim: int, dim: int, stride: int, expand_ratio: float, drop_path: float
    ) -> None:
        super().__init__()
        mid_dim = expanded_channels(in_dim, expand_ratio)
        self.residual = stride == 1 and in_dim == dim
        self.conv1_1x1 = ConvNorm(in_dim, mid_dim, 1, silu)
        self.conv2_kxk = ConvNorm(mid_dim, mid_dim, 3, silu, stride=stride, groups=mid_dim)
        self.conv3_1x1 = ConvNorm(mid_dim, dim, 1)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.conv3_1x1(self.conv2_kxk(self.conv1_1x1(x)))
        return self.drop_path(branch, onto=x) if self.residual else self.drop_path(branch)


class MobileViTBlock(nn.Layer):
    """Convolutions, then attention between patches; a convolution fuses the output with the input.

    A place attends to the places that have the same position within other patches of 2 x 2. A map
    of odd sides is stretched for the attention.

    Shape: [B, dim, H, W] -> the same.

    Args:
        dim: channels of the map.
        hidden_dim: channels of the attention.
        num_heads: number of attention heads.
        layers: number of transformer blocks.
        mlp_ratio: hidden width of their MLPs over hidden_dim.
        epsilon: epsilon of the norm after them.
        hidden_norm: whether a batch norm and SiLU follow the convolution to ``hidden_dim``.
        drop: dropout after the attention's projection and in the MLPs.
        attn_drop: dropout rate of the attention weights.
        drop_path: rate of stochastic depth of each transformer block.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_heads: int,
        layers: int,
        mlp_ratio: float,
        epsilon: float,
        hidden_norm: bool,
        drop: float,
        attn_drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.conv_kxk = ConvNorm(dim, dim, 3, silu)
        plain_conv = Conv2D(dim, hidden_dim, 1, bias_attr=False)
        self.conv_1x1 = ConvNorm(dim, hidden_dim, 1, silu) if hidden_norm else plain_conv
        self.transformer = nn.LayerList()
        for _ in range(layers):
            attn = Attention(hidden_dim, num_heads, attn_drop=attn_drop, proj_drop=drop)
            block = Block(
                hidden_dim,
                attn,
                mlp_ratio=mlp_ratio,
                init_values=None,
                drop=drop,
                drop_path=drop_path,
                epsilon=1e-5,
                act="silu",
            )
            self.transformer.append(block)
        self.norm = LayerNorm(hidden_dim, epsilon=epsilon)
        self.conv_proj = ConvNorm(hidden_dim, dim, 1, silu)
        self.conv_fusion = ConvNorm(2 * dim, dim, 3, silu)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        hidden = self.conv_1x1(self.conv_kxk(x))
        _, dim, height, width = hidden.shape
        # Rows and columns of patches. A map of odd sides is stretched to whole patches.
        rows = (height + PATCH - 1) // PATCH
        columns = (width + PATCH - 1) // PATCH
        hidden = in_float32(interpolate(hidden, (rows * PATCH, columns * PATCH)))
        # Each position within a patch is an item of the batch, and the patches are its tokens.
        hidden = hidden.reshape([-1, dim, rows, PATCH, columns, PATCH])
        hidden = hidden.transpose([0, 3, 5, 2, 4, 1]).reshape([-1, rows * columns, dim])
        for block in self.transformer:
            hidden = block(hidden)
        hidden = self.norm(hidden).reshape([-1, PATCH, PATCH, rows, columns, dim])
        hidden = hidden.transpose([0, 5, 3, 1, 4, 2])
        hidden = hidden.reshape([-1, dim, rows * PATCH, columns * PATCH])
        hidden = self.conv_proj(interpolate(hidden, (height, width)))
        return self.conv_fusion(paddle.concat([x.astype(hidden.dtype), hidden], axis=1))


@register("mobilevit")
class MobileViT(ImageModel):
    """MobileViT. It takes images of any size; sides that are multiples of 64 are never stretched.

    Its features are [B, embed_dims[8], H / 32, W / 32], rounded up.

    Args:
        embed_dims: nine numbers of channels: of the stem, of each of the seven inverted residuals,
            and of the last convolution. The second to the fourth inverted residual form one stage.
        hidden_dims: number of channels of the transformer blocks in each of the last three stages.
        stage_depths: number of transformer blocks in each of the last three stages.
        num_heads: number of attention heads: 4 in the authors' and timm's models, 8 in PaddleViT's.
        expand_ratio: ratio of the channels within an inverted residual to its input channels.
            PaddleViT uses 4 in mobilevit_xxs as well.
        mlp_ratio: ratio of the MLPs' hidden width to their input width.
        last_norm_eps: epsilon of the norm after the transformer blocks of a stage. PaddleViT uses
            1e-6. All other layer norms have 1e-5.
        hidden_norm: whether a batch norm and SiLU follow the convolution before the transformer
            blocks, as in PaddleViT.
        dropout: dropout rate in the transformer blocks, after the attention's projection and in the
            MLP.
        attention_dropout: dropout rate of the attention weights.
        head_dropout: dropout rate before the classifier.
        droppath: stochastic depth rate of the last stage's transformer blocks; the rates grow
            linearly from 0 at the first inverted residual.

    Raises:
        InputError: a wrong count of numbers, or channels that aren't a multiple of the heads.
    """

    weight_names = names
    first_conv = "stem.conv"
    min_image_size = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 256,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dims: Sequence[Size] = (16, 32, 64, 64, 64, 96, 128, 160, 640),
        hidden_dims: Sequence[Size] = (144, 192, 240),
        stage_depths: Sequence[Depth] = (2, 4, 3),
        num_heads: Size = 4,
        expand_ratio: Positive = 4.0,
        mlp_ratio: Positive = 2.0,
        last_norm_eps: Epsilon = 1e-5,
        hidden_norm: bool = False,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        head_dropout: OfClassifier[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_counts(3, STAGE_DEPTHS=stage_depths, HIDDEN_DIMS=hidden_dims)
        if len(embed_dims) != 9:
            raise InputError(
                f"EMBED_DIMS is {list(embed_dims)}, expected 9 numbers: stem, blocks, last convolution"
            )
        for dim in hidden_dims:
            if dim % num_heads:
                raise InputError(f"HIDDEN_DIMS has {dim}, not a multiple of NUM_HEADS {num_heads}")
        self.num_features = embed_dims[-1]
        self.num_heads = num_heads
        self.expand_ratio = expand_ratio
        self.last_norm_eps = last_norm_eps
        self.hidden_norm = hidden_norm
        self.stem = ConvNorm(in_channels, embed_dims[0], 3, silu, stride=2)
        # (in, out) channels of one inverted residual after the other.
        residual_dims = itertools.pairwise(embed_dims[:-1])
        # In the last three stages the transformer blocks count as one more block.
        depths = [count + 1 if i > 1 else count for i, count in enumerate(RESIDUALS)]
        rates = drop_path_rates(droppath, depths)
        self.stages = nn.LayerList()
        for i, count in enumerate(RESIDUALS):
            stage = nn.Sequential()
            for j in range(count):
                in_dim, dim = next(residual_dims)
                # The first block of each stage but the first halves the maps.
                stride = 2 if i > 0 and j == 0 else 1
                residual = InvertedResidual(in_dim, dim, stride, expand_ratio, rates[i][j])
                stage.add_sublayer(str(j), residual)
            if i > 1:
                attention = MobileViTBlock(
                    embed_dims[3 + i],
                    hidden_dims[i - 2],
                    num_heads,
                    layers=stage_depths[i - 2],
                    mlp_ratio=mlp_ratio,
                    epsilon=last_norm_eps,
                    hidden_norm=hidden_norm,
                    drop=dropout,
                    attn_drop=attention_dropout,
                    drop_path=rates[i][1],
                )
                stage.add_sublayer("1", attention)
            self.stages.append(stage)
        self.final_conv = ConvNorm(embed_dims[-2], embed_dims[-1], 1, silu)
        modules = [*(f"stages.{i}" for i in range(4)), "final_conv"]
        self.feature_info = feature_info(
            modules, (embed_dims[1], *embed_dims[4:7], embed_dims[8]), (2, 4, 8, 16, 32)
        )
        self.head = nn.Sequential(("drop", nn.Dropout(head_dropout)), ("fc", nn.Identity()))
        self._finish()
        for block in self.sublayers():
            # A fresh residual block is the identity.
            if isinstance(block, InvertedResidual) and block.residual:
                Constant(0.0)(block.conv3_1x1.bn.weight)

    def grid(self, places: int) -> tuple[int, int]:
        """Returns the rows and columns of the stage that has so many patches."""
        # The first attention reads maps of an eighth of the image.
        rows, columns = (math.ceil(side / (8 * PATCH)) for side in self.image_size)
        while rows * columns > places:
            rows = (rows + 1) // 2
            columns = (columns + 1) // 2
        return rows, columns

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        x = self._run_all(stage, x)
        return self.final_conv(x) if stage is self.stages[-1] else x

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns timm's groups, since the authors have none: the stem, each block, and the
        classifier. The last block has the last convolution.
        """
        blocks = [
            (f"stages.{i}.{j}",)
            for i, stage in enumerate(self.stages)
            for j, _ in enumerate(stage.children())
        ]
        return [("stem",), *blocks[:-1], (*blocks[-1], "final_conv"), ("head",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_convolution(layer)
        if isinstance(layer, nn.Linear):
            Normal(std=0.01)(layer.weight)
            Constant(0.0)(layer.bias)
