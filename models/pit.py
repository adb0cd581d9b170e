"""PiT, the Pooling-based Vision Transformer (Heo et al. 2021, arXiv:2103.16302).

A distilled model has DeiT's distillation token (arXiv:2012.12877). Parameter names, the order of
operations and the initialisation are those of timm's ``PoolingVisionTransformer``. The weight of a
Linear is [in, out] here and [out, in] there.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import Attention, LayerNorm, Linear
from models.layers.block import Block
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.layers.layout import concat, split, swap_axes
from models.layers.scale import add_to_all
from models.layers.stages import check_counts, drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import pit as names


class ConvEmbedding(nn.Layer):
    """Projects overlapping patches by a strided convolution.

    Shape: [B, in_channels, H, W] -> [B, dim, rows, columns].

    Attributes:
        grid_size: (rows, columns) of the patches that lie wholly within the image.

    Raises:
        InputError: an image that is smaller than a patch, or isn't of the model's size.
    """

    def __init__(
        self, image_size: Sequence[int], in_channels: int, dim: int, patch_size: int, stride: int
    ) -> None:
        super().__init__()
        height, width = self.image_size = tuple(image_size)
        if min(height, width) < patch_size:
            raise InputError(
                f"IMAGE_SIZE {height} x {width} is smaller than PATCH_SIZE {patch_size}; choose"
                " a larger one"
            )
        self.grid_size = ((height - patch_size) // stride + 1, (width - patch_size) // stride + 1)
        self.conv = Conv2D(in_channels, dim, patch_size, stride=stride)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            height, width = self.image_size
            raise InputError(
                f"the model takes images of {height} x {width}, found {x.shape[2]} x {x.shape[3]}"
            )
        return self.conv(x)


class Pooling(nn.Layer):
    """Halves rows and columns of the places by a depthwise convolution, which also widens them.

    A Linear widens the tokens in front.

    Shape: [B, prefix + rows * columns, in_dim] -> [B, prefix + ceil(rows / 2) * ceil(columns / 2),
    dim].
    """

    def __init__(self, in_dim: int, dim: int, prefix: int, grid_size: tuple[int, int]) -> None:
        super().__init__()
        self.prefix = prefix
        self.grid_size = grid_size
        self.conv = Conv2D(in_dim, dim, 3, stride=2, padding=1, groups=in_dim)
        self.fc = Linear(in_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        tokens, places = split(x, [self.prefix, x.shape[1] - self.prefix], axis=1)
        maps = swap_axes(places).reshape([-1, x.shape[2], *self.grid_size])
        return concat([self.fc(tokens), swap_axes(self.conv(maps).flatten(2))], axis=1)


class Transformer(nn.Layer):
    """``pool`` (not in the first stage), then blocks of one width."""

    def __init__(self, pool: nn.Layer, blocks: Iterable[nn.Layer]) -> None:
        super().__init__()
        self.pool = pool
        self.blocks = nn.LayerList(blocks)


@register("pit")
class PoolingVisionTransformer(ImageModel):
    """PiT. It takes images of image_size only.

    Its features are the class token and, in a distilled model, the distillation token, normalised:
    [B, 1 or 2, num_features].

    Args:
        image_size: pixels, or (height, width).
        patch_size: side of a patch, in pixels.
        stride: distance between neighbouring patches, in pixels.
        base_dims: number of channels of an attention head in each stage.
        stage_depths: number of blocks in each stage.
        num_heads: number of attention heads in each stage. The channels of a stage, base_dims *
            num_heads, must be a multiple of those of the stage before.
        mlp_ratio: ratio of the MLP's hidden width to its input width.
        distilled: whether the model has a distillation token with a head of its own. The output is
            the mean of both heads.
        dropout: dropout rate after the position embedding, after the attention's projection and in
            the MLP.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Attributes:
        distilled_training: for a distilled model. True: train mode returns (logits, distillation
            logits).
        grids: (rows, columns) of the places of each stage.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    first_conv = "patch_embed.conv"
    layout = "NLC"
    pos_embed_layout = "NCHW"
    global_pool = "token"
    distilled_training = False

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 16,
        stride: Size = 8,
        in_channels: int = 3,
        num_classes: int = 1000,
        base_dims: Sequence[Size] = (48, 48, 48),
        stage_depths: Sequence[Depth] = (2, 6, 4),
        num_heads: Sequence[Size] = (2, 4, 8),
        mlp_ratio: Positive = 4.0,
        distilled: bool = False,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_counts(len(stage_depths), BASE_DIMS=base_dims, NUM_HEADS=num_heads)
        dims = [size * heads for size, heads in zip(base_dims, num_heads, strict=True)]
        for previous, dim in pairwise(dims):
            if dim % previous:
                raise InputError(
                    f"BASE_DIMS x NUM_HEADS is {dims}, expected each a multiple of the one before"
                )
        self.distilled = distilled
        self.num_prefix_tokens = 1 + distilled
        self.num_features = dims[-1]
        self.patch_embed = ConvEmbedding(self.image_size, in_channels, dims[0], patch_size, stride)
        initializer = Normal(std=0.02)
        shape = [1, dims[0], *self.patch_embed.grid_size]
        self.pos_embed = self.create_parameter(shape, default_initializer=initializer)
        # The distillation token, if there is one, is part of it.
        self.cls_token = self.create_parameter(
            [1, self.num_prefix_tokens, dims[0]], default_initializer=initializer
        )
        self.pos_drop = nn.Dropout(dropout)
        self.grids = [self.patch_embed.grid_size]
        self.transformers = nn.LayerList()
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            pool = nn.Identity()
            if i:
                pool = Pooling(dims[i - 1], dims[i], self.num_prefix_tokens, self.grids[-1])
                rows, columns = self.grids[-1]
                self.grids.append(((rows + 1) // 2, (columns + 1) // 2))
            blocks = []
            for rate in rates:
                attn = Attention(
                    dims[i], num_heads[i], attn_drop=attention_dropout, proj_drop=dropout
                )
                block = Block(
                    dims[i],
                    attn,
                    mlp_ratio=mlp_ratio,
                    init_values=None,
                    drop=dropout,
                    drop_path=rate,
                )
                blocks.append(block)
            self.transformers.append(Transformer(pool, blocks))
        modules = [f"transformers.{i}" for i in range(len(dims))]
        reductions = [stride * 2**i for i in range(len(dims))]
        self.feature_info = feature_info(modules, dims, reductions)
        self.norm = LayerNorm(self.num_features, epsilon=1e-6)
        self._finish()

    @property
    def blocks(self) -> list[Block]:
        """Returns all blocks, from the first to the last."""
        return [block for stage in self.transformers for block in stage.blocks]

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        x = swap_axes(self.pos_drop(add_to_all(self.patch_embed(x), self.pos_embed)).flatten(2))
        return concat([self.cls_token.expand([x.shape[0], -1, -1]), x], axis=1)

    def _stages(self) -> Iterable[Any]:
        return self.transformers

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage.blocks, stage.pool(x))

    def _last_norm(self, x: paddle.Tensor) -> paddle.Tensor:
        # The norm is for the class and distillation tokens only.
        return x

    def _head_input(self, x: paddle.Tensor, last: bool) -> paddle.Tensor:
        tokens = x[:, : self.num_prefix_tokens]
        return self.norm(tokens) if last else tokens

    def grid(self, places: int) -> tuple[int, int]:
        return next(grid for grid in self.grids if grid[0] * grid[1] == places)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]:
        logits = self.head(x[:, 0])
        if not self.distilled:
            return logits
        distilled_logits = self.head_dist(x[:, 1])
        if self.distilled_training and self.training:
            return logits, distilled_logits
        return (logits + distilled_logits) / 2

    def classifier_names(self) -> tuple[str, ...]:
        return ("head", "head_dist") if self.distilled else ("head",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block, and the heads with their norm. The first
        block of a stage has the pooling before it.
        """
        groups: list[tuple[str, ...]] = [("cls_token", "pos_embed", "patch_embed")]
        for i, stage in enumerate(self.transformers):
            blocks: list[tuple[str, ...]] = [
                (f"transformers.{i}.blocks.{j}",) for j in range(len(stage.blocks))
            ]
            if i:
                blocks[0] += (f"transformers.{i}.pool",)
            groups += blocks
        return [*groups, ("norm", "head", "head_dist")]

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def _init_weights(self, layer: nn.Layer) -> None:
        init_as_torch(layer)
