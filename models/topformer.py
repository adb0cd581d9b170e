"""TopFormer (Zhang et al. 2022, arXiv:2204.05525): MobileNetV2's blocks make a pyramid of maps, and
attention reads all of them, averaged to one small map.

The order of operations is that of the authors' code. ``models.heads.topformer`` has their layers
for segmentation. PaddleViT's ``TopTransformer`` has both in one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, init_linear
from models.layers.activations import relu
from models.layers.attention import attend_heads
from models.layers.conv import Conv2D, adaptive_mean
from models.layers.conv_norm import ConvNorm
from models.layers.folding import NormLinear, fold
from models.layers.init import init_convolution
from models.layers.layout import mean_of_places, swap_axes
from models.layers.mlp import hidden_width
from models.layers.stages import check_stages, drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import topformer as names

# The first block has MobileNetV2's smallest size: it widens nothing and halves nothing.
STEM_BLOCKS = 1


class InvertedResidual(nn.Layer):
    """The inverted residual of MobileNetV2 (arXiv:1801.04381).

    Args:
        in_dim: channels of the input.
        dim: channels of the output.
        kernel_size: side of the depthwise kernels.
        stride: stride of the depthwise convolution.
        expand_ratio: channels of the depthwise convolution over in_dim; 1: no convolution widens
            the input before it.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(
        self, in_dim: int, dim: int, kernel_size: int, stride: int, expand_ratio: int
    ) -> None:
        super().__init__()
        mid_dim = in_dim * expand_ratio
        self.residual = stride == 1 and in_dim == dim
        self.conv1_1x1 = nn.Identity()
        if expand_ratio != 1:
            self.conv1_1x1 = ConvNorm(in_dim, mid_dim, 1, relu)
        self.conv2_kxk = ConvNorm(
            mid_dim, mid_dim, kernel_size, relu, stride=stride, groups=mid_dim
        )
        self.conv3_1x1 = ConvNorm(mid_dim, dim, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.conv3_1x1(self.conv2_kxk(self.conv1_1x1(x)))
        return x + branch if self.residual else branch


class Attention(nn.Layer):
    """Multi-head attention of all places, by 1 x 1 convolutions with batch norm.

    The scores aren't divided by the square root of ``key_dim``, as in the authors' code.

    Args:
        dim: channels of the map.
        key_dim: number of channels of a head's queries and keys.
        num_heads: number of attention heads.
        attn_ratio: ratio of the channels of a head's values to key_dim.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int, key_dim: int, num_heads: int, attn_ratio: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.key_dim = key_dim
        value_dim = num_heads * hidden_width(key_dim, attn_ratio)
        self.value_dim = value_dim
        self.q = ConvNorm(dim, num_heads * key_dim, 1)
        self.k = ConvNorm(dim, num_heads * key_dim, 1)
        self.v = ConvNorm(dim, value_dim, 1)
        self.attn_drop = nn.Identity()
        self.proj = ConvNorm(value_dim, dim, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        height, width = x.shape[2:]
        qkv = [swap_axes(layer(x).flatten(2)) for layer in (self.q, self.k, self.v)]
        x = swap_axes(attend_heads(qkv, self.num_heads, self.key_dim, 1.0, self.attn_drop))
        # Paddle 2.6 can't trace a convolution of a map whose number of channels isn't given.
        return self.proj(F.relu6(x.reshape([0, self.value_dim, height, width])))


class ConvMlp(nn.Layer):
    """1 x 1 convolution, depthwise 3 x 3 convolution, ReLU6, 1 x 1 convolution.

    The 1 x 1 convolutions have batch norm, the depthwise one has a bias.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int, hidden_dim: int, drop: float) -> None:
        super().__init__()
        self.fc1 = ConvNorm(dim, hidden_dim, 1)
        self.dwconv = Conv2D(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)
        self.drop = nn.Dropout(drop)
        self.fc2 = ConvNorm(hidden_dim, dim, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = F.relu6(self.dwconv(self.fc1(x)))
        return self.drop(self.fc2(self.drop(x)))


class Block(nn.Layer):
    """x + attn(x), then x + mlp(x), each branch with drop path.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(
        self, dim: int, attn: Attention, mlp_ratio: float, drop: float, rate: float
    ) -> None:
        super().__init__()
        self.attn = attn
        self.drop_path1 = DropPath(rate)
        self.mlp = ConvMlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.drop_path2 = DropPath(rate)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(self.attn(x), onto=x)
        return self.drop_path2(self.mlp(x), onto=x)


@register("topformer")
class TopFormer(ImageModel):
    """TopFormer. It takes images of any size.

    Its intermediates are the outputs of four stages of convolutions, and that of the attention. Its
    features are the latter: [B, sum(embed_dims), H / (32 * pool_stride), W / (32 * pool_stride)],
    rounded up. The classifier is a batch norm and a Linear, and reads their mean.

    Args:
        stage_depths: number of inverted residuals in each of the four stages.
        embed_dims: number of channels of each of the four stages.
        stem_dim: number of channels of the stem and of the first inverted residual.
        kernel_size: kernel size of the depthwise convolution of each inverted residual.
        expand_ratio: ratio of the channels within each inverted residual to its input channels.
        depth: number of attention blocks.
        num_heads: number of attention heads.
        key_dim: number of channels of a head's queries and keys.
        attn_ratio: ratio of the channels of a head's values to key_dim.
        mlp_ratio: ratio of the hidden width of the blocks' MLPs to their input width.
        pool_stride: the maps of all stages are averaged to the last stage's size divided by this
            before the attention. 1 for small images, as in the paper's pre-training.
        dropout: dropout rate in the blocks' MLPs.
        droppath: stochastic depth rate of the last attention block; the rates grow linearly from 0
            at the first.

    Raises:
        InputError: a wrong count of numbers.
    """

    weight_names = names
    first_conv = "stem.conv"
    min_image_size = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (3, 2, 2, 3),
        embed_dims: Sequence[Size] = (32, 64, 128, 160),
        stem_dim: Size = 16,
        kernel_size: Sequence[Size] = (3, 3, 3, 5, 5, 3, 3, 5, 5, 3),
        expand_ratio: Sequence[Size] = (1, 4, 3, 3, 3, 3, 3, 6, 6, 6),
        depth: Depth = 4,
        num_heads: Size = 8,
        key_dim: Size = 16,
        attn_ratio: Positive = 2.0,
        mlp_ratio: Positive = 2.0,
        pool_stride: Size = 2,
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        for key, values in (("KERNEL_SIZE", kernel_size), ("EXPAND_RATIO", expand_ratio)):
            if len(values) != sum(stage_depths):
                raise InputError(
                    f"{key} is {list(values)}, expected {sum(stage_depths)} numbers: one per block"
                    " of STAGE_DEPTHS"
                )
        self.pool_stride = pool_stride
        self.stem = ConvNorm(in_channels, stem_dim, 3, relu, stride=2)
        self.stages = nn.LayerList()
        sizes = zip(kernel_size, expand_ratio, strict=True)
        in_dim = stem_dim
        for i, (count, dim) in enumerate(zip(stage_depths, embed_dims, strict=True)):
            stage = nn.LayerList()
            # The block that halves the maps: the second of the first stage, the first of others.
            halving = STEM_BLOCKS if i == 0 else 0
            for j in range(count):
                kernel, expand = next(sizes)
                out_dim = stem_dim if j < halving else dim
                stride = 2 if j == halving else 1
                stage.append(InvertedResidual(in_dim, out_dim, kernel, stride, expand))
                in_dim = out_dim
            self.stages.append(stage)
        self.num_features = sum(embed_dims)
        self.blocks = nn.LayerList()
        [rates] = drop_path_rates(droppath, [depth])
        for rate in rates:
            attn = Attention(self.num_features, key_dim, num_heads, attn_ratio)
            self.blocks.append(Block(self.num_features, attn, mlp_ratio, dropout, rate))
        modules = [*(f"stages.{i}" for i in range(4)), "blocks"]
        channels = (*embed_dims, self.num_features)
        self.feature_info = feature_info(modules, channels, (4, 8, 16, 32, 32 * pool_stride))
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def _stages(self) -> Iterable[Any]:
        return [*self.stages, self.blocks]

    def _shared(self) -> list[paddle.Tensor]:
        """Returns the list that ``_stage`` fills with the maps of the pyramid."""
        return []

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage is self.blocks:
            return self._run_all(stage, self._averaged(shared))
        x = self._run_all(stage, x)
        shared.append(x)
        return x

    def _averaged(self, maps: list[paddle.Tensor]) -> paddle.Tensor:
        """Returns all maps, averaged over regions to one size and joined."""
        size = [-(-side // self.pool_stride) for side in maps[-1].shape[2:]]
        return paddle.concat([adaptive_mean(x, size) for x in maps], axis=1)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def inference_model(self) -> ImageModel:
        """Returns a copy with the classifier's batch norm folded into its Linear."""
        return fold(self)

    def classifier_names(self) -> tuple[str, ...]:
        # A head without classes, and one whose norm is folded, has no ``linear``.
        return ("head.linear",) if isinstance(self.head, NormLinear) else ("head",)

    def _add_classifiers(self) -> None:
        self.head = nn.Identity()
        if self.num_classes:
            self.head = NormLinear(self.num_features, self.num_classes, drop=0.0)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each inverted residual, each block, the classifier."""
        residuals = [
            (f"stages.{i}.{j}",)
            for i, stage in enumerate(self.stages)
            for j, _ in enumerate(stage.children())
        ]
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [("stem",), *residuals, *blocks, ("head",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        init_convolution(layer)
