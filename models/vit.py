"""Vision Transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), with what later papers add to it.

DeiT (arXiv:2012.12877) and DeiT-III (arXiv:2204.07118) bring a distillation token, layer scale and
a position embedding of the patches alone. "Better plain ViT baselines" (arXiv:2205.01580) has fixed
positions. Other options are those of DINOv2 (arXiv:2304.07193) and of the image towers of CLIP and
SigLIP (arXiv:2103.00020, 2303.15343).

Parameter names, the order of operations and the initialisation are those of timm's
``VisionTransformer`` and ``VisionTransformerDistilled``. The weight of a Linear is [in, out] here
and [out, in] there.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Initializer, Normal, Uniform

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
from models.layers.graph_sizes import is_known
from models.layers.init import init_as_big_vision, init_as_mae
from models.layers.layout import concat
from models.layers.merging import Match, Merging
from models.layers.neck import Neck
from models.layers.parallel import ParallelBlock
from models.layers.positions import ResizedPositions, sincos_2d
from models.layers.scale import add_to_all
from models.layers.stages import drop_path_rates, feature_info
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
from settings.needs import above_zero
from weights.names import vit as names


@register("vit", "deit")
class VisionTransformer(ImageModel):
    """The Vision Transformer and its variants. It takes images of image_size only
    (``take_other_sizes``: of other sizes, too).

    Its features are all tokens [B, prefix + patches, embed_dim]. They are normalised, unless the
    last norm comes after the pooling.

    Args:
        image_size: pixels, or (height, width): multiples of patch_size.
        patch_size: side of a patch, in pixels.
        patch_sizes: a list of patch sizes, which divide image_size. Each training step uses one at
            random, as FlexiViT (arXiv:2212.08013); the patch embedding and positions are resized
            from those of patch_size. Evaluations use patch_size. None: always patch_size.
        embed_dim: number of channels of a token.
        depth: number of blocks.
        num_heads: number of attention heads in each block.
        attn_head_size: number of channels of an attention head. None: embed_dim / num_heads.
        attention: the kind of attention: "softmax", or "differential" (``DifferentialHeads``).
        block: the order within a block. "serial": attention, then the MLP; "parallel": both on the
            same input (``ParallelBlock``).
        mlp_ratio: ratio of the MLP's hidden width to embed_dim; the hidden width of a gated MLP
            counts both halves.
        act: activation of the MLP: "gelu", "gelu_tanh" (SigLIP 2), "quick_gelu" (OpenAI), or
            "swiglu", which makes it a gated MLP (``GatedMlp``).
        norm_eps: epsilon of the layer norms. None: 1e-6, or 1e-5 with pre_norm (CLIP).
        qkv_bias: whether the queries, keys and values have a bias.
        qk_norm: whether queries and keys are normalised within each head.
        init_values: initial value of layer scale; None: no layer scale.
        global_pool: the pooled features that the head reads. "token": the class token; "avg": the
            mean of the patch tokens; "token_avg": both, concatenated (DINOv2). "map": the output of
            ``AttentionPool`` over the patch tokens and prompts (SigLIP).
        fc_norm: whether the final norm comes after the pooling. None: only with "avg".
        final_norm: whether the model has a final norm.
        class_token: whether the model has a class token.
        reg_tokens: number of register tokens, placed after the class token (Darcet et al. 2023,
            arXiv:2309.16588). 0: none.
        no_embed_class: whether the position embedding covers the patch tokens only.
        pos_embed: the position embedding. "learn": it is trained; "sincos2d": it is fixed
            (``sincos_2d``), covers patches only and isn't stored in weight files.
        pos_resize: how the position embedding is resized to another grid. "bicubic": antialiased,
            as in timm; "bilinear": without antialiasing, as in DPT (arXiv:2103.13413).
        weight_init: how new weights are initialised. "timm"; "deit": as "timm", but the class token
            with a standard deviation of 0.02, as the positions, instead of 1e-6; "big_vision"
            (``init_as_big_vision``); "mae": Linears and the patch embedding uniformly
            (``init_as_mae``), tokens as "deit".
        pre_norm: whether a norm precedes the first block and the patch embedding has no bias, as in
            CLIP (arXiv:2103.00020).
        cut_images: whether image_size may be other than a multiple of patch_size. Pixels after the
            last whole patch are then ignored.
        distilled: whether the model has a distillation token with a head of its own. The output is
            the mean of both heads.
        dropout: dropout rate after the position embedding, after the attention's projection and in
            the MLP.
        attention_dropout: dropout rate of the attention weights.
        prompt_tokens: number of prompts: learnt tokens without positions, placed before the patch
            tokens (arXiv:2203.12119). 0: none.
        prompt_deep: whether each block has prompts of its own, which replace those of the block
            before.
        merge_tokens: number of patch tokens that each block merges into similar ones
            (``models.layers.merging``), as long as at least twice as many are left. 0: none.
        patch_drop: share of the patch tokens that are dropped at random in training.
        patch_drop_end: the value of patch_drop at the end of training, which it approaches along a
            cosine, as in NaViT (arXiv:2307.06304). 0: the last updates see whole images, as FLIP's
            unmasked tuning (arXiv:2212.00794). None: patch_drop is constant.
        droppath: stochastic depth rate of the last block.
        droppath_shape: how the stochastic depth rates of the blocks are set. "linear": they grow
            from 0 at the first block; "constant": all blocks have droppath.
        neck_dim: number of channels of a projection between the pooled features and the classifier
            (``Neck``). None: no projection.
        neck_norm: whether features are normalised to length 1 before the classifier, as in CLIP and
            SigLIP.
        head_cosine: scale of a cosine classifier (``CosineClassifier``), whose logits are cosines
            times it, as TRAIN.LOSS arcface and proxy_anchor need. None: the classifier is a Linear.

    Attributes:
        num_prefix_tokens: number of tokens before the patches.
        pos_embed_prefix: number of prefix tokens that ``pos_embed`` covers.
        distilled_training: for a distilled model. True: train mode returns (logits, distillation
            logits).

    Raises:
        InputError: sizes or options that don't fit together.
    """

    weight_names = names
    layout = "NLC"
    resizable = True
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
        pos_resize: Literal["bicubic", "bilinear"] = "bicubic",
        weight_init: Literal["timm", "deit", "big_vision", "mae"] = "timm",
        pre_norm: bool = False,
        cut_images: bool = False,
        distilled: bool = False,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        prompt_tokens: Count = 0,
        prompt_deep: Annotated[bool, above_zero("MODEL.PROMPT_TOKENS")] = False,
        patch_sizes: OfClassifier[Sequence[Size] | None] = None,
        merge_tokens: OfClassifier[Count] = 0,
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
        head_cosine: OfClassifier[Positive] | None = None,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if fc_norm is None:
            fc_norm = global_pool == "avg"
        _check_heads(embed_dim, num_heads, attn_head_size, attention, global_pool)
        _check_tokens(global_pool, class_token, reg_tokens, distilled)
        _check_layers(block, act, global_pool, fc_norm)
        if distilled and (neck_dim or neck_norm):
            raise InputError(
                "NECK_DIM and NECK_NORM need models with one head; leave out DISTILLED"
            )
        self.num_features = embed_dim
        self.global_pool = global_pool
        self.head_init_bias = head_init_bias
        self.head_batch_norm = head_batch_norm
        self.head_cosine = head_cosine
        self.weight_init = weight_init
        self.distilled = distilled
        self.takes_masks = block == "serial" and attention == "softmax"
        self.act = act
        self.merge_tokens = merge_tokens
        if merge_tokens and not self.takes_masks:
            raise InputError(
                f"MERGE_TOKENS is {merge_tokens}, expected 0, because only BLOCK serial with"
                " ATTENTION softmax"
                " merges tokens"
            )
        norm_eps = norm_eps or (1e-5 if pre_norm else 1e-6)
        norm_layer = functools.partial(LayerNorm, embed_dim, epsilon=norm_eps)

        self.patch_embed = PatchEmbed(
            self.image_size,
            patch_size,
            in_channels,
            embed_dim,
            bias=not pre_norm,
            cut=cut_images,
            sizes=patch_sizes or (),
        )

        # Tokens before the patches, in this order: the class token, the distillation token,
        # registers, prompts.
        if class_token:
            initializers = {
                "timm": Normal(std=1e-6),
                "deit": Normal(std=0.02),
                "big_vision": Constant(0.0),
                "mae": Normal(std=0.02),
            }
            self.cls_token = self._make_tokens(1, initializers[weight_init])
        if distilled:
            self.dist_token = self._make_tokens(1, Normal(std=0.02))
        if reg_tokens:
            self.reg_token = self._make_tokens(reg_tokens, Normal(std=1e-6))
        if prompt_tokens:
            # Xavier's bound over a patch's values and the channels, as in the authors' program.
            fan_in = math.prod(self.patch_embed.proj.weight.shape[1:])
            bound = (6 / (fan_in + embed_dim)) ** 0.5
            self.prompt_tokens = self.create_parameter(
                [depth if prompt_deep else 1, prompt_tokens, embed_dim],
                default_initializer=Uniform(-bound, bound),
            )
        positioned_prefix = class_token + distilled + reg_tokens
        self.num_prompts = prompt_tokens
        self.num_prefix_tokens = positioned_prefix + prompt_tokens

        # Positions. Prompts never have one.
        self.no_embed_class = no_embed_class or pos_embed == "sincos2d"
        self.pos_embed_prefix = 0 if self.no_embed_class else positioned_prefix
        if pos_embed == "sincos2d":
            table = sincos_2d(*self.patch_embed.grid_size, embed_dim)
            self.register_buffer("pos_embed", paddle.to_tensor(table), persistable=False)
        else:
            positions = self.pos_embed_prefix + self.patch_embed.num_patches
            std = embed_dim**-0.5 if weight_init == "big_vision" else 0.02
            self.pos_embed = self._make_tokens(positions, Normal(std=std))
        self.pos_resize = pos_resize
        self.resized_positions = ResizedPositions(
            self.patch_embed.grid_size, self.pos_embed_prefix, pos_resize
        )
        self.pos_drop = nn.Dropout(dropout)
        self.patch_drop = PatchDropout(patch_drop, positioned_prefix, patch_drop_end)
        self.norm_pre = norm_layer() if pre_norm else nn.Identity()

        attention_options: dict[str, Any] = {
            "num_heads": num_heads,
            "head_dim": attn_head_size,
            "qkv_bias": qkv_bias,
            "qk_norm": qk_norm,
            "attn_drop": attention_dropout,
        }
        block_options: dict[str, Any] = {
            "mlp_ratio": mlp_ratio,
            "init_values": init_values,
            "drop": dropout,
            "epsilon": norm_eps,
            "act": act,
        }
        differential = attention == "differential"
        attention_layer = DifferentialAttention if differential else Attention
        parallel_block = DifferentialParallelBlock if differential else ParallelBlock
        [drop_paths] = drop_path_rates(droppath, [depth], droppath_shape)
        self.blocks = nn.LayerList()
        for index, drop_path in enumerate(drop_paths):
            if block == "parallel":
                layer = parallel_block(
                    embed_dim, **attention_options, **block_options, drop_path=drop_path
                )
                attn = layer
            else:
                attn = attention_layer(embed_dim, **attention_options, proj_drop=dropout)
                layer = Block(embed_dim, attn, **block_options, drop_path=drop_path)
            if isinstance(attn, DifferentialHeads):
                attn.add_lambdas(index)
            self.blocks.append(layer)
        self.feature_info = feature_info(
            [f"blocks.{i}" for i in range(depth)], embed_dim, patch_size
        )

        # The last norm stands before the pooling or after it.
        self.norm = norm_layer() if final_norm and not fc_norm else nn.Identity()
        self.fc_norm = norm_layer() if final_norm and fc_norm else nn.Identity()
        if global_pool == "map":
            self.attn_pool = AttentionPool(
                embed_dim, num_heads, mlp_ratio=mlp_ratio, epsilon=norm_eps, act=act
            )
        else:
            self.attn_pool = None
        if global_pool == "token_avg":
            # The class token and the mean, side by side.
            self.head_widths = {"head": 2 * embed_dim}
        if neck_dim or neck_norm:
            width = self.head_widths.get("head", embed_dim)
            self.neck = Neck(width, neck_dim, neck_norm)
            self.num_features = neck_dim or width
            self.head_widths = {}
        else:
            self.neck = None
        self._finish()

    def _make_tokens(self, count: int, initializer: Initializer) -> paddle.Tensor:
        """Returns a parameter of ``count`` tokens, the same for all images: [1, count, embed_dim]."""
        return self.create_parameter([1, count, self.num_features], default_initializer=initializer)

    def _init_weights(self, layer: nn.Layer) -> None:
        if self.weight_init == "big_vision":
            init_as_big_vision(layer)
        elif self.weight_init == "mae":
            init_as_mae(layer)
        else:
            init_linear(layer)

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.patch_embed(x)
        positions = self.resized_positions.resized(self.pos_embed, self.patch_embed.last_grid)
        if self.no_embed_class:
            x = add_to_all(x, positions)
        names = ("cls_token", "dist_token", "reg_token")
        prefix = [getattr(self, name) for name in names if name in self._parameters]
        x = concat([*(token.expand([x.shape[0], -1, -1]) for token in prefix), x], axis=1)
        if not self.no_embed_class:
            x = add_to_all(x, positions)
        x = self.norm_pre(self.patch_drop(self.pos_drop(x)))
        if self.num_prompts:
            x = self._insert_prompts(x, self.prompt_tokens[0], replaced=0)
        return x

    def _stages(self) -> Iterable[Any]:
        """Returns (block, prompts) for each block; the prompts are None where those of the last
        block stay.
        """
        prompts: list[Any] = [None] * len(self.blocks)
        if self.num_prompts and self.prompt_tokens.shape[0] > 1:
            # ``_embed`` inserts those of the first block.
            prompts[1:] = self.prompt_tokens.unbind(0)[1:]
        return [(block, prompts[index]) for index, block in enumerate(self.blocks)]

    def _stage(
        self,
        stage: Any,
        x: paddle.Tensor,
        shared: Any,
        tokens: int | None = None,
        mask: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        block, prompts = stage
        if prompts is not None:
            x = self._insert_prompts(x, prompts, replaced=self.num_prompts)
        if shared is not None and mask is None:
            return self._merged(block, x, shared, tokens)
        others = () if tokens is None and mask is None else (tokens, mask)
        return self._run(block, x, *others)

    def _shared(self) -> Merging | None:
        if not self.merge_tokens:
            return None
        if not is_known(*self.patch_embed.last_grid):
            raise InputError(
                f"MODEL.MERGE_TOKENS is {self.merge_tokens}, expected 0 in a graph for images of any"
                " size; export one for images of one size, or don't merge tokens"
            )
        return Merging(self.num_prefix_tokens, self.merge_tokens)

    def _merged(
        self, block: Any, x: paddle.Tensor, merging: Merging, tokens: int | None
    ) -> paddle.Tensor:
        """Returns a block's output for x, in which it merges patches.

        Args:
            tokens: only so many of the first ones are returned, and none is merged.
        """
        pairs = merging.pairs_of(x.shape[1])
        if tokens is not None or not pairs:
            return self._run(block, x, tokens, merging.mask())
        outputs = self._run(block.merging, x, merging.sizes, merging.prefix, pairs)
        merging.record(Match(outputs[1], outputs[2], outputs[3]))
        return outputs[0]

    @paddle.no_grad()
    def merged_patches(self, x: paddle.Tensor, block: int) -> paddle.Tensor:
        """Returns the token that stands for each patch after a block, where all blocks merge
        tokens: [B, rows, columns] int64.

        Two patches have the same number if they were merged. In ``forward`` the last block merges
        none, if the head reads the class token.

        Args:
            x: images [B, C, H, W], normalised.
            block: its index, from 0.
        """
        merging = Merging(self.num_prefix_tokens, self.merge_tokens)
        x = self._embed(x)
        tokens = paddle.arange(x.shape[1]).expand([x.shape[0], -1])
        for stage in list(self._stages())[: block + 1]:
            x = self._stage(stage, x, merging)
        if merging.source is not None:
            tokens = merging.source.astype("int64")
        return tokens[:, self.num_prefix_tokens :].reshape(
            [tokens.shape[0], *self.patch_embed.last_grid]
        )

    def _whole(self, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return x if shared is None else shared.spread(x)

    def forward(self, x: paddle.Tensor) -> Any:
        """Returns ``forward_head(forward_features(x))``, up to rounding.

        If the head reads the class token, the MLP of the last block leaves the patches out, which
        saves a twentieth of the products. The block's output is then that of the prefix tokens alone.
        """
        if self.global_pool != "token" or not isinstance(self.blocks[-1], Block):
            # Not super(), which Paddle can't trace.
            return self.forward_head(self.forward_features(x))
        *stages, last = self._stages()
        x = self._embed(x)
        shared = self._shared()
        for stage in stages:
            x = self._stage(stage, x, shared)
        x = self._stage(last, x, shared, self.num_prefix_tokens)
        return self.forward_head(self._head_input(x, last=True))

    def _insert_prompts(
        self, x: paddle.Tensor, prompts: paddle.Tensor, replaced: int
    ) -> paddle.Tensor:
        """Inserts prompts [P, D] into the tokens x [B, N, D], right before the patches.

        Args:
            replaced: how many tokens there give way to them: the last block's prompts.
        """
        start = self.num_prefix_tokens - self.num_prompts
        prompts = prompts.astype(x.dtype).unsqueeze(0).expand([x.shape[0], -1, -1])
        return paddle.concat([x[:, :start], prompts, x[:, start + replaced :]], axis=1)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]:
        if self.distilled:
            logits = self.head(x[:, 0])
            distilled_logits = self.head_dist(x[:, 1])
            if self.distilled_training and self.training:
                return logits, distilled_logits
            return (logits + distilled_logits) / 2
        if self.attn_pool is not None:
            x = self.attn_pool(x[:, self.num_prefix_tokens - self.num_prompts :])
        elif self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(axis=1)
        else:
            x = concat([x[:, 0], x[:, self.num_prefix_tokens :].mean(axis=1)], axis=1)
        x = self.fc_norm(x)
        if self.neck is not None:
            x = self.neck(x)
        return self.head(x)

    def classifier_names(self) -> tuple[str, ...]:
        return ("head", "head_dist") if self.distilled else ("head",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups of BEiT and MAE (arXiv:2106.08254, 2111.06377): the embedding, each
        block, and the classifier with its norm.
        """
        embedding = (
            "cls_token",
            "dist_token",
            "reg_token",
            "pos_embed",
            "patch_embed",
            "norm_pre",
            "prompt_tokens",
        )
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [embedding, *blocks, ("norm", "attn_pool", "fc_norm", "neck", "head", "head_dist")]

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token", "dist_token", "reg_token", "prompt_tokens"}


