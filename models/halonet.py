"""HaloNet (Vaswani et al. 2021, arXiv:2103.12731), a ResNet with local attention.

In some of its bottlenecks attention stands for the 3 x 3 convolution. Maps are cut into square
blocks of places. The places of a block attend to this block and to a halo around it.

Parameter names, the order of operations and the initialisation are those of timm's ``ByobNet`` with
``HaloAttn``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Normal

import ops
from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath
from models.layers.activations import relu, silu
from models.layers.attention import can_fuse
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D, MaxPool2D
from models.layers.conv_norm import ConvNorm
from models.layers.init import fan_in, init_convolution
from models.layers.layout import mean_of_places
from models.layers.linear import matmul
from models.layers.sizes import check_multiples
from models.layers.stages import check_counts, check_stages, drop_path_rates, feature_info
from settings.keys import Count, Depth, Factor, InTraining, Kernel, OfClassifier, Rate, Size
from weights.names import halonet as names

_ACTIVATIONS = {"relu": relu, "silu": silu}
Activation = Callable[[paddle.Tensor], paddle.Tensor]


class Stem(nn.Layer):
    """Three 3 x 3 convolutions, the first of stride 2, and max pooling of stride 2.

    Shape: [B, in_dim, H, W] -> [B, dim, H / 2, W / 2], rounded up; ``pool`` halves that again.
    """

    def __init__(self, in_dim: int, dim: int, act: Activation) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_dim, 3 * dim // 8, 3, act, stride=2)
        self.conv2 = ConvNorm(3 * dim // 8, dim // 2, 3, act)
        self.conv3 = ConvNorm(dim // 2, dim, 3, act)
        self.pool = MaxPool2D(3, 2, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the maps before the pooling, which are an intermediate of the model."""
        return self.conv3(self.conv2(self.conv1(x)))


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


