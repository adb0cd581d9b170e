"""CSWin Transformer (Dong et al. 2021, arXiv:2107.00652), with attention in cross-shaped windows.

Half of a block's heads attend within vertical stripes of the map, the other half within horizontal
ones. Parameter names, the order of operations and the initialisation are those of
microsoft/CSWin-Transformer (f111ae2).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp, init_linear
from models.layers.attention import attend_heads
from models.layers.conv import Conv2D
from models.layers.graph_sizes import extended, is_known, rounded_up
from models.layers.init import init_as_torch
from models.layers.layout import channels_last, concat, split
from models.layers.linear import linear
from models.layers.mlp import hidden_width
from models.layers.scale import add_branch
from models.layers.stages import check_counts, drop_path_rates, feature_info
from models.layers.windows import in_windows, pad_maps
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import cswin as names


class StripeAttention(nn.Layer):
    """Multi-head self-attention within each stripe, plus a depthwise 3 x 3 convolution of the values
    (the paper's locally-enhanced positional encoding).

    Args:
        dim: channels D of the queries, keys and values.
        num_heads: number of attention heads.
        attn_drop: dropout rate of the attention weights.

    Shape: [B * stripes, height * width, 3 D] -> [B * stripes, height * width, D].
    """

    def __init__(self, dim: int, num_heads: int, attn_drop: float) -> None:
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.get_v = Conv2D(dim, dim, 3, padding=1, groups=dim)
        self.attn_drop = nn.Dropout(attn_drop)

    def forward(self, qkv: paddle.Tensor, height: Any, width: Any) -> paddle.Tensor:
        """Returns the outputs for stripes of ``height`` x ``width`` places."""
        q, k, v = split(qkv, [self.dim] * 3, axis=2)
        local = self.get_v(v.reshape([-1, height, width, self.dim]), last=True)
        scale = self.head_dim**-0.5
        x = attend_heads(
            [q, k, v], self.num_heads, self.head_dim, scale, self.attn_drop, flash=True
        )
        # Added as maps: Paddle Inference adds a convolution's tokens in another order (Paddle 3.3.1).
        x = add_branch(x.reshape([-1, height, width, self.dim]), local)
        return x.reshape([-1, height * width, self.dim])


class Block(nn.Layer):
    """x + attention(norm1(x)) within stripes, then x + mlp(norm2(x)), each branch with drop path.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        split_size: width of the stripes in places; None: all heads attend to the whole map.
        qkv_bias: whether the queries, keys and values have a bias.
        mlp_ratio: hidden width of the MLP over D.
        drop: dropout in the MLP.
        attn_drop: dropout rate of the attention weights.
        drop_path: rate of stochastic depth.
        pad_tokens: how maps that aren't a multiple of the stripes are padded (``CSwin``).

    Shape: [B, H, W, D] -> the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        split_size: int | None,
        qkv_bias: bool,
        mlp_ratio: float,
        drop: float,
        attn_drop: float,
        drop_path: float,
        pad_tokens: int | None,
    ) -> None:
        super().__init__()
        self.split_size = split_size
        self.pad_tokens = pad_tokens
        self.norm1 = LayerNorm(dim)
        self.qkv = Linear(dim, 3 * dim, bias_attr=None if qkv_bias else False)
        branches = 2 if split_size else 1
        self.attns: Any = nn.LayerList(
            StripeAttention(dim // branches, num_heads // branches, attn_drop)
            for _ in range(branches)
        )
        self.proj = Linear(dim, dim)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(self.proj(self._attend(self.norm1(x))), onto=x)
        return self.drop_path2(self.mlp(self.norm2(x)), onto=x)

    def _attend(self, x: paddle.Tensor) -> paddle.Tensor:
        height, width = x.shape[1:3]
        unit = self.pad_tokens
        if unit:
            x = _padded(x, unit)
        x = self._attend_in_stripes(x) if self.split_size else self._attend_to_map(x)
        return x[:, :height, :width] if unit else x

    def _attend_to_map(self, x: paddle.Tensor) -> paddle.Tensor:
        height, width, dim = x.shape[1:]
        x = self.attns[0](self.qkv(x).reshape([-1, height * width, 3 * dim]), height, width)
        return x.reshape([-1, height, width, dim])

    def _attend_in_stripes(self, x: paddle.Tensor) -> paddle.Tensor:
        height, width, dim = x.shape[1:]
        first, second = split(self._project_by_branch(x), [3 * dim // 2] * 2, axis=3)
        first = in_stripes(first, (height, self.split_size), self.attns[0])
        second = in_stripes(second, (self.split_size, width), self.attns[1])
        return concat([first, second], axis=3)

    def _project_by_branch(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns queries, keys and values of the first half of the heads, then those of the second
        half: [B, H, W, D] -> [B, H, W, 3 D].

        ``qkv`` has the queries of both halves first. Its weights are sorted, which are fewer than
        its outputs.
        """
        dim = x.shape[3]
        weight = self.qkv.weight.reshape([dim, 3, 2, dim // 2])
        weight = weight.transpose([0, 2, 1, 3]).reshape([dim, 3 * dim])
        bias = self.qkv.bias
        if bias is not None:
            bias = bias.reshape([3, 2, dim // 2]).transpose([1, 0, 2]).flatten()
        return linear(x, weight, bias)


def in_stripes(
    x: paddle.Tensor, stripe: Sequence[Any], attention: StripeAttention
) -> paddle.Tensor:
    """Applies ``attention`` within each stripe of maps [B, H, W, 3 D].

    Maps that aren't a multiple of a stripe are padded by zeros for it, with half of them before the
    map, as in the authors' segmentation.
    """
    # So many steps up are half of the padding down.
    shift = []
    for axis in (0, 1):
        side = x.shape[1 + axis]
        whole = rounded_up(side, stripe[axis])
        shift.append((whole - (whole - side) // 2) % whole)
    return in_windows(
        x,
        stripe,
        # Not partial, which Paddle's tracing doesn't look into.
        lambda windows: attention(windows, stripe[0], stripe[1]),
        shift,
        pad_first=True,
    )


def _padded(x: paddle.Tensor, unit: int) -> paddle.Tensor:
    """Returns maps [B, H, W, D] with zeros below and to the right, up to a multiple of ``unit``."""
    height, width = x.shape[1:3]
    if is_known(height, width):
        return pad_maps(x, -height % unit, -width % unit)
    x = extended(x, 1, rounded_up(height, unit))
    return extended(x, 2, rounded_up(width, unit))


class MergeBlock(nn.Layer):
    """A 3 x 3 convolution of stride 2, then a norm.

    Shape: [B, H, W, in_dim] -> [B, H / 2, W / 2, dim], rounded up.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.conv = Conv2D(in_dim, dim, 3, stride=2, padding=1)
        self.norm = LayerNorm(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(self.conv(x, last=True))


@register("cswin")
class CSwin(ImageModel):
    """CSWin Transformer. It takes images of at least 3 x 3 pixels.

    Its features are the last stage's tokens, normalised: [B, height, width, 8 embed_dim].

    Args:
        embed_dim: number of channels of the first stage. Each further stage has twice as many as
            the one before.
        stage_depths: number of blocks in each of the four stages.
        split_sizes: for each stage the width of its stripes, in tokens. In the last stage, all
            heads attend to the whole map, and the number is only used by pad_tokens.
        num_heads: number of attention heads in each stage.
        mlp_ratio: ratio of the MLP's hidden width to its input width.
        qkv_bias: whether the queries, keys and values have a bias.
        pad_tokens: how maps are padded whose sides aren't multiples of their stage's split_sizes.
            True: with zero tokens on the right and at the bottom, before queries, keys and values
            are computed, in the last stage as well (PaddleViT's segmentation). False: queries, keys
            and values are padded with zeros on all sides, and only across the stripes (the authors'
            segmentation).
        dropout: dropout rate in the MLP.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    first_conv = "stage1_conv_embed.0"
    layout = "NHWC"
    min_image_size = 3

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 64,
        stage_depths: Sequence[Depth] = (1, 2, 21, 1),
        split_sizes: Sequence[Size] = (1, 2, 7, 7),
        num_heads: Sequence[Size] = (2, 4, 8, 16),
        mlp_ratio: Positive = 4.0,
        qkv_bias: bool = True,
        pad_tokens: bool = False,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if len(stage_depths) != 4:
            raise InputError(
                f"STAGE_DEPTHS is {list(stage_depths)}, expected four numbers: one per stage"
            )
        check_counts(4, SPLIT_SIZES=split_sizes, NUM_HEADS=num_heads)
        dims = [embed_dim * 2**i for i in range(4)]
        _check_heads(dims, num_heads)
        self.num_features = dims[-1]
        self.stage1_conv_embed = nn.Sequential(
            ("0", Conv2D(in_channels, embed_dim, 7, stride=4, padding=2)),
            ("2", LayerNorm(embed_dim)),
        )
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            if i:
                setattr(self, f"merge{i}", MergeBlock(dims[i - 1], dims[i]))
            blocks = [
                Block(
                    dims[i],
                    num_heads[i],
                    split_size=None if i == 3 else split_sizes[i],
                    qkv_bias=qkv_bias,
                    mlp_ratio=mlp_ratio,
                    drop=dropout,
                    attn_drop=attention_dropout,
                    drop_path=rate,
                    pad_tokens=split_sizes[i] if pad_tokens else None,
                )
                for rate in rates
            ]
            setattr(self, f"stage{i + 1}", nn.LayerList(blocks))
        modules = [f"stage{i}" for i in range(1, 5)]
        self.feature_info = feature_info(modules, dims, (4, 8, 16, 32))
        self.norm = LayerNorm(self.num_features)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        conv, norm = self.stage1_conv_embed
        return norm(channels_last(conv(x)))

    def _stages(self) -> Iterable[Any]:
        return range(4)

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage:
            x = getattr(self, f"merge{stage}")(x)
        return self._run_all(getattr(self, f"stage{stage + 1}"), x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x.flatten(1, 2).mean(axis=1))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block, and the classifier with the last norm. The
        first block of a stage has the merging before it.
        """
        groups: list[tuple[str, ...]] = [("stage1_conv_embed",)]
        for i in range(1, 5):
            blocks: list[tuple[str, ...]] = [
                (f"stage{i}.{j}",) for j in range(len(getattr(self, f"stage{i}")))
            ]
            if i > 1:
                blocks[0] += (f"merge{i - 1}",)
            groups += blocks
        return [*groups, ("norm", "head")]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            init_as_torch(layer)


def _check_heads(dims: Sequence[int], num_heads: Sequence[int]) -> None:
    for i, (dim, heads) in enumerate(zip(dims, num_heads, strict=True)):
        if dim % heads or (i < 3 and heads % 2):
            expected = "a divisor" if i == 3 else "an even divisor"
            raise InputError(
                f"NUM_HEADS has {heads}, expected {expected} of the {dim} channels of its stage"
            )
