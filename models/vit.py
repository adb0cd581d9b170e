"""Vision Transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), with what later papers add. DeiT
(arXiv:2012.12877) and DeiT-III (arXiv:2204.07118): a distillation token, layer scale, a position
embedding of the patches alone. "Better plain ViT baselines" (arXiv:2205.01580): fixed positions.
Also what DINOv2 and the image towers of CLIP and SigLIP have (arXiv:2304.07193, 2103.00020,
2303.15343).

Parameter names, order of operations and initialisation are those of timm's ``VisionTransformer``
and ``VisionTransformerDistilled``; a Linear's weight is [in, out] here and [out, in] there.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal, Uniform

from errors import InputError
from models.base import ImageModel, register
from models.layers import Attention, LayerNorm, PatchDropout, PatchEmbed, init_linear
from models.layers.attention_pool import AttentionPool
from models.layers.block import Block
from models.layers.differential import (
    DifferentialAttention,
    DifferentialHeads,
    DifferentialParallelBlock,
)
from models.layers.init import init_as_big_vision
from models.layers.layout import concat
from models.layers.parallel import ParallelBlock
from models.layers.positions import sincos_2d
from models.layers.scale import add_to_all
from models.layers.stages import drop_path_rates, feature_info
from settings.keys import Count, Depth, Epsilon, Factor, InTraining, Positive, Rate, Size
from settings.needs import above_zero
from weights.names import vit as names


@register("vit", "deit")
class VisionTransformer(ImageModel):
    """The Vision Transformer and its variants; images of other sizes than image_size aren't taken.

    Features: all tokens [B, prefix + patches, embed_dim], normalised unless that comes after the
    pooling.

    Args:
        image_size: pixels, or (height, width): multiples of patch_size.
        patch_size: pixels along a patch's side.
        embed_dim: channels of a token.
        depth: blocks.
        num_heads: heads of each block.
        attn_head_size: channels of a head; None: embed_dim / num_heads.
        attention: "softmax", or "differential" (``DifferentialHeads``).
        block: "serial": attention, then the MLP; "parallel": both at once (``ParallelBlock``).
        mlp_ratio: hidden width of the MLP over embed_dim, of a gated one both halves'.
        act: of the MLP: "gelu", SigLIP 2's "gelu_tanh", OpenAI's "quick_gelu" (``Mlp``), or
            "swiglu" (``GatedMlp``).
        norm_eps: the layer norms' epsilon; None: 1e-6, with pre_norm 1e-5 (CLIP's).
        qkv_bias: whether the queries, keys and values have a bias.
        qk_norm: normalise each head's queries and keys.
        init_values: layer scale's initial value; None: no layer scale.
        global_pool: what the head reads: "token": the class token; "avg": the mean of the patch
            tokens; "map": what ``AttentionPool`` makes of them, and of prompts (SigLIP). With
            "token_avg" it reads the class token and the mean (DINOv2).
        fc_norm: whether the last norm comes after the pooling; None: for "avg".
        final_norm: whether there is a last norm.
        class_token: whether there is a class token.
        reg_tokens: number of register tokens, after the class token (Darcet et al. 2023,
            arXiv:2309.16588).
        no_embed_class: the position embedding has patches only.
        pos_embed: "learn", or "sincos2d": fixed (``sincos_2d``), of patches only, and in no weight
            file.
        weight_init: how fresh weights are drawn: "timm"; "deit": the class token as the positions,
            with a deviation of 0.02 instead of 1e-6; or "big_vision" (``init_as_big_vision``).
        pre_norm: a norm before the first block, and patches without a bias (CLIP,
            arXiv:2103.00020).
        cut_images: image_size may be no multiple of patch_size; the pixels after the last patch are
            left out.
        distilled: a distillation token with a head of its own; the output is the mean of both
            heads.
        dropout: after the position embedding, after the attention's projection and in the MLP.
        attention_dropout: of the attention weights.
        prompt_tokens: tokens without positions, after all others that come before the patches
            (arXiv:2203.12119).
        prompt_deep: each block gets its own in the place of the last one's.
        patch_drop: share of the patch tokens that training leaves out.
        droppath: rate of stochastic depth at the last block.
        droppath_shape: "linear": from 0 at the first block; "constant": all blocks have the last
            one's rate.

    Attributes:
        num_prefix_tokens: tokens before the patches.
        pos_embed_prefix: how many of them ``pos_embed`` has.
        distilled_training: of a distilled model; True: train mode returns (logits, distillation
            logits).

    Raises:
        InputError: sizes or options that don't fit together.
    """

    weight_names = names
    layout = "NLC"
    distilled_training = False

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 768,
        depth: Depth = 12,
        num_heads: Size = 12,
        attn_head_size: Size | None = None,
        attention: Literal["softmax", "differential"] = "softmax",
        block: Literal["serial", "parallel"] = "serial",
        mlp_ratio: Positive = 4.0,
        act: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu",
        norm_eps: Epsilon | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        init_values: Positive | None = None,
        global_pool: Literal["token", "avg", "map", "token_avg"] = "token",
        fc_norm: bool | None = None,
        final_norm: bool = True,
        class_token: bool = True,
        reg_tokens: Count = 0,
        no_embed_class: bool = False,
        pos_embed: Literal["learn", "sincos2d"] = "learn",
        weight_init: Literal["timm", "deit", "big_vision"] = "timm",
        pre_norm: bool = False,
        cut_images: bool = False,
        distilled: bool = False,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        prompt_tokens: Count = 0,
        prompt_deep: Annotated[bool, above_zero("MODEL.PROMPT_TOKENS")] = False,
        patch_drop: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        droppath_shape: Annotated[
            InTraining[Literal["linear", "constant"]], above_zero("MODEL.DROPPATH")
        ] = "linear",
        head_init_scale: InTraining[Factor] = 1.0,
        head_init_bias: InTraining[float] = 0.0,
        head_batch_norm: bool = False,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        _check_heads(embed_dim, num_heads, attn_head_size, global_pool)
        self.num_features = embed_dim
        self.global_pool = global_pool
        self.head_init_bias = head_init_bias
        self.head_batch_norm = head_batch_norm
        self.weight_init = weight_init
        self.distilled = distilled
        self.act = act
        self.num_prefix_tokens = (prefix := class_token + distilled + reg_tokens) + prompt_tokens
        epsilon = norm_eps or (1e-5 if pre_norm else 1e-6)
        norm = functools.partial(LayerNorm, embed_dim, epsilon=epsilon)
        self.patch_embed = PatchEmbed(
            self.image_size, patch_size, in_channels, embed_dim, not pre_norm, cut_images
        )
        self._add_tokens(class_token, reg_tokens, prompt_tokens, prompt_deep * depth)
        self._add_positions(pos_embed, no_embed_class)
        self.pos_drop, self.patch_drop = nn.Dropout(dropout), PatchDropout(patch_drop, prefix)
        self.norm_pre = norm() if pre_norm else nn.Identity()
        heads = (
            embed_dim,
            num_heads,
            attn_head_size,
            qkv_bias,
            qk_norm,
            attention_dropout,
            dropout,
        )
        [rates] = drop_path_rates(droppath, [depth], droppath_shape)
        self.blocks = _make_blocks(
            block, attention, heads, (mlp_ratio, init_values, dropout), rates, (epsilon, act)
        )
        self.feature_info = feature_info(
            [f"blocks.{i}" for i in range(depth)], embed_dim, patch_size
        )
        after = global_pool == "avg" if fc_norm is None else fc_norm
        if after and global_pool == "token_avg":
            raise InputError(
                "FC_NORM is True, expected False: GLOBAL_POOL token_avg is of normalised tokens"
            )
        self.norm = norm() if final_norm and not after else nn.Identity()
        self.fc_norm = norm() if final_norm and after else nn.Identity()
        if global_pool == "token_avg":
            self.head_widths = {"head": 2 * embed_dim}
        self.attn_pool = (
            AttentionPool(embed_dim, num_heads, mlp_ratio, epsilon, act)
            if global_pool == "map"
            else None
        )
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.patch_embed(x)
        if self.no_embed_class:
            x = add_to_all(x, self.pos_embed)
        names = ("cls_token", "dist_token", "reg_token")
        prefix = [getattr(self, name) for name in names if name in self._parameters]
        x = concat([*(token.expand([x.shape[0], -1, -1]) for token in prefix), x], axis=1)
        if not self.no_embed_class:
            x = add_to_all(x, self.pos_embed)
        x = self.norm_pre(self.patch_drop(self.pos_drop(x)))
        return self._insert_prompts(x, self.prompt_tokens[0], before=0) if self.num_prompts else x

    def _stages(self) -> Iterable[Any]:
        """Returns each block, with the prompts that it gets in the place of the last one's."""
        own: list[Any] = [None] * len(self.blocks)
        if self.num_prompts and self.prompt_tokens.shape[0] > 1:
            own[1:] = self.prompt_tokens.unbind(0)[1:]
        return [(block, own[place]) for place, block in enumerate(self.blocks)]

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        block, prompts = stage
        return self._run(
            block,
            x if prompts is None else self._insert_prompts(x, prompts, before=self.num_prompts),
        )

    def _insert_prompts(
        self, x: paddle.Tensor, prompts: paddle.Tensor, before: int
    ) -> paddle.Tensor:
        """Returns the tokens x with ``prompts`` before the patches, in the place of ``before``
        others.
        """
        place = self.num_prefix_tokens - self.num_prompts
        rows = prompts.astype(x.dtype).unsqueeze(0)
        return paddle.concat(
            [x[:, :place], rows.expand([x.shape[0], -1, -1]), x[:, place + before :]], axis=1
        )

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]:
        if self.distilled:
            logits = self.head(x[:, 0])
            distilled = self.head_dist(x[:, 1])
            return (
                (logits, distilled)
                if self.distilled_training and self.training
                else (logits + distilled) / 2
            )
        if self.attn_pool is not None:
            x = self.attn_pool(x[:, self.num_prefix_tokens - self.num_prompts :])
        elif self.global_pool == "token":
            x = x[:, 0]
        else:
            mean = x[:, self.num_prefix_tokens :].mean(axis=1)
            x = concat([x[:, 0], mean], axis=1) if self.global_pool == "token_avg" else mean
        return self.head(self.fc_norm(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head", "head_dist") if self.distilled else ("head",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block, the classifier with its norm: BEiT's and
        MAE's (arXiv:2106.08254, 2111.06377).
        """
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        embedding = (
            "cls_token",
            "dist_token",
            "reg_token",
            "pos_embed",
            "patch_embed",
            "norm_pre",
            "prompt_tokens",
        )
        return [embedding, *blocks, ("norm", "attn_pool", "fc_norm", "head", "head_dist")]

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token", "dist_token", "reg_token", "prompt_tokens"}

    def _add_tokens(self, class_token: bool, reg_tokens: int, prompts: int, prompted: int) -> None:
        _check_tokens(self.global_pool, class_token, reg_tokens, self.distilled)
        starts = {"timm": Normal(std=1e-6), "deit": Normal(std=0.02), "big_vision": Constant(0.0)}
        for name, count, start in (
            ("cls_token", int(class_token), starts[self.weight_init]),
            ("dist_token", int(self.distilled), Normal(std=0.02)),
            ("reg_token", reg_tokens, Normal(std=1e-6)),
        ):
            if count:
                token = self.create_parameter(
                    [1, count, self.num_features], default_initializer=start
                )
                self.add_parameter(name, token)
        self.num_prompts = prompts
        if prompts:  # drawn as the authors' program does
            bound = (
                6 / (math.prod(self.patch_embed.proj.weight.shape[1:]) + self.num_features)
            ) ** 0.5
            shape = [prompted or 1, prompts, self.num_features]
            start = Uniform(-bound, bound)
            self.prompt_tokens = self.create_parameter(shape, default_initializer=start)

    def _add_positions(self, kind: str, no_embed_class: bool) -> None:
        self.no_embed_class = no_embed_class or kind == "sincos2d"
        self.pos_embed_prefix = (
            0 if self.no_embed_class else self.num_prefix_tokens - self.num_prompts
        )
        if kind == "sincos2d":
            values = paddle.to_tensor(sincos_2d(*self.patch_embed.grid_size, self.num_features))
            self.register_buffer("pos_embed", values, persistable=False)
        else:
            shape = [1, self.patch_embed.num_patches + self.pos_embed_prefix, self.num_features]
            std = self.num_features**-0.5 if self.weight_init == "big_vision" else 0.02
            self.pos_embed = self.create_parameter(shape, default_initializer=Normal(std=std))

    def _init_weights(self, layer: nn.Layer) -> None:
        if self.weight_init == "big_vision":
            init_as_big_vision(layer)
        else:
            init_linear(layer)


def _make_blocks(
    kind: str,
    attention: str,
    heads: tuple[Any, ...],
    sizes: tuple,
    rates: Sequence[float],
    others: tuple,
) -> nn.LayerList:
    """Returns a block for each rate of drop path. ``heads`` is what ``Attention`` takes, and
    ``sizes``, a rate and ``others`` what a block takes besides.

    Raises:
        InputError: options that don't fit together.
    """
    head_size = heads[2] or heads[0] // heads[1]
    act = others[-1]
    if attention == "differential" and head_size % 2:
        raise InputError(
            f"a head has {head_size} channels, ATTENTION differential takes an even number"
        )
    if kind == "parallel" and act == "swiglu":
        raise InputError(
            "ACT is 'swiglu', which BLOCK parallel doesn't take; expected gelu, gelu_tanh or quick_gelu"
        )
    differential = attention == "differential"
    blocks = nn.LayerList()
    for place, rate in enumerate(rates):
        rest: tuple[Any, ...] = (*sizes, rate, *others)
        if kind == "parallel":
            block = attn = (DifferentialParallelBlock if differential else ParallelBlock)(
                *heads[:-1], *rest
            )
        else:
            attn = (DifferentialAttention if differential else Attention)(*heads)
            block = Block(heads[0], attn, *rest)
        if isinstance(attn, DifferentialHeads):
            attn.begin(place)
        blocks.append(block)
    return blocks


def _check_heads(
    embed_dim: int, num_heads: int, attn_head_size: int | None, global_pool: str
) -> None:
    if embed_dim % num_heads and attn_head_size is None:
        raise InputError(
            f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}; or set ATTN_HEAD_SIZE"
        )
    if embed_dim % num_heads and global_pool == "map":
        raise InputError(
            f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}, as GLOBAL_POOL map needs"
        )


def _check_tokens(global_pool: str, class_token: bool, reg_tokens: int, distilled: bool) -> None:
    if distilled and global_pool != "token":
        raise InputError(
            f"GLOBAL_POOL is {global_pool!r}, expected 'token': DISTILLED heads read their tokens"
        )
    if not class_token and global_pool.startswith("token"):
        expected = "expected 'avg' or 'map': without CLASS_TOKEN there is none to read"
        raise InputError(f"GLOBAL_POOL is {global_pool!r}, {expected}")
    if distilled and reg_tokens:
        raise InputError(f"REG_TOKENS is {reg_tokens}, expected 0: DISTILLED models have none")