class HaloAttention(nn.Layer):
    """Multi-head attention from each block of places to its window: the block and a halo around it.

    Beyond the map, keys and values are zeros. As in timm, queries attend to these, too.

    Args:
        dim: channels D.
        num_heads: attention heads.
        block_size: places along a block's side.
        halo_size: width of the halo in places, at most block_size.
        stride: 1, or 2: every second place of each row and column is a query.

    Shape: [B, D, H, W] -> [B, D, H / stride, W / stride]; H and W are multiples of block_size.
    """

    def __init__(
        self, dim: int, num_heads: int, block_size: int, halo_size: int, stride: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.block_size = block_size
        self.halo_size = halo_size
        self.stride = stride
        self.window_size = block_size + 2 * halo_size
        self.q = Conv2D(dim, dim, 1, stride=stride, bias_attr=False)
        self.kv = Conv2D(dim, 2 * dim, 1, bias_attr=False)
        self.pos_embed = RelativePositions(block_size // stride, self.window_size, self.head_dim)
        # Drops nothing. ``attention_weights`` reads the weights from its input.
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        side = self.block_size // self.stride
        dim = self.head_dim
        # Rows and columns of blocks.
        rows, columns = (length // self.block_size for length in x.shape[2:])
        q = self.q(x).reshape([-1, dim, rows, side, columns, side]).transpose([0, 2, 4, 3, 5, 1])
        # [B * heads, blocks, queries of a block, head_dim]
        q = q.reshape([-1, rows * columns, side**2, dim])
        # [B * heads, blocks, keys of a window, 2 * head_dim]
        kv = self._windows(self.kv(x).reshape([-1, 2 * dim, *x.shape[2:]]))
        position_scores = self.pos_embed(q)
        if can_fuse(q, self.attn_drop):
            # The operator takes each block as an item of the batch with a single head.
            qkv = [q.flatten(0, 1), kv.flatten(0, 1)]
            bias = position_scores.flatten(0, 1).unsqueeze(1)
            x = ops.attention(qkv, 1, dim, dim**-0.5, bias)
        else:
            k = kv[:, :, :, :dim]
            v = kv[:, :, :, dim:]
            scores = paddle.matmul(q * dim**-0.5, k, transpose_y=True) + position_scores
            x = paddle.matmul(self.attn_drop(F.softmax(scores, axis=-1)), v)
        x = x.reshape([-1, rows, columns, side, side, dim]).transpose([0, 5, 1, 3, 2, 4])
        return x.reshape([-1, self.num_heads * dim, rows * side, columns * side])

    def _windows(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the windows of maps: [B, C, H, W] -> [B, blocks, window_size ** 2, C].

        They are made of slices. On a GPU, gradients of slices add in a fixed order, and every
        export format has slices.
        """
        if ops.usable(x):
            return ops.halo_windows(x, self.block_size, self.halo_size)
        dim, height, width = x.shape[1:]
        size = self.block_size
        window = self.window_size
        rows = height // size
        columns = width // size
        x = self._with_halo(x.reshape([-1, dim, rows, size, width]), axis=2)
        x = self._with_halo(x.reshape([-1, dim, rows, window, columns, size]), axis=4)
        x = x.transpose([0, 2, 4, 3, 5, 1])
        return x.reshape([-1, rows * columns, window**2, dim])

    def _with_halo(self, x: paddle.Tensor, axis: int) -> paddle.Tensor:
        """Returns x with the halo along one side of the maps.

        Before and after the places of each block come the nearest places of the blocks beside it,
        or zeros beyond the map.

        Args:
            axis: the axis of the blocks; the next one is that of the places within a block.
        """
        blocks = x.shape[axis]
        size = self.block_size
        halo = self.halo_size
        if not halo:
            return x
        zeros = paddle.zeros_like(paddle.slice(x, [axis], [0], [1]))
        padded = paddle.concat([zeros, x, zeros], axis)
        before = paddle.slice(padded, [axis, axis + 1], [0, size - halo], [blocks, size])
        after = paddle.slice(padded, [axis, axis + 1], [2, 0], [blocks + 2, halo])
        return paddle.concat([before, x, after], axis + 1)


class Bottleneck(nn.Layer):
    """act(shortcut(x) + branch(x)), the branch with drop path.

    The branch is a 3 x 3 convolution of dim / 4 channels between two 1 x 1 convolutions.

    Args:
        in_dim: channels of the input.
        dim: channels of the output.
        stride: 1, or 2: the block halves maps.
        act: the activation function.
        drop_path: rate of stochastic depth.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(
        self, in_dim: int, dim: int, stride: int, act: Activation, drop_path: float
    ) -> None:
        super().__init__()
        same_shape = in_dim == dim and stride == 1
        self.shortcut = nn.Identity() if same_shape else ConvNorm(in_dim, dim, 1, stride=stride)
        self.conv1_1x1 = ConvNorm(in_dim, dim // 4, 1, act)
        self._add_middle(dim // 4, stride, act)
        self.conv3_1x1 = ConvNorm(dim // 4, dim, 1)
        self.drop_path = DropPath(drop_path)
        self.act = act

    def _add_middle(self, dim: int, stride: int, act: Activation) -> None:
        self.conv2_kxk = ConvNorm(dim, dim, 3, act, stride=stride)

    def _middle(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.conv2_kxk(x)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.conv3_1x1(self._middle(self.conv1_1x1(x)))
        return self.act(self.drop_path(branch, onto=self.shortcut(x)))


class AttentionBottleneck(Bottleneck):
    """A ``Bottleneck`` with attention, batch norm and the activation instead of the 3 x 3
    convolution.

    Args:
        num_heads: attention heads.
        block_size: places along a block's side.
        halo_size: width of the halo in places.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        stride: int,
        act: Activation,
        drop_path: float,
        num_heads: int,
        block_size: int,
        halo_size: int,
    ) -> None:
        # The base class's constructor calls ``_add_middle``, which reads these.
        self.num_heads = num_heads
        self.block_size = block_size
        self.halo_size = halo_size
        super().__init__(in_dim, dim, stride, act, drop_path)

    def _add_middle(self, dim: int, stride: int, act: Activation) -> None:
        self.self_attn = HaloAttention(dim, self.num_heads, self.block_size, self.halo_size, stride)
        self.post_attn = BatchNorm2D(dim)

    def _middle(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.post_attn(self.self_attn(x), self.act)


@register("halonet")
class HaloNet(ImageModel):
    """HaloNet. It takes images of image_size only.

    Its features are the last stage's output: [B, embed_dims[3], H / 32, W / 32].

    Args:
        image_size: pixels, or (height, width). The maps of a stage with attention have to be
            multiples of block_size.
        stem_dim: channels of the stem, a multiple of 8.
        stage_depths: bottlenecks of each of four stages.
        embed_dims: channels of each of four stages, multiples of 4.
        attention_every: for each stage a number n: every n-th bottleneck has attention instead of a
            3 x 3 convolution; 0: none has.
        num_heads: heads of each stage; ignored in a stage without attention.
        block_size: places along the side of a block, even.
        halo_size: width of the halo around a block, in places.
        act: activation function of all layers.
        dropout: rate before the classifier.
        droppath: rate of stochastic depth at the last bottleneck; rates grow linearly from 0 at the
            first.
        zero_init_last: whether the weight of a bottleneck's last norm starts at 0, so that a fresh
            bottleneck is its shortcut alone.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    first_conv = "stem.conv1.conv"

    def __init__(
        self,
        image_size: int | Sequence[int] = 256,
        in_channels: int = 3,
        num_classes: int = 1000,
        stem_dim: Size = 64,
        stage_depths: Sequence[Depth] = (2, 2, 2, 2),
        embed_dims: Sequence[Size] = (256, 512, 1024, 2048),
        attention_every: Sequence[Count] = (0, 0, 2, 1),
        num_heads: Sequence[Count] = (0, 0, 8, 8),
        block_size: Kernel = 8,
        halo_size: Count = 2,
        act: Literal["relu", "silu"] = "relu",
        dropout: InTraining[OfClassifier[Rate]] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
        zero_init_last: InTraining[bool] = True,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        check_counts(4, ATTENTION_EVERY=attention_every, NUM_HEADS=num_heads)
        _check_sizes(stem_dim, embed_dims, block_size, halo_size)
        self.zero_init_last = zero_init_last
        self.num_features = embed_dims[-1]
        activation = _ACTIVATIONS[act]
        self.stem = Stem(in_channels, stem_dim, activation)
        self.stages = nn.LayerList()
        in_dim = stem_dim
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            dim = embed_dims[i]
            stage = nn.Sequential()
            for j, rate in enumerate(rates):
                # The first block of each stage but the first halves the maps.
                stride = 2 if i > 0 and j == 0 else 1
                if attention_every[i] and (j + 1) % attention_every[i] == 0:
                    # Pixels along a side of a place that the attention reads.
                    reduction = 4 * 2**i // stride
                    self._check_attention(i, dim, num_heads[i], block_size * reduction)
                    block = AttentionBottleneck(
                        in_dim,
                        dim,
                        stride,
                        activation,
                        rate,
                        num_heads=num_heads[i],
                        block_size=block_size,
                        halo_size=halo_size,
                    )
                else:
                    block = Bottleneck(in_dim, dim, stride, activation, rate)
                stage.add_sublayer(str(j), block)
                in_dim = dim
            self.stages.append(stage)
        modules = ["stem.conv3", *(f"stages.{i}" for i in range(4))]
        self.feature_info = feature_info(modules, [stem_dim, *embed_dims], (2, 4, 8, 16, 32))
        self.head = nn.Sequential(("drop", nn.Dropout(dropout)), ("fc", nn.Identity()))
        self._finish()

    def _check_attention(self, stage: int, dim: int, num_heads: int, block_pixels: int) -> None:
        width = dim // 4
        if not num_heads or width % num_heads:
            raise InputError(
                f"NUM_HEADS has {num_heads} where {width} channels attend, a quarter of stage"
                f" {stage}'s; expected a divisor"
            )
        unit = f"{block_pixels}: stage {stage} is cut into blocks of BLOCK_SIZE"
        check_multiples(self.image_size, block_pixels, unit)

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
        elif isinstance(layer, HaloAttention):
            # ``apply`` visits a layer after its sublayers: this replaces init_convolution's values.
            for conv in (layer.q, layer.kv):
                Normal(std=fan_in(conv) ** -0.5)(conv.weight)
        elif isinstance(layer, Bottleneck):
            Constant(0.0 if self.zero_init_last else 1.0)(layer.conv3_1x1.bn.weight)


def _check_sizes(stem_dim: int, dims: Sequence[int], block_size: int, halo_size: int) -> None:
    if stem_dim % 8:
        raise InputError(f"STEM_DIM is {stem_dim}, expected a multiple of 8")
    if any(dim % 4 for dim in dims):
        raise InputError(f"EMBED_DIMS is {list(dims)}, expected multiples of 4")
    if block_size % 2:
        raise InputError(f"BLOCK_SIZE is {block_size}, expected an even number: stride 2 halves it")
    if halo_size > block_size:
        raise InputError(f"HALO_SIZE is {halo_size}, expected at most BLOCK_SIZE {block_size}")
