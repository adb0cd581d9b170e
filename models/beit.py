"""BEiT (Bao et al. 2021, arXiv:2106.08254): a Vision Transformer with relative positions.

Parameter names, the order of operations and the initialisation are those of timm's ``Beit``. The
weight of a Linear is [in, out] here and [out, in] there.
"""

from collections.abc import Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp, PatchEmbed, init_linear, set_norm_eps
from models.layers.attention import attend_heads
from models.layers.init import init_branches
from models.layers.layout import concat
from models.layers.mlp import hidden_width
from models.layers.relative import RelativePositionBias
from models.layers.scale import add_to_all, scale_channels
from models.layers.stages import drop_path_rates, feature_info
from settings.keys import Depth, Epsilon, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import beit as names


class Attention(RelativePositionBias):
    """Multi-head self-attention with a bias by relative position; keys have no bias.

    Args:
        dim: channels D of the tokens.
        num_heads: heads H.
        window_size: (height, width) of the grid of patches; None: no relative positions.
        qkv_bias: whether queries and values have a bias.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout of the output.

    Shape: [B, N, D] -> the same. ``shared_bias`` is [H, N, N] and added to the scores.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: tuple[int, int] | None,
        qkv_bias: bool,
        attn_drop: float,
        proj_drop: float,
    ) -> None:
        super().__init__(window_size, num_heads, class_token=True)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = Linear(dim, 3 * dim, bias_attr=False)
        self.qkv_bias = qkv_bias
        if qkv_bias:
            self.q_bias = self.create_parameter([dim], is_bias=True)
            self.v_bias = self.create_parameter([dim], is_bias=True)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: paddle.Tensor, shared_bias: paddle.Tensor | None = None) -> paddle.Tensor:
        qkv_bias = None
        if self.qkv_bias:
            qkv_bias = paddle.concat([self.q_bias, paddle.zeros_like(self.q_bias), self.v_bias])
        qkv = self.qkv(x, qkv_bias)
        bias = shared_bias
        if self.window_size is not None:
            bias = self.position_bias()
            if shared_bias is not None:
                bias = bias + shared_bias
        x = attend_heads(
            [qkv], self.num_heads, self.head_dim, self.scale, drop=self.attn_drop, bias=bias
        )
        return self.proj_drop(self.proj(x))


class Block(nn.Layer):
    """x + gamma_1 * attn(norm1(x)), then x + gamma_2 * mlp(norm2(x)), each branch with drop path.

    Args:
        dim: channels D of the tokens.
        attn: the attention layer.
        mlp_ratio: hidden width of the MLP over D.
        init_values: initial value of gamma_1 and gamma_2; None: there is none of them.
        drop: dropout in the MLP.
        drop_path: rate of stochastic depth.

    Shape: [B, N, D] -> the same; ``shared_bias`` is that of ``Attention``.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Layer,
        mlp_ratio: float,
        init_values: float | None,
        drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, epsilon=1e-6)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = LayerNorm(dim, epsilon=1e-6)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.drop_path2 = DropPath(drop_path)
        self.gamma_1 = None
        self.gamma_2 = None
        if init_values:
            self.gamma_1 = self.create_parameter([dim], default_initializer=Constant(init_values))
            self.gamma_2 = self.create_parameter([dim], default_initializer=Constant(init_values))

    def forward(self, x: paddle.Tensor, shared_bias: paddle.Tensor | None = None) -> paddle.Tensor:
        branch = self.attn(self.norm1(x), shared_bias)
        if self.gamma_1 is not None:
            branch = scale_channels(branch, self.gamma_1)
        x = self.drop_path1(branch, onto=x)
        branch = self.mlp(self.norm2(x))
        if self.gamma_2 is not None:
            branch = scale_channels(branch, self.gamma_2)
        return self.drop_path2(branch, onto=x)


