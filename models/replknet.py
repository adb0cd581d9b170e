"""RepLKNet (Ding et al. 2022, arXiv:2203.06717): a network of convolutions with depthwise kernels of
up to 31 x 31.

A small kernel beside each large one helps it in training. For inference both become one. Parameter
names, the order of operations and the initialisation are those of the authors' code.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath
from models.layers.activations import gelu, relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.conv_norm import ConvNorm
from models.layers.folding import fill, fold, scale_and_shift
from models.layers.init import init_as_torch
from models.layers.layout import mean_of_places
from models.layers.mlp import hidden_width
from models.layers.scale import add_branch
from models.layers.stages import check_counts, check_stages, drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import replknet as names


class LargeKernel(nn.Layer):
    """A depthwise convolution with batch norm, plus one with a small kernel; or one convolution with
    a bias that equals both.

    Args:
        dim: channels.
        kernel_size: side of the large kernels, odd.
        small_kernel: side of the small kernels, odd; None: there are none.
        merged: whether there is one convolution with a bias.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int, kernel_size: int, small_kernel: int | None, merged: bool) -> None:
        super().__init__()
        self.lkb_reparam = _merged_convolution(dim, kernel_size) if merged else None
        if merged:
            return
        self.lkb_origin = ConvNorm(dim, dim, kernel_size, groups=dim)
        self.small_conv = None
        if small_kernel is not None:
            self.small_conv = ConvNorm(dim, dim, small_kernel, groups=dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.lkb_reparam is not None:
            return self.lkb_reparam(x)
        out = self.lkb_origin(x)
        if self.small_conv is not None:
            out = add_branch(out, self.small_conv(x))
        return out

    @paddle.no_grad()
    def fold(self) -> nn.Layer:
        """Returns an equal layer of one convolution. Its kernels have the small ones in their
        middle, and both have the running statistics of their norms.
        """
        if self.lkb_reparam is not None:
            return self
        dim, _, side, _ = self.lkb_origin.conv.weight.shape
        kernel, bias = _folded(self.lkb_origin)
        if self.small_conv is not None:
            small, shift = _folded(self.small_conv)
            margin = (side - small.shape[-1]) // 2
            kernel = kernel + nn.functional.pad(small, [margin] * 4)
            bias = bias + shift
        merged = LargeKernel(dim, side, None, merged=True)
        merged.lkb_reparam = fill(_merged_convolution(dim, side), kernel, bias)
        return merged


def _merged_convolution(dim: int, side: int) -> Conv2D:
    """Returns a fresh convolution with a bias that can replace both."""
    return Conv2D(dim, dim, side, padding=side // 2, groups=dim)


def _folded(layer: ConvNorm) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns the kernels and biases of a convolution that equals ``layer`` in evaluation."""
    scale, shift = scale_and_shift(layer.bn)
    return layer.conv.weight * scale.reshape([-1, 1, 1, 1]), shift


class RepLKBlock(nn.Layer):
    """x + the large kernels' branch: batch norm, 1 x 1 convolution, large kernels, 1 x 1
    convolution.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int, large_kernel: LargeKernel, mid_dim: int, rate: float) -> None:
        super().__init__()
        self.prelkb_bn = BatchNorm2D(dim)
        self.pw1 = ConvNorm(dim, mid_dim, 1, relu)
        self.large_kernel = large_kernel
        self.pw2 = ConvNorm(mid_dim, dim, 1)
        self.drop_path = DropPath(rate)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = relu(self.large_kernel(self.pw1(self.prelkb_bn(x))))
        return self.drop_path(self.pw2(branch), onto=x)


class ConvFFN(nn.Layer):
    """x + an MLP of 1 x 1 convolutions with batch norm, which also comes before them.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int, hidden_dim: int, rate: float) -> None:
        super().__init__()
        self.preffn_bn = BatchNorm2D(dim)
        self.pw1 = ConvNorm(dim, hidden_dim, 1, gelu)
        self.pw2 = ConvNorm(hidden_dim, dim, 1)
        self.drop_path = DropPath(rate)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.drop_path(self.pw2(self.pw1(self.preffn_bn(x))), onto=x)


class Stage(nn.Layer):
    """Pairs of a ``RepLKBlock`` and a ``ConvFFN``."""

    def __init__(self, blocks: Iterable[nn.Layer]) -> None:
        super().__init__()
        self.blocks = nn.LayerList(blocks)


@register("replknet")
class RepLKNet(ImageModel):
    """RepLKNet. It takes images of any size.

    Its features are the last stage's output after the last norm: [B, embed_dims[3], H / 32, W /
    32], rounded up.

    Args:
        stage_depths: number of block pairs in each of the four stages: one block with a large
            kernel, and one MLP.
        embed_dims: number of channels of each of the four stages.
        large_kernel_sizes: size of the large kernels in each of the four stages, an odd number.
        small_kernel: size of the small kernels that are parallel to the large ones, an odd number.
            null: no small kernels.
        dw_ratio: ratio of the channels of the large kernels to the channels of their stage.
        ffn_ratio: ratio of the MLPs' hidden channels to the channels of their stage.
        small_kernel_merged: whether the small kernels and batch norms are merged into the large
            kernels, as ``inference_model`` does after training.
        droppath: stochastic depth rate of the last pair of blocks; the rates grow linearly from 0
            at the first.

    Raises:
        InputError: a wrong count of numbers, or kernels of an even size.
    """

    weight_names = names
    first_conv = "stem.0.conv"
    min_image_size = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 2, 18, 2),
        embed_dims: Sequence[Size] = (128, 256, 512, 1024),
        large_kernel_sizes: Sequence[Size] = (31, 29, 27, 13),
        small_kernel: Size | None = None,
        dw_ratio: Positive = 1.0,
        ffn_ratio: Positive = 4.0,
        small_kernel_merged: bool = False,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        check_counts(4, LARGE_KERNEL_SIZES=large_kernel_sizes)
        _check_kernels(large_kernel_sizes, small_kernel)
        self.small_kernel_merged = small_kernel_merged
        self.num_features = embed_dims[-1]
        self.feature_info = feature_info(
            [f"stages.{i}" for i in range(4)], embed_dims, (4, 8, 16, 32)
        )
        width = embed_dims[0]
        self.stem = nn.LayerList(
            [
                ConvNorm(in_channels, width, 3, relu, stride=2),
                ConvNorm(width, width, 3, relu, groups=width),
                ConvNorm(width, width, 1, relu),
                ConvNorm(width, width, 3, relu, stride=2, groups=width),
            ]
        )
        self.stages = nn.LayerList()
        self.transitions = nn.LayerList()
        rates = drop_path_rates(droppath, stage_depths)
        for i, dim in enumerate(embed_dims):
            if i > 0:
                widening = ConvNorm(embed_dims[i - 1], dim, 1, relu)
                halving = ConvNorm(dim, dim, 3, relu, stride=2, groups=dim)
                self.transitions.append(nn.Sequential(widening, halving))
            mid_dim = hidden_width(dim, dw_ratio)
            blocks: list[nn.Layer] = []
            for rate in rates[i]:
                large_kernel = LargeKernel(
                    mid_dim, large_kernel_sizes[i], small_kernel, small_kernel_merged
                )
                blocks.append(RepLKBlock(dim, large_kernel, mid_dim, rate))
                blocks.append(ConvFFN(dim, hidden_width(dim, ffn_ratio), rate))
            self.stages.append(Stage(blocks))
        self.norm = BatchNorm2D(self.num_features)
        self._finish()

    def inference_model(self) -> ImageModel:
        """Returns an equivalent model for inference, whose small kernels are merged into the large
        ones. A model with small_kernel_merged is returned itself.
        """
        if self.small_kernel_merged:
            return self
        model = fold(self)
        model.small_kernel_merged = True
        return model

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self._run_all(self.stem, x)

    def _stages(self) -> Iterable[Any]:
        return range(len(self.stages))

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage > 0:
            x = self._run(self.transitions[stage - 1], x)
        return self._run_all(self.stages[stage].blocks, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the authors' groups (optim_factory.py of DingXiaoH/RepLKNet-pytorch).

        They are the stem, each stage, and the last norm with the classifier. The third stage makes
        a group of every two pairs of blocks. The layers between two stages belong to the group
        before them, but those before the last stage to the third stage's last group.
        """
        stages = []
        for i, stage in enumerate(self.stages):
            blocks = [f"stages.{i}.blocks.{j}" for j in range(len(stage.blocks))]
            step = 4 if i == 2 else len(blocks)
            groups = [tuple(blocks[j : j + step]) for j in range(0, len(blocks), step)]
            if i < len(self.transitions):
                groups[-1] += (f"transitions.{i}",)
            stages += groups
        return [("stem",), *stages, ("norm", "head")]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_as_torch(layer)


def _check_kernels(large: Sequence[int], small: int | None) -> None:
    """Raises InputError for kernels without a middle, and small kernels larger than large ones."""
    for side in large:
        if side % 2 == 0:
            raise InputError(f"LARGE_KERNEL_SIZES is {list(large)}, expected odd numbers")
    if small is not None and (small % 2 == 0 or small > min(large)):
        raise InputError(
            f"SMALL_KERNEL is {small}, expected an odd number of at most {min(large)}, the"
            " smallest of"
            " LARGE_KERNEL_SIZES"
        )
