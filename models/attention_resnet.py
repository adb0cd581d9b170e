"""The base of HaloNet and BoTNet: ResNets in which attention stands for the 3 x 3 convolution of
some bottlenecks.

Parameter names, the order of operations and the initialisation are those of timm's ``ByobNet``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal

import ops
from errors import InputError
from models.base import ImageModel
from models.layers import DropPath
from models.layers.activations import relu, silu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import MaxPool2D
from models.layers.conv_norm import ConvNorm
from models.layers.init import init_convolution
from models.layers.layout import mean_of_places
from models.layers.linear import matmul
from models.layers.stages import check_counts, check_stages, drop_path_rates, feature_info

ACTIVATIONS = {"relu": relu, "silu": silu}
Activation = Callable[[paddle.Tensor], paddle.Tensor]


class Stem(nn.Layer):
    """Three 3 x 3 convolutions, the first of stride 2, and max pooling of stride 2.

    Shape: [B, in_dim, H, W] -> [B, dim, H / 2, W / 2], rounded up; ``pool`` halves that again.

    Attributes:
        output: name of the layer whose output is an intermediate of the model.
    """

    output = "stem.conv3"

    def __init__(self, in_dim: int, dim: int, act: Activation) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_dim, 3 * dim // 8, 3, act, stride=2)
        self.conv2 = ConvNorm(3 * dim // 8, dim // 2, 3, act)
        self.conv3 = ConvNorm(dim // 2, dim, 3, act)
        self.pool = MaxPool2D(3, 2, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the maps before the pooling, which are an intermediate of the model."""
        return self.conv3(self.conv2(self.conv1(x)))


class PlainStem(ConvNorm):
    """A 7 x 7 convolution of stride 2, and max pooling of stride 2, as in ResNet.

    Shape: [B, in_dim, H, W] -> [B, dim, H / 2, W / 2], rounded up; ``pool`` halves that again.

    Attributes:
        output: name of the layer whose output is an intermediate of the model.
    """

    output = "stem"

    def __init__(self, in_dim: int, dim: int, act: Activation) -> None:
        super().__init__(in_dim, dim, 7, act, stride=2)
        self.pool = MaxPool2D(3, 2, 1)


