"""ResNet (He et al. 2015, arXiv:1512.03385): ``paddle.vision``'s layers as an ``ImageModel``.

Their parameter names, and their strides on the 3 x 3 convolutions, are those of timm's ``ResNet``; the initialisation
is made timm's.
"""

from collections.abc import Sequence

import paddle
from paddle import nn
from paddle.nn.initializer import Constant
from paddle.vision.models.resnet import BasicBlock, BottleneckBlock
from paddle.vision.models.resnet import ResNet as PaddleResNet

from errors import InputError
from models.base import ImageModel
from models.layers.batch_norm import statistics_as_buffers
from models.layers.init import init_as_torch, init_convolution

BLOCKS = {18: BasicBlock, 34: BasicBlock, 50: BottleneckBlock, 101: BottleneckBlock, 152: BottleneckBlock}


class ResNet(ImageModel):
    """ResNet: images of any size.

    Args:
        image_size, in_channels, num_classes, head_init_scale, recompute: see ``ImageModel``.
        depth: layers: 18, 34, 50, 101 or 152.
        drop: dropout before the classifier.
        small_stem: for small images: the first convolution is 3 x 3 with stride 1, and there is no pooling after it
            (section 4.2 of the paper, on CIFAR-10, begins so).

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
        depth: int = 50,
        drop: float = 0.0,
        small_stem: bool = False,
        head_init_scale: float = 1.0,
        recompute: bool = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if depth not in BLOCKS:
            raise InputError(f"DEPTH is {depth}, expected one of {', '.join(map(str, BLOCKS))}")
        for name, layer in PaddleResNet(BLOCKS[depth], depth, num_classes=0, with_pool=False).named_children():
            self.add_sublayer(name, layer)
        kernel, stride = (3, 1) if small_stem else (7, 2)
        self.conv1 = nn.Conv2D(in_channels, 64, kernel, stride, padding=kernel // 2, bias_attr=False)
        if small_stem:
            self.maxpool = nn.Identity()
        self.num_features = 512 * BLOCKS[depth].expansion
        self.drop = nn.Dropout(drop)
        self._add_classifiers()
        self.apply(statistics_as_buffers)
        self.apply(self._init_weights)
        self._scale_classifiers()

    def forward_features(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the last block's channels [B, num_features, H / 32, W / 32], rounded up; with ``small_stem``
        H / 8 and W / 8.
        """
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                x = self._run(block, x)
        return x

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.fc(self.drop(x.mean(axis=[2, 3])))

    def classifier_names(self) -> tuple[str, ...]:
        return ("fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """The first convolution, each block, the classifier."""
        stages = {name: getattr(self, name) for name in ("layer1", "layer2", "layer3", "layer4")}
        blocks = [(f"{name}.{j}",) for name, stage in stages.items() for j in range(len(stage))]
        return [("conv1", "bn1"), *blocks, ("fc",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_convolution(layer)
        if isinstance(layer, nn.Linear):
            init_as_torch(layer)
        elif isinstance(layer, (BasicBlock, BottleneckBlock)):  # a fresh block is its shortcut alone
            Constant(0.0)((layer.bn3 if isinstance(layer, BottleneckBlock) else layer.bn2).weight)
