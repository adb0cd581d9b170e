"""RepMLP-ResNet (Ding et al. 2021, arXiv:2105.01883): a ResNet with linear layers over places and
channels in two of its stages, and convolutions beside them in training.

For inference the convolutions become part of the linear layers. Parameter names and the order of
operations are those of the authors' first code (DingXiaoH/RepMLP before 82c0ea6) and of
PaddleViT's of 2021. RepMLPNet came later (``models.repmlp``).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel, register
from models.layers import Linear
from models.layers.activations import relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import AvgPool2D, MaxPool2D
from models.layers.conv_norm import ConvNorm
from models.layers.folding import fill, fold, scale_and_shift
from models.layers.graph_sizes import is_known
from models.layers.init import init_as_torch
from models.layers.layout import mean_of_places
from models.layers.scale import add_branch
from models.layers.stages import check_stages, feature_info
from models.repmlp import SetLinear
from settings.configuration import size_text
from settings.keys import Depth, Factor, InTraining, OfClassifier, Size


class RepMLP(nn.Layer):
    """A linear layer over the places and channels of each part of a map, plus convolutions of the
    part; or without the convolutions, which are in the linear layer.

    Before, each part gets a number per channel, which depends on the means of all parts.

    Args:
        dim: channels.
        grid: rows and columns of the map.
        part: rows and columns of a part, which divide ``grid``.
        kernels: sides of the convolutions' kernels, odd.
        reduction: parts times channels over the width between the layers that read the means.
        groups: of the channels. The linear layer and the convolutions stay within a group.
        deploy: whether the convolutions and all norms are in the linear layers.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(
        self,
        dim: int,
        grid: tuple[int, int],
        part: tuple[int, int],
        kernels: Sequence[int],
        reduction: int,
        groups: int,
        deploy: bool,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.part = part
        self.groups = groups
        self.deploy = deploy
        self.down = grid[0] // part[0]
        self.across = grid[1] // part[1]
        self.fc1_fc2 = None
        if grid != part:
            width = dim * self.down * self.across
            fc1 = Linear(width, width // reduction)
            fc2 = Linear(width // reduction, width)
            self.fc1_fc2 = nn.Sequential(("fc1", fc1), ("relu", nn.ReLU()), ("fc2", fc2))
            norm = nn.Identity() if deploy else BatchNorm2D(dim)
            self.avg = nn.Sequential(("avg", AvgPool2D(part, part)), ("bn", norm))
        places = part[0] * part[1]
        self.fc3 = SetLinear(dim // groups * places, groups, bias=deploy)
        self.fc3_bn = nn.Identity() if deploy else BatchNorm2D(dim * places)
        self.local_names = [] if deploy else [f"repconv{kernel}" for kernel in kernels]
        for name, kernel in zip(self.local_names, kernels, strict=False):
            setattr(self, name, ConvNorm(dim, dim, kernel, groups=groups))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        rows, columns = self.part
        down = self.down
        across = self.across
        parts = x.reshape([-1, self.dim, down, rows, across, columns])
        if self.fc1_fc2 is not None:
            added = self.fc1_fc2(self.avg(x).flatten(1))
            parts = parts + added.reshape([-1, self.dim, down, 1, across, 1])
        parts = parts.transpose([0, 2, 4, 1, 3, 5]).reshape([-1, self.dim, rows, columns])
        parts = self.of_parts(parts).reshape([-1, down, across, self.dim, rows, columns])
        out = parts.transpose([0, 3, 1, 4, 2, 5])
        return out.reshape([-1, self.dim, down * rows, across * columns])

    def of_parts(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the linear layer's and the convolutions' output for parts [N, dim, rows,
        columns].
        """
        rows, columns = self.part
        joined = x.reshape([-1, self.groups, self.dim // self.groups * rows, columns])
        out = self.fc3_bn(self.fc3(joined).flatten(1)).reshape([-1, self.dim, rows, columns])
        local = None
        for name in self.local_names:
            branch = getattr(self, name)(x)
            local = branch if local is None else add_branch(local, branch)
        return out if local is None else add_branch(out, local)

    @paddle.no_grad()
    def fold(self) -> nn.Layer:
        """Returns an equal layer, in evaluation, whose linear layers do all that the convolutions
        and the norms do.

        ``of_parts`` is linear within each group, up to a bias. So the weights are its outputs for
        parts with a single one in each group, minus that for zeros.
        """
        if self.deploy:
            return self
        rows, columns = self.part
        grid = (rows * self.down, columns * self.across)
        folded = RepMLP(self.dim, grid, self.part, (), 1, self.groups, deploy=True)
        shape = [-1, self.dim, rows, columns]
        bias = self.of_parts(paddle.zeros([1, *shape[1:]]))
        length = self.fc3.places
        ones = paddle.eye(length).unsqueeze(1).expand([length, self.groups, length])
        outputs = self.of_parts(ones.reshape(shape)) - bias
        weight = outputs.reshape([length, -1]).transpose([1, 0])
        folded.fc3.fill(weight, bias)
        if self.fc1_fc2 is not None:
            scale, shift = scale_and_shift(self.avg.bn)
            # The means of a channel's parts lie side by side.
            count = self.down * self.across
            scale, shift = (
                x.unsqueeze(1).expand([self.dim, count]).flatten() for x in (scale, shift)
            )
            fc1 = self.fc1_fc2.fc1
            fill(fc1, fc1.weight * scale.unsqueeze(1), shift @ fc1.weight + fc1.bias)
            folded.fc1_fc2 = self.fc1_fc2
        folded.eval()
        return folded


def _shortcut(in_dim: int, dim: int, stride: int = 1) -> nn.Layer:
    """Returns the layer on the shortcut: the identity, if the shapes are equal."""
    if stride == 1 and in_dim == dim:
        return nn.Identity()
    return ConvNorm(in_dim, dim, 1, stride=stride)


class BaseBlock(nn.Layer):
    """The bottleneck of ResNet-50.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride].
    """

    def __init__(self, in_dim: int, dim: int, stride: int) -> None:
        super().__init__()
        mid_dim = dim // 4
        self.shortcut = _shortcut(in_dim, dim, stride)
        self.conv1 = ConvNorm(in_dim, mid_dim, 1, relu)
        self.conv2 = ConvNorm(mid_dim, mid_dim, 3, relu, stride=stride)
        self.conv3 = ConvNorm(mid_dim, dim, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.conv3(self.conv2(self.conv1(x)))
        return relu(add_branch(self.shortcut(x), branch))


class LightBlock(nn.Layer):
    """1 x 1 convolution, RepMLP, 1 x 1 convolution, with a shortcut.

    Args:
        dim: channels. The RepMLP has an eighth of them.
        options: the arguments of ``RepMLP`` after its channels.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int, options: dict[str, Any]) -> None:
        super().__init__()
        mid_dim = dim // 8
        self.light_conv1 = ConvNorm(dim, mid_dim, 1, relu)
        self.light_repmlp = RepMLP(mid_dim, **options)
        self.light_conv3 = ConvNorm(mid_dim, dim, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.light_conv3(relu(self.light_repmlp(self.light_conv1(x))))
        return relu(add_branch(x, branch))


class BottleneckBlock(nn.Layer):
    """1 x 1 and 3 x 3 convolutions, RepMLP, 3 x 3 and 1 x 1 convolutions, with a shortcut.

    Args:
        dim: channels.
        ratio: channels of the outer 3 x 3 convolutions, dim / 4, over the RepMLP's.
        options: the arguments of ``RepMLP`` after its channels.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int, ratio: int, options: dict[str, Any]) -> None:
        super().__init__()
        mid_dim = dim // 4
        inner_dim = mid_dim // ratio
        self.btnk_conv1 = ConvNorm(dim, mid_dim, 1, relu)
        self.btnk_conv2 = ConvNorm(mid_dim, inner_dim, 3, relu)
        self.btnk_repmlp = RepMLP(inner_dim, **options)
        self.btnk_conv4 = ConvNorm(inner_dim, mid_dim, 3, relu)
        self.btnk_conv5 = ConvNorm(mid_dim, dim, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = relu(self.btnk_repmlp(self.btnk_conv2(self.btnk_conv1(x))))
        branch = self.btnk_conv5(self.btnk_conv4(branch))
        return relu(add_branch(x, branch))


@register("repmlp_resnet")
class RepMLPResNet(ImageModel):
    """RepMLP-ResNet. It takes images of image_size alone.

    In its second and third stage, all blocks but the first have a RepMLP. Its features are the last
    stage's output: [B, embed_dims[3], H / 32, W / 32], rounded up.

    Args:
        stage_depths: number of blocks in each of the four stages.
        embed_dims: number of channels of each of the four stages. The stem has a quarter of the
            first stage's.
        block_type: the layers around a RepMLP. "light": two 1 x 1 convolutions; "bottleneck": also
            3 x 3 convolutions.
        part_size: side of the parts into which a RepMLP divides the map, in positions of the map.
        reparam_conv_k: sizes of the kernels of the convolutions that are parallel to the linear
            layers, odd numbers.
        fc1_fc2_reduction: ratio of the size of the input, which describes all parts, to the hidden
            width of the layers that read it.
        fc3_groups: number of groups of channels in the linear layers.
        deploy: whether the convolutions are merged into the linear layers, as ``inference_model``
            does after training.

    Raises:
        InputError: a wrong count of numbers, or sizes that don't fit.
    """

    first_conv = "stage0.0.conv"

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (3, 4, 6, 3),
        embed_dims: Sequence[Size] = (256, 512, 1024, 2048),
        block_type: Literal["light", "bottleneck"] = "light",
        part_size: Size = 7,
        reparam_conv_k: Sequence[Size] = (1, 3, 5),
        fc1_fc2_reduction: Size = 1,
        fc3_groups: Size = 4,
        deploy: bool = False,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        for side in reparam_conv_k:
            if side % 2 == 0:
                raise InputError(f"REPARAM_CONV_K is {list(reparam_conv_k)}, expected odd numbers")
        if any(side % (16 * part_size) for side in self.image_size):
            raise InputError(
                f"DATA.IMAGE_SIZE is {size_text(self.image_size)}, expected a multiple of 16 times"
                f" PART_SIZE {part_size}"
            )
        self.deploy = deploy
        self.num_features = embed_dims[-1]
        names = [f"stage{i}" for i in range(1, 5)]
        self.feature_info = feature_info(names, embed_dims, (4, 8, 16, 32))
        in_dim = embed_dims[0] // 4
        self.stage0 = nn.Sequential(
            ConvNorm(in_channels, in_dim, 7, relu, stride=2), MaxPool2D(3, 2, 1)
        )
        for i, dim in enumerate(embed_dims):
            options = {
                "grid": (self.image_size[0] // (4 * 2**i), self.image_size[1] // (4 * 2**i)),
                "part": (part_size, part_size),
                "kernels": reparam_conv_k,
                "reduction": fc1_fc2_reduction,
                "groups": fc3_groups,
                "deploy": deploy,
            }
            blocks: list[nn.Layer] = []
            for j in range(stage_depths[i]):
                if j == 0 or i in (0, 3):
                    stride = 2 if i > 0 and j == 0 else 1
                    blocks.append(BaseBlock(in_dim, dim, stride))
                elif block_type == "light":
                    blocks.append(LightBlock(dim, options))
                else:
                    blocks.append(BottleneckBlock(dim, 2 * i, options))
                in_dim = dim
            setattr(self, f"stage{i + 1}", nn.Sequential(*blocks))
        self._finish()

    def inference_model(self) -> ImageModel:
        """Returns an equivalent model for inference, whose convolutions beside the linear layers
        are in them. A model with deploy is returned itself.
        """
        if self.deploy:
            return self
        model = fold(self)
        model.deploy = True
        return model

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        size = tuple(x.shape[2:])
        if is_known(*size) and size != self.image_size:
            raise InputError(f"the model takes {self.input_sizes}, found {size[0]} x {size[1]}")
        return self.stage0(x)

    def _stages(self) -> Iterable[Any]:
        return [self.stage1, self.stage2, self.stage3, self.stage4]

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.linear(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("linear",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each block, and the classifier."""
        blocks = [
            (f"stage{i}.{j}",)
            for i, stage in enumerate(self._stages(), start=1)
            for j, _ in enumerate(stage.children())
        ]
        return [("stage0",), *blocks, ("linear",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_as_torch(layer)
        if isinstance(layer, SetLinear):
            layer.init_as_torch()