class RelativePositions(nn.Layer):
    """Computes the scores of relative positions, which are added to those of queries and keys.

    There is a learnt vector for each offset in rows and for each offset in columns. The score of a
    query and a key is the product of the query with the vectors of both offsets.

    Args:
        block_size: queries along a block's side.
        window_size: keys w along a window's side.
        head_dim: channels d of a query.

    Shape: [B, blocks, block_size ** 2, d] -> [B, blocks, block_size ** 2, w ** 2].
    """

    def __init__(self, block_size: int, window_size: int, head_dim: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.window_size = window_size
        offsets = 2 * window_size - 1
        initializer = Normal(std=head_dim**-0.5)
        self.height_rel = self.create_parameter(
            [offsets, head_dim], default_initializer=initializer
        )
        self.width_rel = self.create_parameter([offsets, head_dim], default_initializer=initializer)

    def forward(self, q: paddle.Tensor) -> paddle.Tensor:
        blocks, length, dim = q.shape[1:]
        side = self.block_size
        window = self.window_size
        if ops.usable(q):
            vectors = paddle.concat([self.height_rel, self.width_rel])
            products = matmul(q.reshape([-1, dim]), vectors, transpose_y=True)
            scores = ops.relative_bias(products, side, window)
            return scores.reshape([-1, blocks, length, window**2])
        q = q.reshape([-1, side, side, dim])
        column_scores = self._scores(q, self.width_rel).reshape([-1, side, side, 1, window])
        # The axes are: the query's column, its row, the key's row.
        row_scores = self._scores(q.transpose([0, 2, 1, 3]), self.height_rel)
        row_scores = row_scores.reshape([-1, side, side, window, 1]).transpose([0, 2, 1, 3, 4])
        return (row_scores + column_scores).reshape([-1, blocks, length, window**2])

    def _scores(self, q: paddle.Tensor, vectors: paddle.Tensor) -> paddle.Tensor:
        """Returns the products of queries with the vectors of their offsets from the keys, along
        one axis of the map.

        Query i and key j have the vector j - i + w - 1. So each query needs w of its 2 w - 1
        products. They begin one place earlier than those of the query before it. One zero is
        appended to each query's products, and all of them are read as one sequence. Cut into rows
        of 2 w - 1 again, each row begins one place earlier than the one before, and the wanted
        products stand in the same columns.

        Args:
            q: [B, side, side, d]; the third axis is the one along which offsets count.
            vectors: [2 w - 1, d].

        Returns:
            [B * side, side, w].
        """
        side = self.block_size
        offsets = 2 * self.window_size - 1
        products = matmul(q.reshape([-1, q.shape[3]]), vectors, transpose_y=True)
        products = products.reshape([-1, side, offsets])
        padded = paddle.concat([products, paddle.zeros_like(products[:, :, :1])], axis=2)
        sequence = padded.reshape([-1, side * (offsets + 1)])
        # Fills the last row up.
        rest = paddle.zeros_like(sequence[:, : offsets - side])
        rows = paddle.concat([sequence, rest], axis=1).reshape([-1, side + 1, offsets])
        return rows[:, :side, self.window_size - 1 :]


class Bottleneck(nn.Layer):
    """act(shortcut(x) + branch(x)), the branch with drop path.

    The branch is a 3 x 3 convolution of dim / 4 channels, or attention, between two 1 x 1
    convolutions.

    Args:
        in_dim: channels of the input.
        dim: channels of the output.
        stride: 1, or 2: the block halves maps.
        act: the activation function.
        drop_path: rate of stochastic depth.
        self_attn: the attention, [B, dim / 4, H, W] -> [B, dim / 4, H / stride, W / stride]; None:
            there is a convolution.
        shortcut_act: whether a shortcut that changes the shape ends with the activation.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        stride: int,
        act: Activation,
        drop_path: float,
        self_attn: nn.Layer | None = None,
        shortcut_act: bool = False,
    ) -> None:
        super().__init__()
        width = dim // 4
        self.shortcut: nn.Layer = nn.Identity()
        if in_dim != dim or stride != 1:
            self.shortcut = ConvNorm(in_dim, dim, 1, act if shortcut_act else None, stride=stride)
        self.conv1_1x1 = ConvNorm(in_dim, width, 1, act)
        self.attends = self_attn is not None
        if self_attn is None:
            self.conv2_kxk = ConvNorm(width, width, 3, act, stride=stride)
        else:
            self.self_attn = self_attn
            self.post_attn = BatchNorm2D(width)
        self.conv3_1x1 = ConvNorm(width, dim, 1)
        self.drop_path = DropPath(drop_path)
        self.act = act

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.conv1_1x1(x)
        if self.attends:
            branch = self.post_attn(self.self_attn(branch), self.act)
        else:
            branch = self.conv2_kxk(branch)
        return self.act(self.drop_path(self.conv3_1x1(branch), onto=self.shortcut(x)))


class AttentionResNet(ImageModel):
    """A ResNet with attention in some of its bottlenecks. It takes images of image_size only.

    An architecture adds its ``stem``, then calls ``_add_stages`` and ``_finish``. It defines
    ``_attention``.
    """

    stem: "Stem | PlainStem"
    zero_init_last: bool

    def _add_stages(
        self,
        stem_dim: int,
        depths: Sequence[int],
        dims: Sequence[int],
        attention_every: Sequence[int],
        num_heads: Sequence[int],
        act: Activation,
        droppath: float,
        strides: Sequence[int] = (1, 2, 2, 2),
        shortcut_act: bool = False,
    ) -> None:
        """Adds the stages and the classifier.

        Args:
            strides: of each stage's first bottleneck.
            shortcut_act: of the bottlenecks with attention.
            stem_dim, depths, dims, attention_every, num_heads, act, droppath: see ``HaloNet``.

        Raises:
            InputError: sizes that don't fit together.
        """
        check_stages(depths, dims)
        check_counts(4, ATTENTION_EVERY=attention_every, NUM_HEADS=num_heads)
        if any(dim % 4 for dim in dims):
            raise InputError(f"EMBED_DIMS is {list(dims)}, expected multiples of 4")
        self.num_features = dims[-1]
        self.stages = nn.LayerList()
        in_dim = stem_dim
        # Pixels along a side of a place.
        reduction = 4
        reductions = [2]
        for i, rates in enumerate(drop_path_rates(droppath, depths)):
            dim = dims[i]
            stage = nn.Sequential()
            for j, rate in enumerate(rates):
                stride = strides[i] if j == 0 else 1
                attention = None
                if attention_every[i] and (j + 1) % attention_every[i] == 0:
                    self._check_heads(i, dim // 4, num_heads[i])
                    attention = self._attention(i, dim // 4, num_heads[i], stride, reduction)
                of_attention = shortcut_act and attention is not None
                stage.add_sublayer(
                    str(j), Bottleneck(in_dim, dim, stride, act, rate, attention, of_attention)
                )
                reduction *= stride
                in_dim = dim
            reductions.append(reduction)
            self.stages.append(stage)
        modules = [self.stem.output, *(f"stages.{i}" for i in range(4))]
        self.feature_info = feature_info(modules, [stem_dim, *dims], reductions)

    def _check_heads(self, stage: int, width: int, num_heads: int) -> None:
        if not num_heads or width % num_heads:
            raise InputError(
                f"NUM_HEADS has {num_heads} for stage {stage}, whose attention has {width} channels"
                " (a quarter of the stage's); expected a divisor"
            )

    def _attention(
        self, stage: int, dim: int, num_heads: int, stride: int, reduction: int
    ) -> nn.Layer:
        """Returns the attention of one bottleneck.

        Args:
            stage: number of the stage.
            dim: channels of its input and output.
            num_heads: number of attention heads.
            stride: 1, or 2: it halves maps.
            reduction: pixels along a side of a place of its input.

        Raises:
            InputError: sizes that don't fit together.
        """
        raise NotImplementedError

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            raise InputError(
                f"the model takes {self.input_sizes}, found {x.shape[2]} x {x.shape[3]}"
            )
        return self.stem(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage is self.stages[0]:
            x = self.stem.pool(x)
        return self._run_all(stage, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each block, the classifier."""
        blocks = [
            (name,) for name, layer in self.named_sublayers() if isinstance(layer, Bottleneck)
        ]
        return [("stem",), *blocks, ("head",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_convolution(layer)
        if isinstance(layer, nn.Linear):
            Normal(std=0.01)(layer.weight)
        elif isinstance(layer, Bottleneck):
            Constant(0.0 if self.zero_init_last else 1.0)(layer.conv3_1x1.bn.weight)
