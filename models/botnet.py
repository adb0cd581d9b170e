"""BoTNet (Srinivas et al. 2021, arXiv:2101.11605), a ResNet whose last stage attends to all places.

Parameter names, the order of operations and the initialisation are those of timm's ``ByobNet`` with
``BottleneckAttn``. PaddleViT's BoTNet has another stem, and differs in three further keys.
"""

from collections.abc import Sequence
from typing import Literal

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal

import ops
from errors import InputError
from models.attention_resnet import (
    ACTIVATIONS,
    AttentionResNet,
    PlainStem,
    RelativePositions,
    Stem,
)
from models.base import register
from models.layers.attention import can_fuse
from models.layers.conv import AvgPool2D, Conv2D
from models.layers.init import fan_in
from models.layers.sizes import check_multiples
from settings.keys import Count, Depth, Factor, InTraining, OfClassifier, Rate, Size
from weights.names import botnet as names


class Attention(nn.Layer):
    """Multi-head attention of all places of a square map, with scores of relative positions.

    Args:
        dim: channels D.
        num_heads: number of attention heads.
        side: places along a side of the map.
        stride: 1, or 2: each 2 x 2 places of the output are averaged.
        scale_pos_embed: whether the scores of positions are divided by the square root of a head's
            channels, as those of queries and keys are.

    Shape: [B, D, side, side] -> [B, D, side / stride, side / stride].
    """

    def __init__(
        self, dim: int, num_heads: int, side: int, stride: int, scale_pos_embed: bool
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale_pos_embed = scale_pos_embed
        self.qkv = Conv2D(dim, 3 * dim, 1, bias_attr=False)
        self.pos_embed = RelativePositions(side, side, self.head_dim)
        # Drops nothing. ``attention_weights`` reads the weights from its input.
        self.attn_drop = nn.Dropout(0.0)
        self.pool = AvgPool2D(2, 2) if stride == 2 else nn.Identity()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        side = x.shape[2]
        dim = self.head_dim
        scale = dim**-0.5
        qkv = self.qkv(x).reshape([-1, 3, self.num_heads, dim, side**2])
        qkv = qkv.transpose([1, 0, 2, 4, 3])
        # [B * heads, places, head_dim]
        q, k, v = (each.flatten(0, 1) for each in qkv.unbind())
        positions = self.pos_embed(q.reshape([-1, 1, side**2, dim])).flatten(0, 1)
        if self.scale_pos_embed:
            positions = positions * scale
        if can_fuse(q, self.attn_drop):
            # The operator takes each head as an item of the batch with a single head.
            x = ops.attention([q, k, v], 1, dim, scale, positions.unsqueeze(1))
        else:
            scores = paddle.matmul(q * scale, k, transpose_y=True) + positions
            x = paddle.matmul(self.attn_drop(F.softmax(scores, axis=-1)), v)
        x = x.reshape([-1, self.num_heads, side**2, dim]).transpose([0, 1, 3, 2])
        return self.pool(x.reshape([-1, self.num_heads * dim, side, side]))


@register("botnet")
class BoTNet(AttentionResNet):
    """BoTNet. It takes square images of image_size only.

    Its features are the last stage's output: [B, embed_dims[3], H / 32, W / 32], or H / 16 with a
    last_stride of 1.

    Args:
        image_size: pixels, a multiple of 32.
        stem_type: "tiered": three 3 x 3 convolutions; "plain": a 7 x 7 one, as in ResNet.
        stem_dim: number of channels of the stem, a multiple of 8.
        stage_depths: number of bottlenecks in each of the four stages.
        embed_dims: number of channels of each of the four stages, multiples of 4.
        attention_every: for each stage a number n: every n-th bottleneck has attention instead of a
            3 x 3 convolution. 0: none has.
        num_heads: number of attention heads in each stage; ignored in a stage without attention.
        last_stride: stride of the last stage, 1 or 2. With 1, its maps are as large as those of the
            stage before.
        scale_pos_embed: whether the scores of relative positions are divided by the square root of
            a head's channels, as the products of queries and keys are.
        shortcut_act: whether the activation also follows the shortcut's convolution in bottlenecks
            with attention.
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

    def __init__(
        self,
        image_size: int | Sequence[int] = 256,
        in_channels: int = 3,
        num_classes: int = 1000,
        stem_type: Literal["tiered", "plain"] = "tiered",
        stem_dim: Size = 64,
        stage_depths: Sequence[Depth] = (2, 2, 2, 2),
        embed_dims: Sequence[Size] = (256, 512, 1024, 2048),
        attention_every: Sequence[Count] = (0, 0, 2, 1),
        num_heads: Sequence[Count] = (0, 0, 4, 4),
        last_stride: Size = 2,
        scale_pos_embed: bool = False,
        shortcut_act: bool = False,
        act: Literal["relu", "silu"] = "relu",
        dropout: InTraining[OfClassifier[Rate]] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
        zero_init_last: InTraining[bool] = True,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        height, width = self.image_size
        if height != width:
            raise InputError(f"IMAGE_SIZE is {height} x {width}, BoTNet takes square images")
        check_multiples(self.image_size, 32, "32, a place's pixels")
        if stem_dim % 8:
            raise InputError(f"STEM_DIM is {stem_dim}, expected a multiple of 8")
        if last_stride > 2:
            raise InputError(f"LAST_STRIDE is {last_stride}, expected 1 or 2")
        self.scale_pos_embed = scale_pos_embed
        self.zero_init_last = zero_init_last
        activation = ACTIVATIONS[act]
        if stem_type == "plain":
            self.first_conv = "stem.conv"
            self.stem = PlainStem(in_channels, stem_dim, activation)
        else:
            self.first_conv = "stem.conv1.conv"
            self.stem = Stem(in_channels, stem_dim, activation)
        self._add_stages(
            stem_dim,
            stage_depths,
            embed_dims,
            attention_every,
            num_heads,
            activation,
            droppath,
            strides=(1, 2, 2, last_stride),
            shortcut_act=shortcut_act,
        )
        self.head = nn.Sequential(("drop", nn.Dropout(dropout)), ("fc", nn.Identity()))
        self._finish()

    def _attention(
        self, stage: int, dim: int, num_heads: int, stride: int, reduction: int
    ) -> nn.Layer:
        side = self.image_size[0] // reduction
        return Attention(dim, num_heads, side, stride, self.scale_pos_embed)

    def _init_weights(self, layer: nn.Layer) -> None:
        super()._init_weights(layer)
        if isinstance(layer, Attention):
            # ``apply`` visits a layer after its sublayers: this replaces init_convolution's values.
            Normal(std=fan_in(layer.qkv) ** -0.5)(layer.qkv.weight)
