"""MobileViT (Mehta and Rastegari 2021, arXiv:2110.02178): MobileNetV2's blocks, and attention
between places that lie alike in their patches.

Parameter names, order of operations and initialisation are those of timm's ``ByobNet`` of
MobileViT's variants.
"""

import itertools
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
from settings.keys import Depth, Epsilon, Factor, InTraining, Positive, Rate, Size
from weights.names import mobilevit as names

PATCH = 2  # places along a side
RESIDUALS = (1, 3, 1, 1, 1)  # inverted residuals of each stage


def expanded_channels(dim: int, ratio: float) -> int:
    """Returns ``ratio`` times as many channels, as a multiple of 8 that isn't more than a tenth too
    small.
    """
    wanted = int(dim * ratio)
    near = max(8, int(dim * ratio + 4) // 8 * 8)
    return near if near >= 0.9 * wanted else near + 8


class InvertedResidual(nn.Layer):
    """Three convolutions, to more channels, within each of these, and to ``dim``: MobileNetV2's
    (arXiv:1801.04381).

    What they read is added where the shape is the same. Shape: [B, in_dim, H, W] -> [B, dim, H /
    stride, W / stride].
    """

    def __init__(
        self, in_dim: int, dim: int, stride: int, expand_ratio: float, drop_path: float
    ) -> None:
        super().__init__()
        between = expanded_channels(in_dim, expand_ratio)
        self.residual = stride == 1 and in_dim == dim
        self.conv1_1x1 = ConvNorm(in_dim, between, 1, silu)
        self.conv2_kxk = ConvNorm(between, between, 3, silu, stride=stride, groups=between)
        self.conv3_1x1 = ConvNorm(between, dim, 1)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.conv3_1x1(self.conv2_kxk(self.conv1_1x1(x)))
        return self.drop_path(branch, onto=x) if self.residual else self.drop_path(branch)


class MobileViTBlock(nn.Layer):
    """Convolutions and attention of a map, whose output is fused with the map itself.

    A place attends to the places at the same position within other patches of 2 x 2. A map of odd
    sides is stretched meanwhile. Shape: [B, dim, H, W] -> the same.

    Args:
        dim: channels of the map.
        hidden_dim: channels of the attention.
        num_heads: heads of the attention.
        layers: number of transformer blocks.
        mlp_ratio: hidden width of their MLPs over hidden_dim.
        epsilon: epsilon of the norm after them.
        hidden_norm: whether a batch norm and SiLU follow the convolution to ``hidden_dim``.
        drop: dropout after the attention's projection and in the MLPs.
        attn_drop: dropout of the attention weights.
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
        to_hidden = Conv2D(dim, hidden_dim, 1, bias_attr=False)
        self.conv_1x1 = ConvNorm(dim, hidden_dim, 1, silu) if hidden_norm else to_hidden
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
        # Patches, rounded up: a map of odd sides is stretched to whole ones.
        rows = -(-height // PATCH)
        columns = -(-width // PATCH)
        hidden = in_float32(interpolate(hidden, (rows * PATCH, columns * PATCH)))
        # The batch counts positions within a patch, and the tokens are the patches.
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
        embed_dims: channels of the stem, of each of seven inverted residuals, of which the second
            to the fourth are one stage, and of the last convolution.
        hidden_dims: channels of the attention in each of the last three stages.
        stage_depths: layers of attention in each of the last three stages.
        num_heads: heads of the attention: the authors' and timm's 4; PaddleViT's 8.
        expand_ratio: channels within an inverted residual over its input's; PaddleViT's are 4 in
            mobilevit_xxs, too.
        mlp_ratio: hidden width of the MLPs over their input's.
        last_norm_eps: of the norm after a stage's layers of attention; PaddleViT's is 1e-6. All
            others have 1e-5.
        hidden_norm: whether a batch norm and SiLU follow the convolution before the attention, as
            PaddleViT's.
        dropout: in the layers of attention, after their projections and within their MLPs.
        attention_dropout: of the attention weights.
        head_dropout: before the classifier.
        droppath: rate of stochastic depth at the last stage's attention; linear from 0 at the first
            inverted residual.

    Raises:
        InputError: numbers of another count, or channels that aren't a multiple of the heads.
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
        head_dropout: Rate = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[Factor] = 1.0,
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
                raise InputError(f"HIDDEN_DIMS has {dim}, no multiple of NUM_HEADS {num_heads}")
        self.num_features = embed_dims[-1]
        self.num_heads = num_heads
        self.expand_ratio = expand_ratio
        self.last_norm_eps = last_norm_eps
        self.hidden_norm = hidden_norm
        self.stem = ConvNorm(in_channels, embed_dims[0], 3, silu, stride=2)
        # (in, out) channels of one inverted residual after the other.
        residual_dims = itertools.pairwise(embed_dims[:-1])
        rates = drop_path_rates(droppath, [count + (i > 1) for i, count in enumerate(RESIDUALS)])
        self.stages = nn.LayerList()
        for i, count in enumerate(RESIDUALS):
            stage = nn.Sequential()
            for j in range(count):
                in_dim, dim = next(residual_dims)
                stride = 2 if i and not j else 1
                residual = InvertedResidual(in_dim, dim, stride, expand_ratio, rates[i][j])
                stage.add_sublayer(str(j), residual)
            # The last three stages have attention.
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
            # A residual block starts as the identity.
            if isinstance(block, InvertedResidual) and block.residual:
                Constant(0.0)(block.conv3_1x1.bn.weight)

    def grid(self, places: int) -> tuple[int, int]:
        """Returns the grid of the stage with so many patches, for images of image_size."""
        height, width = (-(-side // (8 * PATCH)) for side in self.image_size)
        while height * width > places:
            height, width = (height + 1) // 2, (width + 1) // 2
        return height, width

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
        """Returns timm's groups, as the authors have none: the stem, each block, the classifier.
        The last block has the last convolution.
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
