"""ResNet (He et al. 2015, arXiv:1512.03385) and its variants.

- ResNeXt (Xie et al. 2017, arXiv:1611.05431) and Wide ResNet (arXiv:1605.07146)
- ResNet-C and -D (He et al. 2018, "Bag of Tricks", arXiv:1812.01187)
- ResNet-RS (arXiv:2103.07579), SE-ResNet (arXiv:1709.01507), ECA-ResNet (arXiv:1910.03151)

Parameter names, the order of operations and the initialisation are those of timm's ``ResNet``. The
3 x 3 convolutions have the strides, as there and in torchvision.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath
from models.layers.activations import ReLU, relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import AvgPool2D, Conv2D, MaxPool2D
from models.layers.conv_norm import SqueezeExcite
from models.layers.init import init_as_torch, init_convolution
from models.layers.layout import mean_of_places
from models.layers.linear import in_float32
from models.layers.scale import scale_planes
from models.layers.stages import drop_path_rates, feature_info
from settings.keys import Factor, InTraining, OfClassifier, Rate, Size
from settings.needs import above_zero


class BlockOptions(NamedTuple):
    """The options of ``ResNet`` that all its blocks share."""

    cardinality: int = 1
    base_width: int = 64
    avg_down: bool = False
    anti_alias: str | None = None
    se_ratio: float = 0.0
    eca: bool = False


class _Block(nn.Layer):
    """relu(shortcut(x) + channel_attention(branch(x))), the branch with drop path.

    Args:
        in_dim: channels of the input.
        dim: channels of the 3 x 3 convolutions, where the blocks aren't wider than ResNet's.
        stride: 1, or 2: the block halves maps.
        drop_path: rate of stochastic depth.
        options: those of all blocks.
        dilations: of the block's first 3 x 3 convolution, and of the others of its stage.

    Attributes:
        expansion: channels of the output over dim.
        last_norm: name of the branch's last norm.

    Shape: [B, in_dim, H, W] -> [B, expansion * dim, H / stride, W / stride], rounded up.
    """

    expansion: int
    last_norm: str

    def __init__(
        self,
        in_dim: int,
        dim: int,
        stride: int,
        drop_path: float,
        options: BlockOptions,
        dilations: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__()
        # With anti-aliasing, maps are halved by a layer after the convolution instead of by it.
        halved_after = stride == 2 and options.anti_alias is not None
        self._add_branch(in_dim, dim, 1 if halved_after else stride, options, dilations)
        out_dim = dim * self.expansion
        width = self.conv2.weight.shape[1] * options.cardinality
        self.aa = halving(options.anti_alias, width) if halved_after else nn.Identity()
        self.se = channel_attention(out_dim, options)
        if in_dim == out_dim and stride == 1:
            self.downsample = nn.Identity()
        else:
            self.downsample = downsample(in_dim, out_dim, stride, options.avg_down)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return relu(self.drop_path(self.se(self._branch(x)), onto=self.downsample(x)))


class BasicBlock(_Block):
    """A block whose branch is two 3 x 3 convolutions."""

    expansion = 1
    last_norm = "bn2"

    def _add_branch(
        self,
        in_dim: int,
        dim: int,
        stride: int,
        options: BlockOptions,
        dilations: tuple[int, int],
    ) -> None:
        if options.cardinality != 1 or options.base_width != 64:
            raise InputError(
                "CARDINALITY and BASE_WIDTH need blocks of three convolutions, as in DEPTH 50"
            )
        first, others = dilations
        self.conv1, self.bn1 = convolution(in_dim, dim, 3, stride, dilation=first)
        self.conv2, self.bn2 = convolution(dim, dim, 3, dilation=others)

    def _branch(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.bn2(self.conv2(self.aa(self.bn1(self.conv1(x), relu))))


class Bottleneck(_Block):
    """A block whose branch is a 3 x 3 convolution between two of 1 x 1, which narrow its input and
    widen its output.
    """

    expansion = 4
    last_norm = "bn3"

    def _add_branch(
        self,
        in_dim: int,
        dim: int,
        stride: int,
        options: BlockOptions,
        dilations: tuple[int, int],
    ) -> None:
        # BASE_WIDTH counts the channels of a group in the first stage, which has dim 64.
        width = dim * options.base_width // 64 * options.cardinality
        self.conv1, self.bn1 = convolution(in_dim, width, 1)
        self.conv2, self.bn2 = convolution(
            width, width, 3, stride, options.cardinality, dilations[0]
        )
        self.conv3, self.bn3 = convolution(width, dim * self.expansion, 1)

    def _branch(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.bn1(self.conv1(x), relu)
        return self.bn3(self.conv3(self.aa(self.bn2(self.conv2(x), relu))))


class BlurPool(nn.Layer):
    """Blurs maps with the binomial filter (1, 2, 1) / 4 along both axes, and halves them (Zhang
    2019, arXiv:1904.11486).

    Shape: [B, dim, H, W] -> [B, dim, H / 2, W / 2], rounded up.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        row = paddle.to_tensor([0.25, 0.5, 0.25])
        self.register_buffer(
            "weight", paddle.outer(row, row).expand([dim, 1, 3, 3]), persistable=False
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        # Mirroring has no gradient for bfloat16 in Paddle.
        padded = F.pad(in_float32(x), [1, 1, 1, 1], mode="reflect")
        return F.conv2d(padded, self.weight, stride=2, groups=x.shape[1]).astype(x.dtype)


class EfficientChannelAttention(nn.Layer):
    """Multiplies each channel by a factor in 0..1 that depends on the means of nearby channels
    (ECA; Wang et al. 2020, arXiv:1910.03151).

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        # The paper's kernel size: log2(dim) / 2 + 1 / 2, made odd; as in timm at least 3.
        kernel_size = int(abs(math.log2(dim) + 1) / 2)
        if kernel_size % 2 == 0:
            kernel_size += 1
        kernel_size = max(kernel_size, 3)
        self.conv = nn.Conv1D(1, 1, kernel_size, padding=kernel_size // 2, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        means = mean_of_places(x).unsqueeze(1)
        factors = F.sigmoid(self.conv(means))
        return scale_planes(x, factors.reshape([*x.shape[:2], 1, 1]))


def convolution(
    in_dim: int, dim: int, kernel_size: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> tuple[nn.Layer, nn.Layer]:
    """Returns a convolution without a bias, and its batch norm."""
    padding = dilation * (kernel_size // 2)
    conv = Conv2D(
        in_dim, dim, kernel_size, stride, padding, dilation, groups=groups, bias_attr=False
    )
    return conv, BatchNorm2D(dim)


def downsample(in_dim: int, dim: int, stride: int, avg_down: bool) -> nn.Layer:
    """Returns the layers of a shortcut that give it the size and the channels of the branch."""
    if not avg_down:
        return nn.Sequential(*convolution(in_dim, dim, 1, stride))
    pool = nn.Identity() if stride == 1 else AvgPool2D(2, stride, ceil_mode=True)
    return nn.Sequential(pool, *convolution(in_dim, dim, 1))


def halving(anti_alias: str | None, dim: int) -> nn.Layer:
    """Returns the layer that halves maps of ``dim`` channels: ANTI_ALIAS "blur" or "avg"."""
    return BlurPool(dim) if anti_alias == "blur" else AvgPool2D(2, ceil_mode=True)


def channel_attention(dim: int, options: BlockOptions) -> nn.Layer:
    """Returns the layer that scales the channels of a branch, if the options name one."""
    if options.eca:
        return EfficientChannelAttention(dim)
    if options.se_ratio:
        # The multiple of 8 that is nearest, at least 8.
        hidden_dim = max(8, int(dim * options.se_ratio + 4) // 8 * 8)
        return SqueezeExcite(dim, hidden_dim)
    return nn.Identity()


# The kind of block, and the number of blocks of each stage, by DEPTH.
SIZES = {
    10: (BasicBlock, (1, 1, 1, 1)),
    14: (Bottleneck, (1, 1, 1, 1)),
    18: (BasicBlock, (2, 2, 2, 2)),
    26: (Bottleneck, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
    200: (Bottleneck, (3, 24, 36, 3)),
    201: (Bottleneck, (3, 24, 36, 4)),
    269: (Bottleneck, (3, 30, 48, 8)),
    # ResNet-RS.
    270: (Bottleneck, (4, 29, 53, 4)),
    350: (Bottleneck, (4, 36, 72, 4)),
    420: (Bottleneck, (4, 44, 87, 4)),
}


def stem_pooling(dim: int, stem_pool: str, anti_alias: str | None) -> nn.Layer:
    """Returns the layer that halves the stem's maps before the first stage."""
    if stem_pool == "conv":
        if anti_alias is None:
            return nn.Sequential(*convolution(dim, dim, 3, stride=2), ReLU())
        conv, norm = convolution(dim, dim, 3)
        return nn.Sequential(conv, halving(anti_alias, dim), norm, ReLU())
    if anti_alias is None:
        return MaxPool2D(3, 2, 1)
    if anti_alias == "blur":
        return nn.Sequential(MaxPool2D(3, 1, 1), BlurPool(dim))
    return halving(anti_alias, dim)


@register("resnet")
class ResNet(ImageModel):
    """ResNet. It takes images of any size, from 17 x 17 on with ``anti_alias`` "blur".

    Its features are the last block's output: [B, num_features, H / output_stride, W /
    output_stride], rounded up; with ``small_stem`` H / 8 and W / 8.

    Args:
        depth: number of layers: 10, 14, 18, 26, 34, 50, 101, 152, 200, 201, 269, 270, 350 or 420.
            Blocks have two convolutions with 10, 18 and 34 layers, otherwise three.
        dropout: dropout rate before the classifier.
        small_stem: whether the stem is that for small images (section 4.2 of the paper, CIFAR-10):
            the first convolution is 3 x 3 with stride 1, without pooling after it.
        stem_type: the first layers. "plain": one 7 x 7 convolution; "deep": three 3 x 3
            convolutions with stem_width, stem_width and 2 * stem_width channels; "deep_tiered": the
            same, but the first one has fewer channels.
        stem_width: number of channels of a deep stem's first two convolutions.
        stem_pool: the pooling of the stem. "max": max pooling; "conv": a convolution of stride 2
            (ResNet-RS).
        avg_down: whether shortcuts are halved by average pooling before their convolution
            (ResNet-D).
        cardinality: number of groups of the 3 x 3 convolutions (ResNeXt).
        base_width: number of channels of each group (cardinality) in the first stage: 64 in ResNet,
            128 in Wide ResNet-2.
        anti_alias: the layer that halves maps instead of strided convolutions. "avg": 2 x 2 average
            pooling; "blur": ``BlurPool``; None: strided convolutions are used.
        output_stride: ratio of the image size to the size of the feature map: 32, 16 or 8. Below 32
            the last stages have dilated convolutions instead of strides, so that their receptive
            field stays the same (Chen et al. 2017, arXiv:1706.05587).
        se_ratio: ratio of the hidden channels of squeeze and excitation to the block's channels. 0:
            no squeeze and excitation.
        eca: whether blocks have efficient channel attention.
        droppath: stochastic depth rate of the last block.
        droppath_shape: how the stochastic depth rates of the blocks are set. "linear": they grow
            from 0 at the first block; "constant": all blocks have droppath.
        zero_init_last: whether the weight of the last norm of each block starts at 0, as in timm,
            so that a new block passes its input on unchanged. Otherwise it starts at 1, as in the
            paper and in torchvision.

    Raises:
        InputError: another depth, or options that don't fit together.
    """

    min_image_size = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        depth: Size = 50,
        dropout: InTraining[OfClassifier[Rate]] = 0.0,
        small_stem: bool = False,
        stem_type: Literal["plain", "deep", "deep_tiered"] = "plain",
        stem_width: Size = 32,
        stem_pool: Literal["max", "conv"] = "max",
        avg_down: bool = False,
        cardinality: Size = 1,
        base_width: Size = 64,
        anti_alias: Literal["avg", "blur"] | None = None,
        output_stride: Size = 32,
        se_ratio: Factor = 0.0,
        eca: bool = False,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
        droppath: InTraining[Rate] = 0.0,
        droppath_shape: Annotated[
            InTraining[Literal["linear", "constant"]], above_zero("MODEL.DROPPATH")
        ] = "linear",
        zero_init_last: InTraining[bool] = True,
    ) -> None:
        if anti_alias == "blur":
            # BlurPool mirrors the border, for which a map needs two places along each side.
            self.min_image_size = 17
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if depth not in SIZES:
            raise InputError(f"DEPTH is {depth}, expected one of {', '.join(map(str, SIZES))}")
        self.zero_init_last = zero_init_last
        block, stage_depths = SIZES[depth]
        if small_stem and not (stem_type == "plain" and stem_pool == "max" and anti_alias is None):
            raise InputError(
                "SMALL_STEM True has no pooling; leave STEM_TYPE, STEM_POOL and ANTI_ALIAS out"
            )
        if output_stride not in (8, 16, 32):
            raise InputError(f"OUTPUT_STRIDE is {output_stride}, expected 8, 16 or 32")
        if output_stride < 32 and (small_stem or avg_down or anti_alias):
            raise InputError(
                f"OUTPUT_STRIDE {output_stride} needs strided convolutions; leave"
                " SMALL_STEM, AVG_DOWN and ANTI_ALIAS out"
            )
        if se_ratio and eca:
            raise InputError(
                f"SE_RATIO is {se_ratio} and ECA True, expected only one of them, because both"
                " scale the channels"
            )

        stem_dim = 64 if stem_type == "plain" else 2 * stem_width
        self.act1 = ReLU()
        if stem_type == "plain":
            self._add_plain_stem(in_channels, stem_dim, small_stem)
        else:
            self._add_deep_stem(in_channels, stem_dim, tiered=stem_type == "deep_tiered")
        if small_stem:
            self.maxpool = nn.Identity()
        else:
            self.maxpool = stem_pooling(stem_dim, stem_pool, anti_alias)

        options = BlockOptions(cardinality, base_width, avg_down, anti_alias, se_ratio, eca)
        dims = [stem_dim]
        in_dim = stem_dim
        # Pixels along a side that make a place of the present maps.
        reduction = 4
        dilation = 1
        reductions = [2]
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths, droppath_shape)):
            dim = 64 * 2**i
            stage = nn.Sequential()
            # Every stage but the first halves the maps, or its kernels become twice as wide.
            halves = i > 0 and reduction < output_stride
            previous = dilation
            if halves:
                reduction *= 2
            elif i > 0:
                dilation *= 2
            for j, rate in enumerate(rates):
                stride = 2 if halves and j == 0 else 1
                # The first convolution reads maps that are as fine as the previous stage's.
                dilations = (previous if j == 0 else dilation, dilation)
                layer = block(in_dim, dim, stride, rate, options, dilations)
                stage.add_sublayer(str(j), layer)
                in_dim = dim * block.expansion
            reductions.append(reduction)
            self.add_sublayer(f"layer{i + 1}", stage)
            dims.append(in_dim)
        self.num_features = in_dim
        modules = ["act1", "layer1", "layer2", "layer3", "layer4"]
        self.feature_info = feature_info(
            modules, dims, (1, 1, 2, 4, 8) if small_stem else reductions
        )
        self.drop = nn.Dropout(dropout)
        self._finish()

    def _add_plain_stem(self, in_channels: int, dim: int, small: bool) -> None:
        kernel_size, stride = (3, 1) if small else (7, 2)
        self.conv1, self.bn1 = convolution(in_channels, dim, kernel_size, stride)
        self.first_conv = "conv1"

    def _add_deep_stem(self, in_channels: int, dim: int, tiered: bool) -> None:
        second_dim = dim // 2
        first_dim = second_dim // 4 * 3 if tiered else second_dim
        last_conv, self.bn1 = convolution(second_dim, dim, 3)
        self.conv1 = nn.Sequential(
            *convolution(in_channels, first_dim, 3, stride=2),
            ReLU(),
            *convolution(first_dim, second_dim, 3),
            ReLU(),
            last_conv,
        )
        self.first_conv = "conv1.0"

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.act1(self.bn1(self.conv1(x)))

    def _stages(self) -> Iterable[Any]:
        return (self.layer1, self.layer2, self.layer3, self.layer4)

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage is self.layer1:
            x = self.maxpool(x)
        return self._run_all(stage, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.fc(self.drop(mean_of_places(x)))

    def classifier_names(self) -> tuple[str, ...]:
        return ("fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the first convolution, each block, the classifier."""
        stages = {name: getattr(self, name) for name in ("layer1", "layer2", "layer3", "layer4")}
        blocks = [(f"{name}.{j}",) for name, stage in stages.items() for j in range(len(stage))]
        return [("conv1", "bn1", "maxpool"), *blocks, ("fc",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_convolution(layer)
        if isinstance(layer, nn.Linear):
            init_as_torch(layer)
        elif isinstance(layer, _Block):
            Constant(0.0 if self.zero_init_last else 1.0)(getattr(layer, layer.last_norm).weight)
