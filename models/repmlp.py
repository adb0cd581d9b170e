"""RepMLPNet (Ding et al. 2022, arXiv:2112.11081): linear layers over the places of a map, with
convolutions beside them in training.

For inference the convolutions become part of the linear layers. Parameter names, the order of
operations and the initialisation are those of the authors' code.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Uniform

from errors import InputError
from models.base import ImageModel, register
from models.layers.activations import gelu, relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.conv_norm import ConvNorm, SqueezeExcite
from models.layers.folding import fold
from models.layers.graph_sizes import is_known
from models.layers.init import init_as_torch
from models.layers.layout import mean_of_places
from models.layers.linear import matmul
from models.layers.scale import add_branch, scale_planes
from models.layers.stages import check_counts, check_stages, feature_info
from settings.configuration import size_text
from settings.keys import Depth, Factor, InTraining, OfClassifier, Size
from weights.names import repmlp as names


class SetLinear(nn.Layer):
    """A linear layer from all places of a map to all places, for each set of channels.

    The weight has the shape that a convolution of one place has in the authors' code.

    Args:
        places: rows times columns of the map.
        sets: number of sets. Each has one channel here.
        bias: whether there is a bias.

    Shape: [N, sets, H, W] -> the same.
    """

    bias: paddle.Tensor | None

    def __init__(self, places: int, sets: int, bias: bool) -> None:
        super().__init__()
        self.places = places
        self.sets = sets
        self.weight = self.create_parameter([sets * places, places, 1, 1])
        self.bias = self.create_parameter([sets * places], is_bias=True) if bias else None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        height, width = x.shape[2:]
        rows = x.reshape([-1, self.sets, self.places]).transpose([1, 0, 2])
        weight = self.weight.reshape([self.sets, self.places, self.places])
        rows = matmul(rows, weight, transpose_y=True)
        if self.bias is not None:
            rows = rows + self.bias.reshape([self.sets, 1, self.places])
        return rows.transpose([1, 0, 2]).reshape([-1, self.sets, height, width])

    def fill(self, *values: paddle.Tensor) -> None:
        """Sets the weight and the bias."""
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.set_value(value.reshape(parameter.shape))

    def init_as_torch(self) -> None:
        """Initialises weight and bias as PyTorch does by itself."""
        bound = self.places**-0.5
        for parameter in self.parameters():
            Uniform(-bound, bound)(parameter)


class RepMLPBlock(nn.Layer):
    """A linear layer over the places of a map, plus depthwise convolutions of it, times a factor for
    each channel; or without the convolutions, which are in the linear layer.

    The authors' code also splits maps into parts. It mixes up their places, and no published model
    does so.

    Args:
        dim: channels.
        grid: rows and columns of the map.
        sets: number of sets of channels. All channels of a set share their weights.
        kernels: sides of the convolutions' kernels, odd.
        reduction: the channels over those within the layers that compute the factors.
        deploy: whether the convolutions are in the linear layer.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(
        self,
        dim: int,
        grid: tuple[int, int],
        sets: int,
        kernels: Sequence[int],
        reduction: int,
        deploy: bool,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.grid = grid
        self.sets = sets
        self.deploy = deploy
        self.gp = SqueezeExcite(dim, dim // reduction)
        self.fc3 = SetLinear(grid[0] * grid[1], sets, bias=deploy)
        self.fc3_bn = nn.Identity() if deploy else BatchNorm2D(sets)
        self.local_names = [] if deploy else [f"repconv{kernel}" for kernel in kernels]
        for name, kernel in zip(self.local_names, kernels, strict=False):
            setattr(self, name, ConvNorm(sets, sets, kernel, groups=sets))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        factors = self.gp.factors(x)
        rows, columns = self.grid
        out = self.of_sets(x.reshape([-1, self.sets, rows, columns]))
        return scale_planes(out.reshape([-1, self.dim, rows, columns]), factors)

    def of_sets(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the linear layer's and the convolutions' output for maps [N, sets, H, W]."""
        out = self.fc3_bn(self.fc3(x))
        local = None
        for name in self.local_names:
            branch = getattr(self, name)(x)
            local = branch if local is None else add_branch(local, branch)
        return out if local is None else add_branch(out, local)

    @paddle.no_grad()
    def fold(self) -> nn.Layer:
        """Returns an equal block, in evaluation, whose linear layer does all that ``of_sets`` does.

        That function is linear for each set alone, up to a bias. So the weights are its outputs for
        maps with a single one in each set, minus that for zeros.
        """
        if self.deploy:
            return self
        rows, columns = self.grid
        places = rows * columns
        folded = RepMLPBlock(self.dim, self.grid, self.sets, (), 1, deploy=True)
        folded.gp = self.gp
        bias = self.of_sets(paddle.zeros([1, self.sets, rows, columns]))
        ones = paddle.eye(places).reshape([places, 1, rows, columns])
        outputs = self.of_sets(ones.expand([places, self.sets, rows, columns])) - bias
        weight = outputs.reshape([places, -1]).transpose([1, 0])
        folded.fc3.fill(weight, bias)
        folded.eval()
        return folded


class FFNBlock(nn.Layer):
    """An MLP of 1 x 1 convolutions with batch norm.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.ffn_fc1 = ConvNorm(dim, hidden_dim, 1, gelu)
        self.ffn_fc2 = ConvNorm(hidden_dim, dim, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.ffn_fc2(self.ffn_fc1(x))


class Unit(nn.Layer):
    """x + the block over places, then + the MLP, each after a batch norm.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, block: RepMLPBlock) -> None:
        super().__init__()
        self.repmlp_block = block
        self.ffn_block = FFNBlock(block.dim, 4 * block.dim)
        self.prebn1 = BatchNorm2D(block.dim)
        self.prebn2 = BatchNorm2D(block.dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = add_branch(x, self.repmlp_block(self.prebn1(x)))
        return add_branch(x, self.ffn_block(self.prebn2(x)))


@register("repmlp")
class RepMLPNet(ImageModel):
    """RepMLPNet. It takes images of image_size alone, a multiple of 32.

    Its features are the last stage's output after the last norm: [B, embed_dims[3], H / 32, W /
    32].

    Args:
        stage_depths: number of units in each of the four stages.
        embed_dims: number of channels of each of the four stages.
        sharesets_nums: number of sets of channels in each of the four stages. All channels of a set
            share the weights over positions.
        reparam_conv_k: sizes of the kernels of the convolutions that are parallel to the linear
            layers, odd numbers.
        globalperceptron_reduce: ratio of the channels of a stage to the hidden channels of the
            layers that compute a factor for each channel.
        deploy: whether the convolutions are merged into the linear layers, as ``inference_model``
            does after training.

    Raises:
        InputError: a wrong count of numbers, or sizes that don't fit.
    """

    weight_names = names
    first_conv = "conv_embedding.conv"

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 2, 12, 2),
        embed_dims: Sequence[Size] = (96, 192, 384, 768),
        sharesets_nums: Sequence[Size] = (1, 4, 32, 128),
        reparam_conv_k: Sequence[Size] = (1, 3),
        globalperceptron_reduce: Size = 4,
        deploy: bool = False,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        check_counts(4, SHARESETS_NUMS=sharesets_nums)
        for side in reparam_conv_k:
            if side % 2 == 0:
                raise InputError(f"REPARAM_CONV_K is {list(reparam_conv_k)}, expected odd numbers")
        if any(side % 32 for side in self.image_size):
            raise InputError(
                f"DATA.IMAGE_SIZE is {size_text(self.image_size)}, RepMLPNet takes multiples of 32"
            )
        self.deploy = deploy
        self.num_features = embed_dims[-1]
        self.feature_info = feature_info(
            [f"stages.{i}" for i in range(4)], embed_dims, (4, 8, 16, 32)
        )
        self.conv_embedding = _Patches(in_channels, embed_dims[0], 4)
        self.stages = nn.LayerList()
        self.embeds = nn.LayerList()
        for i, dim in enumerate(embed_dims):
            if dim % sharesets_nums[i]:
                raise InputError(
                    f"EMBED_DIMS has {dim}, expected a multiple of SHARESETS_NUMS'"
                    f" {sharesets_nums[i]}"
                )
            if i > 0:
                self.embeds.append(_Patches(embed_dims[i - 1], dim, 2))
            grid = (self.image_size[0] // (4 * 2**i), self.image_size[1] // (4 * 2**i))
            blocks = (
                RepMLPBlock(
                    dim,
                    grid,
                    sharesets_nums[i],
                    reparam_conv_k,
                    globalperceptron_reduce,
                    deploy,
                )
                for _ in range(stage_depths[i])
            )
            self.stages.append(nn.LayerList(Unit(block) for block in blocks))
        self.head_norm = BatchNorm2D(self.num_features)
        self._finish()

    def inference_model(self) -> ImageModel:
        """Returns an equivalent model for inference, whose convolutions beside the linear
        layers are in them. A model with deploy is returned itself.
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
        return self.conv_embedding(x)

    def _stages(self) -> Iterable[Any]:
        return list(enumerate(self.stages))

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        index, units = stage
        if index > 0:
            x = self.embeds[index - 1](x)
        return self._run_all(units, x)

    def _last_norm(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head_norm(x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the first layer, each unit, and the last norm with the classifier. A
        stage's first unit has the layer before it.
        """
        groups: list[tuple[str, ...]] = [("conv_embedding",)]
        for i, stage in enumerate(self.stages):
            units: list[tuple[str, ...]] = [
                (f"stages.{i}.{j}",) for j, _ in enumerate(stage.children())
            ]
            if i > 0:
                units[0] += (f"embeds.{i - 1}",)
            groups += units
        return [*groups, ("head_norm", "head")]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_as_torch(layer)
        if isinstance(layer, SetLinear):
            layer.init_as_torch()


class _Patches(nn.Layer):
    """Projects squares of places that don't overlap, then batch norm and ReLU.

    Shape: [B, in_dim, H, W] -> [B, dim, H / side, W / side].
    """

    def __init__(self, in_dim: int, dim: int, side: int) -> None:
        super().__init__()
        self.conv = Conv2D(in_dim, dim, side, side, bias_attr=False)
        self.bn = BatchNorm2D(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.bn(self.conv(x), relu)
