"""HVT, the Hierarchical Visual Transformer (Pan et al. 2021, arXiv:2103.10619): a plain Vision
Transformer without a class token, in which some blocks pool their tokens to half as many.

Parameter names, the order of operations and the initialisation are those of the authors' code
(ziplab/HVT, f32cc1c). The weight of a Linear is [in, out] here and [out, in] there.
"""

from collections.abc import Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import Attention, LayerNorm, PatchEmbed, init_linear
from models.layers.block import Block
from models.layers.conv import MaxPool2D
from models.layers.layout import swap_axes
from models.layers.scale import add_to_all
from models.layers.stages import drop_path_rates, feature_info
from settings.keys import (
    Blocks,
    Depth,
    Factor,
    InTraining,
    Kernel,
    OfClassifier,
    Positive,
    Rate,
    Size,
)
from weights.names import hvt as names


class PoolingBlock(Block):
    """A transformer block, then max pooling over the sequence of tokens, and new positions.

    Args:
        length: tokens after the pooling.
        kernel_size: tokens of a window; windows have a stride of 2.
        options: arguments of ``Block``, with the channels ``dim``.

    Shape: [B, N, dim] -> [B, length, dim].
    """

    def __init__(self, length: int, kernel_size: int, **options: Any) -> None:
        super().__init__(**options)
        self.downsample = MaxPool2D((1, kernel_size), stride=(1, 2))
        self.pos_embed = self.create_parameter(
            [1, length, options["dim"]], default_initializer=Normal(std=0.02)
        )

    def forward(
        self, x: paddle.Tensor, tokens: int | None = None, mask: paddle.Tensor | None = None
    ) -> paddle.Tensor:
        # Not super(), which Paddle 2.6 can't trace.
        x = Block.forward(self, x, tokens, mask)
        pooled = self.downsample(swap_axes(x).unsqueeze(2)).squeeze(2)
        return add_to_all(swap_axes(pooled), self.pos_embed)


@register("hvt")
class HVT(ImageModel):
    """HVT. It takes images of image_size only.

    Its features are the last block's tokens, normalised: [B, N, embed_dim]. The classifier reads
    their mean. Pooled tokens make no map: windows run over the ends of rows. As an intermediate,
    they are a single row.

    Args:
        image_size: pixels, or (height, width): multiples of patch_size.
        patch_size: side of a patch, in pixels.
        embed_dim: number of channels of a token.
        depth: number of blocks.
        num_heads: number of attention heads.
        mlp_ratio: ratio of the MLPs' hidden width to embed_dim.
        qkv_bias: whether the queries, keys and values have a bias.
        pool_block_width: every n-th block pools its tokens, beginning with the first one. 0: none
            does.
        pool_kernel_size: number of tokens in a pooling window.
        dropout: dropout rate after the position embedding, after the attention's projection and in
            the MLPs.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block.
        droppath_shape: how the stochastic depth rates of the blocks are set. "linear": they grow
            linearly from 0 at the first block; "constant": all blocks have droppath, as in
            PaddleViT.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    layout = "NLC"
    pos_embed_prefix = 0

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 384,
        depth: Depth = 12,
        num_heads: Size = 6,
        mlp_ratio: Positive = 4.0,
        qkv_bias: bool = True,
        pool_block_width: Blocks = 12,
        pool_kernel_size: Kernel = 3,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        droppath_shape: InTraining[Literal["linear", "constant"]] = "linear",
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if embed_dim % num_heads:
            raise InputError(f"EMBED_DIM is {embed_dim}, not a multiple of NUM_HEADS {num_heads}")
        self.num_features = embed_dim
        self.ends_in_map = not pool_block_width
        self.patch_embed = PatchEmbed(self.image_size, patch_size, in_channels, embed_dim)
        length = self.patch_embed.num_patches
        self.pos_embed = self.create_parameter(
            [1, length, embed_dim], default_initializer=Normal(std=0.02)
        )
        self.pos_drop = nn.Dropout(dropout)
        self.blocks = nn.LayerList()
        reductions = []
        reduction = patch_size
        [drop_paths] = drop_path_rates(droppath, [depth], droppath_shape)
        for index, drop_path in enumerate(drop_paths):
            options: dict[str, Any] = {
                "dim": embed_dim,
                "attn": Attention(
                    embed_dim,
                    num_heads,
                    qkv_bias=qkv_bias,
                    attn_drop=attention_dropout,
                    proj_drop=dropout,
                ),
                "mlp_ratio": mlp_ratio,
                "init_values": None,
                "drop": dropout,
                "drop_path": drop_path,
            }
            if pool_block_width and index % pool_block_width == 0:
                if length < pool_kernel_size:
                    raise InputError(
                        f"POOL_KERNEL_SIZE is {pool_kernel_size}, but block {index} has {length}"
                        " tokens; choose a smaller one or larger images"
                    )
                length = (length - pool_kernel_size) // 2 + 1
                self.blocks.append(PoolingBlock(length, pool_kernel_size, **options))
                # Half as many tokens, all in one row.
                reduction *= 2
            else:
                self.blocks.append(Block(**options))
            reductions.append(reduction)
        modules = [f"blocks.{i}" for i in range(depth)]
        self.feature_info = feature_info(modules, embed_dim, reductions)
        self.norm = LayerNorm(embed_dim, epsilon=1e-6)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.pos_drop(add_to_all(self.patch_embed(x), self.pos_embed))

    def grid(self, places: int) -> tuple[int, int]:
        if places == self.patch_embed.num_patches:
            return self.patch_embed.grid_size
        return 1, places

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x.mean(axis=1))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block, and the classifier with the last norm."""
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [("patch_embed", "pos_embed"), *blocks, ("norm", "head")]

    def no_weight_decay(self) -> set[str]:
        """Returns the names of all position embeddings."""
        return {name for name, _ in self.named_parameters() if name.endswith("pos_embed")}

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
