"""HaloNet (Vaswani et al. 2021, arXiv:2103.12731), a ResNet with local attention.

In some of its bottlenecks attention stands for the 3 x 3 convolution. Maps are cut into square
blocks of places. The places of a block attend to this block and to a halo around it.

Parameter names, the order of operations and the initialisation are those of timm's ``ByobNet`` with
``HaloAttn``.
"""

from collections.abc import Sequence
from typing import Literal

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal

import ops
from errors import InputError
from models.attention_resnet import ACTIVATIONS, AttentionResNet, RelativePositions, Stem
from models.base import register
from models.layers.attention import can_fuse
from models.layers.conv import Conv2D
from models.layers.init import fan_in
from models.layers.sizes import check_multiples
from settings.keys import Count, Depth, Factor, InTraining, Kernel, OfClassifier, Rate, Size
from weights.names import halonet as names


class HaloAttention(nn.Layer):
    """Multi-head attention from each block of places to its window: the block and a halo around it.

    Beyond the map, keys and values are zeros. As in timm, queries attend to these, too.

    Args:
        dim: channels D.
        num_heads: number of attention heads.
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

        Before and after the places of each block come the nearest places of the neighbouring blocks,
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


@register("halonet")
class HaloNet(AttentionResNet):
    """HaloNet. It takes images of image_size only.

    Its features are the last stage's output: [B, embed_dims[3], H / 32, W / 32].

    Args:
        image_size: pixels, or (height, width). The maps of a stage with attention have to be
            multiples of block_size.
        stem_dim: number of channels of the stem, a multiple of 8.
        stage_depths: number of bottlenecks in each of the four stages.
        embed_dims: number of channels of each of the four stages, multiples of 4.
        attention_every: for each stage a number n: every n-th bottleneck has attention instead of a
            3 x 3 convolution. 0: none has.
        num_heads: number of attention heads in each stage; ignored in a stage without attention.
        block_size: side of a block in tokens, an even number.
        halo_size: width of the halo around a block, in tokens.
        act: activation function of all layers.
        dropout: dropout rate before the classifier.
        droppath: stochastic depth rate of the last bottleneck; the rates grow linearly from 0 at
            the first.
        zero_init_last: whether the weight of the last norm of each bottleneck starts at 0, so that
            a new bottleneck passes its input on unchanged.

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
        _check_sizes(stem_dim, block_size, halo_size)
        self.zero_init_last = zero_init_last
        self.block_size = block_size
        self.halo_size = halo_size
        self.stem = Stem(in_channels, stem_dim, ACTIVATIONS[act])
        self._add_stages(
            stem_dim,
            stage_depths,
            embed_dims,
            attention_every,
            num_heads,
            ACTIVATIONS[act],
            droppath,
        )
        self.head = nn.Sequential(("drop", nn.Dropout(dropout)), ("fc", nn.Identity()))
        self._finish()

    def _attention(
        self, stage: int, dim: int, num_heads: int, stride: int, reduction: int
    ) -> nn.Layer:
        block_pixels = self.block_size * reduction
        unit = f"{block_pixels}: stage {stage} is cut into blocks of BLOCK_SIZE"
        check_multiples(self.image_size, block_pixels, unit)
        return HaloAttention(dim, num_heads, self.block_size, self.halo_size, stride)

    def _init_weights(self, layer: nn.Layer) -> None:
        super()._init_weights(layer)
        if isinstance(layer, HaloAttention):
            # ``apply`` visits a layer after its sublayers: this replaces init_convolution's values.
            for conv in (layer.q, layer.kv):
                Normal(std=fan_in(conv) ** -0.5)(conv.weight)


def _check_sizes(stem_dim: int, block_size: int, halo_size: int) -> None:
    if stem_dim % 8:
        raise InputError(f"STEM_DIM is {stem_dim}, expected a multiple of 8")
    if block_size % 2:
        raise InputError(
            f"BLOCK_SIZE is {block_size}, expected an even number, because stride 2 halves it"
        )
    if halo_size > block_size:
        raise InputError(f"HALO_SIZE is {halo_size}, expected at most BLOCK_SIZE {block_size}")
