"""ConvMixer (Trockman and Kolter 2022, arXiv:2201.09792).

Parameter names, the order of operations and the initialisation, which is PyTorch's default, are
those of timm's ``ConvMixer``.
"""

from collections.abc import Sequence
from typing import Any, Literal

import paddle
from paddle import nn

from models.base import ImageModel, register
from models.layers.activations import GELU, ReLU
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.layers.layout import mean_of_places
from models.layers.scale import add_branch
from models.layers.stages import feature_info
from settings.keys import Depth, Factor, InTraining, Kernel, OfClassifier, Rate, Size
from weights.names import convmixer as names

ACTIVATIONS = {"gelu": GELU, "relu": ReLU}


class Residual(nn.Layer):
    """fn(x) + x."""

    def __init__(self, fn: nn.Layer) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return add_branch(self.fn(x), x)


@register("convmixer")
class ConvMixer(ImageModel):
    """ConvMixer: patches, then blocks of a depthwise and a 1 x 1 convolution.

    After each convolution come an activation and a batch norm. The model takes images of any size
    from one patch on. Its features are the last block's output: [B, embed_dim, H / patch_size,
    W / patch_size], rounded down.

    Args:
        embed_dim: number of channels of all blocks.
        depth: number of blocks.
        kernel_size: kernel size of the depthwise convolutions.
        patch_size: side of a patch, in pixels.
        act: activation after each convolution.
        dropout: dropout rate before the classifier.
    """

    weight_names = names
    first_conv = "stem.0"
    # The constructor sets it to the patch size.
    min_image_size = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 1536,
        depth: Depth = 20,
        kernel_size: Kernel = 9,
        patch_size: Size = 7,
        act: Literal["gelu", "relu"] = "gelu",
        dropout: InTraining[OfClassifier[Rate]] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        # ImageModel's constructor compares image_size with it.
        self.min_image_size = patch_size
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        self.num_features = embed_dim
        activation = ACTIVATIONS[act]

        def convolution(channels: int, size: int, **options: Any) -> list[nn.Layer]:
            conv = Conv2D(channels, embed_dim, size, **options)
            return [conv, activation(), BatchNorm2D(embed_dim)]

        self.stem = nn.Sequential(*convolution(in_channels, patch_size, stride=patch_size))
        # An even kernel needs more padding on one side, which Paddle computes for "same".
        padding = kernel_size // 2 if kernel_size % 2 else "same"
        self.blocks = nn.LayerList()
        for _ in range(depth):
            depthwise = convolution(embed_dim, kernel_size, groups=embed_dim, padding=padding)
            pointwise = convolution(embed_dim, 1)
            self.blocks.append(nn.Sequential(Residual(nn.Sequential(*depthwise)), *pointwise))
        modules = [f"blocks.{i}" for i in range(depth)]
        self.feature_info = feature_info(modules, embed_dim, patch_size)
        self.head_drop = nn.Dropout(dropout)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.head_drop(mean_of_places(x)))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each block, the classifier."""
        return [("stem",), *((f"blocks.{i}",) for i in range(len(self.blocks))), ("head",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_as_torch(layer)
