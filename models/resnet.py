"""ResNet (He et al. 2015, arXiv:1512.03385) and its variants.

- ResNeXt (Xie et al. 2017, arXiv:1611.05431) and Wide ResNet (arXiv:1605.07146)
- ResNet-C and -D (He et al. 2018, "Bag of Tricks", arXiv:1812.01187)
- ResNet-RS (arXiv:2103.07579), SE-ResNet (arXiv:1709.01507), ECA-ResNet (arXiv:1910.03151)

Parameter names, strides (on the 3 x 3 convolutions), order of operations and initialisation are
those of timm's ``ResNet``.
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
from settings.keys import Factor, InTraining, Rate, Size
from settings.needs import above_zero


class Options(NamedTuple):
    """What all blocks of a model share; see ``ResNet``."""

    cardinality: int = 1
    base_width: int = 64
    avg_down: bool = False
    anti_alias: str | None = None
    se_ratio: float = 0.0
    eca: bool = False


PLAIN = Options()


class _Block(nn.Layer):
    """relu(shortcut(x) + attention(branch(x))), the branch with drop path. [B, in_dim, H, W] -> [B,
    expansion x dim, H / stride, W / stride], rounded up.
    """

    expansion: int

    def __init__(
        self, in_dim: int, dim: int, stride: int, drop_path: float, options: Options = PLAIN
    ) -> None:
        super().__init__()
        # Where maps are blurred before they are halved, the convolution itself halves nothing.
        blurred = stride == 2 and options.anti_alias is not None
        self._add_branch(in_dim, dim, 1 if blurred else stride, options)
        dim = dim * self.expansion
        width = self.conv2.weight.shape[1] * options.cardinality
        self.aa = anti_alias(options.anti_alias, width) if blurred else nn.Identity()
        self.se = channel_attention(dim, options)
        same = in_dim == dim and stride == 1
        self.downsample = (
            nn.Identity() if same else downsample(in_dim, dim, stride, options.avg_down)
        )
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return relu(self.drop_path(self.se(self._branch(x)), onto=self.downsample(x)))


class BasicBlock(_Block):
    """Two convolutions of 3 x 3."""

    expansion = 1

    def _add_branch(self, in_dim: int, dim: int, stride: int, options: Options) -> None:
        if options.cardinality != 1 or options.base_width != 64:
            raise InputError(
                "CARDINALITY and BASE_WIDTH are for blocks of three convolutions, as of DEPTH 50"
            )
        self.conv1, self.bn1 = convolution(in_dim, dim, 3, stride)
        self.conv2, self.bn2 = convolution(dim, dim, 3)
        self.last_norm = "bn2"

    def _branch(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.bn2(self.conv2(self.aa(self.bn1(self.conv1(x), relu))))


class Bottleneck(_Block):
    """A convolution of 3 x 3 between two of 1 x 1, over a quarter of the block's channels."""

    expansion = 4

    def _add_branch(self, in_dim: int, dim: int, stride: int, options: Options) -> None:
        width = dim * options.base_width // 64 * options.cardinality
        self.conv1, self.bn1 = convolution(in_dim, width, 1)
        self.conv2, self.bn2 = convolution(width, width, 3, stride, options.cardinality)
        self.conv3, self.bn3 = convolution(width, dim * 4, 1)
        self.last_norm = "bn3"

    def _branch(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.bn1(self.conv1(x), relu)
        return self.bn3(self.conv3(self.aa(self.bn2(self.conv2(x), relu))))


class BlurPool(nn.Layer):
    """Halves maps, each place with a quarter of its neighbours (Zhang 2019, arXiv:1904.11486).

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
    """Scales each channel by a factor in 0..1 that the means of the channels beside it decide (Wang
    et al. 2020, arXiv:1910.03151).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        size = int(abs(math.log2(dim) + 1) / 2)
        size = max(size if size % 2 else size + 1, 3)
        self.conv = nn.Conv1D(1, 1, size, padding=size // 2, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        means = mean_of_places(x).unsqueeze(1)
        return scale_planes(x, F.sigmoid(self.conv(means)).reshape([*x.shape[:2], 1, 1]))


def convolution(
    in_dim: int, dim: int, kernel_size: int, stride: int = 1, groups: int = 1
) -> tuple[nn.Layer, nn.Layer]:
    """Returns a convolution without a bias, and its batch norm."""
    conv = Conv2D(
        in_dim, dim, kernel_size, stride, padding=kernel_size // 2, groups=groups, bias_attr=False
    )
    return conv, BatchNorm2D(dim)


def downsample(in_dim: int, dim: int, stride: int, avg_down: bool) -> nn.Layer:
    """Returns what makes a shortcut as small and as wide as its branch."""
    if not avg_down:
        return nn.Sequential(*convolution(in_dim, dim, 1, stride))
    pool = nn.Identity() if stride == 1 else AvgPool2D(2, stride, ceil_mode=True)
    return nn.Sequential(pool, *convolution(in_dim, dim, 1))


def anti_alias(kind: str | None, dim: int) -> nn.Layer:
    """Returns what halves maps of ``dim`` channels without aliasing."""
    return BlurPool(dim) if kind == "blur" else AvgPool2D(2, ceil_mode=True)


def channel_attention(dim: int, options: Options) -> nn.Layer:
    """Returns what scales the channels of a block's branch."""
    if options.eca:
        return EfficientChannelAttention(dim)
    if not options.se_ratio:
        return nn.Identity()
    return SqueezeExcite(dim, max(8, int(dim * options.se_ratio + 4) // 8 * 8))


SIZES = {  # by depth: the kind of block, and how many of each stage
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
    270: (Bottleneck, (4, 29, 53, 4)),  # ResNet-RS's, as the next two
    350: (Bottleneck, (4, 36, 72, 4)),
    420: (Bottleneck, (4, 44, 87, 4)),
}


def pool_of_stem(dim: int, kind: str, aliasing: str | None) -> nn.Layer:
    """Returns what halves the stem's maps before the first stage."""
    if kind == "conv":
        conv, norm = convolution(dim, dim, 3, 2 if aliasing is None else 1)
        halved = () if aliasing is None else (anti_alias(aliasing, dim),)
        return nn.Sequential(conv, *halved, norm, ReLU())
    if aliasing == "blur":
        return nn.Sequential(MaxPool2D(3, 1, 1), BlurPool(dim))
    return MaxPool2D(3, 2, 1) if aliasing is None else anti_alias(aliasing, dim)


@register("resnet")
class ResNet(ImageModel):
    """ResNet: images of any size, from 17 x 17 with ``anti_alias`` "blur".

    Features: the last block's channels [B, num_features, H / 32, W / 32], rounded up; with
    ``small_stem`` H / 8, W / 8.

    Args:
        depth: layers: 10, 14, 18, 26, 34, 50, 101, 152, 200, 201, 269, 270, 350 or 420. Blocks of
            10, 18 and 34 have two convolutions, those of the others three.
        dropout: before the classifier.
        small_stem: for small images, as in section 4.2 of the paper (CIFAR-10). The first
            convolution is 3 x 3 with stride 1, and there is no pooling after it.
        stem_type: what reads the image. "plain": one convolution of 7 x 7; "deep": three of 3 x 3;
            "deep_tiered": the first of fewer channels. The three have stem_width, stem_width and
            twice as many.
        stem_width: channels of a deep stem's first two convolutions.
        stem_pool: "max": max pooling; "conv": a convolution of stride 2 (ResNet-RS).
        avg_down: shortcuts are halved by average pooling before their convolution (ResNet-D).
        cardinality: groups of the 3 x 3 convolutions (ResNeXt).
        base_width: channels of each of these groups in the first stage; 64 in ResNet, 128 in Wide
            ResNet-2.
        anti_alias: what halves maps in place of strided convolutions: "avg": the mean of 2 x 2
            places; "blur": ``BlurPool``; None: nothing.
        se_ratio: channels that squeeze and excitation reduces to, over its block's; 0: none.
        eca: efficient channel attention.
        droppath: rate of stochastic depth at the last block.
        droppath_shape: "linear": from 0 at the first block; "constant": all blocks have the last
            one's rate.
        zero_init_last: True: the weight of a block's last norm starts at 0 (timm's), so that a
            fresh block is its shortcut alone. False: it starts at 1 (the paper's, torchvision's).

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
        dropout: InTraining[Rate] = 0.0,
        small_stem: bool = False,
        stem_type: Literal["plain", "deep", "deep_tiered"] = "plain",
        stem_width: Size = 32,
        stem_pool: Literal["max", "conv"] = "max",
        avg_down: bool = False,
        cardinality: Size = 1,
        base_width: Size = 64,
        anti_alias: Literal["avg", "blur"] | None = None,
        se_ratio: Factor = 0.0,
        eca: bool = False,
        head_init_scale: InTraining[Factor] = 1.0,
        recompute: InTraining[bool] = False,
        droppath: InTraining[Rate] = 0.0,
        droppath_shape: Annotated[
            InTraining[Literal["linear", "constant"]], above_zero("MODEL.DROPPATH")
        ] = "linear",
        zero_init_last: InTraining[bool] = True,
    ) -> None:
        if anti_alias == "blur":
            self.min_image_size = 17  # a border is mirrored, for which a map needs two places
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if depth not in SIZES:
            raise InputError(f"DEPTH is {depth}, expected one of {', '.join(map(str, SIZES))}")
        self.zero_init_last = zero_init_last
        block, stage_depths = SIZES[depth]
        self._check_options(small_stem, (stem_type, stem_pool, anti_alias), se_ratio, eca)
        stem_dim = 64 if stem_type == "plain" else 2 * stem_width
        self._add_stem(in_channels, stem_dim, small_stem, stem_type)
        self.maxpool = (
            nn.Identity() if small_stem else pool_of_stem(stem_dim, stem_pool, anti_alias)
        )
        options = Options(cardinality, base_width, avg_down, anti_alias, se_ratio, eca)
        in_dim = stem_dim
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths, droppath_shape)):
            stage = nn.Sequential()
            for j, rate in enumerate(rates):
                stage.add_sublayer(
                    str(j), block(in_dim, 64 << i, 1 if j or i == 0 else 2, rate, options)
                )
                in_dim = (64 << i) * block.expansion
            self.add_sublayer(f"layer{i + 1}", stage)
        self.num_features = in_dim
        dims = [stem_dim, *((64 << i) * block.expansion for i in range(4))]
        reductions = (1, 1, 2, 4, 8) if small_stem else (2, 4, 8, 16, 32)
        self.feature_info = feature_info(
            ["act1", *(f"layer{i + 1}" for i in range(4))], dims, reductions
        )
        self.drop = nn.Dropout(dropout)
        self._finish()

    def _add_stem(self, in_channels: int, dim: int, small: bool, kind: str) -> None:
        self.act1 = ReLU()
        if kind == "plain":
            kernel, stride = (3, 1) if small else (7, 2)
            self.conv1, self.bn1 = convolution(in_channels, dim, kernel, stride)
            self.first_conv = "conv1"
            return
        second = dim // 2
        first = second // 4 * 3 if kind == "deep_tiered" else second
        last, self.bn1 = convolution(second, dim, 3)
        layers = (
            *convolution(in_channels, first, 3, 2),
            ReLU(),
            *convolution(first, second, 3),
            ReLU(),
        )
        self.conv1 = nn.Sequential(*layers, last)
        self.first_conv = "conv1.0"

    def _check_options(
        self, small_stem: bool, kinds: tuple[str | None, ...], se_ratio: float, eca: bool
    ) -> None:
        if small_stem and kinds != ("plain", "max", None):
            raise InputError(
                "SMALL_STEM True has no pooling; leave STEM_TYPE, STEM_POOL and ANTI_ALIAS out"
            )
        if se_ratio and eca:
            raise InputError(
                f"SE_RATIO is {se_ratio} and ECA True, expected one of them: each scales the channels"
            )

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.act1(self.bn1(self.conv1(x)))

    def _stages(self) -> Iterable[Any]:
        return (self.layer1, self.layer2, self.layer3, self.layer4)

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage, self.maxpool(x) if stage is self.layer1 else x)

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
