"""Hiera (Ryali et al. 2023, arXiv:2306.00989), a hierarchical transformer of plain blocks.

Its first stages attend within mask units, the later ones to all tokens. "Window Attention is
Bugged" (Bolya et al. 2023, arXiv:2311.05613) adds positions within a mask unit to those of the
image.

Parameter names, the order of operations and the initialisation are those of timm's ``Hiera``. Only
a fresh classifier starts as the authors': the weights from N(0, 0.02) and the bias at 0.02, both
times ``head_init_scale``. timm's starts at 0.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import LayerNorm, Linear, PatchDropout
from models.layers.block import Block
from models.layers.conv import Conv2D
from models.layers.init import init_as_flax, init_as_mae, init_as_torch, init_branches
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
from settings.keys import Count, Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from settings.needs import above_zero
from weights.names import hiera as names
from weights.resize import bicubic_matrix

# Stride of the patches in pixels. They are 7 x 7 pixels, so they overlap.
STRIDE = 4


class PatchEmbed(nn.Layer):
    """A 7 x 7 convolution with stride 4.

    Shape: [B, C, H, W] -> [B, H / 4, W / 4, dim].
    """

    def __init__(self, image_size: tuple[int, int], in_channels: int, dim: int) -> None:
        super().__init__()
        self.grid_size = (image_size[0] // STRIDE, image_size[1] // STRIDE)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = Conv2D(in_channels, dim, 7, STRIDE, padding=3)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return channels_last(self.proj(x))


class TransitionBlock(Block):
    """The first block of a stage. It doubles the channels and may pool the tokens.

    Args:
        in_dim: channels of the stage before.
        dim: channels of this stage: 2 * in_dim.
        attn: the attention. If it pools its queries, the shortcut is pooled, too.
        mlp_ratio: hidden width of the MLP over dim.
        init_values: initial value of layer scale; None: no layer scale.
        drop_path: rate of stochastic depth.
        use_expand_proj: whether a Linear doubles the channels of the shortcut. Otherwise the
            maximum of 2 x 2 places and their mean are concatenated.

    Shape: [B, N, in_dim] -> [B, N / 4, dim] with pooling, else [B, N, dim]. Tokens are unit by
    unit.
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
        x = self.drop_path1(self.ls1(self.attn(normed)), onto=self._shortcut(x, normed))
        return self.drop_path2(self.ls2(self.mlp(self.norm2(x))), onto=x)

    def _shortcut(self, x: paddle.Tensor, normed: paddle.Tensor) -> paddle.Tensor:
        places = self.attn.places
        pools = self.attn.pools
        if self.use_expand_proj:
            x = in_float32(self.proj(normed))
            return pool_units(x, places) if pools else x
        if not pools:
            return paddle.concat([x, x], axis=2)
        first, second, third, fourth = quarters(x, places)
        mean = (first + second + third + fourth) * 0.25
        return paddle.concat([pool_units(x, places), mean], axis=2)


