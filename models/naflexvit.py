"""NaFlexViT: a Vision Transformer for images of any ratio and size.

Batches have images of several shapes, as patches with masks (NaViT, Dehghani et al. 2023,
arXiv:2307.06304). Position embeddings are resized for each image, as in SigLIP 2's NaFlex (Tschannen
et al. 2025, arXiv:2502.14786).

Parameter names, the order of operations and the initialisation are those of timm 1.0.31's
``NaFlexVit``. The weight of a Linear is [in, out] here and [out, in] there.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel, register
from models.layers import Attention, LayerNorm, PatchDropout, init_linear
from models.layers.attention_pool import AttentionPool
from models.layers.block import Block
from models.layers.init import init_branches
from models.layers.naflex import NaFlexEmbed, key_mask
from models.layers.neck import Neck
from models.layers.stages import drop_path_rates, feature_info
from settings.keys import (
    Count,
    Depth,
    Factor,
    InTraining,
    OfClassifier,
    Positive,
    Rate,
    Size,
)
from settings.needs import above_zero, is_
from weights.names import naflexvit as names

_EPSILON = 1e-6


@register("naflexvit")
class NaFlexVit(ImageModel):
    """A Vision Transformer that takes images of all ratios and sizes, in one batch.

    It takes images [B, C, H, W], of multiples of patch_size. Or it takes patches [B, N, patch_size *
    patch_size * C], pixel by pixel, each with its channels, together with:

    - ``patch_coord`` [B, N, 2]: row and column of each patch in its image, from 0. An image has as
      many rows and columns as the largest of these say.
    - ``patch_valid`` [B, N]: whether it is a patch of the image. The others fill up shorter images,
      and don't change an answer: they are neither attended to nor pooled.

    A dictionary with the keys "patches", "patch_coord" and "patch_valid" is taken, too, as timm's
    loader gives it.

    Args:
        image_size: pixels, or (height, width): multiples of patch_size. Other sizes are taken, too.
        patch_size: side of a patch, in pixels.
        embed_dim: number of channels of a token.
        depth: number of blocks.
        num_heads: number of attention heads in each block.
        mlp_ratio: ratio of the MLP's hidden width to embed_dim.
        act: activation of the MLP: "gelu", or SigLIP 2's "gelu_tanh".
        qkv_bias: whether the queries, keys and values have a bias.
        init_values: initial value of layer scale; None: no layer scale.
        global_pool: the pooled features that the head reads. "token": the class token; "avg": the
            mean of the patch tokens; "map": the output of ``AttentionPool`` over the patch tokens
            (SigLIP).
        fc_norm: whether the final norm comes after the pooling. None: only with "avg".
        final_norm: whether the model has a final norm.
        class_token: whether the model has a class token.
        reg_tokens: number of register tokens, placed after the class token (Darcet et al. 2023,
            arXiv:2309.16588). 0: none.
        pos_embed: the position embedding. "learn": one for each position of a grid; "factorized":
            the sum of one for the row and one for the column, resized linearly (NaViT).
        pos_grid: rows and columns of the position embedding, or [rows, columns].
        pos_resize: how a learnt position embedding is resized to the grid of an image. "bicubic":
            antialiased; "antialiased": bilinear and antialiased (SigLIP 2); "bilinear": without
            antialiasing; "corners": the same with aligned corners (C-RADIO v3).
        pos_keep_ratio: whether the position embedding is resized to a square with the longer side
            of the image, of which the image uses the upper left part. It keeps its aspect ratio
            that way.
        dropout: dropout rate after the position embedding, after the attention's projection and in
            the MLP.
        attention_dropout: dropout rate of the attention weights.
        patch_drop: share of each image's patches that are dropped at random in training (NaViT,
            section 2.2).
        patch_drop_end: the value of patch_drop at the end of training, which it approaches along a
            cosine. None: patch_drop is constant.
        droppath: stochastic depth rate of the last block.
        neck_dim: number of channels of a projection between the pooled features and the classifier
            (``Neck``). None: no projection.
        neck_norm: whether features are normalised to length 1 before the classifier, as in SigLIP
            2.
        droppath_shape: how the stochastic depth rates of the blocks are set. "linear": they grow
            from 0 at the first block; "constant": all blocks have droppath.

    Raises:
        InputError: sizes or options that don't fit together.
    """

    weight_names = names
    layout = "NLC"
    resizable = True
    first_conv = "embeds.proj"
    channels_last = True
    pos_embed_layout = "NHWC"

    def __init__(
        self,
        image_size: int | Sequence[int] = 384,
        patch_size: Size = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 768,
        depth: Depth = 12,
        num_heads: Size = 12,
        mlp_ratio: Positive = 4.0,
        act: Literal["gelu", "gelu_tanh"] = "gelu",
        qkv_bias: bool = True,
        init_values: Positive | None = None,
        global_pool: Literal["token", "avg", "map"] = "map",
        fc_norm: bool | None = None,
        final_norm: bool = True,
        class_token: bool = False,
        reg_tokens: Count = 0,
        pos_embed: Literal["learn", "factorized"] = "learn",
        pos_grid: Size | Sequence[Size] = 16,
        pos_resize: Annotated[
            Literal["bicubic", "antialiased", "bilinear", "corners"],
            is_("MODEL.POS_EMBED", "learn"),
        ] = "bicubic",
        pos_keep_ratio: bool = False,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        patch_drop: InTraining[Rate] = 0.0,
        patch_drop_end: Annotated[InTraining[Rate | None], above_zero("MODEL.PATCH_DROP")] = None,
        droppath: InTraining[Rate] = 0.0,
        droppath_shape: Annotated[
            InTraining[Literal["linear", "constant"]], above_zero("MODEL.DROPPATH")
        ] = "linear",
        neck_dim: OfClassifier[Size | None] = None,
        neck_norm: OfClassifier[bool] = False,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        head_init_bias: InTraining[OfClassifier[float]] = 0.0,
        head_batch_norm: OfClassifier[bool] = False,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if embed_dim % num_heads:
            raise InputError(f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}")
        if global_pool == "token" and not class_token:
            raise InputError(
                "GLOBAL_POOL is 'token', expected 'avg' or 'map': the model has no CLASS_TOKEN"
            )
        if fc_norm is None:
            fc_norm = global_pool == "avg"
        self.window_side = patch_size
        self.num_features = embed_dim
        self.global_pool = global_pool
        self.head_init_bias = head_init_bias
        self.head_batch_norm = head_batch_norm
        self.num_prefix_tokens = class_token + reg_tokens

        self.embeds = NaFlexEmbed(
            self.image_size,
            patch_size,
            in_channels,
            embed_dim,
            class_token=class_token,
            reg_tokens=reg_tokens,
            positions=pos_embed,
            grid=pos_grid,
            resize=pos_resize,
            keep_ratio=pos_keep_ratio,
        )
        self.pos_drop = nn.Dropout(dropout)
        self.patch_drop = PatchDropout(patch_drop, self.num_prefix_tokens, patch_drop_end)
        [drop_paths] = drop_path_rates(droppath, [depth], droppath_shape)
        self.blocks = nn.LayerList()
        for drop_path in drop_paths:
            attn = Attention(
                embed_dim,
                num_heads,
                qkv_bias=qkv_bias,
                attn_drop=attention_dropout,
                proj_drop=dropout,
            )
            self.blocks.append(
                Block(
                    embed_dim,
                    attn,
                    mlp_ratio=mlp_ratio,
                    init_values=init_values,
                    drop=dropout,
                    drop_path=drop_path,
                    act=act,
                )
            )
        self.feature_info = feature_info(
            [f"blocks.{i}" for i in range(depth)], embed_dim, patch_size
        )

        # The last norm stands before the pooling or after it.
        norm_before = final_norm and not fc_norm
        norm_after = final_norm and fc_norm
        self.norm = LayerNorm(embed_dim, epsilon=_EPSILON) if norm_before else nn.Identity()
        self.fc_norm = LayerNorm(embed_dim, epsilon=_EPSILON) if norm_after else nn.Identity()
        self.attn_pool = None
        if global_pool == "map":
            self.attn_pool = AttentionPool(
                embed_dim, num_heads, mlp_ratio=mlp_ratio, epsilon=_EPSILON, act=act
            )
        self.neck = None
        if neck_dim or neck_norm:
            self.neck = Neck(embed_dim, neck_dim, neck_norm)
            self.num_features = neck_dim or embed_dim
        self._finish()
        init_branches(self.blocks)

    @property
    def patch_embed(self) -> NaFlexEmbed:
        """The embedding, by the name that other architectures have for it."""
        return self.embeds

    @property
    def pos_embed(self) -> paddle.Tensor:
        """The positions of the grid, [1, rows, columns, embed_dim]."""
        embeds = self.embeds
        if embeds.factorized:
            return embeds.pos_embed_y.unsqueeze(2) + embeds.pos_embed_x.unsqueeze(1)
        return embeds.pos_embed

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        patches, patch_coord = self.embeds.cut(x)
        return self.patch_drop(self.pos_drop(self.embeds(patches, patch_coord)))

    def forward(
        self,
        x: paddle.Tensor | Mapping[str, paddle.Tensor],
        patch_coord: paddle.Tensor | None = None,
        patch_valid: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Returns the logits of images, or of patches with their coordinates and mask.

        Raises:
            InputError: patches without one of the two.
        """
        if not isinstance(x, Mapping) and patch_coord is None and x.ndim == 4:
            # A call of the base class's method wouldn't be traced with the batch's size unknown.
            return self.forward_head(self.forward_features(x))
        return self._forward_packed(x, patch_coord, patch_valid)

    def _forward_packed(
        self,
        x: paddle.Tensor | Mapping[str, paddle.Tensor],
        patch_coord: paddle.Tensor | None,
        patch_valid: paddle.Tensor | None,
    ) -> paddle.Tensor:
        if isinstance(x, Mapping):
            return self._forward_packed(x["patches"], x.get("patch_coord"), x.get("patch_valid"))
        if patch_coord is None or patch_valid is None:
            raise InputError("patches need patch_coord and patch_valid; pass all three")
        tokens = self.pos_drop(self.embeds(x, patch_coord))
        tokens, patch_valid = self.patch_drop.of_padded(tokens, patch_valid)
        return self.forward_head(self._run_blocks(tokens, patch_valid), patch_valid)

    def _run_blocks(self, x: paddle.Tensor, patch_valid: paddle.Tensor) -> paddle.Tensor:
        """Returns the features of tokens. Those of padding have no meaning."""
        mask = key_mask(patch_valid, self.num_prefix_tokens)
        for block in self.blocks:
            x = self._run(block, x, None, mask)
        return self._last_norm(x)

    def forward_head(
        self, x: paddle.Tensor, patch_valid: paddle.Tensor | None = None
    ) -> paddle.Tensor:
        """Returns the logits of features [B, prefix + N, embed_dim].

        Args:
            patch_valid: which of the N are patches of the image; None: all of them.
        """
        x = self.fc_norm(self._pool(x, patch_valid))
        if self.neck is not None:
            x = self.neck(x)
        return self.head(x)

    def _pool(self, x: paddle.Tensor, patch_valid: paddle.Tensor | None) -> paddle.Tensor:
        if self.global_pool == "token":
            return x[:, 0]
        x = x[:, self.num_prefix_tokens :]
        if self.attn_pool is not None:
            mask = None if patch_valid is None else key_mask(patch_valid, 0)
            return self.attn_pool(x, mask)
        if patch_valid is None:
            return x.mean(axis=1)
        share = patch_valid.astype("float32")
        share = share / share.sum(1, keepdim=True).clip(min=1)
        return paddle.matmul(share.unsqueeze(1).astype(x.dtype), x)[:, 0]

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the embedding, each block, and the classifier with its norm."""
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [("embeds",), *blocks, ("norm", "attn_pool", "fc_norm", "neck", "head")]

    def no_weight_decay(self) -> set[str]:
        # As timm's, which decays factorized positions.
        names = {"embeds.pos_embed", "embeds.cls_token", "embeds.reg_token"}
        return names & {name for name, _ in self.named_parameters()}
