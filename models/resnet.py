"""ResNet (He et al. 2015, arXiv:1512.03385).

Parameter names, strides (on the 3 x 3 convolutions), order of operations and initialisation are those of timm's
``ResNet``.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Constant

from configs.signatures import Depth, Factor, Rate
from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath
from models.layers.activations import ReLU, relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D, MaxPool2D
from models.layers.init import init_as_torch, init_convolution
from models.layers.layout import mean_of_places
from models.layers.stages import drop_path_rates, feature_info


class _Block(nn.Layer):
    """relu(shortcut(x) + branch(x)), the branch with drop path. [B, in_dim, H, W] -> [B, expansion x dim, H / stride,
    W / stride], rounded up.
    """

    expansion: int

    def __init__(self, in_dim: int, dim: int, stride: int, drop_path: float) -> None:
        super().__init__()
        self._add_branch(in_dim, dim, stride)
        dim = dim * self.expansion
        same = in_dim == dim and stride == 1
        self.downsample = nn.Identity() if same else nn.Sequential(*convolution(in_dim, dim, 1, stride))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return relu(self.drop_path(self._branch(x), onto=self.downsample(x)))


class BasicBlock(_Block):
    """Two convolutions of 3 x 3."""

    expansion = 1

    def _add_branch(self, in_dim: int, dim: int, stride: int) -> None:
        self.conv1, self.bn1 = convolution(in_dim, dim, 3, stride)
        self.conv2, self.bn2 = convolution(dim, dim, 3)
        self.last_norm = "bn2"

    def _branch(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.bn2(self.conv2(self.bn1(self.conv1(x), relu)))


class Bottleneck(_Block):
    """A convolution of 3 x 3 between two of 1 x 1, over a quarter of the block's channels."""

    expansion = 4

    def _add_branch(self, in_dim: int, dim: int, stride: int) -> None:
        self.conv1, self.bn1 = convolution(in_dim, dim, 1)
        self.conv2, self.bn2 = convolution(dim, dim, 3, stride)
        self.conv3, self.bn3 = convolution(dim, dim * 4, 1)
        self.last_norm = "bn3"

    def _branch(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.bn1(self.conv1(x), relu)
        return self.bn3(self.conv3(self.bn2(self.conv2(x), relu)))


def convolution(in_dim: int, dim: int, kernel_size: int, stride: int = 1) -> tuple[nn.Layer, nn.Layer]:
    """Returns a convolution without a bias, and its batch norm."""
    conv = Conv2D(in_dim, dim, kernel_size, stride, padding=kernel_size // 2, bias_attr=False)
    return conv, BatchNorm2D(dim)


SIZES = {  # by depth: the kind of block, and how many of each stage
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


@register("resnet")
class ResNet(ImageModel):
    """ResNet: images of any size.

    Features: the last block's channels [B, num_features, H / 32, W / 32], rounded up; with ``small_stem`` H / 8, W / 8.

    Args:
        depth: layers: 18, 34, 50, 101 or 152.
        dropout: before the classifier.
        small_stem: for small images, as in section 4.2 of the paper (CIFAR-10). The first convolution is 3 x 3 with
            stride 1, and there is no pooling after it.
        droppath: rate of stochastic depth at the last block.
        droppath_shape: "linear": from 0 at the first block; "constant": all blocks have the last one's rate.
        zero_init_last: True: the weight of a block's last norm starts at 0 (timm's), so that a fresh block is its
            shortcut alone. False: it starts at 1 (the paper's, torchvision's).

    Raises:
        InputError: another depth.
    """

    first_conv = "conv1"
    min_image_size = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        depth: Depth = 50,
        dropout: Rate = 0.0,
        small_stem: bool = False,
        head_init_scale: Factor = 1.0,
        recompute: bool = False,
        droppath: Rate = 0.0,
        droppath_shape: Literal["linear", "constant"] = "linear",
        zero_init_last: bool = True,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if depth not in SIZES:
            raise InputError(f"DEPTH is {depth}, expected one of {', '.join(map(str, SIZES))}")
        self.zero_init_last = zero_init_last
        block, stage_depths = SIZES[depth]
        kernel, stride = (3, 1) if small_stem else (7, 2)
        self.conv1, self.bn1 = convolution(in_channels, 64, kernel, stride)
        self.act1 = ReLU()
        self.maxpool = nn.Identity() if small_stem else MaxPool2D(3, 2, 1)
        in_dim = 64
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths, droppath_shape)):
            stage = nn.Sequential()
            for j, rate in enumerate(rates):
                stage.add_sublayer(str(j), block(in_dim, 64 << i, 1 if j or i == 0 else 2, rate))
                in_dim = (64 << i) * block.expansion
            self.add_sublayer(f"layer{i + 1}", stage)
        self.num_features = in_dim
        dims = [64, *((64 << i) * block.expansion for i in range(4))]
        reductions = (1, 1, 2, 4, 8) if small_stem else (2, 4, 8, 16, 32)
        self.feature_info = feature_info(["act1", *(f"layer{i + 1}" for i in range(4))], dims, reductions)
        self.drop = nn.Dropout(dropout)
        self._finish()

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
        return [("conv1", "bn1"), *blocks, ("fc",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_convolution(layer)
        if isinstance(layer, nn.Linear):
            init_as_torch(layer)
        elif isinstance(layer, _Block):
            Constant(0.0 if self.zero_init_last else 1.0)(getattr(layer, layer.last_norm).weight)
