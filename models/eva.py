"""EVA-02 (Fang et al. 2023, arXiv:2303.11331) and DINOv3 (Siméoni et al. 2025, arXiv:2508.10104).

Both are Vision Transformers with rotary position embeddings. Parameter names, the order of
operations and the initialisation are those of timm's ``Eva``. The weight of a Linear is [in, out]
here and [out, in] there.
"""

from collections.abc import Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp, PatchEmbed, init_linear
from models.layers.attention import attend_heads
from models.layers.init import init_branches
from models.layers.layout import concat
from models.layers.linear import in_float32
from models.layers.mlp import hidden_width
from models.layers.positions import ResizedPositions
from models.layers.rotary import RotaryEmbedding
from models.layers.scale import add_to_all, scale_channels
from models.layers.stages import drop_path_rates, feature_info
from models.layers.swiglu import PackedSwiGLU, SwiGLU
from settings.keys import (
    Count,
    Depth,
    Epsilon,
    Factor,
    InTraining,
    OfClassifier,
    Positive,
    Rate,
    Size,
)
from weights.names import eva as names


class Attention(nn.Layer):
    """Multi-head self-attention with rotary position embeddings; keys have no bias.

    Args:
        dim: channels D of the tokens.
        num_heads: heads H.
        qkv_bias: whether queries and values have a bias.
        qkv_fused: whether one projection computes queries, keys and values.
        halves: which channels make a pair (``rotate``).
        epsilon: epsilon of a norm before the output's projection; None: no norm.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout of the output.

    Shape: [B, N, D] -> the same. ``cosines`` and ``sines`` are the output of ``RotaryEmbedding``
    for N tokens. A ``mask`` [B, N, N] is added to each item's scores.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool,
        qkv_fused: bool,
        halves: bool,
        epsilon: float | None,
        attn_drop: float,
        proj_drop: float,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.halves = halves
        self.scale = self.head_dim**-0.5
        self.qkv_fused = qkv_fused
        self.qkv_bias = qkv_bias
        if qkv_fused:
            self.qkv = Linear(dim, 3 * dim, bias_attr=False)
            if qkv_bias:
                self.q_bias = self.create_parameter([dim], is_bias=True)
                self.v_bias = self.create_parameter([dim], is_bias=True)
        else:
            self.q_proj = Linear(dim, dim, bias_attr=None if qkv_bias else False)
            self.k_proj = Linear(dim, dim, bias_attr=False)
            self.v_proj = Linear(dim, dim, bias_attr=None if qkv_bias else False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = nn.Identity() if epsilon is None else LayerNorm(dim, epsilon=epsilon)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: paddle.Tensor,
        cosines: paddle.Tensor,
        sines: paddle.Tensor,
        mask: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        x = attend_heads(
            self._project(x),
            self.num_heads,
            self.head_dim,
            self.scale,
            drop=self.attn_drop,
            mask=mask,
            turns=(cosines, sines),
            halves=self.halves,
            flash=mask is None,
        )
        return self.proj_drop(self.proj(self.norm(x)))

    def _project(self, x: paddle.Tensor) -> list[paddle.Tensor]:
        """Returns queries, keys and values, three of [B, N, D] or one of [B, N, 3 D]."""
        if not self.qkv_fused:
            return [projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        bias = None
        if self.qkv_bias:
            bias = paddle.concat([self.q_bias, paddle.zeros_like(self.q_bias), self.v_bias])
        return [self.qkv(x, bias)]


class Block(nn.Layer):
    """x + gamma_1 * attn(norm1(x)), then x + gamma_2 * mlp(norm2(x)), each branch with drop path.

    Args:
        dim: channels D of the tokens.
        attn: the attention layer.
        mlp: the MLP.
        init_values: initial value of gamma_1 and gamma_2; None: there is none of them.
        epsilon: epsilon of the layer norms.
        drop_path: rate of stochastic depth.

    Shape: [B, N, D] -> the same; ``cosines``, ``sines`` and ``mask`` are those of ``Attention``.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Layer,
        mlp: nn.Layer,
        init_values: float | None,
        epsilon: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, epsilon=epsilon)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = LayerNorm(dim, epsilon=epsilon)
        self.mlp = mlp
        self.drop_path2 = DropPath(drop_path)
        self.gamma_1 = None
        self.gamma_2 = None
        if init_values:
            self.gamma_1 = self.create_parameter([dim], default_initializer=Constant(init_values))
            self.gamma_2 = self.create_parameter([dim], default_initializer=Constant(init_values))

    def forward(
        self,
        x: paddle.Tensor,
        cosines: paddle.Tensor,
        sines: paddle.Tensor,
        mask: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        branch = self.attn(self.norm1(x), cosines, sines, mask)
        if self.gamma_1 is not None:
            branch = scale_channels(branch, self.gamma_1)
        x = self.drop_path1(branch, onto=x)
        branch = self.mlp(self.norm2(x))
        if self.gamma_2 is not None:
            branch = scale_channels(branch, self.gamma_2)
        return self.drop_path2(branch, onto=x)


@register("eva")
class Eva(ImageModel):
    """EVA-02 and DINOv3. They take images of image_size only, unless dynamic_img_size is set
    (or ``take_other_sizes`` is called).

    Their features are all tokens: [B, prefix + patches, embed_dim]. They are normalised, unless the
    last norm comes after the pooling.

    Args:
        image_size: pixels, or (height, width): multiples of patch_size.
        patch_size: side of a patch, in pixels.
        embed_dim: number of channels of a token.
        depth: number of blocks.
        num_heads: number of attention heads in each block.
        mlp_ratio: ratio of the MLP's hidden width to embed_dim.
        swiglu_mlp: whether MLPs are SwiGLU.
        swiglu_align_to: the hidden width of SwiGLU MLPs is rounded up to a multiple of this. 0: it
            isn't rounded.
        scale_mlp: whether SwiGLU MLPs have a norm.
        scale_attn_inner: whether a norm precedes the projection of the attention's output.
        qkv_bias: whether queries and values have a bias.
        qkv_fused: whether a single projection computes queries, keys and values. Otherwise each has
            its own.
        init_values: initial value of layer scale; None: no layer scale.
        class_token: whether the model has a class token.
        reg_tokens: number of register tokens, placed after the class token (Darcet et al. 2023,
            arXiv:2309.16588). 0: none.
        use_abs_pos_emb: whether the model has an absolute position embedding, of all tokens.
        dynamic_img_size: whether images of sizes other than image_size are accepted. A position
            embedding is resized for them.
        rope_type: rotary positions. "cat": as EVA-02, by the index of row and column; "dinov3": as
            DINOv3, by the position in the image.
        rope_temperature: base of the frequencies of rotary positions.
        rope_bfloat16: whether DINOv3's periods are rounded to bfloat16, as in the authors' files,
            but not in timm's.
        ref_feat_shape: rows and columns to which EVA-02's token indices are scaled. None: they
            aren't scaled.
        global_pool: the pooled features that the head reads. "avg": the mean of the patch tokens;
            "token": the class token.
        fc_norm: whether the final norm comes after the pooling. None: only with "avg".
        norm_eps: epsilon of all layer norms.
        dropout: dropout rate before the first block, after the attention's projection and in the
            MLP.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Attributes:
        num_prefix_tokens: number of tokens before the patches.
        pos_embed_prefix: number of prefix tokens that ``pos_embed`` covers: all of them.

    Raises:
        InputError: sizes or options that don't fit together.
    """

    weight_names = names
    layout = "NLC"
    resizable = True
    takes_masks = True

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
        swiglu_mlp: bool = False,
        swiglu_align_to: Count = 0,
        scale_mlp: bool = False,
        scale_attn_inner: bool = False,
        qkv_bias: bool = True,
        qkv_fused: bool = True,
        init_values: Positive | None = None,
        class_token: bool = True,
        reg_tokens: Count = 0,
        use_abs_pos_emb: bool = True,
        dynamic_img_size: bool = False,
        rope_type: Literal["cat", "dinov3"] = "cat",
        rope_temperature: Positive = 10_000.0,
        rope_bfloat16: bool = False,
        ref_feat_shape: Size | None = None,
        global_pool: Literal["token", "avg"] = "avg",
        fc_norm: bool | None = None,
        norm_eps: Epsilon = 1e-6,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 0.001,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if embed_dim % num_heads:
            raise InputError(
                f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}; choose one that is"
            )
        if global_pool == "token" and not class_token:
            raise InputError("GLOBAL_POOL is 'token', expected 'avg': the model has no CLASS_TOKEN")
        self.num_features = embed_dim
        self.global_pool = global_pool
        self.rope_bfloat16 = rope_bfloat16
        self.ref_feat_shape = ref_feat_shape
        self.num_prefix_tokens = class_token + reg_tokens
        self.pos_embed_prefix = self.num_prefix_tokens
        self.patch_embed = PatchEmbed(self.image_size, patch_size, in_channels, embed_dim)
        if dynamic_img_size:
            self.take_other_sizes()
        if class_token:
            self.cls_token = self._make_tokens(1)
        if reg_tokens:
            self.reg_token = self._make_tokens(reg_tokens)
        self.pos_embed = None
        if use_abs_pos_emb:
            self.pos_embed = self._make_tokens(
                self.patch_embed.num_patches + self.num_prefix_tokens
            )
        self.resized_positions = ResizedPositions(
            self.patch_embed.grid_size, self.num_prefix_tokens
        )
        self.pos_drop = nn.Dropout(dropout)
        self.rope = RotaryEmbedding(
            rope_type,
            self.patch_embed.grid_size,
            embed_dim // num_heads,
            temperature=rope_temperature,
            reference=ref_feat_shape,
            prefix=self.num_prefix_tokens,
            bfloat16=rope_bfloat16,
        )

        hidden_dim = hidden_width(embed_dim, mlp_ratio)
        [drop_paths] = drop_path_rates(droppath, [depth])
        self.blocks = nn.LayerList()
        for drop_path in drop_paths:
            mlp = _make_mlp(
                embed_dim,
                hidden_dim,
                gated=swiglu_mlp,
                align_to=swiglu_align_to,
                epsilon=norm_eps if scale_mlp else None,
                drop=dropout,
            )
            attn = Attention(
                embed_dim,
                num_heads,
                qkv_bias=qkv_bias,
                qkv_fused=qkv_fused,
                halves=rope_type == "dinov3",
                epsilon=norm_eps if scale_attn_inner else None,
                attn_drop=attention_dropout,
                proj_drop=dropout,
            )
            block = Block(
                embed_dim,
                attn,
                mlp,
                init_values=init_values,
                epsilon=norm_eps,
                drop_path=drop_path,
            )
            self.blocks.append(block)
        self.feature_info = feature_info(
            [f"blocks.{i}" for i in range(depth)], embed_dim, patch_size
        )
        # The last norm stands before the pooling or after it.
        if fc_norm is None:
            fc_norm = global_pool == "avg"
        self.norm = nn.Identity() if fc_norm else LayerNorm(embed_dim, epsilon=norm_eps)
        self.fc_norm = LayerNorm(embed_dim, epsilon=norm_eps) if fc_norm else nn.Identity()
        self._add_classifiers()
        self.apply(self._init_weights)
        init_branches(self.blocks)
        self._scale_classifiers()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        patches = in_float32(self.patch_embed(x))
        names = ("cls_token", "reg_token")
        prefix = [getattr(self, name) for name in names if name in self._parameters]
        prefix = [token.expand([patches.shape[0], -1, -1]) for token in prefix]
        x = concat([*prefix, patches], axis=1)
        if self.pos_embed is not None:
            positions = self.resized_positions.resized(self.pos_embed, self.patch_embed.last_grid)
            x = add_to_all(x, positions)
        return self.pos_drop(x)

    def _shared(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        return self.rope(self.patch_embed.last_grid)

    def _stage(
        self,
        stage: Any,
        x: paddle.Tensor,
        shared: tuple[paddle.Tensor, paddle.Tensor],
        mask: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        others = shared if mask is None else (*shared, mask)
        return self._run(stage, x, *others)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x[:, 0] if self.global_pool == "token" else x[:, self.num_prefix_tokens :].mean(axis=1)
        return self.head(self.fc_norm(x))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups of both authors: the embedding, each block, and the classifier with
        its norm (optim_factory.py in baaivision/EVA's EVA-02/asuka, param_groups.py in
        facebookresearch/dinov3).
        """
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [
            ("cls_token", "reg_token", "pos_embed", "patch_embed"),
            *blocks,
            ("norm", "fc_norm", "head"),
        ]

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token", "reg_token"}

    def _make_tokens(self, count: int) -> paddle.Tensor:
        """Returns a parameter of ``count`` tokens, the same for all images: [1, count, embed_dim]."""
        return self.create_parameter(
            [1, count, self.num_features], default_initializer=Normal(std=0.02)
        )

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)


def _make_mlp(
    dim: int, hidden_dim: int, gated: bool, align_to: int, epsilon: float | None, drop: float
) -> nn.Layer:
    """Returns a block's MLP.

    Args:
        gated: whether it is a SwiGLU.
        align_to: its hidden width is rounded up to a multiple of this; 0: it isn't rounded.
        epsilon: epsilon of a norm within it; None: no norm.
    """
    if not gated:
        if align_to or epsilon is not None:
            raise InputError(
                "SWIGLU_MLP is False, but SWIGLU_ALIGN_TO and SCALE_MLP need it; set it to True"
            )
        return Mlp(dim, hidden_dim, drop)
    # timm has both first layers in one tensor where neither option is used.
    if not align_to and epsilon is None:
        return PackedSwiGLU(dim, hidden_dim, drop)
    if align_to:
        hidden_dim += -hidden_dim % align_to
    return SwiGLU(dim, hidden_dim, epsilon, drop)
