"""MobileOne (Vasu et al. 2022, arXiv:2206.04040).

Its blocks have several branches in training, which become one convolution for inference. Parameter
names, the order of operations and the initialisation are those of MobileOne in timm's ``ByobNet``.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from models.base import ImageModel, register
from models.layers import DropPath
from models.layers.activations import relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.conv_norm import ConvNorm, SqueezeExcite
from models.layers.init import init_convolution
from models.layers.layout import mean_of_places
from models.layers.scale import add_branch
from models.layers.stages import check_stages, drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Rate, Size
from weights.names import mobileone as names


class Block(nn.Layer):
    """relu(attn(y)), where y is the sum of all branches, or the output of an equal convolution.

    The branches are convolutions of kernel_size, a 1 x 1 convolution if they are larger, and the
    input itself if it has the shape of the output. Each branch has a batch norm.

    Args:
        in_dim: channels of the input.
        dim: channels of the output.
        kernel_size: side of the kernels.
        stride: stride of all convolutions.
        groups: groups of all convolutions.
        branches: number of convolutions of kernel_size.
        squeeze: whether ``attn`` is squeeze and excitation. Otherwise it is the identity.
        drop_path: rate at which the convolutions are dropped, if the input is a branch.
        deploy: whether there is one convolution with a bias instead of the branches.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        kernel_size: int,
        stride: int = 1,
        groups: int = 1,
        branches: int = 1,
        squeeze: bool = False,
        drop_path: float = 0.0,
        deploy: bool = False,
    ) -> None:
        super().__init__()
        self.in_dim = in_dim
        self.stride = stride
        self.groups = groups
        self.kernel_size = kernel_size
        self.attn = SqueezeExcite(dim, dim // 16) if squeeze else nn.Identity()
        self.reparam_conv = self._convolution(dim) if deploy else None
        if deploy:
            return
        self.identity = BatchNorm2D(dim) if in_dim == dim and stride == 1 else None
        self.conv_kxk = nn.LayerList(
            ConvNorm(in_dim, dim, kernel_size, stride=stride, groups=groups)
            for _ in range(branches)
        )
        self.conv_scale = None
        if kernel_size > 1:
            self.conv_scale = ConvNorm(in_dim, dim, 1, stride=stride, groups=groups)
        self.drop_path = DropPath(drop_path if self.identity is not None else 0.0)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.reparam_conv is not None:
            return relu(self.attn(self.reparam_conv(x)))
        branches = list(self.conv_kxk)
        if self.conv_scale is not None:
            branches.insert(0, self.conv_scale)
        out = branches[0](x)
        for branch in branches[1:]:
            out = add_branch(out, branch(x))
        if self.identity is not None:
            out = self.drop_path(out, onto=self.identity(x))
        return relu(self.attn(out))

    def fold(self) -> None:
        """Replaces the branches by one convolution, computed with the running statistics of their
        norms.
        """
        if self.reparam_conv is not None:
            return
        dim, group_dim, side, _ = self.conv_kxk[0].conv.weight.shape
        kernel = np.zeros([dim, group_dim, side, side])
        bias = np.zeros([dim])
        channels = np.arange(dim)
        middle = side // 2
        optional = [branch for branch in (self.conv_scale, self.identity) if branch is not None]
        branches = [*self.conv_kxk, *optional]
        for branch in branches:
            norm = branch.bn if isinstance(branch, ConvNorm) else branch
            mean, variance, weight, shift = (
                tensor.numpy().astype(np.float64)
                for tensor in (norm._mean, norm._variance, norm.weight, norm.bias)
            )
            scale = weight / np.sqrt(variance + norm._epsilon)
            bias += shift - mean * scale
            if branch is norm:
                # The input itself is a convolution whose kernel is 1 in the middle of its own
                # channel.
                kernel[channels, channels % group_dim, middle, middle] += scale
            else:
                scaled = branch.conv.weight.numpy() * scale.reshape([-1, 1, 1, 1])
                # A 1 x 1 kernel is added to the middle of a larger one.
                margin = (side - scaled.shape[-1]) // 2
                kernel[:, :, margin : side - margin, margin : side - margin] += scaled
        self.reparam_conv = self._convolution(dim)
        for parameter, values in zip(self.reparam_conv.parameters(), (kernel, bias), strict=True):
            parameter.set_value(values.astype(np.float32))
        del self.identity, self.conv_kxk, self.conv_scale, self.drop_path

    def _convolution(self, dim: int) -> Conv2D:
        """Returns a fresh convolution with a bias that can replace the branches."""
        side = self.kernel_size
        return Conv2D(self.in_dim, dim, side, self.stride, side // 2, groups=self.groups)


@register("mobileone")
class MobileOne(ImageModel):
    """MobileOne. It takes images of any size.

    Its features are the last stage's output: [B, embed_dims[3], H / 32, W / 32], rounded up.

    Args:
        stage_depths: number of block pairs in each of the four stages: a depthwise 3 x 3 block,
            then a 1 x 1 block.
        embed_dims: number of channels of each of the four stages. The stem has as many as the first
            stage, but at most 64.
        num_branches: number of parallel convolutions whose outputs a block adds.
        use_se: whether squeeze and excitation is used, in the last half of the third stage and in
            the fourth.
        dropout: dropout rate before the classifier.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.
        deploy: whether each block is a single convolution, as ``inference_model`` makes it from a
            trained block.

    Raises:
        InputError: not four stages.
    """

    weight_names = names
    first_conv = "stem.conv_kxk.0.conv"
    beside_first_conv = ("stem.conv_scale.conv",)
    min_image_size = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 8, 10, 1),
        embed_dims: Sequence[Size] = (96, 192, 512, 1280),
        num_branches: Size = 1,
        use_se: bool = False,
        dropout: InTraining[OfClassifier[Rate]] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
        deploy: bool = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        self.deploy = deploy
        self.num_features = embed_dims[-1]
        in_dim = min(64, embed_dims[0])
        if deploy:
            self._name_folded_stem()
        self.stem = Block(in_channels, in_dim, 3, stride=2, deploy=deploy)
        modules = ["stem", *(f"stages.{i}" for i in range(4))]
        self.feature_info = feature_info(modules, [in_dim, *embed_dims], (2, 4, 8, 16, 32))
        # The number of pairs of blocks at the end of each stage that have squeeze and excitation.
        squeezed = [0, 0, 0, 0]
        if use_se:
            squeezed = [0, 0, stage_depths[2] // 2, stage_depths[3]]
        rates = drop_path_rates(droppath, [2 * depth for depth in stage_depths])
        self.stages = nn.LayerList()
        for stage, dim in enumerate(embed_dims):
            depth = stage_depths[stage]
            blocks: list[Block] = []
            for i in range(depth):
                options: dict[str, Any] = {
                    "branches": num_branches,
                    "squeeze": i >= depth - squeezed[stage],
                    "deploy": deploy,
                }
                depthwise = Block(
                    in_dim,
                    in_dim,
                    kernel_size=3,
                    stride=1 if i else 2,
                    groups=in_dim,
                    drop_path=rates[stage][2 * i],
                    **options,
                )
                pointwise = Block(
                    in_dim, dim, kernel_size=1, drop_path=rates[stage][2 * i + 1], **options
                )
                blocks += [depthwise, pointwise]
                in_dim = dim
            self.stages.append(nn.Sequential(*blocks))
        self.head = nn.Sequential(("drop", nn.Dropout(dropout)), ("fc", nn.Identity()))
        self._finish()

    def inference_model(self) -> ImageModel:
        """Returns an equivalent model for inference, whose branches are folded into one convolution
        each. A model with deploy is returned itself.
        """
        if self.deploy:
            return self
        model = copy.deepcopy(self)
        for layer in model.sublayers():
            if isinstance(layer, Block):
                layer.fold()
        model.deploy = True
        model._name_folded_stem()
        model.eval()
        return model

    def _name_folded_stem(self) -> None:
        """Sets the names of the convolutions that read the image to those of a folded stem."""
        self.first_conv = "stem.reparam_conv"
        self.beside_first_conv = ()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each block, and the classifier."""
        blocks = [
            (f"stages.{i}.{j}",)
            for i, stage in enumerate(self.stages)
            for j, _ in enumerate(stage.children())
        ]
        return [("stem",), *blocks, ("head",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_convolution(layer)
        if isinstance(layer, nn.Linear):
            Normal(std=0.01)(layer.weight)
