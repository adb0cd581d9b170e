"""HaloNet (Vaswani et al. 2021, arXiv:2103.12731): a ResNet, some of whose blocks attend within
blocks of places and a halo around each.

Parameter names, order of operations and initialisation are those of timm's ``ByobNet`` with
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
from settings.keys import Count, Depth, Factor, InTraining, Kernel, Rate, Size
from weights.names import halonet as names

_ACTIVATIONS = {"relu": relu, "silu": silu}
Activation = Callable[[paddle.Tensor], paddle.Tensor]


class Stem(nn.Layer):
    """Three convolutions, the first of stride 2, then max pooling of stride 2."""

    def __init__(self, in_dim: int, dim: int, act: Activation) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_dim, 3 * dim // 8, 3, act, stride=2)
        self.conv2 = ConvNorm(3 * dim // 8, dim // 2, 3, act)
        self.conv3 = ConvNorm(dim // 2, dim, 3, act)
        self.pool = MaxPool2D(3, 2, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the maps before the pooling."""
        return self.conv3(self.conv2(self.conv1(x)))


class RelativePositions(nn.Layer):
    """A learnt vector for each distance of rows and of columns; a query's products with them are
    added to its scores.

    Args:
        block_size: queries along a block's side.
        window_size: keys along a window's side, w.
        head_dim: channels d of a query.

    Shape: [B, blocks, block_size ** 2, d] -> [B, blocks, block_size ** 2, w ** 2].
    """

    def __init__(self, block_size: int, window_size: int, head_dim: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.window_size = window_size
        start = Normal(std=head_dim**-0.5)
        self.height_rel = self.create_parameter(
            [2 * window_size - 1, head_dim], default_initializer=start
        )
        self.width_rel = self.create_parameter(
            [2 * window_size - 1, head_dim], default_initializer=start
        )

    def forward(self, q: paddle.Tensor) -> paddle.Tensor:
        blocks, length, dim = q.shape[1:]
        side = self.block_size
        window = self.window_size
        if ops.usable(q):
            vectors = paddle.concat([self.height_rel, self.width_rel])
            products = matmul(q.reshape([-1, dim]), vectors, transpose_y=True)
            return ops.relative_bias(products, side, window).reshape(
                [-1, blocks, length, window**2]
            )
        q = q.reshape([-1, side, side, dim])
        columns = self._scores(q, self.width_rel).reshape([-1, side, side, 1, window])
        # by column, row, and the key's row
        rows = self._scores(q.transpose([0, 2, 1, 3]), self.height_rel)
        rows = rows.reshape([-1, side, side, window, 1]).transpose([0, 2, 1, 3, 4])
        return (rows + columns).reshape([-1, blocks, length, window**2])

    def _scores(self, q: paddle.Tensor, vectors: paddle.Tensor) -> paddle.Tensor:
        """Returns of queries [B, side, side, d] along the third axis the products with each key's:
        [B * side, side, w].

        Query i and key j have vector j - i + w - 1. Rows of all 2 w - 1 products are made one
        longer and read on end in rows of the old length: each begins one place later than the one
        before.
        """
        side = self.block_size
        count = 2 * self.window_size - 1
        products = matmul(q.reshape([-1, q.shape[3]]), vectors, transpose_y=True).reshape(
            [-1, side, count]
        )
        longer = paddle.concat([products, paddle.zeros_like(products[:, :, :1])], axis=2).reshape(
            [-1, side * count + side]
        )
        longer = paddle.concat([longer, paddle.zeros_like(longer[:, : count - side])], axis=1)
        return longer.reshape([-1, side + 1, count])[:, :side, self.window_size - 1 :]


class HaloAttention(nn.Layer):
    """Multi-head attention from each block of places to its window: the block and a halo around it.

    Places beyond the map are zeros, which are attended to.

    Args:
        dim, num_heads: channels D, heads.
        block_size: places along a block's side.
        halo_size: places on each side of a block, at most its own.
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
        self.attn_drop = nn.Dropout(0.0)  # where the weights are looked at

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        side = self.block_size // self.stride
        dim = self.head_dim
        rows, columns = (length // self.block_size for length in x.shape[2:])
        q = self.q(x).reshape([-1, dim, rows, side, columns, side]).transpose([0, 2, 4, 3, 5, 1])
        q = q.reshape([-1, rows * columns, side**2, dim])  # [B * heads, blocks, queries, head_dim]
        kv = self._windows(self.kv(x).reshape([-1, 2 * dim, *x.shape[2:]]))
        positions = self.pos_embed(q)
        if can_fuse(q, self.attn_drop):  # to it, blocks are items of the batch
            parts = [q.flatten(0, 1), kv.flatten(0, 1)]
            positions = positions.flatten(0, 1).unsqueeze(1)
            x = ops.attention(parts, 1, dim, dim**-0.5, positions)
        else:
            k = kv[:, :, :, :dim]
            v = kv[:, :, :, dim:]
            attn = paddle.matmul(q * dim**-0.5, k, transpose_y=True) + positions
            x = paddle.matmul(self.attn_drop(F.softmax(attn, axis=-1)), v)
        x = x.reshape([-1, rows, columns, side, side, dim]).transpose([0, 5, 1, 3, 2, 4])
        return x.reshape([-1, self.num_heads * dim, rows * side, columns * side])

    def _windows(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the windows of maps [B, C, H, W]: [B, blocks, window_size ** 2, C].

        They are made of slices, whose gradients are added in one order on a GPU, and which every
        kind of export has.
        """
        if ops.usable(x):
            return ops.halo_windows(x, self.block_size, self.halo_size)
        dim, height, width = x.shape[1:]
        size = self.block_size
        window = self.window_size
        x = self._with_halo(x.reshape([-1, dim, height // size, size, width]), 2)
        x = self._with_halo(x.reshape([-1, dim, height // size, window, width // size, size]), 4)
        return x.transpose([0, 2, 4, 3, 5, 1]).reshape(
            [-1, height * width // size**2, window**2, dim]
        )

    def _with_halo(self, x: paddle.Tensor, axis: int) -> paddle.Tensor:
        """Puts before and after the places (axis + 1) of each block (axis) its neighbours' nearest
        ones, or zeros.
        """
        count = x.shape[axis]
        size = self.block_size
        halo = self.halo_size
        if not halo:
            return x
        beyond = paddle.zeros_like(paddle.slice(x, [axis], [0], [1]))
        padded = paddle.concat([beyond, x, beyond], axis)
        before = paddle.slice(padded, [axis, axis + 1], [0, size - halo], [count, size])
        after = paddle.slice(padded, [axis, axis + 1], [2, 0], [count + 2, halo])
        return paddle.concat([before, x, after], axis + 1)


class Bottleneck(nn.Layer):
    """act(shortcut(x) + branch(x)): between two convolutions of 1 x 1 one of 3 x 3, over a quarter
    of the channels.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up. The branch has drop
    path.
    """

    def __init__(
        self, in_dim: int, dim: int, stride: int, act: Activation, drop_path: float
    ) -> None:
        super().__init__()
        same = in_dim == dim and stride == 1
        self.shortcut = nn.Identity() if same else ConvNorm(in_dim, dim, 1, stride=stride)
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
    """``Bottleneck`` with attention, batch norm and the activation in its middle."""

    def __init__(
        self,
        in_dim: int,
        dim: int,
        stride: int,
        act: Activation,
        drop_path: float,
        sizes: tuple[int, int, int],
    ) -> None:
        self.sizes = sizes  # heads, block, halo
        super().__init__(in_dim, dim, stride, act, drop_path)

    def _add_middle(self, dim: int, stride: int, act: Activation) -> None:
        self.self_attn = HaloAttention(dim, *self.sizes, stride)
        self.post_attn = BatchNorm2D(dim)

    def _middle(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.post_attn(self.self_attn(x), self.act)


@register("halonet")
class HaloNet(ImageModel):
    """HaloNet; images of other sizes than image_size aren't taken.

    Features: the last stage's channels [B, embed_dims[3], H / 32, W / 32].

    Args:
        image_size: pixels, or (height, width): where a stage attends, its maps are multiples of
            block_size.
        stem_dim: channels of the stem, a multiple of 8.
        stage_depths: blocks of each of four stages.
        embed_dims: channels of each of four stages, multiples of 4.
        attention_every: of each stage every so many-th block attends, instead of a convolution; 0:
            none.
        num_heads: heads of each stage; ignored where none attends.
        block_size: places along the side of a block, even.
        halo_size: places around a block that its queries attend to, too.
        act: activation function.
        dropout: before the classifier.
        droppath: rate of stochastic depth at the last block; linear from 0 at the first.
        zero_init_last: whether the weight of a block's last norm starts at 0, so that a fresh block
            is its shortcut.

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
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[Factor] = 1.0,
        recompute: InTraining[bool] = False,
        zero_init_last: InTraining[bool] = True,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        check_counts(4, ATTENTION_EVERY=attention_every, NUM_HEADS=num_heads)
        _check_sizes(stem_dim, embed_dims, block_size, halo_size)
        self.zero_init_last = zero_init_last
        self.num_features = embed_dims[-1]
        self.stem = Stem(in_channels, stem_dim, _ACTIVATIONS[act])
        self.stages = nn.LayerList()
        in_dim = stem_dim
        for i, (dim, every, rates) in enumerate(
            zip(embed_dims, attention_every, drop_path_rates(droppath, stage_depths), strict=True)
        ):
            stage = nn.Sequential()
            sizes = (num_heads[i], block_size, halo_size)
            for j, rate in enumerate(rates):
                stride = 2 if i and not j else 1
                block = (in_dim, dim, stride, _ACTIVATIONS[act], rate)
                attends = every and (j + 1) % every == 0
                if attends:
                    self._check_attention(i, dim, num_heads[i], block_size * (4 << i) // stride)
                stage.add_sublayer(
                    str(j), AttentionBottleneck(*block, sizes) if attends else Bottleneck(*block)
                )
                in_dim = dim
            self.stages.append(stage)
        modules = ["stem.conv3", *(f"stages.{i}" for i in range(4))]
        self.feature_info = feature_info(modules, [stem_dim, *embed_dims], (2, 4, 8, 16, 32))
        self.head = nn.Sequential(("drop", nn.Dropout(dropout)), ("fc", nn.Identity()))
        self._finish()

    def _check_attention(self, stage: int, dim: int, heads: int, pixels: int) -> None:
        if not heads or dim // 4 % heads:
            found = f"NUM_HEADS has {heads} where {dim // 4} channels attend, a quarter of stage {stage}'s"
            raise InputError(f"{found}; expected a divisor")
        check_multiples(
            self.image_size, pixels, f"{pixels}: stage {stage} is cut into blocks of BLOCK_SIZE"
        )

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            height, width = self.image_size
            raise InputError(
                f"the model takes images of {height} x {width}, found {x.shape[2]} x {x.shape[3]}"
            )
        return self.stem(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage, self.stem.pool(x) if stage is self.stages[0] else x)

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
        elif isinstance(layer, HaloAttention):  # after its convolutions
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
