"""RegNet (Radosavovic et al. 2020, arXiv:2003.13678): RegNetX, and RegNetY with squeeze and
excitation.

Parameter names, the order of operations and the initialisation are those of timm's ``RegNet``. timm
computes the widths and depths of the stages from the paper's parameters; here they are arguments.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath
from models.layers.activations import relu
from models.layers.conv_norm import ConvNorm, SqueezeExcite
from models.layers.init import init_convolution
from models.layers.layout import mean_of_places
from models.layers.stages import check_stages, drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Rate, Size
from weights.names import regnet as names

STEM_DIM = 32


class Block(nn.Layer):
    """relu(shortcut(x) + conv3(se(conv2(conv1(x))))), the branch with drop path.

    Args:
        in_dim: channels of the input.
        dim: channels of the output.
        stride: stride of conv2 and of the shortcut.
        group_width: channels of a group of conv2.
        se_ratio: hidden channels of squeeze and excitation over in_dim; 0: there is none.
        drop_path: rate of stochastic depth.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        stride: int,
        group_width: int,
        se_ratio: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_dim, dim, 1, relu)
        self.conv2 = ConvNorm(dim, dim, 3, relu, stride=stride, groups=dim // group_width)
        if se_ratio:
            self.se = SqueezeExcite(dim, max(1, round(in_dim * se_ratio)))
        else:
            self.se = nn.Identity()
        self.conv3 = ConvNorm(dim, dim, 1)
        same_shape = in_dim == dim and stride == 1
        self.downsample = nn.Identity() if same_shape else ConvNorm(in_dim, dim, 1, stride=stride)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.conv3(self.se(self.conv2(self.conv1(x))))
        return relu(self.drop_path(branch, onto=self.downsample(x)))


@register("regnet")
class RegNet(ImageModel):
    """RegNet. It takes images of any size.

    Its features are the last stage's output: [B, embed_dims[3], H / 32, W / 32], rounded up.

    Args:
        stage_depths: number of blocks in each of the four stages.
        embed_dims: number of channels of each of the four stages.
        group_width: number of channels in a group of the 3 x 3 convolutions. A stage with fewer
            channels has a single group.
        se_ratio: ratio of the hidden channels of squeeze and excitation to the channels of the
            block's input. 0: no squeeze and excitation (RegNetX).
        dropout: dropout rate before the classifier.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.
        zero_init_last: whether the weight of the last norm of each block starts at 0, as in timm,
            so that a new block passes its input on unchanged. Otherwise it starts at 1, as in the
            authors' code.

    Raises:
        InputError: not four stages, or a width that isn't a multiple of group_width.
    """

    weight_names = names
    first_conv = "stem.conv"
    min_image_size = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 4, 11, 1),
        embed_dims: Sequence[Size] = (224, 448, 1232, 3024),
        group_width: Size = 112,
        se_ratio: Factor = 0.25,
        dropout: InTraining[OfClassifier[Rate]] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
        zero_init_last: InTraining[bool] = True,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        self.zero_init_last = zero_init_last
        check_stages(stage_depths, embed_dims)
        for dim in embed_dims:
            if dim % min(group_width, dim):
                raise InputError(
                    f"EMBED_DIMS holds {dim}, which is not a multiple of GROUP_WIDTH {group_width}"
                )
        self.num_features = embed_dims[-1]
        self.stem = ConvNorm(in_channels, STEM_DIM, 3, relu, stride=2)
        in_dim = STEM_DIM
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            dim = embed_dims[i]
            stage = nn.Sequential()
            for j, rate in enumerate(rates):
                block = Block(
                    in_dim,
                    dim,
                    stride=2 if j == 0 else 1,
                    group_width=min(group_width, dim),
                    se_ratio=se_ratio,
                    drop_path=rate,
                )
                # timm counts stages and blocks from 1.
                stage.add_sublayer(f"b{j + 1}", block)
                in_dim = dim
            self.add_sublayer(f"s{i + 1}", stage)
        modules = ["stem", "s1", "s2", "s3", "s4"]
        self.feature_info = feature_info(modules, [STEM_DIM, *embed_dims], (2, 4, 8, 16, 32))
        self.head = nn.Sequential(("drop", nn.Dropout(dropout)), ("fc", nn.Identity()))
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def _stages(self) -> Iterable[Any]:
        return (self.s1, self.s2, self.s3, self.s4)

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each block, the classifier."""
        stages = {name: getattr(self, name) for name in ("s1", "s2", "s3", "s4")}
        blocks = [
            (f"{name}.b{j + 1}",) for name, stage in stages.items() for j in range(len(stage))
        ]
        return [("stem",), *blocks, ("head",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_convolution(layer)
        if isinstance(layer, nn.Linear):
            Normal(std=0.01)(layer.weight)
        elif isinstance(layer, Block):
            Constant(0.0 if self.zero_init_last else 1.0)(layer.conv3.bn.weight)