@register("beit")
class Beit(ImageModel):
    """BEiT. It takes images of image_size only.

    Its features are all tokens: [B, 1 + patches, embed_dim]. They are normalised, unless the last
    norm comes after the pooling.

    Args:
        image_size: pixels, or (height, width): multiples of patch_size.
        patch_size: side of a patch, in pixels.
        embed_dim: number of channels of a token.
        depth: number of blocks.
        num_heads: number of attention heads in each block.
        mlp_ratio: ratio of the MLP's hidden width to embed_dim.
        qkv_bias: whether queries and values have a bias.
        norm_eps: epsilon of all layer norms.
        init_values: initial value of layer scale; None: no layer scale.
        use_abs_pos_emb: whether the model has a position embedding.
        use_rel_pos_bias: whether each block has a relative position bias of its own.
        use_shared_rel_pos_bias: whether all blocks share one relative position bias.
        global_pool: the pooled features that the head reads. "avg": the mean of the patch tokens;
            "token": the class token.
        fc_norm: whether the final norm comes after the pooling. None: only with "avg".
        dropout: dropout rate before the first block, after the attention's projection and in the
            MLP.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Attributes:
        num_prefix_tokens: number of tokens before the patches: the class token.
        pos_embed_prefix: number of prefix tokens that ``pos_embed`` covers.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    layout = "NLC"
    num_prefix_tokens = 1
    pos_embed_prefix = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 768,
        depth: Depth = 12,
        num_heads: Size = 12,
        mlp_ratio: Positive = 4.0,
        qkv_bias: bool = True,
        norm_eps: Epsilon = 1e-6,
        init_values: Positive | None = None,
        use_abs_pos_emb: bool = True,
        use_rel_pos_bias: bool = False,
        use_shared_rel_pos_bias: bool = False,
        global_pool: Literal["token", "avg"] = "avg",
        fc_norm: bool | None = None,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 0.001,
        head_batch_norm: OfClassifier[bool] = False,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if embed_dim % num_heads:
            raise InputError(
                f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}; choose one that is"
            )
        self.num_features = embed_dim
        self.global_pool = global_pool
        self.head_batch_norm = head_batch_norm
        self.patch_embed = PatchEmbed(self.image_size, patch_size, in_channels, embed_dim)
        grid = self.patch_embed.grid_size
        self.cls_token = self.create_parameter(
            [1, 1, embed_dim], default_initializer=Normal(std=0.02)
        )
        self.pos_embed = None
        if use_abs_pos_emb:
            positions = [1, self.patch_embed.num_patches + self.pos_embed_prefix, embed_dim]
            self.pos_embed = self.create_parameter(positions, default_initializer=Normal(std=0.02))
        self.pos_drop = nn.Dropout(dropout)
        self.rel_pos_bias = None
        if use_shared_rel_pos_bias:
            self.rel_pos_bias = RelativePositionBias(grid, num_heads, class_token=True)
        [drop_paths] = drop_path_rates(droppath, [depth])
        self.blocks = nn.LayerList()
        for drop_path in drop_paths:
            attn = Attention(
                embed_dim,
                num_heads,
                window_size=grid if use_rel_pos_bias else None,
                qkv_bias=qkv_bias,
                attn_drop=attention_dropout,
                proj_drop=dropout,
            )
            block = Block(
                embed_dim,
                attn,
                mlp_ratio=mlp_ratio,
                init_values=init_values,
                drop=dropout,
                drop_path=drop_path,
            )
            self.blocks.append(block)
        self.feature_info = feature_info(
            [f"blocks.{i}" for i in range(depth)], embed_dim, patch_size
        )
        # The last norm stands before the pooling or after it.
        if fc_norm is None:
            fc_norm = global_pool == "avg"
        self.norm = nn.Identity() if fc_norm else LayerNorm(embed_dim, epsilon=1e-6)
        self.fc_norm = LayerNorm(embed_dim, epsilon=1e-6) if fc_norm else nn.Identity()
        set_norm_eps(self, norm_eps)
        self._add_classifiers()
        self.apply(self._init_weights)
        init_branches(self.blocks)
        self._scale_classifiers()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.patch_embed(x)
        x = concat([self.cls_token.expand([x.shape[0], -1, -1]), x], axis=1)
        if self.pos_embed is not None:
            x = add_to_all(x, self.pos_embed)
        return self.pos_drop(x)

    def _shared(self) -> paddle.Tensor | None:
        return None if self.rel_pos_bias is None else self.rel_pos_bias.position_bias()

    def _stage(self, stage: Any, x: paddle.Tensor, shared: paddle.Tensor | None) -> paddle.Tensor:
        return self._run(stage, x) if shared is None else self._run(stage, x, shared)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x[:, 0] if self.global_pool == "token" else x[:, self.num_prefix_tokens :].mean(axis=1)
        return self.head(self.fc_norm(x))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the authors' groups: the embedding, each block, and the classifier with its norm
        and the shared bias.
        """
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [
            ("cls_token", "pos_embed", "patch_embed"),
            *blocks,
            ("rel_pos_bias", "norm", "fc_norm", "head"),
        ]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns timm's groups: the shared bias belongs to the embedding, the last norm to the
        last block.
        """
        first, *blocks, last = super().timm_layer_groups()
        classifier = tuple(name for name in last if name != "rel_pos_bias")
        return [(*first, "rel_pos_bias"), *blocks, classifier]

    def no_weight_decay(self) -> set[str]:
        """Returns the authors' choice; timm adds the tables of relative positions."""
        return {"pos_embed", "cls_token"}

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