def _check_heads(
    embed_dim: int, num_heads: int, attn_head_size: int | None, attention: str, global_pool: str
) -> None:
    divides = embed_dim % num_heads == 0
    if not divides and attn_head_size is None:
        raise InputError(
            f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}; choose one that"
            " is, or set ATTN_HEAD_SIZE"
        )
    if not divides and global_pool == "map":
        raise InputError(
            f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}, as GLOBAL_POOL map needs"
        )
    head_size = attn_head_size or embed_dim // num_heads
    if attention == "differential" and head_size % 2:
        raise InputError(
            f"a head has {head_size} channels, ATTENTION differential needs an even number"
        )


def _check_tokens(global_pool: str, class_token: bool, reg_tokens: int, distilled: bool) -> None:
    if distilled and global_pool != "token":
        raise InputError(
            f"GLOBAL_POOL is {global_pool!r}, expected 'token', because DISTILLED heads read"
            " their tokens"
        )
    if not class_token and global_pool.startswith("token"):
        expected = "expected 'avg' or 'map', because the model has no CLASS_TOKEN"
        raise InputError(f"GLOBAL_POOL is {global_pool!r}, {expected}")
    if distilled and reg_tokens:
        raise InputError(
            f"REG_TOKENS is {reg_tokens}, expected 0, because DISTILLED models have none"
        )


def _check_layers(block: str, act: str, global_pool: str, fc_norm: bool) -> None:
    if block == "parallel" and act == "swiglu":
        raise InputError(
            "ACT is 'swiglu', which BLOCK parallel doesn't support; expected gelu, gelu_tanh or"
            " quick_gelu"
        )
    if fc_norm and global_pool == "token_avg":
        raise InputError(
            "FC_NORM is True, expected False, because GLOBAL_POOL token_avg needs normalised tokens"
        )
