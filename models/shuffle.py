"""Shuffle Transformer (Huang et al. 2021, arXiv:2106.03650): windows of neighbouring places, and
then of places from all over the map.

Parameter names, the order of operations and the initialisation are those of
mulinmeng/Shuffle-Transformer (8ba81ea).
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath
from models.layers.attention import attend_heads
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.layout import channels_first, channels_last, mean_of_places
from models.layers.mlp import hidden_width
from models.layers.relative import RelativePositionBias
from models.layers.scale import add_branch
from models.layers.sizes import check_multiples
from models.layers.stages import check_counts, drop_path_rates, feature_info
from models.layers.windows import in_windows, windows_of
from settings.keys import Depth, Factor, InTraining, Kernel, OfClassifier, Positive, Rate, Size
from weights.names import shuffle as names

# Channels of a head.
_HEAD_DIM = 32


class PatchEmbedding(nn.Layer):
    """Two 3 x 3 convolutions of stride 2 with batch norm and ReLU6, then a 1 x 1 convolution.

    Shape: [B, in_channels, H, W] -> [B, dim, H / 4, W / 4].
    """

    def __init__(self, in_channels: int, token_dim: int, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(
            Conv2D(in_channels, token_dim, 3, stride=2, padding=1), BatchNorm2D(token_dim)
        )
        self.conv2 = nn.Sequential(Conv2D(token_dim, dim, 3, stride=2, padding=1), BatchNorm2D(dim))
        self.conv3 = Conv2D(dim, dim, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.conv3(F.relu6(self.conv2(F.relu6(self.conv1(x)))))


class WindowAttention(RelativePositionBias):
    """Multi-head self-attention within each window, with a bias by relative position.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        window_size: places along a window's side, of which H and W are multiples.
        shuffle: whether a window's places lie as far from each other as the map allows, instead of
            beside each other.
        qkv_bias: whether the queries, keys and values have a bias.
        proj_drop: dropout of the output.

    Shape: [B, D, H, W] -> the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: int,
        shuffle: bool,
        qkv_bias: bool,
        proj_drop: float,
    ) -> None:
        super().__init__((window_size, window_size), num_heads, std=0.02)
        self.side = window_size
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.shuffle = shuffle
        self.to_qkv = Conv2D(dim, 3 * dim, 1, bias_attr=None if qkv_bias else False)
        # Drops nothing, as in the authors' code. ``attention_weights`` reads the weights from it.
        self.attn_drop = nn.Dropout(0.0)
        self.proj = Conv2D(dim, dim, 1)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        height, width = x.shape[2:]
        side = self.side
        x = self.to_qkv(channels_last(x), last=True)
        bias = self.position_bias()
        if self.shuffle:
            x = spread(x, side, side)
        x = in_windows(
            x,
            (side, side),
            # Not partial, which Paddle's tracing doesn't look into.
            lambda windows: self._attend(windows, bias),
        )
        if self.shuffle:
            x = spread(x, height // side, width // side)
        return channels_first(self.proj_drop(self.proj(x, last=True)))

    def _attend(self, qkv: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
        return attend_heads(
            [qkv], self.num_heads, self.head_dim, self.head_dim**-0.5, self.attn_drop, bias=bias
        )


def spread(x: paddle.Tensor, rows: int, columns: int) -> paddle.Tensor:
    """Returns maps [B, H, W, D] in which ``rows`` neighbouring rows, and ``columns`` columns, are
    those that lay H / rows and W / columns places from each other.

    With H / rows and W / columns, it puts the places back.
    """
    height, width, dim = x.shape[1:]
    x = windows_of(x.reshape([-1, rows, height // rows, width * dim]), (rows, 1))
    x = windows_of(x.reshape([-1, columns, width // columns, dim]), (columns, 1))
    return x.reshape([-1, height, width, dim])


class Mlp(nn.Layer):
    """A 1 x 1 convolution, ReLU6, a 1 x 1 convolution: [B, dim, H, W] -> the same."""

    def __init__(self, dim: int, hidden_dim: int, drop: float) -> None:
        super().__init__()
        self.fc1 = Conv2D(dim, hidden_dim, 1)
        self.fc2 = Conv2D(hidden_dim, dim, 1)
        self.drop = nn.Dropout(drop)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.drop(self.fc2(self.drop(F.relu6(self.fc1(x)))))


class Block(nn.Layer):
    """x + attn(norm1(x)), then x + local(norm2(x)), a depthwise convolution as large as a window,
    then x + mlp(norm3(x)). The first and the last branch have drop path.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        window_size: side of a window, in tokens.
        shuffle: whether a window's places lie far from each other.
        qkv_bias: whether the queries, keys and values have a bias.
        mlp_ratio: hidden width of the MLP over D.
        drop: dropout after the attention's projection and in the MLP.
        drop_path: rate of stochastic depth.

    Shape: [B, D, H, W] -> the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: int,
        shuffle: bool,
        qkv_bias: bool,
        mlp_ratio: float,
        drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = BatchNorm2D(dim)
        self.attn = WindowAttention(dim, num_heads, window_size, shuffle, qkv_bias, proj_drop=drop)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = BatchNorm2D(dim)
        self.local = Conv2D(dim, dim, window_size, padding=window_size // 2, groups=dim)
        self.norm3 = BatchNorm2D(dim)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(self.attn(self.norm1(x)), onto=x)
        x = add_branch(x, self.local(self.norm2(x)))
        return self.drop_path2(self.mlp(self.norm3(x)), onto=x)


class PatchMerging(nn.Layer):
    """Batch norm, then a 2 x 2 convolution of stride 2: [B, in_dim, H, W] -> [B, dim, H / 2, W / 2]."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.norm = BatchNorm2D(in_dim)
        self.reduction = Conv2D(in_dim, dim, 2, stride=2, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.reduction(self.norm(x))


class Stage(nn.Layer):
    """The merging of the stage before (not in the first stage), then pairs of blocks: the second one's
    windows are of places far from each other.
    """

    def __init__(self, merging: nn.Layer | None, pairs: Iterable[Sequence[Block]]) -> None:
        super().__init__()
        self.patch_partition = merging
        self.layers: Any = nn.LayerList(nn.LayerList(pair) for pair in pairs)

    def blocks(self) -> list[Any]:
        """Returns the blocks in order."""
        return [block for pair in self.layers for block in pair]


@register("shuffle")
class ShuffleTransformer(ImageModel):
    """Shuffle Transformer. It takes images of image_size only.

    Its features are the last stage's output: [B, 32 num_heads[3], H / 32, W / 32].

    Args:
        image_size: pixels, or (height, width): multiples of 32 window_size.
        token_dim: number of channels between the two convolutions of the patch embedding.
        embed_dim: number of channels of the patch embedding and of the first stage.
        stage_depths: number of blocks in each of the four stages, even numbers.
        num_heads: number of attention heads in each of the four stages, each of 32 channels.
            Neighbouring stages must have different numbers.
        window_size: side of a window in tokens, an odd number.
        mlp_ratio: ratio of the MLP's hidden width to its input width.
        qkv_bias: whether queries, keys and values have a bias: PaddleViT's do, the authors' don't.
        dropout: dropout rate after the attention's projection and in the MLP.
        droppath: stochastic depth rate of the last stage. The rates grow linearly from 0 in the
            first stage, and are the same for all blocks of a stage.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    first_conv = "to_token.conv1.0"

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        token_dim: Size = 32,
        embed_dim: Size = 96,
        stage_depths: Sequence[Depth] = (2, 2, 6, 2),
        num_heads: Sequence[Size] = (3, 6, 12, 24),
        window_size: Kernel = 7,
        mlp_ratio: Positive = 4.0,
        qkv_bias: bool = False,
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        _check(embed_dim, stage_depths, num_heads, window_size)
        unit = 32 * window_size
        check_multiples(self.image_size, unit, f"{unit}: WINDOW_SIZE positions of the last stage")
        dims = [_HEAD_DIM * heads for heads in num_heads]
        self.num_features = dims[-1]
        self.to_token = PatchEmbedding(in_channels, token_dim, embed_dim)
        [rates] = drop_path_rates(droppath, [4])
        for i, rate in enumerate(rates):
            pairs = [
                [
                    Block(
                        dims[i],
                        num_heads[i],
                        window_size,
                        shuffle=shuffle,
                        qkv_bias=qkv_bias,
                        mlp_ratio=mlp_ratio,
                        drop=dropout,
                        drop_path=rate,
                    )
                    for shuffle in (False, True)
                ]
                for _ in range(stage_depths[i] // 2)
            ]
            merging = PatchMerging(dims[i - 1], dims[i]) if i else None
            setattr(self, f"stage{i + 1}", Stage(merging, pairs))
        self.feature_info = feature_info([f"stage{i}" for i in range(1, 5)], dims, (4, 8, 16, 32))
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            raise InputError(
                f"the model takes {self.input_sizes}, found {x.shape[2]} x {x.shape[3]}"
            )
        return self.to_token(x)

    def _stages(self) -> Iterable[Any]:
        return [self.stage1, self.stage2, self.stage3, self.stage4]

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage.patch_partition is not None:
            x = stage.patch_partition(x)
        return self._run_all(stage.blocks(), x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block, and the classifier. The first block of a
        stage has the merging before it.
        """
        groups: list[tuple[str, ...]] = [("to_token",)]
        for i, stage in enumerate(self._stages(), start=1):
            blocks: list[tuple[str, ...]] = [
                (f"stage{i}.layers.{pair}.{j}",)
                for pair in range(len(stage.layers))
                for j in (0, 1)
            ]
            if stage.patch_partition is not None:
                blocks[0] += (f"stage{i}.patch_partition",)
            groups += blocks
        return [*groups, ("head",)]

    def no_weight_decay(self) -> set[str]:
        return {
            name
            for name, _ in self.named_parameters()
            if name.endswith("relative_position_bias_table")
        }

    def _init_weights(self, layer: nn.Layer) -> None:
        if isinstance(layer, (nn.Conv2D, nn.Linear)):
            Normal(std=0.02)(layer.weight)
            if layer.bias is not None:
                Constant(0.0)(layer.bias)


def _check(
    embed_dim: int, stage_depths: Sequence[int], num_heads: Sequence[int], window_size: int
) -> None:
    if len(stage_depths) != 4 or any(depth % 2 for depth in stage_depths):
        raise InputError(
            f"STAGE_DEPTHS is {list(stage_depths)}, expected four even numbers: one per stage"
        )
    check_counts(4, NUM_HEADS=num_heads)
    # A merging, which halves the map, comes only before another width.
    if embed_dim != _HEAD_DIM * num_heads[0]:
        raise InputError(
            f"EMBED_DIM is {embed_dim}, expected {_HEAD_DIM * num_heads[0]}, 32 for each head"
        )
    if any(heads == following for heads, following in pairwise(num_heads)):
        raise InputError(
            f"NUM_HEADS is {list(num_heads)}, expected numbers that differ from stage to stage"
        )
    if window_size % 2 == 0:
        raise InputError(f"WINDOW_SIZE is {window_size}, expected an odd number")
