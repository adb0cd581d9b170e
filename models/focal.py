"""Focal Transformer (Yang et al. 2021, arXiv:2107.00641): windows that see their surroundings, near
ones place by place and far ones as means of windows.

Parameter names, the order of operations and the initialisation are those of
microsoft/Focal-Transformer (57bb303).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp, init_linear
from models.layers.attention import attend_heads
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.layers.layout import channels_first, channels_last, concat, split
from models.layers.linear import matmul
from models.layers.mlp import hidden_width
from models.layers.relative import RelativePositionBias, gather_columns
from models.layers.sizes import check_multiples
from models.layers.stages import check_counts, drop_path_rates, feature_info
from models.layers.windows import (
    in_windows,
    neighbourhoods,
    pad_maps,
    surrounded_windows,
    windows_of,
)
from settings.keys import Count, Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import focal as names


class FocalAttention(RelativePositionBias):
    """Multi-head attention of each window to itself, to the places around it, and to pooled windows.

    The places around a window are those of the authors' four copies of the map, each rolled by
    ``expand_size`` in both directions. So maps continue at their other side. A place of two copies
    counts twice there, with a bias for each: here it counts once, with the logarithm of the sum of
    both biases' exponentials, which gives the same weights.

    Args:
        dim: channels D of the tokens.
        num_heads: heads H.
        window_size: side of a window, in tokens.
        expand_size: how many places beyond a window it attends to, at most half a window; 0: none.
        focal_window: pooled windows along the side of the region that a window attends to, an odd
            number; 0: none.
        grid: (rows, columns) of windows of the map.
        qkv_bias: whether the queries, keys and values have a bias.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout of the output.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: int,
        expand_size: int,
        focal_window: int,
        grid: tuple[int, int],
        qkv_bias: bool,
        attn_drop: float,
        proj_drop: float,
    ) -> None:
        super().__init__((window_size, window_size), num_heads)
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.side = window_size
        self.expand_size = expand_size
        self.focal_window = focal_window
        area = window_size**2
        if expand_size:
            ranks, pairs = surrounding_ranks(window_size, expand_size)
            shape = [1, num_heads, area, neighbour_count(window_size, expand_size)]
            self.relative_position_bias_table_to_neighbors = self.create_parameter(
                shape, default_initializer=Normal(std=0.02)
            )
            self.register_buffer("ranks", paddle.to_tensor(ranks), persistable=False)
            self.register_buffer("pairs", paddle.to_tensor(pairs), persistable=False)
        mask: Any = None
        if focal_window:
            offsets = (window_size + focal_window - 1) ** 2
            # Not nn.ParameterList, which a static graph's parameters don't fit.
            self.relative_position_bias_table_to_windows = nn.Layer()
            table = self.create_parameter(
                [num_heads, offsets], default_initializer=Normal(std=0.02)
            )
            setattr(self.relative_position_bias_table_to_windows, "0", table)
            index = paddle.to_tensor(window_index(window_size, focal_window))
            self.register_buffer("index_to_windows", index, persistable=False)
            if focal_window > 1:
                near = (window_size + 2 * expand_size) ** 2
                mask = paddle.to_tensor(outside_mask(grid, focal_window, near, area))
        self.register_buffer("outside", mask, persistable=False)
        self.qkv = Linear(dim, 3 * dim, bias_attr=None if qkv_bias else False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: paddle.Tensor, pooled: paddle.Tensor | None) -> paddle.Tensor:
        """Returns the outputs of maps [B, H, W, D], whose sides are multiples of the window.

        Args:
            pooled: the pooled windows [B, rows, columns, D], if there are any.
        """
        q, kv = split(self.qkv(x), [self.dim, 2 * self.dim], axis=3)
        if self.expand_size:
            keys = surrounded_windows(kv, self.side, self.expand_size)
        else:
            keys = windows_of(kv, (self.side, self.side))
        if pooled is not None:
            _, far = split(self.qkv(pooled), [self.dim, 2 * self.dim], axis=3)
            keys = concat([keys, neighbourhoods(far, self.focal_window // 2)], axis=1)
        bias = self.bias()
        return in_windows(
            q,
            (self.side, self.side),
            # Not partial, which Paddle's tracing doesn't look into.
            lambda windows: self._attend(windows, keys, bias),
        )

    def _attend(self, q: paddle.Tensor, kv: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
        x = attend_heads(
            [q, kv],
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.attn_drop,
            bias=bias,
            mask=self.outside,
        )
        return self.proj_drop(self.proj(x))

    def bias(self) -> paddle.Tensor:
        """Returns the bias of each head, query and key: [H, N, keys]."""
        bias = self.position_bias()
        if self.expand_size:
            bias = self._surrounding_bias(bias)
        if self.focal_window:
            table = getattr(self.relative_position_bias_table_to_windows, "0")
            bias = concat([bias, gather_columns(table, self.index_to_windows)], axis=2)
        return bias

    def _surrounding_bias(self, inside: paddle.Tensor) -> paddle.Tensor:
        """Returns the bias of a window's places and those around it: [H, N, N] -> [H, N, keys]."""
        heads, area, _ = inside.shape
        around = self.relative_position_bias_table_to_neighbors.squeeze(0)
        # Keys become rows: on a GPU, gradients of an embedding add in a fixed order.
        rows = concat([inside, around], axis=2).flatten(0, 1).transpose([1, 0])
        if self.pairs.shape[0]:
            twice = F.embedding(self.pairs, rows)
            first = twice[:, 0]
            second = twice[:, 1]
            # log(exp(first) + exp(second)). paddle2onnx ends the process at a softplus.
            rows = concat([rows, second - F.log_sigmoid(second - first)], axis=0)
        rows = F.embedding(self.ranks, rows)
        return rows.reshape([-1, heads, area]).transpose([1, 2, 0])


def _copies(side: int, expand: int) -> list[tuple[int, int]]:
    """Returns the row and column of each place around a window in the authors' four copies, in
    their order. (0, 0) is ``expand`` rows above and columns left of the window.
    """
    found = []
    for down in (2 * expand, 0):
        for right in (2 * expand, 0):
            for row in range(side):
                for column in range(side):
                    y = row + down
                    x = column + right
                    inside = expand <= y < expand + side and expand <= x < expand + side
                    if not inside:
                        found.append((y, x))
    return found


def neighbour_count(side: int, expand: int) -> int:
    """Returns the number of places around a window, those of two copies counted twice."""
    return len(_copies(side, expand))


def surrounding_ranks(side: int, expand: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of biases among those of a window's side ** 2 places, then those around it
    in the authors' order, then the pairs' sums.

    Returns:
        (of each place of the window with its surroundings, row by row [keys]; of the pairs whose
        biases are those of one place [pairs, 2]), both int64.
    """
    area = side**2
    copies: dict[tuple[int, int], list[int]] = {}
    for rank, place in enumerate(_copies(side, expand)):
        copies.setdefault(place, []).append(area + rank)
    count = neighbour_count(side, expand)
    ranks = []
    pairs = []
    for y in range(side + 2 * expand):
        for x in range(side + 2 * expand):
            found = copies.get((y, x))
            if found is None:
                ranks.append((y - expand) * side + x - expand)
            elif len(found) == 1:
                ranks.append(found[0])
            else:
                ranks.append(area + count + len(pairs))
                pairs.append(found)
    return np.array(ranks), np.array(pairs, np.int64).reshape(-1, 2)


def window_index(side: int, focal: int) -> np.ndarray:
    """Returns the offset of each of a window's places from each pooled window around it: [side ** 2,
    focal ** 2] int64.
    """
    y, x = np.divmod(np.arange(side**2), side)
    far_y, far_x = np.divmod(np.arange(focal**2), focal)
    rows = y[:, None] - far_y + focal - 1
    columns = x[:, None] - far_x + focal - 1
    return rows * (side + focal - 1) + columns


def outside_mask(grid: tuple[int, int], focal: int, near: int, area: int) -> np.ndarray:
    """Returns what is added to the scores of pooled windows beyond the map, -100: [windows, area,
    near + focal ** 2].
    """
    rows, columns = grid
    reach = focal // 2
    inside = np.zeros((rows + 2 * reach, columns + 2 * reach), bool)
    inside[reach : reach + rows, reach : reach + columns] = True
    seen = np.lib.stride_tricks.sliding_window_view(inside, (focal, focal))
    far = np.where(seen.reshape(rows * columns, focal**2), 0.0, -100.0)
    mask = np.concatenate([np.zeros((rows * columns, near)), far], axis=1).astype(np.float32)
    return np.repeat(mask[:, None], area, axis=1)


class Block(nn.Layer):
    """x + attention(norm1(x)), then x + mlp(norm2(x)), each branch with drop path.

    A map that isn't a multiple of the windows is padded by zeros below and to the right. A map that
    isn't larger than a window is one window, and attends to nothing around it.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        resolution: (height, width) of the map.
        window_size: side of a window, in tokens.
        expand_size: how many places beyond a window it attends to.
        focal_window: pooled windows along the side of the region that a window attends to; 0: none.
        qkv_bias: whether the queries, keys and values have a bias.
        mlp_ratio: hidden width of the MLP over D.
        drop: dropout after the attention's projection and in the MLP.
        attn_drop: dropout rate of the attention weights.
        drop_path: rate of stochastic depth.

    Shape: [B, height, width, D] -> the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        resolution: tuple[int, int],
        window_size: int,
        expand_size: int,
        focal_window: int,
        qkv_bias: bool,
        mlp_ratio: float,
        drop: float,
        attn_drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        if min(resolution) <= window_size:
            window_size = min(resolution)
            expand_size = 0
        self.resolution = resolution
        self.window_size = window_size
        self.pool_layers = nn.LayerList()
        if focal_window:
            self.pool_layers.append(Linear(window_size**2, 1))
        self.norm1 = LayerNorm(dim)
        grid = (-(-resolution[0] // window_size), -(-resolution[1] // window_size))
        self.attn = FocalAttention(
            dim,
            num_heads,
            window_size,
            expand_size,
            focal_window,
            grid,
            qkv_bias,
            attn_drop,
            proj_drop=drop,
        )
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(self._attend(self.norm1(x)), onto=x)
        return self.drop_path2(self.mlp(self.norm2(x)), onto=x)

    def _attend(self, x: paddle.Tensor) -> paddle.Tensor:
        height, width = x.shape[1:3]
        side = self.window_size
        below = -height % side
        right = -width % side
        x = pad_maps(x, below, right)
        pooled = None
        if len(self.pool_layers):
            pool = self.pool_layers[0]
            pooled = matmul(
                pool.weight, windows_of(x, (side, side)), transpose_x=True, bias=pool.bias
            )
            grid = [(height + below) // side, (width + right) // side]
            pooled = pooled.reshape([-1, *grid, x.shape[3]])
        x = self.attn(x, pooled)
        return x[:, :height, :width] if below or right else x


class PatchEmbed(nn.Layer):
    """A strided convolution, then a norm: [B, in_dim, H, W] -> [B, H / stride, W / stride, dim]."""

    def __init__(self, in_dim: int, dim: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.proj = Conv2D(in_dim, dim, kernel, stride=stride, padding=padding)
        self.norm = LayerNorm(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(channels_last(self.proj(x)))


class Stage(nn.Layer):
    """Blocks of one width, then the embedding of the next stage (not in the last stage)."""

    def __init__(self, blocks: Iterable[Block], downsample: nn.Layer | None) -> None:
        super().__init__()
        self.blocks = nn.LayerList(blocks)
        self.downsample = downsample


@register("focal")
class FocalTransformer(ImageModel):
    """Focal Transformer. It takes images of image_size only.

    Its features are the last stage's tokens, normalised: [B, height, width, num_features].

    Args:
        image_size: pixels, or (height, width): multiples of patch_size times 8, with four stages.
        patch_size: side of a patch, in pixels.
        embed_dim: number of channels of the first stage. Each further stage has twice as many as
            the one before.
        stage_depths: number of blocks in each stage.
        num_heads: number of attention heads in each stage.
        window_size: side of a window, in tokens.
        expand_sizes: for each stage the number of tokens by which the attention of a window extends
            beyond it, at most half a window. 0: none.
        focal_windows: for each stage the side, in pooled windows, of the region that a window
            attends to: an odd number. 0: none.
        conv_embed: whether the patch embeddings are overlapping convolutions, the first of 7 x 7
            pixels.
        mlp_ratio: ratio of the MLP's hidden width to its input width.
        qkv_bias: whether the queries, keys and values have a bias.
        dropout: dropout rate after the embedding, after the attention's projection and in the MLP.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    layout = "NHWC"

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 4,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 96,
        stage_depths: Sequence[Depth] = (2, 2, 6, 2),
        num_heads: Sequence[Size] = (3, 6, 12, 24),
        window_size: Size = 7,
        expand_sizes: Sequence[Count] = (3, 3, 3, 3),
        focal_windows: Sequence[Count] = (7, 5, 3, 1),
        conv_embed: bool = False,
        mlp_ratio: Positive = 4.0,
        qkv_bias: bool = True,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        stages = len(stage_depths)
        check_counts(
            stages, NUM_HEADS=num_heads, EXPAND_SIZES=expand_sizes, FOCAL_WINDOWS=focal_windows
        )
        dims = [embed_dim * 2**i for i in range(stages)]
        _check(dims, num_heads, window_size, expand_sizes, focal_windows)
        if conv_embed and patch_size != 4:
            raise InputError(f"PATCH_SIZE is {patch_size}, expected 4, because CONV_EMBED is True")
        unit = patch_size * 2 ** (stages - 1)
        check_multiples(self.image_size, unit, f"{unit}, a position of the last stage")
        self.num_features = dims[-1]
        stem = (7, 4, 2) if conv_embed else (patch_size, patch_size, 0)
        self.patch_embed = PatchEmbed(in_channels, embed_dim, *stem)
        self.pos_drop = nn.Dropout(dropout)
        self.layers = nn.LayerList()
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            reduction = patch_size * 2**i
            resolution = (self.image_size[0] // reduction, self.image_size[1] // reduction)
            blocks = [
                Block(
                    dims[i],
                    num_heads[i],
                    resolution,
                    window_size,
                    expand_sizes[i],
                    focal_windows[i],
                    qkv_bias=qkv_bias,
                    mlp_ratio=mlp_ratio,
                    drop=dropout,
                    attn_drop=attention_dropout,
                    drop_path=rate,
                )
                for rate in rates
            ]
            downsample = None
            if i < stages - 1:
                between = (3, 2, 1) if conv_embed else (2, 2, 0)
                downsample = PatchEmbed(dims[i], dims[i + 1], *between)
            self.layers.append(Stage(blocks, downsample))
        modules = [f"layers.{i}" for i in range(stages)]
        self.feature_info = feature_info(modules, dims, [patch_size * 2**i for i in range(stages)])
        self.norm = LayerNorm(self.num_features)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            raise InputError(
                f"the model takes {self.input_sizes}, found {x.shape[2]} x {x.shape[3]}"
            )
        return self.pos_drop(self.patch_embed(x))

    def _stages(self) -> Iterable[Any]:
        return range(len(self.layers))

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage:
            x = self.layers[stage - 1].downsample(channels_first(x))
        return self._run_all(self.layers[stage].blocks, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x.flatten(1, 2).mean(axis=1))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block, and the classifier with the last norm. The
        last block of a stage has the embedding after it.
        """
        groups: list[tuple[str, ...]] = [("patch_embed",)]
        for i, stage in enumerate(self.layers):
            groups += [(f"layers.{i}.blocks.{j}",) for j in range(len(stage.blocks))]
            if stage.downsample is not None:
                groups[-1] += (f"layers.{i}.downsample",)
        return [*groups, ("norm", "head")]

    def no_weight_decay(self) -> set[str]:
        return {
            name for name, _ in self.named_parameters() if "relative_position_bias_table" in name
        }

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            init_as_torch(layer)
        elif isinstance(layer, Block):
            # Pooled windows start as means. ``apply`` visits a layer after its sublayers.
            for pool in layer.pool_layers:
                Constant(1 / layer.window_size**2)(pool.weight)


def _check(
    dims: Sequence[int],
    num_heads: Sequence[int],
    window_size: int,
    expand_sizes: Sequence[int],
    focal_windows: Sequence[int],
) -> None:
    for dim, heads in zip(dims, num_heads, strict=True):
        if dim % heads:
            raise InputError(
                f"NUM_HEADS has {heads}, expected a divisor of the {dim} channels of its stage"
            )
    for expand in expand_sizes:
        if 2 * expand > window_size:
            raise InputError(
                f"EXPAND_SIZES has {expand}, expected at most half of WINDOW_SIZE {window_size}"
            )
    for window in focal_windows:
        if window and window % 2 == 0:
            raise InputError(f"FOCAL_WINDOWS has {window}, expected odd numbers, or 0 for none")