@register("hiera")
class Hiera(ImageModel):
    """Hiera. It takes images of image_size only. Each stage doubles the channels and the heads.

    Its features are the last stage's tokens, not normalised: [B, N, num_features], row by row. If
    mask units are left out, they are the tokens of the others, unit by unit.

    Args:
        image_size: pixels, or (height, width): multiples of 32 with four stages.
        embed_dim: number of channels of the first stage.
        num_heads: number of attention heads in the first stage.
        stage_depths: number of blocks in each stage. The side of a mask unit is 2 ** (stages - 1)
            tokens.
        q_pool: number of stages that begin with 2 x 2 pooling, counted from the second stage on.
        mask_unit_attn: for each stage, whether its attention stays within mask units. The first
            block of a stage attends as the stage before.
        mlp_ratio: ratio of the MLP's hidden width to its input width.
        use_expand_proj: whether a Linear doubles the channels between stages. Otherwise the maximum
            and the mean of 2 x 2 tokens are concatenated.
        init_values: initial value of layer scale; None: no layer scale.
        global_pos_size: rows and columns of a coarse position embedding, which is interpolated over
            the image and added to one within mask units. None: each token has its own position
            embedding.
        dropout: dropout rate before the classifier.
        patch_drop: share of the mask units that are dropped at random in training.
        patch_drop_end: the value of patch_drop at the end of training, which it approaches along a
            cosine, as in NaViT (arXiv:2307.06304). None: patch_drop is constant.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.
        weight_init: how new weights are initialised: "timm", "jax" (``init_as_flax``), or "mae", as
            in the authors' pre-training (``init_as_mae``).

    Attributes:
        units: rows and columns of mask units.
        unit_side: places of the first stage along a mask unit's side.

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
        dropout: InTraining[OfClassifier[Rate]] = 0.0,
        patch_drop: InTraining[Rate] = 0.0,
        patch_drop_end: Annotated[InTraining[Rate | None], above_zero("MODEL.PATCH_DROP")] = None,
        droppath: InTraining[Rate] = 0.0,
        weight_init: Literal["timm", "jax", "mae"] = "timm",
        head_init_scale: InTraining[OfClassifier[Factor]] = 0.001,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        stages = len(stage_depths)
        self.patch_drop = PatchDropout(patch_drop, 0, patch_drop_end)
        self.weight_init = weight_init
        check_counts(stages, MASK_UNIT_ATTN=mask_unit_attn)
        self.unit_side = 2 ** (stages - 1)
        self._check_sizes(embed_dim, num_heads, stages, q_pool)
        # How many times the tokens of each stage have been pooled.
        self.poolings = [min(stage, q_pool) for stage in range(stages)]
        self.patch_embed = PatchEmbed(self.image_size, in_channels, embed_dim)
        rows, columns = self.patch_embed.grid_size
        self.units = (rows // self.unit_side, columns // self.unit_side)
        self._add_positions(embed_dim, global_pos_size)
        # Stage i has the blocks from bounds[i] on, up to bounds[i + 1].
        self.bounds = [sum(stage_depths[:stage]) for stage in range(stages + 1)]
        dims = [embed_dim * 2**stage for stage in range(stages)]
        self.blocks = nn.LayerList()
        for stage, drop_paths in enumerate(drop_path_rates(droppath, stage_depths)):
            for i, drop_path in enumerate(drop_paths):
                # The first block of a later stage reads the tokens of the stage before.
                is_transition = stage > 0 and i == 0
                source = stage - 1 if is_transition else stage
                attn = MaskUnitAttention(
                    dims[source],
                    dims[stage],
                    num_heads * 2**stage,
                    places=self._side_of_unit(source) ** 2,
                    within=mask_unit_attn[source],
                    pools=self.poolings[source] < self.poolings[stage],
                )
                if is_transition:
                    block = TransitionBlock(
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
        last_blocks = [f"blocks.{end - 1}" for end in self.bounds[1:]]
        reductions = [STRIDE * 2**poolings for poolings in self.poolings]
        self.feature_info = feature_info(last_blocks, dims, reductions)
        self.num_features = dims[-1]
        norm = LayerNorm(self.num_features, epsilon=1e-6)
        drop = nn.Dropout(dropout)
        self.head = nn.Sequential(("norm", norm), ("drop", drop), ("fc", nn.Identity()))
        self._finish()
        if weight_init != "mae":
            init_branches(self.blocks, flax=weight_init == "jax")

    def _check_sizes(self, embed_dim: int, num_heads: int, stages: int, q_pool: int) -> None:
        pixels = STRIDE * self.unit_side
        check_multiples(self.image_size, pixels, f"{pixels}, a mask unit's side")
        if embed_dim % num_heads:
            raise InputError(f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}")
        if q_pool >= stages:
            raise InputError(
                f"Q_POOL is {q_pool}, expected 0 to {stages - 1}: STAGE_DEPTHS has {stages} stages"
            )

    def _side_of_unit(self, stage: int) -> int:
        """Returns how many places of a stage a mask unit has along its side."""
        return self.unit_side // 2 ** self.poolings[stage]

    def _add_positions(self, dim: int, global_size: Sequence[int] | None) -> None:
        rows, columns = self.patch_embed.grid_size
        initializer = Normal(std=0.02)
        if global_size is None:
            self.pos_embed = self.create_parameter(
                [1, rows * columns, dim], default_initializer=initializer
            )
            self.pos_embed_win = None
            return
        if len(global_size) != 2:
            raise InputError(
                f"GLOBAL_POS_SIZE is {list(global_size)}, expected two numbers: rows and columns"
            )
        self.pos_embed_layout = "NCHW"
        self.pos_embed = self.create_parameter(
            [1, dim, *global_size], default_initializer=initializer
        )
        self.pos_embed_win = self.create_parameter(
            [1, dim, self.unit_side, self.unit_side], default_initializer=initializer
        )
        # Matrices that stretch the rows and the columns of pos_embed over the image, bicubically.
        old_rows, old_columns = global_size
        for name, old, new in (
            ("stretch_rows", old_rows, rows),
            ("stretch_columns", old_columns, columns),
        ):
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
        unit_rows, unit_columns = self.units
        side = self.unit_side
        x = x.reshape([1, -1, unit_rows, side, unit_columns, side])
        x = x + self.pos_embed_win.unsqueeze([2, 4])
        return x.reshape([1, -1, rows, columns]).transpose([0, 2, 3, 1])

    def forward_features(
        self,
        x: paddle.Tensor,
        mask: paddle.Tensor | None = None,
        return_intermediates: bool = False,
    ) -> Any:
        """Returns the last block's output for the images.

        Args:
            x: images [B, C, H, W], normalised.
            mask: which mask units are kept; every image keeps equally many. The others are left
                out, as if they weren't there. Either boolean [B, mask units], units row by row,
                True for those that are kept; counting them waits for the device. Or int64 [B,
                kept], the indices of those that are kept. None: all are kept, apart from PATCH_DROP
                in training.
            return_intermediates: whether (features, the output of each stage) is returned. An
                output is [B, rows, columns, channels]. If a mask is given or PATCH_DROP leaves
                units out, it is a map of each unit that is kept: [B, kept, rows, columns,
                channels].

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
        if mask is None and self._has_all_units(x):
            return features, [self.by_rows(output) for output in outputs]
        return features, [
            unit_maps(output, self._side_of_unit(stage)) for stage, output in enumerate(outputs)
        ]

    def _embed(self, x: paddle.Tensor, mask: paddle.Tensor | None = None) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            raise InputError(
                f"the model takes {self.input_sizes}, found {x.shape[2]} x {x.shape[3]}"
            )
        kept = self._kept_units(x.shape[0], mask)
        if kept is not None:
            # The patches of a kept unit overlap its neighbours. They shall read zeros there, and
            # nothing of the units that are left out.
            x = self._masked_images(x, kept)
        x = to_units(add_to_all(self.patch_embed(x), self._positions()), self.unit_side)
        if kept is None:
            return x
        batch, length, dim = x.shape
        units = self.units[0] * self.units[1]
        # Gathers whole units: a row of the reshaped tokens is one unit of one image.
        rows = kept + units * paddle.arange(batch).unsqueeze(1)
        x = paddle.gather(x.reshape([-1, length // units * dim]), rows.flatten())
        return x.reshape([batch, -1, dim])

    def _kept_units(self, batch: int, mask: paddle.Tensor | None) -> paddle.Tensor | None:
        """Returns the indices of the units that each image keeps, [B, kept] int64; None: all."""
        units = self.units[0] * self.units[1]
        if mask is None:
            return self.patch_drop.choose(batch, units)
        if self.training and self.patch_drop.drop_prob > 0:
            raise InputError("a mask was passed, but PATCH_DROP drops units as well; set it to 0")
        if mask.dtype == paddle.int64:
            return mask
        if list(mask.shape) != [batch, units]:
            raise InputError(
                f"the mask is {list(mask.shape)}, expected {[batch, units]}: images x mask units"
            )
        counts = sorted(set(mask.astype("int64").sum(axis=1).numpy().tolist()))
        if len(counts) > 1 or not counts[0]:
            raise InputError(
                f"the mask keeps {counts} units, expected one number of 1 to {units} for all images"
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
        return [blocks[start:end] for start, end in itertools.pairwise(self.bounds)]

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage, x)

    def _has_all_units(self, x: paddle.Tensor) -> bool:
        """Returns whether the tokens x of a stage are those of all mask units."""
        # No two stages have equally many channels.
        dims = [info["num_chs"] for info in self.feature_info]
        stage = dims.index(x.shape[2])
        return x.shape[1] == self.patch_embed.num_patches // 4 ** self.poolings[stage]

    def _head_input(self, x: paddle.Tensor, last: bool) -> paddle.Tensor:
        return self.by_rows(x).flatten(1, 2) if self._has_all_units(x) else x

    def by_rows(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the tokens of all places as maps: [B, N, D], unit by unit -> [B, rows, columns,
        D].
        """
        rows, _ = self.grid(x.shape[1])
        return from_units(x, rows // self.units[0], self.units)

    def grid(self, places: int) -> tuple[int, int]:
        rows, columns = self.patch_embed.grid_size
        # Places of the first stage along one side of a place of this stage.
        ratio = math.isqrt(self.patch_embed.num_patches // places)
        return rows // ratio, columns // ratio

    def _as_map(self, x: paddle.Tensor, output_format: str) -> paddle.Tensor:
        if not self._has_all_units(x):
            problem = f"{x.shape[1]} tokens don't form a map"
            raise InputError(
                f"{problem}: PATCH_DROP drops some in training; call model.eval() first"
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
            if self.weight_init == "mae":
                # It sets no bias of a convolution, which stays as torch's.
                init_as_mae(layer)
            else:
                Normal(std=0.02)(layer.weight)
                if isinstance(layer, nn.Linear):
                    Constant(0.02)(layer.bias)
