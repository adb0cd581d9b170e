"""VOLO, the Vision Outlooker (Yuan et al. 2021, arXiv:2106.13112).

It can be trained by token labels (Jiang et al. 2021, arXiv:2104.10858). Parameter names, the order
of operations and the initialisation are those of timm's ``VOLO``. The weight of a Linear is [in,
out] here and [out, in] there.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal

import ops
from errors import InputError
from models.base import ImageModel, register
from models.layers import Attention, LayerNorm, Linear, init_linear, set_norm_eps
from models.layers.activations import ReLU
from models.layers.attention import attend_heads, can_fuse
from models.layers.batch_norm import BatchNorm2D
from models.layers.block import Block
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.layers.layout import channels_last
from models.layers.linear import in_float32
from models.layers.sizes import check_multiples
from models.layers.stages import check_counts, check_stages, drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import volo as names


def neighbours(x: paddle.Tensor, axis: int) -> paddle.Tensor:
    """Returns the windows of 3 places with stride 2 along ``axis``, in a new axis after it.

    Window i has the places 2 i - 1, 2 i and 2 i + 1; a zero stands before the first place. Applied
    to rows and to columns, it is ``unfold`` with 3 x 3 windows, stride 2 and padding 1.

    Shape: [..., 2 n, ...] -> [..., n, 3, ...].
    """
    shape = [-1, *x.shape[1:]]
    even, odd = x.reshape([*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :]]).unbind(axis + 1)
    before = paddle.concat(
        [paddle.zeros_like(_part(odd, axis, 0, 1)), _part(odd, axis, 0, -1)], axis
    )
    return paddle.stack([before, even, odd], axis + 1)


def sum_windows(x: paddle.Tensor, axis: int) -> paddle.Tensor:
    """Returns for each place the sum of its values in all windows that contain it.

    It is the transpose of ``neighbours``. Applied to rows and to columns, it is ``fold``.

    Shape: [..., n, 3, ...] -> [..., 2 n, ...].
    """
    before, even, odd = x.unbind(axis + 1)
    odd = odd + paddle.concat(
        [_part(before, axis, 1, None), paddle.zeros_like(_part(before, axis, 0, 1))], axis
    )
    shape = [-1, *even.shape[1:]]
    return paddle.stack([even, odd], axis + 1).reshape(
        [*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]]
    )


def _part(x: paddle.Tensor, axis: int, start: int, end: int | None) -> paddle.Tensor:
    """Returns ``x[..., start:end, ...]`` along ``axis``."""
    return x[(slice(None),) * axis + (slice(start, end),)]


class OutlookAttention(nn.Layer):
    """Outlook attention: attention within 3 x 3 windows, whose weights a Linear computes.

    There is a window around every second place of each row and column. A Linear of the mean of 2 x
    2 places computes the 9 x 9 attention weights of their window. The output of a place is the sum
    of its outputs in all windows that contain it.

    Args:
        dim: channels D.
        num_heads: number of attention heads.
        qkv_bias: whether the values have a bias.
        attn_drop: dropout rate of the attention weights.

    Shape: [B, 2 h, 2 w, D] -> the same.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, attn_drop: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.v = Linear(dim, dim, bias_attr=None if qkv_bias else False)
        # The weights of 9 queries and 9 keys for each head.
        self.attn = Linear(dim, 9 * 9 * num_heads)
        self.drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        rows, columns = [side // 2 for side in x.shape[1:3]]
        dim = x.shape[3]
        mean = x.reshape([-1, rows, 2, columns, 2, dim]).mean(axis=[2, 4])
        v = self.v(x)
        attn = self.attn(mean)
        if can_fuse(v, self.drop):
            return self.proj(ops.outlook(v, attn, self.num_heads, self.scale))
        # [B, h, 3, w, 3, D] -> [B, h, w, 3, 3, D]
        v = neighbours(neighbours(v, 1), 3).transpose([0, 1, 3, 2, 4, 5])
        v = v.reshape([-1, rows * columns, 9, self.num_heads, self.head_dim])
        # [B, heads, h * w, 9, head_dim]
        v = v.transpose([0, 3, 1, 2, 4])
        attn = attn.reshape([-1, rows * columns, self.num_heads, 9, 9]).transpose([0, 2, 1, 3, 4])
        attn = self.drop(F.softmax(attn * self.scale, axis=-1))
        x = paddle.matmul(attn, v).transpose([0, 2, 3, 1, 4])
        x = x.reshape([-1, rows, columns, 3, 3, dim]).transpose([0, 1, 3, 2, 4, 5])
        return self.proj(sum_windows(sum_windows(x, 3), 1))


class ClassAttention(nn.Layer):
    """Multi-head attention of the first token to all tokens.

    Shape: [B, N, D] -> [B, 1, D].
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, attn_drop: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.kv = Linear(dim, 2 * dim, bias_attr=None if qkv_bias else False)
        self.q = Linear(dim, dim, bias_attr=None if qkv_bias else False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        q = self.q(x[:, :1])
        kv = self.kv(x)
        x = attend_heads([q, kv], self.num_heads, self.head_dim, self.scale, self.attn_drop)
        return self.proj(x)


class ClassBlock(Block):
    """A transformer block that changes the first token only.

    Shape: [B, N, D] -> [B, N, D].
    """

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        token = self.drop_path1(self.attn(self.norm1(x)), onto=x[:, :1])
        token = self.drop_path2(self.mlp(self.norm2(token)), onto=token)
        return paddle.concat([token, x[:, 1:]], axis=1)


class PatchEmbed(nn.Layer):
    """Three convolutions, the first of which halves the image, then the patches.

    Shape: [B, in_channels, H, W] -> [B, dim, H / patch_size, W / patch_size].
    """

    def __init__(
        self,
        image_size: Sequence[int],
        in_channels: int,
        hidden_dim: int,
        dim: int,
        patch_size: int,
    ) -> None:
        super().__init__()
        self.image_size = tuple(image_size)
        self.conv = nn.Sequential()
        channels = in_channels
        for i, (kernel, stride) in enumerate(((7, 2), (3, 1), (3, 1))):
            conv = Conv2D(
                channels, hidden_dim, kernel, stride=stride, padding=kernel // 2, bias_attr=False
            )
            for j, layer in enumerate((conv, BatchNorm2D(hidden_dim), ReLU())):
                self.conv.add_sublayer(str(3 * i + j), layer)
            channels = hidden_dim
        self.proj = Conv2D(hidden_dim, dim, patch_size // 2, stride=patch_size // 2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            height, width = self.image_size
            raise InputError(
                f"the model takes images of {height} x {width}, found {x.shape[2]} x {x.shape[3]}"
            )
        return self.proj(self.conv(x))


class Downsample(nn.Layer):
    """A 2 x 2 convolution that halves rows and columns.

    Shape: [B, 2 h, 2 w, in_dim] -> [B, h, w, dim].
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = Conv2D(in_dim, dim, 2, stride=2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.proj(x, last=True)


@register("volo")
class VOLO(ImageModel):
    """VOLO. It takes images of image_size only.

    The logits are those of the class token plus half the largest logits of the patches. Its
    features are the class token, then the patches, normalised: [B, 1 + patches, num_features].

    Args:
        image_size: pixels, or (height, width): multiples of 2 * patch_size.
        patch_size: side of a patch in pixels in the first stage: 4, 8 or 16. In later stages it is
            twice as long.
        stem_hidden_dim: number of channels of the convolutions before the patch embedding.
        stage_depths: number of blocks in each of the four stages. Those of the first have outlook
            attention.
        embed_dims: number of channels of each of the four stages. The last three must be equal.
        num_heads: number of attention heads in each of the four stages.
        mlp_ratio: ratio of the MLPs' hidden width to their input width; one number, or one per
            stage.
        qkv_bias: whether the queries, keys and values have a bias.
        dropout: dropout rate after the position embedding.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block. The rates grow linearly from 0 at the
            first block, but the first stage has none.

    Attributes:
        dense_training: True: train mode returns (logits [B, K], logits of the patches [B, patches,
            K], ``mixed``), for ``training.losses.TokenLabelCrossEntropy``.
        mix_token: True: with dense_training, a rectangle of patches of each image is swapped with
            that of another one, the first image's with the last one's and so on. The logits of the
            patches are swapped back. ``mixed`` [] is the share of patches that were swapped; 0 if
            mix_token is False.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    first_conv = "patch_embed.conv.0"
    layout = "NHWC"
    pos_embed_layout = "NHWC"
    global_pool = "token"
    dense_training = False
    mix_token = False

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 8,
        in_channels: int = 3,
        num_classes: int = 1000,
        stem_hidden_dim: Size = 64,
        stage_depths: Sequence[Depth] = (4, 4, 8, 2),
        embed_dims: Sequence[Size] = (192, 384, 384, 384),
        num_heads: Sequence[Size] = (6, 12, 12, 12),
        mlp_ratio: Positive | Sequence[Positive] = 3.0,
        qkv_bias: bool = False,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        mlp_ratios = [mlp_ratio] * 4 if isinstance(mlp_ratio, int | float) else mlp_ratio
        _check_sizes(self.image_size, patch_size, stage_depths, embed_dims, num_heads, mlp_ratios)
        self.num_features = embed_dims[-1]
        self.patch_embed = PatchEmbed(
            self.image_size, in_channels, stem_hidden_dim, embed_dims[0], patch_size
        )
        rows, columns = (side // (2 * patch_size) for side in self.image_size)
        initializer = Normal(std=0.02)
        self.pos_embed = self.create_parameter(
            [1, rows, columns, self.num_features], default_initializer=initializer
        )
        self.cls_token = self.create_parameter(
            [1, 1, self.num_features], default_initializer=initializer
        )
        self.pos_drop = nn.Dropout(dropout)
        self.network = nn.LayerList()
        for i, drop_paths in enumerate(drop_path_rates(droppath, stage_depths)):
            dim = embed_dims[i]
            blocks = nn.LayerList()
            for drop_path in drop_paths:
                # The first stage has outlookers, without drop path.
                attention = Attention if i else OutlookAttention
                attn = attention(dim, num_heads[i], qkv_bias=qkv_bias, attn_drop=attention_dropout)
                block = Block(
                    dim,
                    attn,
                    mlp_ratio=mlp_ratios[i],
                    init_values=None,
                    drop=0.0,
                    drop_path=drop_path if i else 0.0,
                )
                blocks.append(block)
            self.network.append(blocks)
            if i == 0:
                self.network.append(Downsample(embed_dims[0], embed_dims[1]))
        self.post_network = nn.LayerList()
        for _ in range(2):
            attn = ClassAttention(self.num_features, num_heads[-1], qkv_bias, attention_dropout)
            block = ClassBlock(
                self.num_features,
                attn,
                mlp_ratio=mlp_ratios[-1],
                init_values=None,
                drop=0.0,
                drop_path=0.0,
            )
            self.post_network.append(block)
        # The index of each stage in ``network``; index 1 is the downsampling.
        self.stage_indices = (0, 2, 3, 4)
        modules = [f"network.{index}" for index in self.stage_indices]
        coarse = 2 * patch_size
        self.feature_info = feature_info(modules, embed_dims, (patch_size, coarse, coarse, coarse))
        self.norm = LayerNorm(self.num_features)
        self._add_classifiers()
        set_norm_eps(self, 1e-5)
        self.apply(self._init_weights)
        self._scale_classifiers()

    @property
    def blocks(self) -> list[Any]:
        """Returns all blocks, from the first to the last."""
        stages = [*(self._blocks(index) for index in self.stage_indices), self.post_network]
        return [block for stage in stages for block in stage]

    def _blocks(self, index: int) -> Any:
        return self.network[index]

    def forward(
        self, x: paddle.Tensor
    ) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        if not (self.training and self.dense_training and self.num_classes):
            return self.forward_head(self.forward_features(x))
        x = self._embed(x)
        # [1, rows, columns]: 1 where a patch is swapped.
        mask = paddle.zeros(self.pos_embed.shape[:3])
        if self.mix_token:
            mask = self._random_rectangle()
            # The first stage has twice as many places along each side.
            fine_mask = mask.unsqueeze(-1).repeat_interleave(2, 1).repeat_interleave(2, 2)
            x = x + (x.flip([0]) - x) * fine_mask.astype(x.dtype)
        for stage in self._stages():
            x = self._stage(stage, x, None)
        x = self._head_input(x, last=True)
        logits = self.head(x[:, 0])
        patch_logits = self.aux_head(x[:, 1:])
        if self.mix_token:
            patch_mask = mask.flatten(1).unsqueeze(-1).astype(patch_logits.dtype)
            patch_logits = patch_logits + (patch_logits.flip([0]) - patch_logits) * patch_mask
        return logits, patch_logits, mask.mean()

    def _random_rectangle(self) -> paddle.Tensor:
        """Returns zeros [1, rows, columns] with a random rectangle of ones, drawn as CutMix does
        (arXiv:1905.04899).
        """
        # The side over the image's. CutMix's sqrt(1 - lambda) with a uniform lambda is distributed
        # as sqrt(lambda).
        ratio = paddle.rand([]).sqrt()
        within = []
        for count in self.pos_embed.shape[1:3]:
            length = (ratio * count).floor()
            middle = (paddle.rand([]) * count).floor()
            place = paddle.arange(count, dtype="float32")
            start = middle - (length / 2).floor()
            end = middle + ((length + 1) / 2).floor()
            within.append(((place >= start) & (place < end)).astype("float32"))
        return (within[0].unsqueeze(-1) * within[1]).unsqueeze(0)

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return channels_last(self.patch_embed(x))

    def _stages(self) -> Iterable[Any]:
        return self.stage_indices

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage == 0:
            return self._run_all(self._blocks(0), x)
        if stage == 2:
            x = self.pos_drop(self.network[1](x) + self.pos_embed)
        x = self._run_all(self._blocks(stage), x.flatten(1, 2))
        return x.reshape([-1, *self.pos_embed.shape[1:]])

    def _fits_last_norm(self, index: int) -> bool:
        return index > 0

    def _head_input(self, x: paddle.Tensor, last: bool) -> paddle.Tensor:
        if not last:
            return x
        x = paddle.concat([self.cls_token.expand([x.shape[0], -1, -1]), x.flatten(1, 2)], axis=1)
        return self.norm(self._run_all(self.post_network, x))

    def grid(self, places: int) -> tuple[int, int]:
        _, rows, columns, _ = self.pos_embed.shape
        return rows, columns

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        logits = self.head(x[:, 0])
        if not self.num_classes:
            return logits
        # In float32: not every build of Paddle has a gradient of the maximum in half precision.
        patch_logits = in_float32(self.aux_head(x[:, 1:]))
        # As in PyTorch, the first of equal values gets the gradient. The gradient of paddle.max
        # takes seconds on a CPU, and in Paddle 2.6 each of equal values gets all of it.
        if self.training or ops.usable(patch_logits):
            # On a GPU argmax is -1 where all are NaN.
            place = patch_logits.argmax(axis=1, keepdim=True).clip(min=0)
            return logits + 0.5 * paddle.take_along_axis(patch_logits, place, 1)[:, 0]
        return logits + 0.5 * patch_logits.max(axis=1)

    def classifier_names(self) -> tuple[str, ...]:
        return ("head", "aux_head")

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block, each block of the class token, and the
        classifiers with their norm. The first block of the second stage has the downsampling before
        it, the first block of the class token has the token.
        """
        groups: list[tuple[str, ...]] = [("patch_embed",)]
        for index in self.stage_indices:
            blocks: list[tuple[str, ...]] = [
                (f"network.{index}.{i}",) for i in range(len(self._blocks(index)))
            ]
            if index == 2:
                blocks[0] += ("network.1", "pos_embed")
            groups += blocks
        groups += [("post_network.0", "cls_token"), ("post_network.1",)]
        return [*groups, ("norm", "head", "aux_head")]

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            init_as_torch(layer)


def _check_sizes(
    image_size: Sequence[int],
    patch_size: int,
    depths: Sequence[int],
    dims: Sequence[int],
    num_heads: Sequence[int],
    ratios: Sequence[float],
) -> None:
    check_stages(depths, dims)
    check_counts(4, NUM_HEADS=num_heads, MLP_RATIO=ratios)
    if patch_size not in (4, 8, 16):
        raise InputError(f"PATCH_SIZE is {patch_size}, expected 4, 8 or 16")
    check_multiples(image_size, 2 * patch_size, f"{2 * patch_size}, two patches")
    if len(set(dims[1:])) > 1:
        raise InputError(f"EMBED_DIMS is {list(dims)}, expected three equal values at the end")
    for dim, heads in zip(dims, num_heads, strict=True):
        if dim % heads:
            raise InputError(
                f"NUM_HEADS has {heads}, expected a divisor of the {dim} channels in EMBED_DIMS"
            )
