"""Hiera (Ryali et al. 2023, arXiv:2306.00989): a plain transformer of stages, with attention within
mask units first.

Parameter names, order of operations and initialisation are those of timm's ``Hiera``. Only a fresh
classifier is the authors' (N(0, 0.02) and 0.02, times ``head_init_scale``), where timm's is 0.
Models of "Window Attention is Bugged" (Bolya et al. 2023, arXiv:2311.05613) have positions within a
unit besides those of the image.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import LayerNorm, Linear
from models.layers.block import Block
from models.layers.conv import Conv2D
from models.layers.init import init_as_flax, init_as_torch, init_branches
from models.layers.layout import channels_last
from models.layers.linear import in_float32
from models.layers.scale import add_to_all
from models.layers.sizes import check_multiples
from models.layers.stages import check_counts, drop_path_rates, feature_info
from models.layers.units import (
    MaskUnitAttention,
    from_units,
    pool_units,
    quarters,
    to_units,
    unit_maps,
)
from settings.keys import Count, Depth, Factor, InTraining, Positive, Rate, Size
from weights.names import hiera as names
from weights.resize import bicubic_matrix

STRIDE = 4  # of the patches, which overlap


class PatchEmbed(nn.Layer):
    """A convolution of 7 x 7 with stride 4. Shape: [B, C, H, W] -> [B, H / 4, W / 4, dim]."""

    def __init__(self, image_size: tuple[int, int], in_channels: int, dim: int) -> None:
        super().__init__()
        self.grid_size = (image_size[0] // STRIDE, image_size[1] // STRIDE)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = Conv2D(in_channels, dim, 7, STRIDE, padding=3)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return channels_last(self.proj(x))


class Widening(Block):
    """The block that begins a stage: twice the channels, and the maximum of 2 x 2 neighbours if its
    attention pools.

    Shape: [B, N, in_dim], unit by unit -> [B, N / 4, dim].
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        attn: MaskUnitAttention,
        mlp_ratio: float,
        init_values: float | None,
        drop_path: float,
        use_expand_proj: bool,
    ) -> None:
        super().__init__(dim, attn, mlp_ratio, init_values, 0.0, drop_path)
        self.norm1 = LayerNorm(in_dim, epsilon=1e-6)
        self.use_expand_proj = use_expand_proj
        if use_expand_proj:
            self.proj = Linear(in_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        normed = self.norm1(x)
        x = self.drop_path1(self.ls1(self.attn(normed)), onto=self._widen(x, normed))
        return self.drop_path2(self.ls2(self.mlp(self.norm2(x))), onto=x)

    def _widen(self, x: paddle.Tensor, normed: paddle.Tensor) -> paddle.Tensor:
        places = self.attn.places
        pools = self.attn.pools
        if self.use_expand_proj:
            x = in_float32(self.proj(normed))
            return pool_units(x, places) if pools else x
        if not pools:
            return paddle.concat([x, x], axis=2)
        one, two, three, four = quarters(x, places)
        return paddle.concat([pool_units(x, places), (one + two + three + four) * 0.25], axis=2)


@register("hiera")
class Hiera(ImageModel):
    """Hiera; images of other sizes than image_size aren't taken. Stages double the channels and the
    heads.

    Features: the last stage's tokens [B, N, num_features], row by row, not normalised; where units
    were left out, those that are kept, unit by unit.

    Args:
        image_size: pixels, or (height, width): multiples of 32 with four stages.
        embed_dim: channels of the first stage.
        num_heads: heads of the first stage.
        stage_depths: blocks of each stage. A mask unit has 2 ** (stages - 1) places along its side.
        q_pool: how many of the stages after the first begin by pooling 2 x 2 places: the earlier
            ones do.
        mask_unit_attn: whether a stage attends within mask units; the block that begins a stage
            does as the stage before.
        mlp_ratio: hidden width of the MLP over its input's.
        use_expand_proj: a Linear doubles the channels; else the maximum of 2 x 2 places and their
            mean do.
        init_values: layer scale's initial value; None: no layer scale.
        global_pos_size: rows and columns of position embeddings that are stretched over the image;
            to them those within a unit are added. None: each place of the image has its own, and no
            others.
        dropout: before the classifier.
        patch_drop: share of the mask units that training leaves out.
        droppath: rate of stochastic depth at the last block; linear from 0 at the first.
        weight_init: how fresh weights are drawn: "timm", or "jax" (``init_as_flax``).

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    layout = "NLC"
    global_pool = "avg"
    pos_embed_prefix = 0

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 96,
        num_heads: Size = 1,
        stage_depths: Sequence[Depth] = (2, 3, 16, 3),
        q_pool: Count = 3,
        mask_unit_attn: Sequence[bool] = (True, True, False, False),
        mlp_ratio: Positive = 4.0,
        use_expand_proj: bool = True,
        init_values: Positive | None = None,
        global_pos_size: Sequence[Size] | None = None,
        dropout: InTraining[Rate] = 0.0,
        patch_drop: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        weight_init: Literal["timm", "jax"] = "timm",
        head_init_scale: InTraining[Factor] = 0.001,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        stages = len(stage_depths)
        self.patch_drop = patch_drop
        self.weight_init = weight_init
        check_counts(stages, MASK_UNIT_ATTN=mask_unit_attn)
        self.unit_side = 2 ** (stages - 1)
        self._check_sizes(embed_dim, num_heads, stages, q_pool)
        # How often the tokens of each stage were pooled.
        self.pools = [min(stage, q_pool) for stage in range(stages)]
        self.patch_embed = PatchEmbed(self.image_size, in_channels, embed_dim)
        rows, columns = self.patch_embed.grid_size
        self.units = (rows // self.unit_side, columns // self.unit_side)
        self._add_positions(embed_dim, global_pos_size)
        ends = [sum(stage_depths[:stage]) for stage in range(stages + 1)]
        # The blocks of each stage, as a slice of all.
        self.spans = [slice(*ends[stage : stage + 2]) for stage in range(stages)]
        dims = [embed_dim << stage for stage in range(stages)]
        self.blocks = nn.LayerList()
        for stage, drop_paths in enumerate(drop_path_rates(droppath, stage_depths)):
            for i, drop_path in enumerate(drop_paths):
                # The first block of a further stage reads the tokens of the stage before.
                widens = stage > 0 and i == 0
                source = stage - 1 if widens else stage
                attn = MaskUnitAttention(
                    dims[source],
                    dims[stage],
                    num_heads << stage,
                    places=(self.unit_side >> self.pools[source]) ** 2,
                    within=mask_unit_attn[source],
                    pools=self.pools[source] < self.pools[stage],
                )
                if widens:
                    block = Widening(
                        dims[source],
                        dims[stage],
                        attn,
                        mlp_ratio=mlp_ratio,
                        init_values=init_values,
                        drop_path=drop_path,
                        use_expand_proj=use_expand_proj,
                    )
                else:
                    block = Block(
                        dims[stage],
                        attn,
                        mlp_ratio=mlp_ratio,
                        init_values=init_values,
                        drop=0.0,
                        drop_path=drop_path,
                    )
                self.blocks.append(block)
        modules = [f"blocks.{end - 1}" for end in ends[1:]]
        self.feature_info = feature_info(modules, dims, [STRIDE << pools for pools in self.pools])
        self.num_features = dims[-1]
        norm = LayerNorm(self.num_features, epsilon=1e-6)
        drop = nn.Dropout(dropout)
        self.head = nn.Sequential(("norm", norm), ("drop", drop), ("fc", nn.Identity()))
        self._finish()
        init_branches(self.blocks, flax=weight_init == "jax")

    def _check_sizes(self, embed_dim: int, num_heads: int, stages: int, q_pool: int) -> None:
        unit = STRIDE * self.unit_side
        check_multiples(self.image_size, unit, f"{unit}, a mask unit's side")
        if embed_dim % num_heads:
            raise InputError(f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}")
        if q_pool >= stages:
            raise InputError(
                f"Q_POOL is {q_pool}, expected 0 to {stages - 1}: STAGE_DEPTHS has {stages} stages"
            )

    def _add_positions(self, dim: int, size: Sequence[int] | None) -> None:
        grid = self.patch_embed.grid_size
        start = Normal(std=0.02)
        if size is None:
            self.pos_embed = self.create_parameter(
                [1, grid[0] * grid[1], dim], default_initializer=start
            )
            self.pos_embed_win = None
            return
        if len(size) != 2:
            raise InputError(
                f"GLOBAL_POS_SIZE is {list(size)}, expected two numbers: rows and columns"
            )
        self.pos_embed_layout = "NCHW"
        self.pos_embed = self.create_parameter([1, dim, *size], default_initializer=start)
        sides = [self.unit_side, self.unit_side]
        self.pos_embed_win = self.create_parameter([1, dim, *sides], default_initializer=start)
        for name, old, new in zip(("stretch_rows", "stretch_columns"), size, grid, strict=True):
            matrix = paddle.to_tensor(bicubic_matrix(old, new).astype("float32"))
            self.register_buffer(name, matrix, persistable=False)

    def _positions(self) -> paddle.Tensor:
        """Returns the position embedding of all places: [1, rows, columns, D], float32."""
        rows, columns = self.patch_embed.grid_size
        if self.pos_embed_win is None:
            return self.pos_embed.reshape([1, rows, columns, -1])
        # Sums of products instead of matrix products, which autocast would compute in half
        # precision.
        x = (self.pos_embed.unsqueeze(2) * self.stretch_rows.unsqueeze(2)).sum(axis=3)
        x = (x.unsqueeze(3) * self.stretch_columns).sum(axis=4)
        down, across = self.units
        side = self.unit_side
        x = x.reshape([1, -1, down, side, across, side]) + self.pos_embed_win.unsqueeze([2, 4])
        return x.reshape([1, -1, rows, columns]).transpose([0, 2, 3, 1])

    def forward_features(
        self,
        x: paddle.Tensor,
        mask: paddle.Tensor | None = None,
        return_intermediates: bool = False,
    ) -> Any:
        """Returns what the last block makes of the images.

        Args:
            x: [B, C, H, W], normalised.
            mask: [B, mask units], boolean, units row by row. Units that are False are left out, as
                if they weren't there; every image keeps equally many. Counting them waits for the
                device. Or the indices of the units that are kept, [B, kept] int64. None: all are
                kept, apart from PATCH_DROP in training.
            return_intermediates: whether (features, the output of each stage) is returned. An
                output is maps [B, rows, columns, channels]. Where units may be left out, it has a
                map of each that is kept: [B, units, rows, columns, channels].

        Raises:
            InputError: a mask that doesn't fit the images, or one together with PATCH_DROP.
        """
        outputs = []
        x = self._embed(x, mask)
        for stage in self._stages():
            x = self._stage(stage, x, None)
            outputs.append(x)
        features = self._head_input(x, last=True)
        if not return_intermediates:
            return features
        if mask is None and self._whole(x):
            return features, [self.by_rows(output) for output in outputs]
        return features, [
            unit_maps(output, self.unit_side >> self.pools[i]) for i, output in enumerate(outputs)
        ]

    def _embed(self, x: paddle.Tensor, mask: paddle.Tensor | None = None) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            raise InputError(
                f"the model takes {self.input_sizes}, found {x.shape[2]} x {x.shape[3]}"
            )
        kept = self._kept_units(x.shape[0], mask)
        # Convolutions cross the borders of units: they read zeros there, not what is left out.
        if kept is not None:
            x = self._masked_images(x, kept)
        x = to_units(add_to_all(self.patch_embed(x), self._positions()), self.unit_side)
        if kept is None:
            return x
        count = self.units[0] * self.units[1]
        _, length, dim = x.shape
        # Gathers whole units: a row of the reshaped tokens is one unit of one image.
        rows = kept + count * paddle.arange(kept.shape[0]).unsqueeze(1)
        x = paddle.gather(x.reshape([-1, length // count * dim]), rows.flatten())
        return x.reshape([kept.shape[0], -1, dim])

    def _kept_units(self, batch: int, mask: paddle.Tensor | None) -> paddle.Tensor | None:
        """Returns the indices of the units that each image keeps, [B, kept] int64; None: all."""
        count = self.units[0] * self.units[1]
        drops = self.training and self.patch_drop > 0
        if mask is None:
            if not drops:
                return None
            kept = max(1, int(count * (1 - self.patch_drop)))
            return paddle.rand([batch, count]).argsort(axis=1)[:, :kept]
        if drops:
            raise InputError(
                "a mask was given, and PATCH_DROP leaves out units by itself; set it to 0"
            )
        if mask.dtype == paddle.int64:
            return mask
        if list(mask.shape) != [batch, count]:
            raise InputError(
                f"the mask is {list(mask.shape)}, expected {[batch, count]}: images x mask units"
            )
        numbers = sorted(set(mask.astype("int64").sum(axis=1).numpy().tolist()))
        if len(numbers) > 1 or not numbers[0]:
            raise InputError(
                f"the mask keeps {numbers} units, expected one number of 1 to {count} for all images"
            )
        return paddle.nonzero(mask)[:, 1].reshape([batch, -1])

    def _masked_images(self, x: paddle.Tensor, kept: paddle.Tensor) -> paddle.Tensor:
        """Returns the images with zeros in the units that aren't kept."""
        rows, columns = self.units
        height, width = self.image_size
        channels = x.shape[1]
        side = STRIDE * self.unit_side
        mask = F.one_hot(kept, rows * columns).sum(axis=1).astype(x.dtype)
        mask = mask.reshape([-1, 1, rows, 1, columns, 1])
        x = x.reshape([-1, channels, rows, side, columns, side]) * mask
        return x.reshape([-1, channels, height, width])

    def _stages(self) -> Iterable[Any]:
        blocks = list(self.blocks)
        return [blocks[span] for span in self.spans]

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage, x)

    def _whole(self, x: paddle.Tensor) -> bool:
        """Returns whether no units were left out of a stage's tokens; their channels tell which
        stage it is.
        """
        dims = [info["num_chs"] for info in self.feature_info]
        stage = dims.index(x.shape[2])
        return self.patch_embed.num_patches >> 2 * self.pools[stage] == x.shape[1]

    def _head_input(self, x: paddle.Tensor, last: bool) -> paddle.Tensor:
        return self.by_rows(x).flatten(1, 2) if self._whole(x) else x

    def by_rows(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns tokens of all places, unit by unit, as maps: [B, N, D] -> [B, rows, columns, D]."""
        rows, _ = self.grid(x.shape[1])
        return from_units(x, rows // self.units[0], self.units)

    def grid(self, places: int) -> tuple[int, int]:
        height, width = self.patch_embed.grid_size
        share = math.isqrt(self.patch_embed.num_patches // places)
        return height // share, width // share

    def _as_map(self, x: paddle.Tensor, output_format: str) -> paddle.Tensor:
        if not self._whole(x):
            left = f"{x.shape[1]} tokens make no map"
            raise InputError(
                f"{left}: PATCH_DROP leaves some out in training; call model.eval() before"
            )
        return super()._as_map(self.by_rows(x).flatten(1, 2), output_format)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x.mean(axis=1))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the authors' groups (hiera/hiera.py in dbolya/hiera, v0.2.0): the embedding and
        each block, the last one with the head.
        """
        *groups, last, head = self.timm_layer_groups()
        return [*groups, last + head]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block, the head with its norm."""
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [("pos_embed", "pos_embed_win", "patch_embed"), *blocks, ("head",)]

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed"}

    def _init_weights(self, layer: nn.Layer) -> None:
        if self.weight_init == "jax":
            init_as_flax(layer)
        elif isinstance(layer, nn.Linear | nn.Conv2D):
            init_as_torch(layer)
            Normal(std=0.02)(layer.weight)
            if isinstance(layer, nn.Linear):
                Constant(0.02)(layer.bias)
